# Defines attentune::tvm_runtime, TVM's runtime library out of its Python package. Kernels find it
# by name at run time only, so it is linked although nothing refers to it.
function(attentune_add_tvm_runtime)
  execute_process(
    COMMAND
      "${Python_EXECUTABLE}" -c
      "import importlib.util as u; print(u.find_spec('tvm').submodule_search_locations[0])"
    OUTPUT_VARIABLE folder
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE failed
    ERROR_QUIET
  )
  if(failed)
    message(FATAL_ERROR "There is no apache-tvm for ${Python_EXECUTABLE}; install attentune there.")
  endif()
  find_library(ATTENTUNE_TVM_RUNTIME tvm_runtime PATHS "${folder}/lib" NO_DEFAULT_PATH REQUIRED)
  add_library(attentune::tvm_runtime INTERFACE IMPORTED GLOBAL)
  target_link_options(
    attentune::tvm_runtime INTERFACE "-Wl,--no-as-needed,${ATTENTUNE_TVM_RUNTIME},--as-needed"
    "-Wl,-rpath,${folder}/lib"
  )
endfunction()

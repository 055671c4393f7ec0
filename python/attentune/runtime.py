"""TVM's small runtime library, loaded on its own: enough to run kernels, without the compiler."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from functools import cache
from pathlib import Path

from attentune.errors import IncompatibleVersions
from attentune.versions import check_versions

_NAMES = {"darwin": "libtvm_runtime.dylib", "win32": "tvm_runtime.dll"}


def runtime_library() -> Path:
    """Return the path of TVM's runtime library, found without importing TVM.

    Raises
    ------
    IncompatibleVersions
        If it is not where the installed package has it.
    """
    check_versions()
    name = _NAMES.get(sys.platform, "libtvm_runtime.so")
    spec = importlib.util.find_spec("tvm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "lib" / name
        if path.exists():
            return path
    raise IncompatibleVersions(
        f"The installed apache-tvm has no {name} in its lib folder; install it from its wheel."
    )


@cache
def load_runtime() -> None:
    """Load the runtime: kernels allocate workspace and find their threads through it."""
    import tvm_ffi  # noqa: F401 - the library that the runtime is linked to

    if "tvm" not in sys.modules:
        ctypes.CDLL(str(runtime_library()), ctypes.RTLD_GLOBAL)

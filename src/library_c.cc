#include <attentune/library.h>
#include <attentune/library_c.h>

#include <string>
#include <vector>

struct AttentuneLibrary {
  attentune::Library library;
  std::vector<std::string> keys;
};

namespace {

thread_local std::string last_error;

// No exception may leave a function of C.
template <typename Function, typename Result>
Result guarded(Result failed, Function function) {
  try {
    return function();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return failed;
}

attentune::Options options_of(const AttentuneOptions* given) {
  attentune::Options options;
  if (given == nullptr) return options;
  options.mask = given->mask;
  options.bias = given->bias;
  options.is_causal = given->is_causal != 0;
  options.top_left = given->top_left != 0;
  if (given->has_window_left) options.window_left = given->window_left;
  if (given->has_window_right) options.window_right = given->window_right;
  if (given->has_scale) options.scale = given->scale;
  if (given->softcap != 0) options.softcap = given->softcap;
  options.relaxed = given->relaxed != 0;
  return options;
}

}  // namespace

extern "C" {

AttentuneLibrary* attentune_open(const char* path, int threads) {
  return guarded(static_cast<AttentuneLibrary*>(nullptr), [&] {
    attentune::Library library = attentune::Library::open(path, threads);
    std::vector<std::string> keys = library.keys();
    return new AttentuneLibrary{std::move(library), std::move(keys)};
  });
}

void attentune_close(AttentuneLibrary* library) { delete library; }

size_t attentune_num_keys(const AttentuneLibrary* library) { return library->keys.size(); }

const char* attentune_key(const AttentuneLibrary* library, size_t index) {
  return guarded(static_cast<const char*>(nullptr),
                 [&] { return library->keys.at(index).c_str(); });
}

int attentune_attention(const AttentuneLibrary* library, const DLTensor* query,
                        const DLTensor* key, const DLTensor* value, DLTensor* out,
                        const AttentuneOptions* options) {
  return guarded(0, [&] {
    library->library.attention(query, key, value, out, options_of(options));
    return 1;
  });
}

const char* attentune_last_error(void) { return last_error.c_str(); }

}  // extern "C"

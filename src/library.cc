#include <attentune/library.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "manifest.h"
#include "tensor.h"

namespace attentune {
namespace {

namespace ffi = tvm::ffi;

// Workspace that is granted without asking how much memory is free, as in Python.
constexpr int64_t kGrantedBytes = int64_t{1} << 26;
constexpr int64_t kMemoryShare = 4;
// A bound that hides nothing.
constexpr int64_t kUnbounded = int64_t{1} << 40;
// TVM's affinity mode in which threads may run on every core of a list.
constexpr int kAnyListedCore = -3;

int available_cores() {
  const unsigned count = std::thread::hardware_concurrency();
  return count == 0 ? 1 : static_cast<int>(count);
}

// TVM keeps a pool for each calling thread, and sizes it at the thread's first call.
void use_cores(int count) {
  thread_local bool done = false;
  if (done) return;
#ifndef _WIN32
  setenv("TVM_BIND_THREADS", "0", 0);
#endif
  ffi::Array<ffi::String> cores;
  for (int n = 0; n < count; ++n) cores.push_back(std::to_string(n % available_cores()));
  ffi::Function::GetGlobalRequired("runtime.config_threadpool")(kAnyListedCore, count, cores);
  done = true;
}

int64_t memory_budget() {
  std::ifstream info("/proc/meminfo");
  std::string name;
  int64_t kilobytes = 0;
  while (info >> name >> kilobytes) {
    if (name == "MemAvailable:") return kilobytes * 1024 / kMemoryShare;
    info.ignore(64, '\n');
  }
  return int64_t{1} << 30;
}

std::string kind(const std::optional<std::vector<int64_t>>& shape) {
  if (!shape) return "none";
  return (*shape)[2] == 1 ? "broadcast" : "dense";
}

Key make_key(const Problem& p, const std::string& level) {
  Key key;
  key.dtype = p.dtype;
  key.total_batches = anchor(p.batch * p.q_heads, level);
  key.seq_q = anchor(p.seq_q, level);
  key.seq_kv = anchor(p.seq_kv, level);
  key.head_dim = p.head_dim;
  key.value_dim = p.value_dim;
  key.group = p.kv_heads != 0 ? p.q_heads / p.kv_heads : 1;
  key.mask = kind(p.mask);
  key.bias = kind(p.bias);
  key.bias_dtype = p.bias ? p.bias_dtype : "none";
  key.causal = p.is_causal;
  const bool window = p.window_left || p.window_right;
  key.alignment = !p.is_causal && !window ? "none" : p.top_left ? "top_left" : "bottom_right";
  if (p.window_left) key.window_left = anchor(*p.window_left, level);
  if (p.window_right) key.window_right = anchor(*p.window_right, level);
  key.softcap = p.softcap.has_value();
  key.precision = p.relaxed ? "relaxed" : "strict";
  key.layout = p.layout;
  return key;
}

__extension__ typedef __int128 Wide;

Wide workspace(const Choice& choice, const Entry& entry, const Problem& p) {
  const Wide scores = Wide{p.batch} * p.q_heads * p.seq_q * p.seq_kv;
  const Wide corner = std::max<int64_t>(entry.scores, 1);
  return choice.fixed_bytes + (choice.bytes * scores + corner - 1) / corner;
}

}  // namespace

struct Library::State {
  std::string path;
  OnMiss on_miss = OnMiss::kHeuristic;
  int threads = 1;
  std::optional<int64_t> memory_bytes;
  Manifest manifest;
  ffi::Optional<ffi::Module> module;
  std::unordered_map<std::string, ffi::Function> functions;
  mutable std::mutex lock;  // guards steps
  mutable std::map<std::string, int64_t> steps;

  void step(const std::string& reason, const std::string& message) const {
    bool first = false;
    {
      const std::lock_guard<std::mutex> guard(lock);
      first = ++steps[reason] == 1;
    }
    if (first) std::clog << "attentune: stepping down (" << reason << "): " << message << "\n";
  }

  std::pair<const Entry*, const Choice*> choose(const Problem& problem) const {
    const Key key = make_key(problem, manifest.level);
    const auto [entry, own] = manifest.choose(key);
    if (entry == nullptr || (on_miss == OnMiss::kError && !own)) {
      throw RecordNotFound("The library " + path + " has no kernel for " + key.str() +
                           "; export one for this key.");
    }
    if (!own) step("miss", key.str() + " is not in " + path + "; " + entry->key.str() +
                               " serves it");
    for (const Choice& choice : entry->choices) {
      const Wide needed = workspace(choice, *entry, problem);
      if (!memory_bytes && needed <= kGrantedBytes) return {entry, &choice};
      if (needed <= (memory_bytes ? *memory_bytes : memory_budget())) return {entry, &choice};
      step(choice.variant + ": memory", choice.symbol + " needs more workspace than is free");
    }
    throw Unsupported("No kernel of " + path +
                      " has the memory that the call needs; free some, or raise memory_bytes.");
  }
};

Library Library::open(const std::string& path, int threads, OnMiss on_miss,
                      std::optional<int64_t> memory_bytes) {
  auto state = std::make_shared<State>();
  state->path = path;
  state->on_miss = on_miss;
  state->memory_bytes = memory_bytes;
  state->threads = threads > 0 ? threads : available_cores();
  state->manifest = Manifest::read(path);
  state->manifest.check_machine(path);
  const std::string absolute = path.find('/') == std::string::npos ? "./" + path : path;
  try {
    state->module = ffi::Module::LoadFromFile(absolute);
  } catch (const std::exception& error) {
    throw CorruptLibrary("The library " + path + " cannot be loaded (" + error.what() +
                         "); export it anew on this system.");
  }
  for (const Entry& entry : state->manifest.entries) {
    for (const Choice& choice : entry.choices) {
      auto function = (*state->module)->GetFunction(choice.symbol);
      if (!function.has_value()) {
        throw CorruptLibrary("The library " + path + " lacks the kernel " + choice.symbol +
                             " that its manifest names; export it anew.");
      }
      state->functions.emplace(choice.symbol, *function);
    }
  }
  return Library(std::move(state));
}

std::vector<std::string> Library::keys() const {
  std::vector<std::string> result;
  for (const Entry& entry : state_->manifest.entries) result.push_back(entry.key.str());
  return result;
}

Key Library::key_of(const Problem& problem) const {
  return make_key(problem, state_->manifest.level);
}

std::string Library::choose(const Problem& problem) const {
  return state_->choose(problem).second->symbol;
}

std::map<std::string, int64_t> Library::steps() const {
  const std::lock_guard<std::mutex> guard(state_->lock);
  return state_->steps;
}

TensorPtr Library::attention(const DLTensor* query, const DLTensor* key, const DLTensor* value,
                             const Options& options) const {
  const View q("query", query), v("value", value);
  if (q.rank() != 4 || v.rank() != 4) {
    const bool wrong = q.rank() != 4;
    throw InvalidProblem(std::string(wrong ? "query" : "value") + " has shape " +
                         tuple_text(wrong ? q.shape : v.shape) +
                         "; it must have four axes, [batch, heads, seq, dim].");
  }
  TensorPtr out = allocate({q.shape[0], q.shape[1], q.shape[2], v.shape[3]}, query->dtype);
  attention(query, key, value, &out->dl_tensor, options);
  return out;
}

void Library::attention(const DLTensor* query, const DLTensor* key, const DLTensor* value,
                        DLTensor* out, const Options& options) const {
  View q("query", query), k("key", key), v("value", value), o("out", out);
  std::optional<View> mask, bias;
  if (options.mask != nullptr) mask.emplace("mask", options.mask);
  if (options.bias != nullptr) bias.emplace("bias", options.bias);
  View* const m = mask ? &*mask : nullptr;
  View* const b = bias ? &*bias : nullptr;
  const Problem problem = describe(q, k, v, m, b, options);
  check_out(o, problem,
            {{"query", &q}, {"key", &k}, {"value", &v}, {"mask", m}, {"bias", b}});
  if (o.elements() == 0) return;
  if (problem.seq_kv == 0) {
    const int64_t bytes = out->dtype.bits / 8, row = o.shape[3] * bytes;
    for (int64_t n = 0; n < o.elements() / o.shape[3]; ++n) {
      const int64_t i = n / (o.shape[1] * o.shape[2]), j = n / o.shape[2] % o.shape[1];
      const int64_t offset =
          i * o.strides[0] + j * o.strides[1] + n % o.shape[2] * o.strides[2];
      std::memset(static_cast<char*>(o.tensor()->data) + offset * bytes, 0,
                  static_cast<size_t>(row));
    }
    return;
  }
  const auto [entry, choice] = state_->choose(problem);
  const std::vector<int64_t> full = {problem.batch, problem.q_heads, problem.seq_q,
                                     problem.seq_kv};
  for (View* view : {&q, &k, &v}) view->make_readable(true);
  ffi::AnyView arguments[10];
  int count = 0;
  for (View* view : {&q, &k, &v}) arguments[count++] = view->tensor();
  for (View* view : {m, b}) {
    if (view == nullptr) continue;
    view->make_readable(false);
    view->broadcast(full);
    arguments[count++] = view->tensor();
  }
  arguments[count++] = o.tensor();
  arguments[count++] = problem.scale.value_or(1.0 / std::sqrt(double(problem.head_dim)));
  if (entry->key.softcap) arguments[count++] = *problem.softcap;
  const int64_t offset = problem.top_left ? 0 : problem.seq_kv - problem.seq_q;
  if (entry->key.window_left) {
    arguments[count++] = problem.window_left ? offset - *problem.window_left : -kUnbounded;
  }
  if (entry->key.causal || entry->key.window_right) {
    const int64_t right = problem.is_causal ? 0 : problem.window_right.value_or(kUnbounded);
    arguments[count++] = offset + right;
  }
  use_cores(state_->threads);
  ffi::Any result;
  state_->functions.at(choice->symbol)
      .CallPacked(ffi::PackedArgs(arguments, count), &result);
}

}  // namespace attentune

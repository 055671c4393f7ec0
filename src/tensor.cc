#include "tensor.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

namespace attentune {
namespace {

bool is_kernel_dtype(const std::string& name) {
  return name == "float32" || name == "float16" || name == "bfloat16";
}

std::string device_text(DLDevice device) {
  const char* name = device.device_type == kDLCUDA    ? "cuda"
                     : device.device_type == kDLMetal ? "metal"
                     : device.device_type == kDLROCM  ? "rocm"
                                                      : "device";
  return std::string(name) + ":" + std::to_string(device.device_id);
}

std::string layout_of(const View& view) {
  const int64_t h = view.shape[1], s = view.shape[2], d = view.shape[3];
  const std::vector<int64_t> bhsd = {h * s * d, s * d, d, 1}, bshd = {s * h * d, d, h * d, 1};
  for (const auto& [name, wanted] : {std::pair("bhsd", &bhsd), std::pair("bshd", &bshd)}) {
    bool fits = true;
    for (int axis = 0; axis < 4; ++axis) {
      fits = fits && (view.strides[axis] == (*wanted)[axis] || view.shape[axis] <= 1);
    }
    if (fits) return name;
  }
  return "strided";
}

std::vector<int64_t> padded(const std::string& name, const View& view,
                            const std::vector<int64_t>& full) {
  if (view.rank() < 1 || view.rank() > 4) {
    throw InvalidProblem(name + " has shape " + tuple_text(view.shape) + ", of rank " +
                         std::to_string(view.rank()) + "; its rank must be 1 to 4.");
  }
  std::vector<int64_t> shape(4 - view.rank(), 1);
  shape.insert(shape.end(), view.shape.begin(), view.shape.end());
  for (int axis = 0; axis < 4; ++axis) {
    if (shape[axis] != 1 && shape[axis] != full[axis]) {
      std::string list = tuple_text(full);
      list.front() = '[';
      list.back() = ']';
      throw InvalidProblem(name + " has shape " + tuple_text(view.shape) +
                           "; it must broadcast from the right over [batch, q_heads, seq_q, "
                           "seq_kv] = " +
                           list + ".");
    }
  }
  return shape;
}

void release(DLManagedTensor* tensor) {
  delete[] static_cast<char*>(tensor->manager_ctx);
  delete[] tensor->dl_tensor.shape;
  delete tensor;
}

}  // namespace

std::string tuple_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    text += (axis != 0 ? ", " : "") + std::to_string(shape[axis]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

View::View(const std::string& name, const DLTensor* tensor) {
  if (tensor == nullptr) throw InvalidProblem(name + " is no tensor; pass one.");
  if (tensor->device.device_type != kDLCPU) {
    throw UnsupportedArray("A tensor is on the device " + device_text(tensor->device) +
                           "; move it to the CPU, which the kernel was compiled for.");
  }
  tensor_ = *tensor;
  tensor_.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
  tensor_.byte_offset = 0;
  shape.assign(tensor->shape, tensor->shape + tensor->ndim);
  if (tensor->strides != nullptr) {
    strides.assign(tensor->strides, tensor->strides + tensor->ndim);
  } else {
    strides.assign(shape.size(), 1);
    for (size_t axis = shape.size(); axis-- > 1;) {
      strides[axis - 1] = strides[axis] * shape[axis];
    }
  }
}

std::string View::dtype() const {
  const DLDataType type = tensor_.dtype;
  if (type.lanes != 1) return "vector";
  if (type.code == kDLBool || (type.code == kDLUInt && type.bits == 1)) return "bool";
  const char* name = type.code == kDLFloat    ? "float"
                     : type.code == kDLBfloat ? "bfloat"
                     : type.code == kDLInt    ? "int"
                     : type.code == kDLUInt   ? "uint"
                                              : "other";
  return name + std::to_string(type.bits);
}

int64_t View::elements() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
}

std::pair<const char*, const char*> View::span() const {
  const char* begin = static_cast<const char*>(tensor_.data);
  if (elements() == 0) return {begin, begin};
  int64_t low = 0, high = 0;
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const int64_t reach = (shape[axis] - 1) * strides[axis];
    (reach < 0 ? low : high) += reach;
  }
  const int64_t bytes = (tensor_.dtype.bits + 7) / 8;
  return {begin + low * bytes, begin + (high + 1) * bytes};
}

bool View::readable(bool unit_innermost) const {
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    if (strides[axis] < 0 && shape[axis] > 1) return false;
  }
  return !unit_innermost || shape.empty() || shape.back() <= 1 || strides.back() == 1;
}

void View::make_readable(bool unit_innermost) {
  if (readable(unit_innermost)) return;
  const int64_t bytes = (tensor_.dtype.bits + 7) / 8, count = elements();
  copy_.resize(static_cast<size_t>(count * bytes));
  std::vector<int64_t> index(shape.size(), 0);
  const char* from = static_cast<const char*>(tensor_.data);
  for (int64_t n = 0; n < count; ++n) {
    int64_t offset = 0;
    for (size_t axis = 0; axis < shape.size(); ++axis) offset += index[axis] * strides[axis];
    std::memcpy(copy_.data() + n * bytes, from + offset * bytes, static_cast<size_t>(bytes));
    for (size_t axis = shape.size(); axis-- > 0;) {
      if (++index[axis] < shape[axis]) break;
      index[axis] = 0;
    }
  }
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  tensor_.data = copy_.data();
}

void View::broadcast(const std::vector<int64_t>& full) {
  std::vector<int64_t> wide(full.size() - shape.size(), 0);
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    const int64_t whole = full[full.size() - shape.size() + axis];
    wide.push_back(shape[axis] == 1 && whole != 1 ? 0 : strides[axis]);
  }
  strides = wide;
  shape = full;
}

DLTensor* View::tensor() {
  tensor_.ndim = rank();
  tensor_.shape = shape.data();
  tensor_.strides = strides.data();
  return &tensor_;
}

Problem describe(const View& query, const View& key, const View& value, const View* mask,
                 const View* bias, const Options& options) {
  for (const auto& [name, view] :
       {std::pair("query", &query), std::pair("key", &key), std::pair("value", &value)}) {
    if (view->rank() != 4) {
      throw InvalidProblem(std::string(name) + " has shape " + tuple_text(view->shape) +
                           "; it must have four axes, [batch, heads, seq, dim].");
    }
    if (!is_kernel_dtype(view->dtype())) {
      throw InvalidProblem(std::string(name) + " has the element type " + view->dtype() +
                           "; convert it to one of float32, float16, bfloat16.");
    }
  }
  auto count = [](int64_t number) { return std::to_string(number); };
  for (const auto& [name, view] : {std::pair("key", &key), std::pair("value", &value)}) {
    if (view->dtype() != query.dtype()) {
      throw InvalidProblem(std::string(name) + " has the element type " + view->dtype() +
                           " and query " + query.dtype() + "; convert them to one type.");
    }
    if (view->shape[0] != query.shape[0]) {
      throw InvalidProblem(std::string(name) + " has the batch size " + count(view->shape[0]) +
                           " and query " + count(query.shape[0]) + "; they must be equal.");
    }
  }
  if (key.shape[3] != query.shape[3]) {
    throw InvalidProblem("key has the head_dim " + count(key.shape[3]) + " and query " +
                         count(query.shape[3]) + "; they must be equal.");
  }
  if (value.shape[1] != key.shape[1] || value.shape[2] != key.shape[2]) {
    throw InvalidProblem("value has " + count(value.shape[1]) + " heads of " +
                         count(value.shape[2]) + " keys and key " + count(key.shape[1]) + " of " +
                         count(key.shape[2]) + "; they must be equal.");
  }
  Problem problem;
  problem.batch = query.shape[0];
  problem.q_heads = query.shape[1];
  problem.kv_heads = key.shape[1];
  problem.seq_q = query.shape[2];
  problem.seq_kv = key.shape[2];
  problem.head_dim = query.shape[3];
  problem.value_dim = value.shape[3];
  problem.dtype = query.dtype();
  if ((problem.kv_heads == 0) != (problem.q_heads == 0) ||
      (problem.kv_heads != 0 && problem.q_heads % problem.kv_heads != 0)) {
    throw InvalidProblem("q_heads is " + count(problem.q_heads) + " and kv_heads " +
                         count(problem.kv_heads) +
                         "; q_heads must be a multiple of kv_heads, and 0 only where kv_heads is.");
  }
  const std::vector<int64_t> full = {problem.batch, problem.q_heads, problem.seq_q,
                                     problem.seq_kv};
  if (mask != nullptr) {
    if (mask->dtype() != "bool") {
      throw InvalidProblem("mask has the element type " + mask->dtype() +
                           "; a mask is boolean, True where a key takes part: pass values to be "
                           "added as bias.");
    }
    problem.mask = padded("mask", *mask, full);
  }
  if (bias != nullptr) {
    if (!is_kernel_dtype(bias->dtype())) {
      throw InvalidProblem("bias has the element type " + bias->dtype() +
                           "; a bias is a float that is added to the scores: pass a boolean one "
                           "as mask.");
    }
    problem.bias = padded("bias", *bias, full);
    problem.bias_dtype = bias->dtype();
  }
  for (const auto& side : {options.window_left, options.window_right}) {
    if (side && *side < 0) {
      throw InvalidProblem("window is " + count(*side) +
                           "; it must be a whole number of at least 0.");
    }
  }
  if (options.softcap && !(*options.softcap > 0)) {
    throw InvalidProblem("softcap is " + std::to_string(*options.softcap) +
                         "; it must be None or a finite number above 0.");
  }
  problem.is_causal = options.is_causal;
  problem.top_left = options.top_left;
  problem.window_left = options.window_left;
  problem.window_right = options.window_right;
  problem.scale = options.scale;
  problem.softcap = options.softcap;
  problem.relaxed = options.relaxed;
  const std::string layout = layout_of(query);
  problem.layout = layout == layout_of(key) && layout == layout_of(value) ? layout : "strided";
  return problem;
}

void check_out(const View& out, const Problem& problem,
               const std::vector<std::pair<std::string, const View*>>& read) {
  const std::vector<int64_t> shape = {problem.batch, problem.q_heads, problem.seq_q,
                                      problem.value_dim};
  if (out.shape != shape || out.dtype() != problem.dtype) {
    throw InvalidProblem("out has shape " + tuple_text(out.shape) + " and the element type " +
                         out.dtype() + "; the result is " + tuple_text(shape) + " of " +
                         problem.dtype + ".");
  }
  if (!out.readable(true)) {
    throw InvalidProblem("out has the strides " + tuple_text(out.strides) +
                         "; its innermost axis must be contiguous.");
  }
  const auto [begin, end] = out.span();
  for (const auto& [name, view] : read) {
    if (view == nullptr) continue;
    const auto [first, last] = view->span();
    if (begin < last && first < end) {
      throw InvalidProblem("out overlaps " + name + " in memory; give it memory of its own.");
    }
  }
}

TensorPtr allocate(const std::vector<int64_t>& shape, DLDataType dtype) {
  int64_t bytes = (dtype.bits + 7) / 8;
  for (const int64_t extent : shape) bytes *= extent;
  TensorPtr result(new DLManagedTensor{});
  result->deleter = release;
  result->manager_ctx = new char[static_cast<size_t>(bytes)];
  DLTensor& tensor = result->dl_tensor;
  tensor.data = result->manager_ctx;
  tensor.device = {kDLCPU, 0};
  tensor.ndim = static_cast<int32_t>(shape.size());
  tensor.dtype = dtype;
  tensor.shape = new int64_t[shape.size()];
  std::copy(shape.begin(), shape.end(), tensor.shape);
  tensor.strides = nullptr;
  tensor.byte_offset = 0;
  return result;
}

}  // namespace attentune

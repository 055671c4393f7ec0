// What the C++ tests share: arrays of the fixture, and checks that end the program.
#ifndef ATTENTUNE_TESTS_COMMON_H_
#define ATTENTUNE_TESTS_COMMON_H_

#include <attentune/library.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #condition << " is false\n"; \
      std::exit(1);                                                                    \
    }                                                                                  \
  } while (false)

struct Array {
  std::vector<int64_t> shape, strides;
  std::vector<char> bytes;
  DLTensor tensor{};

  DLTensor* dl(bool is_bool) {
    tensor.data = bytes.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = static_cast<int>(shape.size());
    tensor.dtype = is_bool ? DLDataType{kDLBool, 8, 1} : DLDataType{kDLFloat, 32, 1};
    tensor.shape = shape.data();
    tensor.strides = strides.data();
    return &tensor;
  }
};

struct Call {
  std::map<std::string, Array> arrays;
  attentune::Options options;

  Call(const std::string& folder, int number) {
    const std::string stem = folder + "/" + std::to_string(number);
    std::ifstream file(stem + ".txt");
    std::string name;
    int64_t left = -1, right = -1;
    std::string scale;
    double softcap = 0;
    file >> name >> options.is_causal >> options.top_left >> left >> right >> scale >> softcap;
    CHECK(name == "options");
    if (left >= 0) options.window_left = left;
    if (right >= 0) options.window_right = right;
    if (scale != "nan") options.scale = std::stod(scale);
    if (softcap > 0) options.softcap = softcap;
    int rank = 0;
    while (file >> name >> rank) {
      Array& array = arrays[name];
      array.shape.resize(rank);
      array.strides.resize(rank);
      for (int64_t& extent : array.shape) file >> extent;
      for (int64_t& stride : array.strides) file >> stride;
      std::ifstream raw(stem + "." + name + ".bin", std::ios::binary);
      array.bytes.assign(std::istreambuf_iterator<char>(raw), {});
    }
    if (arrays.count("mask")) options.mask = arrays["mask"].dl(true);
    if (arrays.count("bias")) options.bias = arrays["bias"].dl(false);
  }

  DLTensor* dl(const std::string& name) { return arrays.at(name).dl(false); }

  // Run into poisoned memory and compare with the reference.
  void check(const attentune::Library& library) {
    Array out = arrays.at("expected");
    float* const result = reinterpret_cast<float*>(out.bytes.data());
    const size_t count = out.bytes.size() / sizeof(float);
    for (size_t n = 0; n < count; ++n) result[n] = std::numeric_limits<float>::quiet_NaN();
    library.attention(dl("query"), dl("key"), dl("value"), out.dl(false), options);
    const float* const expected = reinterpret_cast<float*>(arrays.at("expected").bytes.data());
    for (size_t n = 0; n < count; ++n) CHECK(std::abs(result[n] - expected[n]) <= 1e-4f);
  }
};

inline int count_calls(const std::string& folder) {
  std::ifstream file(folder + "/calls.txt");
  int count = 0;
  file >> count;
  CHECK(count > 0);
  return count;
}

#endif  // ATTENTUNE_TESTS_COMMON_H_

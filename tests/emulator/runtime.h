// What CUDA source finds in place of a GPU: the names that it uses, and threads that are fibers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__
#define CUDART_INF_F INFINITY

struct Index {
  unsigned x, y, z;
};

// All of it: one block runs at a time, and TVM's kernels name it so.
extern "C" unsigned char buf_dyn_shmem_ptr[];

namespace emulator {
Index thread();
Index block();
void barrier(const void* site);
}  // namespace emulator

#define threadIdx (emulator::thread())
#define blockIdx (emulator::block())

// Not inlined, so that the return address says which barrier it is.
__attribute__((noinline)) inline void __syncthreads() {
  emulator::barrier(__builtin_return_address(0));
}

// An element type that computes in float32 and rounds to nearest even when it is stored.
template <typename Format>
struct Narrow {
  uint16_t bits;
  Narrow() = default;
  template <typename T, typename = std::enable_if_t<std::is_arithmetic<T>::value>>
  Narrow(T value) : bits(Format::narrow(static_cast<float>(value))) {}
  operator float() const { return Format::widen(bits); }
};

struct Half {
  static uint16_t narrow(float value) {
    _Float16 half = static_cast<_Float16>(value);
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
  }
  static float widen(uint16_t bits) {
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return static_cast<float>(half);
  }
};

struct Bfloat {
  static uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) return (bits >> 16) | 0x40;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
  static float widen(uint16_t bits) {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

using half = Narrow<Half>;
using nv_bfloat16 = Narrow<Bfloat>;
using __half = half;
using __nv_bfloat16 = nv_bfloat16;
struct half2 {
  half x, y;
};
struct nv_bfloat162 {
  nv_bfloat16 x, y;
  nv_bfloat162() = default;
  nv_bfloat162(nv_bfloat16 first, nv_bfloat16 second) : x(first), y(second) {}
};
using __half2 = half2;
using __nv_bfloat162 = nv_bfloat162;

inline float __half2float(half value) { return value; }
inline half __float2half(float value) { return value; }
inline float __bfloat162float(nv_bfloat16 value) { return value; }
inline nv_bfloat16 __float2bfloat16(float value) { return value; }
template <typename F>
bool __hgt(Narrow<F> a, Narrow<F> b) {
  return float(a) > float(b);
}
template <typename F>
bool __hlt(Narrow<F> a, Narrow<F> b) {
  return float(a) < float(b);
}

inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

// Replaces csrc/common/cuda/vector.cuh on the CPU (see cuda_runtime.h).
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <type_traits>

#include "common/dtype.h"

// The kernels call these without std::. The global ::exp of C is only for double.
using std::exp;
using std::fma;
using std::log1p;
using std::max;
using std::min;

#define __grid_constant__

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

template <int BYTES>
struct Bits;
template <>
struct Bits<16> {
  using type = uint4;
};
template <>
struct Bits<8> {
  using type = uint64_t;
};
template <>
struct Bits<4> {
  using type = unsigned;
};
template <typename T, int N>
using Vector = typename Bits<sizeof(T) * N>::type;

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {  // to nearest, ties to even
    const unsigned all = __float_as_uint(x);
    bits = static_cast<uint16_t>(x == x ? (all + 0x7fff + (all >> 16 & 1)) >> 16 : 0x7fff);
  }
};

// Written by hand, because older compilers have no _Float16 in C++.
struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) {  // to nearest, ties to even
    const unsigned sign = std::signbit(x) ? 0x8000 : 0;
    const float size = std::fabs(x);
    int exponent;
    std::frexp(size, &exponent);
    // 0 and subnormal numbers have the same spacing as the smallest normal numbers.
    exponent = size < 0x1p-14f ? -13 : exponent;
    // If the significand is rounded up to 2048, the addition below carries into the exponent.
    const float significand = std::nearbyint(std::ldexp(size, 11 - exponent));
    const unsigned rounded = (exponent + 13) * 1024 + static_cast<unsigned>(significand);
    bits = static_cast<uint16_t>(sign | (x != x ? 0x7e00 : size < 65520 ? rounded : 0x7c00));
  }
  float value() const {
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    float size = exponent == 0 ? std::ldexp(digits, -24) : std::ldexp(1024 + digits, exponent - 25);
    if (exponent == 31) size = digits == 0 ? INFINITY : NAN;
    return bits & 0x8000 ? -size : size;
  }
};

template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline double to_acc(double x) { return x; }
inline float to_acc(float x) { return x; }
inline float to_acc(__nv_bfloat16 x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

inline float to_acc(__half x) { return x.value(); }

template <typename T>
T from_acc(acc_t<T> x) {
  return T(x);
}

template <typename T, int N>
void unpack(acc_t<T> (&x)[N], const uint4 &bits) {
  T v[N];
  std::memcpy(v, &bits, sizeof v);
  for (int k = 0; k < N; ++k) x[k] = to_acc(v[k]);
}

template <typename T, int N>
uint4 pack(const acc_t<T> (&x)[N]) {
  T v[N];
  for (int k = 0; k < N; ++k) v[k] = from_acc<T>(x[k]);
  uint4 bits;
  std::memcpy(&bits, v, sizeof bits);
  return bits;
}

// Element types and vectors for CUDA kernels. Arithmetic is in float (double for float64), and
// memory is accessed in vectors of up to 16 bytes.
#ifndef EXTENSION_CPP_CUDA_VECTOR_CUH
#define EXTENSION_CPP_CUDA_VECTOR_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename T>
using acc_t = typename Accumulator<T>::type;

__device__ inline double to_acc(double x) { return x; }
__device__ inline float to_acc(float x) { return x; }
__device__ inline float to_acc(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_acc(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T from_acc(acc_t<T> x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(x);
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return x;
}

// Vector<T, N> holds N elements as they are stored in memory. Vector is a built-in type such as
// uint4, because nvcc would load and store a struct element by element.
template <int BYTES>
struct Bits;
template <>
struct Bits<16> {
  using type = uint4;
};
template <>
struct Bits<8> {
  using type = uint2;
};
template <>
struct Bits<4> {
  using type = unsigned;
};
template <>
struct Bits<2> {
  using type = unsigned short;
};
template <typename T, int N>
using Vector = typename Bits<sizeof(T) * N>::type;

// Loads a vector into registers. To have several in flight, issue all loads before the first
// unpack().
template <typename T, int N>
__device__ inline Vector<T, N> load_vector(const T *p) {
  return *reinterpret_cast<const Vector<T, N> *>(p);
}

template <typename T, int N>
__device__ inline void unpack(acc_t<T> (&x)[N], const Vector<T, N> &bits) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
    // A bfloat16 is the upper half of a float. nvcc compiles __bfloat162float to three instructions
    // per word, and this code to two. __byte_perm keeps bytes 2 and 3 and fills the rest with
    // zeros. With & in its place, some kernels spill registers.
    uint32_t words[N / 2];
    memcpy(words, &bits, sizeof words);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      x[k] = __uint_as_float(words[k / 2] << 16);
      x[k + 1] = __uint_as_float(__byte_perm(words[k / 2], 0, 0x3244));
    }
  } else if constexpr (std::is_same_v<T, __half> && N % 2 == 0) {
    // With __half2float, nvcc would split each word of a predicated load and join the halves again.
    uint32_t words[N / 2];
    memcpy(words, &bits, sizeof words);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
      asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 "
          "%1, high;\n}"
          : "=f"(x[k]), "=f"(x[k + 1])
          : "r"(words[k / 2]));
    }
  } else {
    T v[N];
    memcpy(v, &bits, sizeof v);
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = to_acc(v[k]);
  }
}

template <typename T, int N>
__device__ inline void load(acc_t<T> (&x)[N], const T *p) {
  unpack<T, N>(x, load_vector<T, N>(p));
}

template <typename T, int N>
__device__ inline Vector<T, N> pack(const acc_t<T> (&x)[N]) {
  T v[N];
#pragma unroll
  for (int k = 0; k < N; ++k) v[k] = from_acc<T>(x[k]);
  Vector<T, N> bits;
  memcpy(&bits, v, sizeof bits);
  return bits;
}

// Stores a vector with __stwb. nvcc may split a plain store into narrow ones, at half the speed.
template <typename T, int N>
__device__ inline void store(T *p, const acc_t<T> (&x)[N]) {
  __stwb(reinterpret_cast<Vector<T, N> *>(p), pack<T, N>(x));
}

// Host code. Calls f with a zero of the C++ type that belongs to a dtype:
//   with_dtype(dtype, [&](auto zero) { using T = decltype(zero); ... })
// with_row_type is for kernels that hold rows in registers, which do not exist for float64.
template <typename F>
cudaError_t with_row_type(dtype_t dtype, F &&f) {
  switch (dtype) {
    case DTYPE_FLOAT32: return f(float{});
    case DTYPE_BFLOAT16: return f(__nv_bfloat16{});
    case DTYPE_FLOAT16: return f(__half{});
    default: return cudaErrorInvalidValue;
  }
}

template <typename F>
cudaError_t with_dtype(dtype_t dtype, F &&f) {
  return dtype == DTYPE_FLOAT64 ? f(double{}) : with_row_type(dtype, f);
}

#endif

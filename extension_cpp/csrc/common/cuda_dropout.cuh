// Dropout of elements in registers.
#ifndef EXTENSION_CPP_CUDA_DROPOUT_CUH
#define EXTENSION_CPP_CUDA_DROPOUT_CUH

#include <cstdint>

#include "common/philox.h"

__device__ inline int64_t seed_of(const dropout_t &dropout) { return dropout.seed == nullptr ? 0 : *dropout.seed; }

// Rounded, also where a sum follows: the CPU's bits.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The N elements from i on; i is a multiple of 4, or N is 1.
template <typename A, int N>
__device__ inline void drop(A (&x)[N], const dropout_t &dropout, int64_t seed, int64_t i) {
  const A scale = static_cast<A>(dropout.scale);
#pragma unroll
  for (int g = 0; g < N; g += 4) {
    const philox_t bits = philox_of(seed, (i + g) / 4);
    if constexpr (N == 1) {  // by selection: an index into registers would send them through memory
      const uint32_t low = i & 1 ? bits.word[1] : bits.word[0], high = i & 1 ? bits.word[3] : bits.word[2];
      x[0] = (i & 2 ? high : low) > dropout.last_dropped ? rounded_product(x[0], scale) : A(0);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        x[g + k] = bits.word[k] > dropout.last_dropped ? rounded_product(x[g + k], scale) : A(0);
    }
  }
}

#endif

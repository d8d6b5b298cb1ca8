// Dropout of elements in registers.
#ifndef EXTENSION_CPP_CUDA_DROPOUT_CUH
#define EXTENSION_CPP_CUDA_DROPOUT_CUH

#include <cstdint>

#include "common/philox.h"

__device__ inline int64_t seed_of(const dropout_t &dropout) {
  return dropout.seed == nullptr ? 0 : *dropout.seed;
}

// A product that nvcc does not fuse with an addition, so that the bits are the same as on the CPU.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// Computes which elements of COUNT vectors of N elements are kept: bit k of masks[v] is for element
// first[v] + k. N is 1, 2, 4 or 8, and first[v] is a multiple of N. The loop over rounds is the
// outer one: the vectors share the keys of a round, and their latencies overlap.
template <int N, int COUNT>
__device__ inline void keep(uint32_t (&masks)[COUNT], const dropout_t &dropout, int64_t seed,
                            const int64_t (&first)[COUNT]) {
  philox_t words[COUNT];
#pragma unroll
  for (int v = 0; v < COUNT; ++v) words[v] = counter_of(first[v] / 8);
  uint32_t key_0 = static_cast<uint32_t>(seed),
           key_1 = static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32);
#pragma unroll
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) philox_round(&words[v], key_0, key_1);
    key_0 += PHILOX_WEYL_0;
    key_1 += PHILOX_WEYL_1;
  }
#pragma unroll
  for (int v = 0; v < COUNT; ++v) {
    uint32_t *const word = words[v].word;
    // Selections, because an index would move `word` from registers to local memory.
    if (N <= 4 && first[v] & 4) word[0] = word[2], word[1] = word[3];
    if (N <= 2 && first[v] & 2) word[0] = word[1];
    masks[v] = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (bits_of(word[k / 2], N == 1 ? first[v] & 1 : k % 2) > dropout.last_dropped)
        masks[v] |= 1u << k;
    }
  }
}

// The same for the single element i.
__device__ inline uint32_t keep_one(const dropout_t &dropout, int64_t seed, int64_t i) {
  uint32_t masks[1];
  keep<1>(masks, dropout, seed, {i});
  return masks[0];
}

// Replaces elements whose mask bit is 0 by 0, and scales the others.
template <typename A, int N>
__device__ inline void drop(A (&x)[N], const dropout_t &dropout, uint32_t mask) {
  const A scale = sizeof(A) == 4 ? dropout.scale_float : dropout.scale;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    // The product is outside the selection, because nvcc would make a branch of it.
    const A product = rounded_product(x[k], scale);
    x[k] = mask >> k & 1 ? product : A(0);
  }
}

#endif

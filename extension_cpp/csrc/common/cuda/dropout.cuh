// Dropout of elements that a kernel holds in registers.
#ifndef EXTENSION_CPP_CUDA_DROPOUT_CUH
#define EXTENSION_CPP_CUDA_DROPOUT_CUH

#include <cstdint>

#include "common/philox.h"

__device__ inline int64_t seed_of(const dropout_t &dropout) {
  return dropout.seed == nullptr ? 0 : *dropout.seed;
}

// Returns a * b. nvcc fuses no addition into this product, so the bits are the same as on the CPU.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// Computes which elements of COUNT vectors of N elements are kept. Bit k of masks[v] is set if
// element first[v] + k is kept. N is 1, 2, 4 or 8, and first[v] is a multiple of N. The outer loop
// is over rounds, so that the vectors share a round's keys and their multiplications overlap.
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
    // Conditions select the words, because a variable index would move `word` to local memory.
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

// Does the same as keep() for the single element i. Returns 1 if it is kept, and 0 if not.
__device__ inline uint32_t keep_one(const dropout_t &dropout, int64_t seed, int64_t i) {
  uint32_t masks[1];
  keep<1>(masks, dropout, seed, {i});
  return masks[0];
}

// Scales the elements whose mask bit is 1, and sets the others to 0.
template <typename A, int N>
__device__ inline void drop(A (&x)[N], const dropout_t &dropout, uint32_t mask) {
  const A scale = sizeof(A) == 4 ? dropout.scale_float : dropout.scale;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    // With the product inside the selection, nvcc would compile the selection to a branch.
    const A product = rounded_product(x[k], scale);
    x[k] = mask >> k & 1 ? product : A(0);
  }
}

#endif

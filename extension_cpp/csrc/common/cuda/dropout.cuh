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

// The random bits of N neighbouring elements. Two elements share a word (common/philox.h). Kernels
// keep the words until they drop the elements. To make and test a mask of one bit per element would
// take twice as many instructions.
template <int N>
struct RandomBits {
  uint32_t word[(N + 1) / 2];
};

// Computes the random bits of COUNT vectors of N elements. Vector v begins at element first[v] of
// the tensor. N is 1, 2, 4 or 8, and first[v] is a multiple of N. The outer loop is over rounds, so
// that the vectors share a round's keys and their multiplications overlap.
template <int N, int COUNT>
__device__ inline void draw(RandomBits<N> (&bits)[COUNT], int64_t seed,
                            const int64_t (&first)[COUNT]) {
  philox_t words[COUNT];
#pragma unroll
  for (int v = 0; v < COUNT; ++v) words[v] = counter_of(first[v] >> 3);
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
    if (N == 1) word[0] = bits_of(word[0], first[v] & 1);
#pragma unroll
    for (int i = 0; i < (N + 1) / 2; ++i) bits[v].word[i] = word[i];
  }
}

// Does the same as draw() for the single element i.
__device__ inline RandomBits<1> draw_one(int64_t seed, int64_t i) {
  RandomBits<1> bits[1];
  draw(bits, seed, {i});
  return bits[0];
}

// Sets the elements to 0 that are not kept.
template <typename A, int N>
__device__ inline void select(A (&x)[N], const dropout_t &dropout, const RandomBits<N> &bits) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    x[k] = bits_of(bits.word[k / 2], k % 2) > dropout.last_dropped ? x[k] : A(0);
  }
}

// Does the same, and scales the elements that are kept.
template <typename A, int N>
__device__ inline void drop(A (&x)[N], const dropout_t &dropout, const RandomBits<N> &bits) {
  const A scale = sizeof(A) == 4 ? dropout.scale_float : dropout.scale;
  // With the products inside the selection, nvcc would compile the selection to a branch.
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = rounded_product(x[k], scale);
  select(x, dropout, bits);
}

// The same for the elements that begin at element `first` of the tensor, whose bits it draws.
template <typename A, int N>
__device__ inline void drop(A (&x)[N], const dropout_t &dropout, int64_t first) {
  RandomBits<N> bits[1];
  draw(bits, *dropout.seed, {first});
  drop(x, dropout, bits[0]);
}

#endif

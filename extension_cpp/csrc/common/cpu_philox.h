/* Dropout for lane loops: the random bits of philox.h, a block at a time, in the block order of each type (cpu_block.h).
 *
 * The counters fill 64-bit lanes, of which Philox uses the lower halves: a product then lies where it is needed, and what is
 * in the upper halves of factors and sums does no harm. The product of the lower halves is the one step that gcc has no
 * loop for. */
#ifndef EXTENSION_CPP_CPU_PHILOX_H
#define EXTENSION_CPP_CPU_PHILOX_H

#include "common/cpu_block.h"
#include "common/philox.h"

enum { COUNTERS = BLOCK / 8 };

/* A loop that gcc unrolled whole would be scalar, and an index of another width would take other vectors. */
#define FOR_COUNTERS _Pragma("GCC unroll 1") for (uint64_t j = 0; j < COUNTERS; ++j)

ALWAYS_INLINE void multiply_low_halves(uint64_t *restrict product, const uint64_t *restrict c, uint32_t multiplier) {
#if defined(__AVX2__)
  const __m256i lanes = _mm256_loadu_si256((const __m256i *)c);
  _mm256_storeu_si256((__m256i *)product, _mm256_mul_epu32(lanes, _mm256_set1_epi64x(multiplier)));
#else
  FOR_COUNTERS product[j] = (c[j] & 0xffffffff) * multiplier;
#endif
}

/* The words of the 32 elements from 8 * group on. */
ALWAYS_INLINE void philox_words(uint32_t *restrict words, int64_t group, int64_t seed) {
  uint64_t c0[COUNTERS], c1[COUNTERS], c2[COUNTERS], c3[COUNTERS];
  uint64_t key_0 = (uint64_t)seed & 0xffffffff, key_1 = (uint64_t)seed >> 32;
  FOR_COUNTERS c0[j] = (uint64_t)group + j;
  FOR_COUNTERS c1[j] = ((uint64_t)group + j) >> 32;
  FOR_COUNTERS c2[j] = 0;
  FOR_COUNTERS c3[j] = 0;
#pragma GCC unroll 10
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    uint64_t product_0[COUNTERS], product_1[COUNTERS];
    multiply_low_halves(product_0, c0, PHILOX_MULTIPLIER_0);
    multiply_low_halves(product_1, c2, PHILOX_MULTIPLIER_1);
    FOR_COUNTERS c0[j] = (product_1[j] >> 32) ^ c1[j] ^ key_0;
    FOR_COUNTERS c2[j] = (product_0[j] >> 32) ^ c3[j] ^ key_1;
    FOR_COUNTERS c1[j] = product_1[j];
    FOR_COUNTERS c3[j] = product_0[j];
    key_0 += PHILOX_WEYL_0;
    key_1 += PHILOX_WEYL_1;
  }
  uint64_t pairs[2 * COUNTERS];
  FOR_COUNTERS c0[j] = (c0[j] & 0xffffffff) | c1[j] << 32;
  FOR_COUNTERS c2[j] = (c2[j] & 0xffffffff) | c3[j] << 32;
  FOR_COUNTERS pairs[2 * j] = c0[j], pairs[2 * j + 1] = c2[j];
  memcpy(words, pairs, sizeof pairs);
}

/* The bits of elements [i, i + BLOCK) in memory order, for any i; a function, for it is long and rare. */
static __attribute__((noinline)) void philox_shifted(uint32_t *bits, int64_t i, int64_t seed) {
  uint32_t words[BLOCK / 2 + 4];
  philox_words(words, i / 8, seed);
  const philox_t last = philox_of(seed, i / 8 + COUNTERS);
  memcpy(words + BLOCK / 2, last.word, sizeof last.word);
  for (int k = 0; k < BLOCK; ++k) bits[k] = bits_of(words[(i % 8 + k) / 2], (i + k) % 2);
}

/* The same; quick where i is a multiple of 8. */
ALWAYS_INLINE void philox_block(uint32_t *restrict bits, int64_t i, int64_t seed) {
  if (i % 8 == 0) {
    uint32_t words[BLOCK / 2];
    philox_words(words, i / 8, seed);
    _Pragma("GCC unroll 1") for (int k = 0; k < BLOCK / 2; ++k) {
      bits[2 * k] = words[k];
      bits[2 * k + 1] = bits_of(words[k], 1);
    }
  } else {
    uint32_t shifted[BLOCK]; /* of its own, so that bits may stay in registers */
    philox_shifted(shifted, i, seed);
    for (int k = 0; k < BLOCK; ++k) bits[k] = shifted[k];
  }
}

ALWAYS_INLINE void philox_block_float64(uint32_t *restrict bits, int64_t i, int64_t seed) {
  philox_block(bits, i, seed);
}
ALWAYS_INLINE void philox_block_float32(uint32_t *restrict bits, int64_t i, int64_t seed) {
  philox_block(bits, i, seed);
}
ALWAYS_INLINE void philox_block_float16(uint32_t *restrict bits, int64_t i, int64_t seed) {
  philox_block(bits, i, seed);
}

/* bfloat16: even elements first, as they come. */
ALWAYS_INLINE void philox_block_bfloat16(uint32_t *restrict bits, int64_t i, int64_t seed) {
  if (i % 8 == 0) {
    philox_words(bits, i / 8, seed);
    for (int k = 0; k < BLOCK / 2; ++k) bits[BLOCK / 2 + k] = bits_of(bits[k], 1);
  } else {
    uint32_t shifted[BLOCK];
    philox_shifted(shifted, i, seed);
    for (int k = 0; k < BLOCK / 2; ++k) bits[k] = shifted[2 * k], bits[BLOCK / 2 + k] = shifted[2 * k + 1];
  }
}

/* What dropout_t says, in locals: what is read through a pointer would be read again after every store. */
typedef struct {
  int64_t seed;
  double scale;
  uint32_t last_dropped;
} cpu_dropout_t;

ALWAYS_INLINE cpu_dropout_t cpu_dropout_of(const dropout_t *dropout) {
  return (cpu_dropout_t){dropout->seed ? *dropout->seed : 0, dropout->scale, dropout->last_dropped};
}

/* x where `kept`, else 0, by arithmetic: of a selection gcc makes a branch where the loop around it is large. */
ALWAYS_INLINE float float_if(int kept, float x) { return bits_float(float_bits(x) & -(uint32_t)kept); }
ALWAYS_INLINE double double_if(int kept, double x) { return kept ? x : 0; }

/* Drops and scales a block, the one of elements [i, i + BLOCK). */
#define DEFINE_DROPOUT_BLOCK(type, acc)                                                               \
  ALWAYS_INLINE void dropout_block_##type(acc *restrict v, const cpu_dropout_t *dropout, int64_t i) { \
    const acc scale = (acc)dropout->scale;                                                            \
    uint32_t bits[BLOCK];                                                                             \
    philox_block_##type(bits, i, dropout->seed);                                                      \
    for (int k = 0; k < BLOCK; ++k) v[k] = acc##_if(bits[k] > dropout->last_dropped, v[k] * scale);   \
  }
DEFINE_DROPOUT_BLOCK(float64, double)
DEFINE_DROPOUT_BLOCK(float32, float)
DEFINE_DROPOUT_BLOCK(bfloat16, float)
DEFINE_DROPOUT_BLOCK(float16, float)

#endif

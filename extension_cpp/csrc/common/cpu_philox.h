/* Dropout for lane loops: the random bits of philox.h, a block at a time, in the block order of each type (cpu_block.h).
 *
 * Philox has two products a round, of words 0 and 2. Here eight 64-bit lanes hold word 0 of four counters and then word 2 of the
 * same four, in their lower halves: one product for both, which lies where it is needed when the two fours have changed places.
 * What is in the upper halves of factors and sums does no harm. */
#ifndef EXTENSION_CPP_CPU_PHILOX_H
#define EXTENSION_CPP_CPU_PHILOX_H

#include "common/cpu_block.h"
#include "common/philox.h"

enum { COUNTERS = BLOCK / 8, LANES = 2 * COUNTERS };

/* A loop that gcc unrolled whole would be scalar, and an index of another width would take other vectors. */
#define FOR_LANES(count) _Pragma("GCC unroll 1") for (uint64_t j = 0; j < (count); ++j)

/* The products of the lower halves, those of words 0 where words 2 were and the other way round; gcc has no loop for either. */
ALWAYS_INLINE void multiply_and_swap(uint64_t *restrict product, const uint64_t *restrict c) {
#if defined(__AVX512F__)
  const __m512i multipliers =
      _mm512_inserti64x4(_mm512_set1_epi64(PHILOX_MULTIPLIER_0), _mm256_set1_epi64x(PHILOX_MULTIPLIER_1), 1);
  const __m512i products = _mm512_mul_epu32(_mm512_loadu_si512(c), multipliers);
  _mm512_storeu_si512(product, _mm512_shuffle_i64x2(products, products, 0x4e));
#elif defined(__AVX2__)
  const __m256i word_0 = _mm256_loadu_si256((const __m256i *)c), word_2 = _mm256_loadu_si256((const __m256i *)(c + 4));
  _mm256_storeu_si256((__m256i *)product, _mm256_mul_epu32(word_2, _mm256_set1_epi64x(PHILOX_MULTIPLIER_1)));
  _mm256_storeu_si256((__m256i *)(product + 4), _mm256_mul_epu32(word_0, _mm256_set1_epi64x(PHILOX_MULTIPLIER_0)));
#else
  FOR_LANES(COUNTERS) product[j] = (c[COUNTERS + j] & 0xffffffff) * PHILOX_MULTIPLIER_1;
  FOR_LANES(COUNTERS) product[COUNTERS + j] = (c[j] & 0xffffffff) * PHILOX_MULTIPLIER_0;
#endif
}

/* The first four and the last four in turn. In AVX-512 gcc would take halves, and wait for their way through memory. */
ALWAYS_INLINE void interleave(uint64_t *restrict pairs, const uint64_t *restrict fours) {
#if defined(__AVX512F__)
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  _mm512_storeu_si512(pairs, _mm512_permutexvar_epi64(order, _mm512_loadu_si512(fours)));
#else
  FOR_LANES(COUNTERS) pairs[2 * j] = fours[j], pairs[2 * j + 1] = fours[COUNTERS + j];
#endif
}

/* The words of the 32 elements from 8 * group on. */
ALWAYS_INLINE void philox_words(uint32_t *restrict words, int64_t group, int64_t seed) {
  static const uint64_t steps[LANES] = {0, 1, 2, 3}, firsts[LANES] = {~0ull, ~0ull, ~0ull, ~0ull};
  static const uint64_t weyl[LANES] = {PHILOX_WEYL_0, PHILOX_WEYL_0, PHILOX_WEYL_0, PHILOX_WEYL_0,
                                       PHILOX_WEYL_1, PHILOX_WEYL_1, PHILOX_WEYL_1, PHILOX_WEYL_1};
  uint64_t even[LANES], odd[LANES], key[LANES]; /* words 0 and 2, words 1 and 3, their keys */
  FOR_LANES(LANES) even[j] = ((uint64_t)group + steps[j]) & firsts[j];
  FOR_LANES(LANES) odd[j] = even[j] >> 32;
  FOR_LANES(LANES) key[j] = ((uint64_t)seed & firsts[j]) | ((uint64_t)seed >> 32 & ~firsts[j]);
#pragma GCC unroll 10
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
    uint64_t product[LANES];
    multiply_and_swap(product, even);
    FOR_LANES(LANES) even[j] = (product[j] >> 32) ^ odd[j] ^ key[j];
    FOR_LANES(LANES) odd[j] = product[j];
    FOR_LANES(LANES) key[j] += weyl[j];
  }
  uint64_t pairs[LANES];
  FOR_LANES(LANES) even[j] = (even[j] & 0xffffffff) | odd[j] << 32;
  interleave(pairs, even);
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

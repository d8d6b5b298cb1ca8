/* Dropout for kernels that loop over lanes. A separate loop turns the random bits of
 * common/philox.h into masks of one bit per element, ahead of their use. A block takes 32 mask
 * bits, starting at any element. A kernel that reads a row twice computes the row's mask only
 * once. */
#ifndef EXTENSION_CPP_CPU_PHILOX_H
#define EXTENSION_CPP_CPU_PHILOX_H

#include "common/cpu/block.h"
#include "common/philox.h"

/* A vector for the Philox rounds holds one word each of COUNTERS counters. Each word is in the
 * lower half of a 64-bit element, because its product has 64 bits. The upper halves are ignored. */
#if defined(__AVX512F__)
enum { COUNTERS = 8 };
#elif defined(__AVX2__)
enum { COUNTERS = 4 };
#else
enum { COUNTERS = 2 };
#endif
typedef uint64_t __attribute__((vector_size(8 * COUNTERS))) lanes_t;
typedef uint32_t __attribute__((vector_size(8 * COUNTERS))) half_lanes_t;

/* Returns the 64-bit products of `multiplier` and the lower half of each element of c. */
ALWAYS_INLINE lanes_t multiply(lanes_t c, uint32_t multiplier) {
#if defined(__AVX512F__)
  return (lanes_t)_mm512_mul_epu32((__m512i)c, _mm512_set1_epi64(multiplier));
#elif defined(__AVX2__)
  return (lanes_t)_mm256_mul_epu32((__m256i)c, _mm256_set1_epi64x(multiplier));
#elif defined(__x86_64__)
  return (lanes_t)_mm_mul_epu32((__m128i)c, _mm_set1_epi64x(multiplier));
#else
  return (c & 0xffffffff) * multiplier;
#endif
}

ALWAYS_INLINE lanes_t upper_halves(lanes_t product) {
#if defined(__AVX512F__)
  /* A shift would compete with the products for the only execution port that runs either. */
  return (lanes_t)_mm512_shuffle_epi32((__m512i)product, 0xf5);
#else
  return product >> 32;
#endif
}

/* Stores one byte per counter: a mask of the counter's eight elements, computed from its four
 * words. Bit k is set if element k is kept: if its random bits exceed last_dropped. */
ALWAYS_INLINE void store_kept(uint8_t *kept, const lanes_t *word, uint32_t last_dropped) {
#if defined(__AVX512F__)
  uint64_t bytes = 0;
  for (int w = 0; w < 4; w += 2) {
    const __m512i pair =
        _mm512_mask_shuffle_epi32((__m512i)word[w], 0xaaaa, (__m512i)word[w + 1], 0xa0);
    const __m512i last = _mm512_set1_epi32((int)last_dropped);
    const uint64_t first_bits = 0x0505050505050505u << 2 * w;
    bytes |= _pdep_u64(_mm512_cmpgt_epu32_mask(pair, last), first_bits);
    bytes |= _pdep_u64(_mm512_cmpgt_epu32_mask(_mm512_rol_epi32(pair, 16), last), first_bits << 1);
  }
  memcpy(kept, &bytes, sizeof bytes);
#else
  lanes_t bytes = {0};
  for (int w = 0; w < 4; w += 2) {
    const half_lanes_t even = (half_lanes_t)((word[w] & 0xffffffff) | word[w + 1] << 32);
    const half_lanes_t odd = even << 16 | even >> 16;
    const half_lanes_t both =
        ((half_lanes_t)(even > last_dropped) & 1) | ((half_lanes_t)(odd > last_dropped) & 2);
    bytes |= ((lanes_t)both | (lanes_t)both >> 30) << 2 * w;
  }
  for (int j = 0; j < COUNTERS; ++j) kept[j] = (uint8_t)bytes[j];
#endif
}

/* Numbers of elements, both multiples of 64. The buffer holds the masks of HELD elements.
 * MADE_AT_ONCE masks are computed together. MADE_AT_ONCE is small, so that the processor computes
 * the masks while it waits for memory. */
enum { HELD = 16384, MADE_AT_ONCE = 512 };

/* The parameters of a dropout, and the masks of elements [begin, end), a range that grows. */
typedef struct {
  uint64_t key[PHILOX_ROUNDS][2];
  double scale;
  float scale_float;
  uint32_t last_dropped;
  int64_t begin, end;         /* multiples of 64 */
  int64_t until;              /* the first element that needs no mask */
  uint8_t kept[HELD / 8 + 8]; /* 8 extra bytes, because kept_bits reads 64 bits at any byte */
} cpu_dropout_t;

/* Initialises `state` for dropout of elements [0, until). */
static inline void cpu_dropout_init(cpu_dropout_t *state, const dropout_t *dropout, int64_t until) {
  const uint64_t seed = dropout->seed ? (uint64_t)*dropout->seed : 0;
  for (uint32_t round = 0; round < PHILOX_ROUNDS; ++round) {
    state->key[round][0] = (uint32_t)seed + round * PHILOX_WEYL_0;
    state->key[round][1] = (uint32_t)(seed >> 32) + round * PHILOX_WEYL_1;
  }
  state->scale = dropout->scale;
  state->scale_float = dropout->scale_float;
  state->last_dropped = dropout->last_dropped;
  state->begin = state->end = 0;
  state->until = until;
}

/* Computes masks from element i on. The new masks are appended if they follow the existing masks
 * directly and the buffer has room. Otherwise they replace the existing masks. */
static __attribute__((noinline)) void cpu_dropout_make(cpu_dropout_t *state, int64_t i) {
  if (i < state->begin || i > state->end || state->end - state->begin > HELD - MADE_AT_ONCE) {
    state->begin = state->end = i - i % 64;
  }
  const int64_t last = state->until + BLOCK, ahead = state->end + MADE_AT_ONCE,
                stop = last < ahead ? last : ahead;
  lanes_t steps;
  for (uint64_t j = 0; j < COUNTERS; ++j) steps[j] = j;
  for (; state->end < stop || state->end % 64 != 0; state->end += 8 * COUNTERS) {
    const uint64_t counter = (uint64_t)state->end / 8;
    lanes_t word[4] = {counter + steps};
    /* all lanes have the same high word, because their counters do not cross a multiple of 2^32 */
    word[1] += counter >> 32;
#pragma GCC unroll 7
    for (int round = 0; round < PHILOX_ROUNDS; ++round) {
      const lanes_t product_0 = multiply(word[0], PHILOX_MULTIPLIER_0),
                    product_1 = multiply(word[2], PHILOX_MULTIPLIER_1);
      word[0] = upper_halves(product_1) ^ word[1] ^ state->key[round][0];
      word[1] = product_1;
      word[2] = upper_halves(product_0) ^ word[3] ^ state->key[round][1];
      word[3] = product_0;
    }
    store_kept(state->kept + (state->end - state->begin) / 8, word, state->last_dropped);
  }
}

/* Makes sure that the masks of elements [i, i + n) exist, for n <= MADE_AT_ONCE - 63. The last
 * block may extend past `until`, so masks are computed for one block beyond it. */
ALWAYS_INLINE void cpu_dropout_hold(cpu_dropout_t *state, int64_t i, int64_t n) {
  if (__builtin_expect(i < state->begin || i + n > state->end, 0)) cpu_dropout_make(state, i);
}

/* Call this before a row of n elements, from element i on, is processed in two passes. The function
 * discards the existing masks if the buffer has no room for the row's masks after them. */
ALWAYS_INLINE void cpu_dropout_begin_row(cpu_dropout_t *state, int64_t i, int64_t n) {
  const int64_t room = state->begin + HELD - MADE_AT_ONCE;
  if (i + n + BLOCK > room) state->begin = state->end = i - i % 64;
}

/* Returns 32 bits, of which bit k says whether element i + k is kept. The mask also matters for the
 * zeros that fill a block past the end of a row: 0 * scale is NaN if the scale is infinite. */
ALWAYS_INLINE uint32_t kept_bits(cpu_dropout_t *state, int64_t i) {
  cpu_dropout_hold(state, i, BLOCK);
  const uint64_t at = (uint64_t)(i - state->begin);
  uint64_t bits;
  memcpy(&bits, state->kept + at / 8, sizeof bits);
  return (uint32_t)(bits >> at % 8);
}

/* Returns x if `kept` is 1, and 0 otherwise. The float version uses a bit mask, because in a large
 * loop gcc compiles a selection to a branch. */
ALWAYS_INLINE float float_if(int kept, float x) {
  return bits_float(float_bits(x) & -(uint32_t)kept);
}
ALWAYS_INLINE double double_if(int kept, double x) { return kept ? x : 0; }

/* Applies dropout to the block of elements [i, i + BLOCK). */
#define DEFINE_DROPOUT_BLOCK(type, acc)                                                         \
  ALWAYS_INLINE void dropout_block_##type(acc *restrict v, cpu_dropout_t *dropout, int64_t i) { \
    const uint32_t kept = kept_bits(dropout, i);                                                \
    const acc scale = sizeof(acc) == 4 ? (acc)dropout->scale_float : (acc)dropout->scale;       \
    for (int k = 0; k < BLOCK; ++k)                                                             \
      v[k] = acc##_if((kept & 1u << column_##type(k)) != 0, v[k] * scale);                      \
  }
DEFINE_DROPOUT_BLOCK(float64, double)
DEFINE_DROPOUT_BLOCK(float32, float)
DEFINE_DROPOUT_BLOCK(bfloat16, float)
DEFINE_DROPOUT_BLOCK(float16, float)

#endif

/* Blocks: the unit in which CPU kernels load, compute and store. A block is BLOCK elements widened
 * to float (float64: double) in a local array. Compilers keep the array in vector registers if
 * every loop over it has the constant trip count BLOCK.
 *
 * Block order. A bfloat16 block holds the even elements first, then the odd ones: widening a pair
 * is then a shift and a mask, without a shuffle. The other types keep memory order. Every load and
 * store of a type uses the same order, so element-by-element arithmetic and sums over blocks need
 * not know it. Code that depends on the column of v[k] must (column_<type>).
 *
 * A load of n < BLOCK elements fills the rest with zeros; a store of n < BLOCK writes n. Both go by
 * way of a whole block in memory, so that a kernel has its arithmetic once for all n: a branch for
 * each partial block costs less than a copy of the kernel. Pass n as a constant where it is one. */
#ifndef EXTENSION_CPP_CPU_BLOCK_H
#define EXTENSION_CPP_CPU_BLOCK_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h> /* SSE2 alone: the other header takes the compiler 0.4 s */
#endif

/* Kernels are inlined into the loops that call them, one copy for each constant that they are
 * called with. For the baseline of x86-64 (CPU_SMALL) the compiler decides: these processors are of
 * before 2013, and the copies take most of the time that compiling takes. */
#if defined(CPU_SMALL)
#define ALWAYS_INLINE static inline __attribute__((unused))
#else
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#endif
#define NOINLINE static __attribute__((noinline, unused))

enum { BLOCK = 32 };

/* Two neighbouring 16-bit elements. */
typedef uint32_t __attribute__((may_alias, aligned(2))) pair_t;
typedef uint16_t __attribute__((may_alias)) half_t;

/* The element of a block that lane k holds. */
ALWAYS_INLINE int column_float64(int k) { return k; }
ALWAYS_INLINE int column_float32(int k) { return k; }
ALWAYS_INLINE int column_float16(int k) { return k; }
ALWAYS_INLINE int column_bfloat16(int k) { return k < BLOCK / 2 ? 2 * k : 2 * (k - BLOCK / 2) + 1; }

ALWAYS_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

ALWAYS_INLINE float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* The bits of x rounded to bfloat16 (nearest, ties to even), in the upper half; NaN stays NaN. */
ALWAYS_INLINE uint32_t bfloat16_bits(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return x != x ? 0x7fc00000u : rounded;
}

/* The same for x that is no NaN, or one whose lower half is 0. */
ALWAYS_INLINE uint32_t clean_bfloat16_bits(float x) {
  const uint32_t bits = float_bits(x);
  return bits + 0x7fff + (bits >> 16 & 1);
}

/* float16 conversions without F16C. Each equals the F16C instruction on every input. */
ALWAYS_INLINE float float16_to_float(uint16_t half) {
  const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
  /* 2^112 changes the exponent's bias from 15 to 127 and normalises subnormals. */
  const float scaled = bits_float(magnitude) * 0x1p112f;
  const uint32_t bits = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : float_bits(scaled);
  return bits_float(bits | sign);
}

ALWAYS_INLINE uint16_t float_to_float16(float x) {
  const uint32_t sign = float_bits(x) >> 16 & 0x8000;
  const uint32_t bits = float_bits(x) & 0x7fffffff;
  /* Subnormal results: adding 0.5 leaves the rounded value in the low bits of the significand. */
  const uint32_t small = float_bits(bits_float(bits) + 0.5f) - 0x3f000000;
  const uint32_t normal = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  uint32_t half = bits < 0x38800000 ? small : normal;
  half = bits >= 0x477ff000 ? 0x7c00 : half; /* 65520 and more round to infinity */
  half = bits > 0x7f800000 ? 0x7e00 : half;
  return (uint16_t)(half | sign);
}

/* One element as a number. */
ALWAYS_INLINE double widen_float64(double x) { return x; }
ALWAYS_INLINE double widen_float32(float x) { return x; }
ALWAYS_INLINE double widen_float16(uint16_t x) { return float16_to_float(x); }
ALWAYS_INLINE double widen_bfloat16(uint16_t x) { return bits_float((uint32_t)x << 16); }

/* A number of the accumulation type rounded to one element. */
ALWAYS_INLINE double narrow_float64(double x) { return x; }
ALWAYS_INLINE float narrow_float32(float x) { return x; }
ALWAYS_INLINE uint16_t narrow_float16(float x) { return float_to_float16(x); }
ALWAYS_INLINE uint16_t narrow_bfloat16(float x) { return (uint16_t)(bfloat16_bits(x) >> 16); }

/* Streams 64 bytes past the caches. p must be aligned to 64. Call stream_fence() after the last of
 * a range. */
ALWAYS_INLINE void stream64(void *p, const void *v) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i *)p, _mm512_loadu_si512(v));
#elif defined(__AVX__)
  for (int j = 0; j < 2; ++j)
    _mm256_stream_si256((__m256i *)p + j, _mm256_loadu_si256((const __m256i *)v + j));
#elif defined(__x86_64__)
  for (int j = 0; j < 4; ++j)
    _mm_stream_si128((__m128i *)p + j, _mm_loadu_si128((const __m128i *)v + j));
#else
  memcpy(p, v, 64);
#endif
}

ALWAYS_INLINE void stream_fence(void) {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

/* The first n elements of `size` bytes at p, and zeros up to a whole block. Returns padded. */
#define DEFINE_PAD(size)                                                                  \
  NOINLINE const void *pad_##size(void *restrict padded, const void *restrict p, int n) { \
    const int pairs = n * size / 4;                                                       \
    for (int k = 0; k < BLOCK * size / 4; ++k)                                            \
      ((pair_t *)padded)[k] = k < pairs ? ((const pair_t *)p)[k] : 0;                     \
    if (n * size % 4 != 0) ((half_t *)padded)[n - 1] = ((const half_t *)p)[n - 1];        \
    return padded;                                                                        \
  }
DEFINE_PAD(2)
DEFINE_PAD(4)
DEFINE_PAD(8)

/* Writes the first n elements of a whole block, from a copy: lanes whose address a call has seen
 * would not stay in registers. */
#define STORE_PART(type, p, v, n)                        \
  do {                                                   \
    enum { WORDS = BLOCK * sizeof *(p) / sizeof(type) }; \
    type padded[WORDS];                                  \
    for (int k = 0; k < WORDS; ++k) padded[k] = (v)[k];  \
    memcpy(p, padded, (size_t)(n) * sizeof *(p));        \
  } while (0)

ALWAYS_INLINE void load_float32(float *restrict v, const float *restrict p, int n) {
  float padded[BLOCK];
  if (n != BLOCK) p = (const float *)pad_4(padded, p, n);
  for (int k = 0; k < BLOCK; ++k) v[k] = p[k];
}

ALWAYS_INLINE void store_float32(float *restrict p, const float *restrict v, int n, int stream) {
  if (n != BLOCK) {
    STORE_PART(float, p, v, n);
  } else if (stream) {
    for (int k = 0; k < BLOCK; k += 16) stream64(p + k, v + k);
  } else {
    for (int k = 0; k < BLOCK; ++k) p[k] = v[k];
  }
}

ALWAYS_INLINE void load_float64(double *restrict v, const double *restrict p, int n) {
  double padded[BLOCK];
  if (n != BLOCK) p = (const double *)pad_8(padded, p, n);
  for (int k = 0; k < BLOCK; ++k) v[k] = p[k];
}

ALWAYS_INLINE void store_float64(double *restrict p, const double *restrict v, int n, int stream) {
  if (n != BLOCK) {
    STORE_PART(double, p, v, n);
  } else if (stream) {
    for (int k = 0; k < BLOCK; k += 8) stream64(p + k, v + k);
  } else {
    for (int k = 0; k < BLOCK; ++k) p[k] = v[k];
  }
}

ALWAYS_INLINE void load_bfloat16(float *restrict v, const uint16_t *restrict p, int n) {
  uint16_t padded[BLOCK];
  if (n != BLOCK) p = (const uint16_t *)pad_2(padded, p, n);
  const pair_t *pairs = (const pair_t *)p;
  for (int k = 0; k < BLOCK / 2; ++k) v[k] = bits_float(pairs[k] << 16);
  for (int k = 0; k < BLOCK / 2; ++k) v[BLOCK / 2 + k] = bits_float(pairs[k] & 0xffff0000u);
}

ALWAYS_INLINE void store_pairs(uint16_t *restrict p, const uint32_t *restrict pairs, int n,
                               int stream) {
  if (n != BLOCK) {
    STORE_PART(uint32_t, p, pairs, n);
  } else if (stream) {
    stream64(p, pairs);
  } else {
    pair_t *out = (pair_t *)p;
    for (int k = 0; k < BLOCK / 2; ++k) out[k] = pairs[k];
  }
}

ALWAYS_INLINE void store_bfloat16(uint16_t *restrict p, const float *restrict v, int n,
                                  int stream) {
  uint32_t pairs[BLOCK / 2];
  for (int k = 0; k < BLOCK / 2; ++k) {
    pairs[k] = (bfloat16_bits(v[BLOCK / 2 + k]) & 0xffff0000u) | bfloat16_bits(v[k]) >> 16;
  }
  store_pairs(p, pairs, n, stream);
}

/* As store_bfloat16, without a test for NaN. For values whose NaN can come only from a bfloat16
 * input or from the processor (inf - inf, 0 * inf): its lower 16 bits are 0, so that rounding does
 * not change it. Not for values computed from float32 inputs. */
#define store_clean_float64 store_float64
#define store_clean_float32 store_float32
#define store_clean_float16 store_float16
ALWAYS_INLINE void store_clean_bfloat16(uint16_t *restrict p, const float *restrict v, int n,
                                        int stream) {
  uint32_t pairs[BLOCK / 2];
  for (int k = 0; k < BLOCK / 2; ++k) {
    const uint32_t low = clean_bfloat16_bits(v[k]), high = clean_bfloat16_bits(v[BLOCK / 2 + k]);
    pairs[k] = (high & 0xffff0000u) | low >> 16;
  }
  store_pairs(p, pairs, n, stream);
}

ALWAYS_INLINE void load_float16(float *restrict v, const uint16_t *restrict p, int n) {
  uint16_t padded[BLOCK];
  if (n != BLOCK) p = (const uint16_t *)pad_2(padded, p, n);
#if defined(__AVX512F__)
  for (int k = 0; k < BLOCK; k += 16) {
    _mm512_storeu_ps(v + k, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + k))));
  }
#elif defined(__F16C__)
  for (int k = 0; k < BLOCK; k += 8) {
    _mm256_storeu_ps(v + k, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + k))));
  }
#else
  for (int k = 0; k < BLOCK; ++k) v[k] = float16_to_float(p[k]);
#endif
}

ALWAYS_INLINE void store_float16(uint16_t *restrict p, const float *restrict v, int n, int stream) {
  uint16_t half[BLOCK];
#if defined(__AVX512F__)
  for (int k = 0; k < BLOCK; k += 16) {
    _mm256_storeu_si256((__m256i *)(half + k),
                        _mm512_cvtps_ph(_mm512_loadu_ps(v + k), _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  for (int k = 0; k < BLOCK; k += 8) {
    _mm_storeu_si128((__m128i *)(half + k),
                     _mm256_cvtps_ph(_mm256_loadu_ps(v + k), _MM_FROUND_TO_NEAREST_INT));
  }
#else
  for (int k = 0; k < BLOCK; ++k) half[k] = float_to_float16(v[k]);
#endif
  if (n != BLOCK) {
    STORE_PART(uint16_t, p, half, n);
  } else if (stream) {
    stream64(p, half);
  } else {
    memcpy(p, half, sizeof half);
  }
}

/* Prefetches the cache lines of `bytes` bytes at p + ahead. Any address is allowed, also one
 * outside the tensor. */
ALWAYS_INLINE void prefetch(const void *p, int64_t ahead, int64_t bytes) {
  const uintptr_t later = (uintptr_t)p + (uintptr_t)ahead;
  for (int64_t byte = 0; byte < bytes; byte += 64)
    __builtin_prefetch((const void *)(later + (uintptr_t)byte), 0, 3);
}

/* LOAD in a loop over all elements, which also prefetches 2 KiB ahead. Where a block is much work,
 * the hardware prefetcher does not look far enough ahead. */
#define READ(v, p, n) (prefetch(p, 2048, BLOCK * (int64_t)sizeof *(p)), LOAD(v, p, n))

/* Calls block(args, i, n, stream) for the elements of [begin, end): n = BLOCK, and less for the
 * tail. With `stream`, `out` must be the address to which the block at `begin` is written. Stores
 * are streamed only if that is aligned to 64 bytes. */
#define FOR_BLOCKS(block, args, begin, end, out, stream)                   \
  do {                                                                     \
    const int aligned = (stream) && (uintptr_t)(out) % 64 == 0;            \
    int64_t i = (begin);                                                   \
    for (; i + BLOCK <= (end); i += BLOCK) block(args, i, BLOCK, aligned); \
    if (i < (end)) block(args, i, (int)((end)-i), 0);                      \
    if (aligned) stream_fence();                                           \
  } while (0)

/* The same with one copy of the block. Where a block is much work, its branches cost nothing, and
 * a second copy would take the compiler as long as the first. */
#define FOR_LONG_BLOCKS(block, args, begin, end, out, stream)            \
  do {                                                                   \
    const int aligned = (stream) && (uintptr_t)(out) % 64 == 0;          \
    for (int64_t i = (begin); i < (end); i += BLOCK)                     \
      block(args, i, (end)-i < BLOCK ? (int)((end)-i) : BLOCK, aligned); \
    if (aligned) stream_fence();                                         \
  } while (0)

#endif

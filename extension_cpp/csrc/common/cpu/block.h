/* Blocks are the unit in which CPU kernels load, compute and store. A block is BLOCK elements in a
 * local array, widened to float (float64 elements stay double). Compilers keep this array in vector
 * registers if every loop over it has the constant trip count BLOCK.
 *
 * Block order. A bfloat16 block holds the even elements first, then the odd ones. Widening a pair
 * of neighbours then takes a shift and a mask, without a shuffle. Blocks of the other types keep
 * memory order. All loads and stores of a type use the same order, so element-wise arithmetic and
 * sums over blocks need not know it. Code that needs the column of v[k] calls column_<type>(k).
 *
 * A load of n < BLOCK elements fills the rest of the block with zeros. A store of n < BLOCK
 * elements writes only n. Partial loads and stores copy through a whole block in memory, so that
 * the arithmetic of a kernel is compiled once for all n. The branch for a partial block costs less
 * than a second copy of the kernel's code. Pass n as a constant wherever it is one. */
#ifndef EXTENSION_CPP_CPU_BLOCK_H
#define EXTENSION_CPP_CPU_BLOCK_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h> /* for SSE2; parsing the larger immintrin.h would take the compiler 0.4 s */
#endif

/* Kernels are inlined into the loops that call them. Each constant argument value gives its own
 * copy of the kernel. At the x86-64 baseline (CPU_SMALL) the compiler decides what to inline: only
 * processors from before 2013 run that level, and the copies would dominate the compile time. */
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

/* column_<type>(k) returns the position in memory, within its block, of lane k's element. */
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

/* Returns x rounded to bfloat16 (to nearest, ties to even) in the upper 16 bits of the result. The
 * lower bits are unspecified. NaN stays NaN. */
ALWAYS_INLINE uint32_t bfloat16_bits(float x) {
  const uint32_t bits = float_bits(x);
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return x != x ? 0x7fc00000u : rounded;
}

/* Does the same as bfloat16_bits without a NaN test. The lower 16 bits of a NaN x must be 0. */
ALWAYS_INLINE uint32_t clean_bfloat16_bits(float x) {
  const uint32_t bits = float_bits(x);
  return bits + 0x7fff + (bits >> 16 & 1);
}

/* Conversions for processors without F16C. Results equal those of F16C for every input. */
ALWAYS_INLINE float float16_to_float(uint16_t half) {
  const uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
  /* The factor 2^112 changes the exponent's bias from 15 to 127 and normalises subnormals. */
  const float scaled = bits_float(magnitude) * 0x1p112f;
  const uint32_t bits = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : float_bits(scaled);
  return bits_float(bits | sign);
}

ALWAYS_INLINE uint16_t float_to_float16(float x) {
  const uint32_t sign = float_bits(x) >> 16 & 0x8000;
  const uint32_t bits = float_bits(x) & 0x7fffffff;
  /* For a subnormal result, adding 0.5 leaves the rounded value in the lowest bits. */
  const uint32_t small = float_bits(bits_float(bits) + 0.5f) - 0x3f000000;
  const uint32_t normal = (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13;
  uint32_t half = bits < 0x38800000 ? small : normal;
  half = bits >= 0x477ff000 ? 0x7c00 : half; /* 65520 and larger values round to infinity */
  half = bits > 0x7f800000 ? 0x7e00 : half;
  return (uint16_t)(half | sign);
}

/* widen_<type> converts one element in memory to a double. */
ALWAYS_INLINE double widen_float64(double x) { return x; }
ALWAYS_INLINE double widen_float32(float x) { return x; }
ALWAYS_INLINE double widen_float16(uint16_t x) { return float16_to_float(x); }
ALWAYS_INLINE double widen_bfloat16(uint16_t x) { return bits_float((uint32_t)x << 16); }

/* narrow_<type> rounds a value of the accumulation type to one element in memory. */
ALWAYS_INLINE double narrow_float64(double x) { return x; }
ALWAYS_INLINE float narrow_float32(float x) { return x; }
ALWAYS_INLINE uint16_t narrow_float16(float x) { return float_to_float16(x); }
ALWAYS_INLINE uint16_t narrow_bfloat16(float x) { return (uint16_t)(bfloat16_bits(x) >> 16); }

/* Writes 64 bytes with non-temporal stores, which bypass the caches. p must be aligned to 64 bytes.
 * Call stream_fence() after the last of these stores. */
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

/* pad_<size> copies the first n elements of `size` bytes at p into `padded`, fills the rest of the
 * block with zeros, and returns `padded`. */
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

/* Writes the first n elements of the block v to p. memcpy reads from a copy of v, because the
 * compiler would not keep v itself in registers if its address were passed to a call. */
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

/* Does the same as store_bfloat16 without a test for NaN. Use it only if a NaN can come from
 * nothing but a bfloat16 input or an invalid operation (inf - inf, 0 * inf). The lower 16 bits of
 * such a NaN are 0, so rounding does not change it. Do not use it for values computed from float32
 * inputs, whose NaN may have other lower bits. */
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

/* Prefetches the cache lines of `bytes` bytes that begin `ahead` bytes after p. The address may lie
 * outside the tensor, because a prefetch cannot fault. */
ALWAYS_INLINE void prefetch(const void *p, int64_t ahead, int64_t bytes) {
  const uintptr_t later = (uintptr_t)p + (uintptr_t)ahead;
  for (int64_t byte = 0; byte < bytes; byte += 64)
    __builtin_prefetch((const void *)(later + (uintptr_t)byte), 0, 3);
}

/* Loads a block as LOAD does, and prefetches the data 2 KiB ahead. Use READ in loops over whole
 * tensors: if a block takes much arithmetic, the hardware prefetcher does not look far enough
 * ahead. */
#define READ(v, p, n) (prefetch(p, 2048, BLOCK * (int64_t)sizeof *(p)), LOAD(v, p, n))

/* Calls block(args, i, n, stream) for the elements [begin, end), with n = BLOCK, and then once with
 * n < BLOCK for the tail. `out` is the address to which the block at `begin` is written. If
 * `stream` is set and `out` is aligned to 64 bytes, whole blocks get non-temporal stores. */
#define FOR_BLOCKS(block, args, begin, end, out, stream)                   \
  do {                                                                     \
    const int aligned = (stream) && (uintptr_t)(out) % 64 == 0;            \
    int64_t i = (begin);                                                   \
    for (; i + BLOCK <= (end); i += BLOCK) block(args, i, BLOCK, aligned); \
    if (i < (end)) block(args, i, (int)((end)-i), 0);                      \
    if (aligned) stream_fence();                                           \
  } while (0)

/* Does the same as FOR_BLOCKS with one inlined copy of the block function instead of two. n is a
 * variable there. If a block takes much arithmetic, the branches on n cost nothing, and a second
 * copy would double the compile time. */
#define FOR_LONG_BLOCKS(block, args, begin, end, out, stream)            \
  do {                                                                   \
    const int aligned = (stream) && (uintptr_t)(out) % 64 == 0;          \
    for (int64_t i = (begin); i < (end); i += BLOCK)                     \
      block(args, i, (end)-i < BLOCK ? (int)((end)-i) : BLOCK, aligned); \
    if (aligned) stream_fence();                                         \
  } while (0)

#endif

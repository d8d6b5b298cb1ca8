/* Code that the C tests share: CHECK, an independent model of the number formats, random data, and
 * guarded buffers. The tests are a single program, tests.c, without torch. tests/test_c.py builds
 * it and runs it at every instruction set. */
#ifndef EXTENSION_CPP_TESTS_CHECK_H
#define EXTENSION_CPP_TESTS_CHECK_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/dtype.h"

enum { DTYPES = 4, OFFSETS = 4 };
extern const char *const dtype_names[DTYPES];

#define FAIL(...)                          \
  do {                                     \
    printf("%s:%d: ", __FILE__, __LINE__); \
    printf(__VA_ARGS__);                   \
    printf("\n");                          \
    exit(1);                               \
  } while (0)
#define CHECK(condition, ...)            \
  do {                                   \
    if (!(condition)) FAIL(__VA_ARGS__); \
  } while (0)

/* ---- number formats, independent of the code under test ---- */

typedef struct {
  size_t size;
  int precision; /* bits of the significand, including the leading one */
  int least;     /* exponent of the smallest normal number */
  double largest;
} format_t;

extern const format_t formats[DTYPES];

/* Returns 2^exponent for an exponent of normal doubles. */
static inline double power_of_2(int exponent) {
  const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
  double power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

/* Returns the exponent of the distance between |x| and its neighbours in the format. Infinity and
 * NaN are not allowed. */
static inline int unit_exponent(const format_t *format, double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int exponent = (int)(bits >> 52 & 0x7ff) - 1023;
  return (exponent < format->least ? format->least : exponent) - (format->precision - 1);
}

static inline double unit_at(const format_t *format, double x) {
  const int exponent = unit_exponent(format, x);
  return exponent < -1022 ? ldexp(1, exponent) : power_of_2(exponent);
}

/* Returns the bits of x rounded to bfloat16 or float16 (to nearest, ties to even). NaN stays NaN.
 * */
uint16_t half_bits(dtype_t dtype, double x);
double half_value(dtype_t dtype, uint16_t bits);

double element(dtype_t dtype, const void *p, int64_t i);
void set_element(dtype_t dtype, void *p, int64_t i, double value);

/* Returns whether `got` is within `slack` plus half a unit in the last place of `want`. */
int close_to(dtype_t dtype, double got, double want, double slack);

/* Returns half a unit in the last place of 1 in the accumulation type. */
static inline double rounding(dtype_t dtype) { return dtype == DTYPE_FLOAT64 ? 0x1p-53 : 0x1p-24; }

/* ---- data ---- */

uint64_t random_bits(uint64_t *state);
double random_between(uint64_t *state, double low, double high);

/* Returns n elements between -range and range. With `specials`, about one in eight is NaN,
 * infinite, zero, huge or tiny. */
void *random_elements(dtype_t dtype, int64_t n, double range, int specials, uint64_t seed);

/* Returns n multiples of 1/64 between -2 and 2. They are exact in every type. Sums of a few
 * thousand of them are exact in float. */
void *random_exact(dtype_t dtype, int64_t n, uint64_t seed);

/* Returns n doubles, all 0. */
double *doubles(int64_t n);

/* Returns a hash of n elements. All NaNs count as equal. */
uint64_t hash_elements(uint64_t hash, dtype_t dtype, const void *p, int64_t n);

/* Calls visit() with every step-th float, in the order of their bits, with SWEEP floats at a time.
 * The array of the last call is filled up with 1. */
enum { SWEEP = 4096 };
void sweep_floats(uint32_t step, void (*visit)(const float *x, void *context), void *context);

/* The largest error seen so far, and the argument at which it was seen. */
typedef struct {
  double error;
  double at;
} worst_t;

static inline void worst_add(worst_t *worst, double error, double at) {
  if (isnan(worst->error) || error <= worst->error)
    return; /* a NaN error is kept, and fails every bound */
  *worst = (worst_t){error, at};
}

/* ---- guarded buffers ---- */

/* Memory between two guards that hold a pattern. The address sanitizer detects reads of the guards,
 * buffer_check() detects writes. */
typedef struct {
  unsigned char *base;
  unsigned char *data;
  size_t bytes;
} buffer_t;

/* Makes a buffer whose data begins `offset` bytes past a multiple of 64. The data is filled with a
 * pattern that is not a correct result anywhere. */
buffer_t buffer_new(size_t bytes, size_t offset);
buffer_t buffer_copy(const void *data, size_t bytes, size_t offset);
/* Fails, naming `what`, unless the guards hold their pattern and the data equals `expected`, if
 * given. */
void buffer_check(const buffer_t *buffer, const void *expected, const char *what);
/* Does what buffer_check() does, for elements of a type. All NaNs are equal, because the compiler
 * chooses their sign. */
void buffer_check_elements(const buffer_t *buffer, dtype_t dtype, const void *expected,
                           const char *what);
/* Fails unless bytes [begin, end) equal those of `expected`, and all others hold the pattern. */
void buffer_check_part(const buffer_t *buffer, const void *expected, size_t begin, size_t end,
                       const char *what);
void buffer_free(buffer_t *buffer);

/* ---- a replacement of cpu_should_stream ---- */

extern int should_stream;       /* the value that cpu_should_stream returns */
extern int64_t streaming_bytes; /* the last argument of cpu_should_stream */

/* ---- the tests; those with a sweep visit every step-th float ---- */

void test_exp(uint32_t step);
void test_softmax_math(uint32_t step);
void test_mish(uint32_t step);
void test_mish_halves(uint32_t step);
void test_loads(uint32_t step);
void test_stores(uint32_t step);
void test_flat_sizes(uint32_t step);
void test_flat_ranges(uint32_t step);
void test_scale_bias_relu_sizes(uint32_t step);
void test_scale_bias_relu_ranges(uint32_t step);
void test_reduce_sum_sizes(uint32_t step);
void test_reduce_sum_ranges(uint32_t step);
void test_philox(uint32_t step);
void test_dropout_sizes(uint32_t step);
void test_dropout_ranges(uint32_t step);
void test_norm_sizes(uint32_t step);
void test_norm_hostile(uint32_t step);
void test_norm_ranges(uint32_t step);
void test_norm_fused(uint32_t step);
void test_softmax_sizes(uint32_t step);
void test_softmax_hostile(uint32_t step);
void test_softmax_ranges(uint32_t step);
void test_loss_sizes(uint32_t step);
void test_loss_hostile(uint32_t step);
void test_loss_ranges(uint32_t step);
void test_loss_reduce(uint32_t step);
void test_rotary(uint32_t step);
void test_bias_gelu(uint32_t step);
void test_scan_sizes(uint32_t step);
void test_scan_parts(uint32_t step);

#endif

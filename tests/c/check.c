#include "check.h"

#if defined(SANITIZED) /* this file may be compiled without the sanitizer */
#include <sanitizer/asan_interface.h>
#define POISON __asan_poison_memory_region
#define UNPOISON __asan_unpoison_memory_region
#else
#define POISON(p, bytes) ((void)(p), (void)(bytes))
#define UNPOISON(p, bytes) ((void)(p), (void)(bytes))
#endif

const char *const dtype_names[DTYPES] = {"float64", "float32", "bfloat16", "float16"};

const format_t formats[DTYPES] = {
    [DTYPE_FLOAT64] = {8, 53, -1022, 0x1.fffffffffffffp1023},
    [DTYPE_FLOAT32] = {4, 24, -126, 0x1.fffffep127},
    [DTYPE_BFLOAT16] = {2, 8, -126, 0x1.fep127},
    [DTYPE_FLOAT16] = {2, 11, -14, 65504},
};

uint16_t half_bits(dtype_t dtype, double x) {
  const format_t *format = &formats[dtype];
  const int fraction_bits = format->precision - 1;
  const unsigned sign = signbit(x) ? 0x8000 : 0, infinity = 0x8000 - (1u << fraction_bits);
  const double magnitude = fabs(x);
  if (isnan(x)) return (uint16_t)(sign | 0x7fff);
  if (magnitude >= format->largest + unit_at(format, format->largest) / 2)
    return (uint16_t)(sign | infinity);
  /* Adding 0x1p52 rounds to nearest even, because doubles of this size have no bits below 1. */
  const int exponent = unit_exponent(format, magnitude);
  const double units = magnitude * power_of_2(-exponent) + 0x1p52 - 0x1p52;
  const unsigned step = (unsigned)(exponent + fraction_bits - format->least);
  return (uint16_t)(sign | ((step << fraction_bits) + (unsigned)units));
}

static double decode_half(const format_t *format, unsigned bits) {
  const int fraction_bits = format->precision - 1;
  const int exponent = (int)(bits & 0x7fff) >> fraction_bits,
            fraction = (int)bits & ((1 << fraction_bits) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 0x7fff >> fraction_bits) return fraction ? (double)NAN : sign * (double)INFINITY;
  const int units = exponent ? fraction + (1 << fraction_bits) : fraction;
  return sign * ldexp(units, format->least - fraction_bits + (exponent ? exponent - 1 : 0));
}

double half_value(dtype_t dtype, uint16_t bits) {
  static double table[2][1 << 16];
  double *values = table[dtype == DTYPE_FLOAT16];
  if (values[1] == 0) { /* bits 1 are the smallest positive number */
    for (unsigned i = 0; i < 1 << 16; ++i) values[i] = decode_half(&formats[dtype], i);
  }
  return values[bits];
}

double element(dtype_t dtype, const void *p, int64_t i) {
  if (dtype == DTYPE_FLOAT64) return ((const double *)p)[i];
  if (dtype == DTYPE_FLOAT32) return (double)((const float *)p)[i];
  return half_value(dtype, ((const uint16_t *)p)[i]);
}

void set_element(dtype_t dtype, void *p, int64_t i, double value) {
  if (dtype == DTYPE_FLOAT64) {
    ((double *)p)[i] = value;
  } else if (dtype == DTYPE_FLOAT32) {
    /* Numbers from half a unit above the largest float on become infinity. This is explicit,
     * because C leaves such a cast undefined. */
    const int overflows = fabs(value) >= 0x1.ffffffp127;
    ((float *)p)[i] = overflows ? copysignf(INFINITY, (float)copysign(1, value)) : (float)value;
  } else {
    ((uint16_t *)p)[i] = half_bits(dtype, value);
  }
}

int close_to(dtype_t dtype, double got, double want, double slack) {
  if (isnan(want)) return isnan(got);
  if (isfinite(got) && fabs(got - want) <= slack + unit_at(&formats[dtype], fabs(want) + slack) / 2)
    return 1;
  double nearest[1]; /* an infinity if `want` exceeds the type's range */
  set_element(dtype, nearest, 0, want);
  return got == element(dtype, nearest, 0);
}

uint64_t random_bits(uint64_t *state) { /* splitmix64 */
  uint64_t z = *state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

double random_between(uint64_t *state, double low, double high) {
  return low + (high - low) * (double)(random_bits(state) >> 11) * 0x1p-53;
}

void *random_elements(dtype_t dtype, int64_t n, double range, int specials, uint64_t seed) {
  static const double special[] = {NAN, INFINITY, -INFINITY, 0.0, -0.0, 1e15, -1e15, 1e-20};
  void *elements = doubles(n);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t kind = random_bits(&seed) % 64;
    const double value = random_between(&seed, -range, range);
    set_element(dtype, elements, i, specials && kind < 8 ? special[kind] : value);
  }
  return elements;
}

void *random_exact(dtype_t dtype, int64_t n, uint64_t seed) {
  void *elements = doubles(n);
  for (int64_t i = 0; i < n; ++i)
    set_element(dtype, elements, i, (double)(random_bits(&seed) % 255) / 64 - 127.0 / 64);
  return elements;
}

double *doubles(int64_t n) {
  double *p = calloc((size_t)n + 1, sizeof *p);
  CHECK(p, "out of memory");
  return p;
}

uint64_t hash_elements(uint64_t hash, dtype_t dtype, const void *p, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint64_t bits = 0;
    if (dtype == DTYPE_FLOAT64) bits = ((const uint64_t *)p)[i];
    if (dtype == DTYPE_FLOAT32) bits = ((const uint32_t *)p)[i];
    if (formats[dtype].size == 2) bits = ((const uint16_t *)p)[i];
    const uint64_t infinity = (uint64_t)(dtype == DTYPE_FLOAT16   ? 31
                                         : dtype == DTYPE_FLOAT64 ? 2047
                                                                  : 255)
                              << (formats[dtype].precision - 1);
    const uint64_t magnitude = bits & ~(uint64_t)0 >> (65 - 8 * formats[dtype].size);
    hash = (hash ^ (magnitude > infinity ? infinity + 1 : bits)) * 0x100000001b3;
    hash ^= hash >> 29;
  }
  return hash;
}

void sweep_floats(uint32_t step, void (*visit)(const float *x, void *context), void *context) {
  float x[SWEEP];
  int n = 0;
  for (uint64_t bits = 0; bits <= UINT32_MAX; bits += step) {
    const uint32_t low = (uint32_t)bits;
    memcpy(&x[n++], &low, sizeof low);
    if (n < SWEEP) continue;
    visit(x, context);
    n = 0;
  }
  while (n < SWEEP) x[n++] = 1;
  visit(x, context);
}

enum { GUARD = 256, PATTERN = 0x55 };

buffer_t buffer_new(size_t bytes, size_t offset) {
  const size_t whole = (GUARD + offset + bytes + GUARD + 63) / 64 * 64;
  buffer_t buffer = {.base = aligned_alloc(64, whole), .bytes = bytes};
  CHECK(buffer.base, "out of memory");
  memset(buffer.base, PATTERN, whole);
  buffer.data = buffer.base + GUARD + offset;
  POISON(buffer.base, GUARD + offset);
  POISON(buffer.data + bytes, GUARD);
  return buffer;
}

buffer_t buffer_copy(const void *data, size_t bytes, size_t offset) {
  buffer_t buffer = buffer_new(bytes, offset);
  memcpy(buffer.data, data, bytes);
  return buffer;
}

void buffer_check(const buffer_t *buffer, const void *expected, const char *what) {
  UNPOISON(buffer->base, (size_t)(buffer->data - buffer->base));
  UNPOISON(buffer->data + buffer->bytes, GUARD);
  for (const unsigned char *p = buffer->base; p < buffer->data; ++p) {
    CHECK(*p == PATTERN, "%s: written %td bytes before it begins", what, buffer->data - p);
  }
  for (const unsigned char *p = buffer->data + buffer->bytes;
       p < buffer->data + buffer->bytes + GUARD; ++p) {
    CHECK(*p == PATTERN, "%s: written %td bytes past its end", what,
          p - buffer->data - (ptrdiff_t)buffer->bytes);
  }
  CHECK(!expected || memcmp(buffer->data, expected, buffer->bytes) == 0,
        "%s: not the bytes that it held before", what);
}

void buffer_check_elements(const buffer_t *buffer, dtype_t dtype, const void *expected,
                           const char *what) {
  const int64_t n = (int64_t)(buffer->bytes / formats[dtype].size);
  buffer_check(buffer, NULL, what);
  CHECK(
      !expected || hash_elements(0, dtype, buffer->data, n) == hash_elements(0, dtype, expected, n),
      "%s: not the elements that it held before", what);
}

/* Returns 1 if each byte is PATTERN: the first byte is PATTERN, and each byte equals the next byte.
 * */
static int holds_pattern(const unsigned char *p, size_t bytes) {
  return bytes == 0 || (*p == PATTERN && memcmp(p, p + 1, bytes - 1) == 0);
}

void buffer_check_part(const buffer_t *buffer, const void *expected, size_t begin, size_t end,
                       const char *what) {
  const unsigned char *bytes = expected;
  if (begin <= end && end <= buffer->bytes && holds_pattern(buffer->data, begin) &&
      holds_pattern(buffer->data + end, buffer->bytes - end) &&
      memcmp(buffer->data + begin, bytes + begin, end - begin) == 0)
    return; /* The loop below makes the same test for each byte, to find which one is wrong. */
  for (size_t i = 0; i < buffer->bytes; ++i) {
    const int inside = begin <= i && i < end;
    CHECK(buffer->data[i] == (inside ? bytes[i] : PATTERN),
          "%s: byte %zu is wrong; only [%zu, %zu) was asked for", what, i, begin, end);
  }
}

void buffer_free(buffer_t *buffer) { free(buffer->base); }

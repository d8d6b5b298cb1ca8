/* Functions that activation_cpu_math.h calls, and that do not depend on the element type. */
#ifndef EXTENSION_CPP_ACTIVATION_CPU_H
#define EXTENSION_CPP_ACTIVATION_CPU_H

#include "activation/activation.h"
#include "activation/activation_constants.h"
#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/long_chains.h"
#include "common/cpu/math.h"

/* A lower limit for u. Callers use the limit in place of a smaller u, for which the scaled exp may
 * be invalid. exp of the limit is 0 in float and in double. */
#define LOGISTIC_ZERO(u) _Generic((u), float : logistic_zero_float, double : -750.0)
/* A lower limit for z, which replaces a smaller z. exp(-z^2 / 2) is 0 at the limit. */
#define GELU_ZERO(z) _Generic((z), float : gelu_zero_float, double : -39.0)

#define ABS(x) _Generic((x), float : __builtin_fabsf, double : __builtin_fabs)(x)
/* Returns -|x|. gcc would compile -fabsf(x) to two instructions instead of one. */
ALWAYS_INLINE float minus_abs_float(float x) { return bits_float(float_bits(x) | 0x80000000u); }
ALWAYS_INLINE double minus_abs_double(double x) { return -__builtin_fabs(x); }
#define MINUS_ABS(x) _Generic((x), float : minus_abs_float, double : minus_abs_double)(x)
/* Returns the larger of x and `limit`, and NaN if x is NaN. */
#define AT_LEAST(x, limit) ((x) < (limit) ? (limit) : (x))
/* Returns whether x < 0: for float the sign bit, which a blend uses without a comparison. */
ALWAYS_INLINE int is_negative_float(float x) { return (int32_t)float_bits(x) < 0; }
ALWAYS_INLINE int is_negative_double(double x) { return x < 0; }
#define IS_NEGATIVE(x) _Generic((x), float : is_negative_float, double : is_negative_double)(x)

/* Returns exp(-z^2 / 2) / EXP_UNSCALE for -15 <= z <= 15. The method is that of exp_scaled_float,
 * with r twice as large so that z^2 need not be halved. `low` corrects the rounding of z^2. */
ALWAYS_INLINE float gauss_scaled_float(float z) {
  const float square = z * z, low = fma_float(z, z, -square);
  const float shifted = fma_float(square, -0x1.715476p-1f, 0x1.8p23f + 64);
  const float n = shifted - (0x1.8p23f + 64);
  const float r = fma_float(n, -0x1.62e4p0f, -square) + fma_float(n, -0x1.7f7d1cp-19f, -low);
  float p = fma_float(r, 0x1.695428p-16f, 0x1.123b08p-12f);
  p = fma_float(r, p, 0x1.555a22p-9f);
  p = fma_float(r, p, 0x1.55549p-6f);
  p = fma_float(r, p, 0x1.fffffap-4f);
  p = fma_float(r, p, 0.5f);
  p = fma_float(r, p, 1.0f);
  return bits_float(float_bits(p) + (float_bits(shifted) << 23));
}
ALWAYS_INLINE double gauss_scaled_double(double z) {
  const double square = z * z, low = fma_double(z, z, -square), rounded = exp(square / -2);
  return fma_double(rounded, low / -2, rounded);
}
#define GAUSS_SCALED(z) _Generic((z), float : gauss_scaled_float, double : gauss_scaled_double)(z)

/* Calls f(kind, ...) with a constant kind, so that inlined functions need not test it. */
#define DISPATCH_ACTIVATION(kind, f, ...)             \
  switch (kind) {                                     \
    case SILU: f(SILU, __VA_ARGS__); break;           \
    case GELU: f(GELU, __VA_ARGS__); break;           \
    case GELU_TANH: f(GELU_TANH, __VA_ARGS__); break; \
  }

#endif

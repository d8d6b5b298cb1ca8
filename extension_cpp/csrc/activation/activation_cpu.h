/* What activation_cpu_math.h needs. That file is compiled once per element type, this one once. */
#ifndef EXTENSION_CPP_ACTIVATION_CPU_H
#define EXTENSION_CPP_ACTIVATION_CPU_H

#include "activation/activation.h"
#include "activation/activation_constants.h"
#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/long_chains.h"
#include "common/cpu/math.h"

/* exp(u) is 0 for this u, in float and in double. It takes the place of a lower u, for which the
 * scaled exp may not be valid. */
#define LOGISTIC_ZERO(u) _Generic((u), float : logistic_zero_float, double : -750.0)
/* The same for exp(-z^2 / 2). */
#define GELU_ZERO(z) _Generic((z), float : gelu_zero_float, double : -39.0)

#define ABS(x) _Generic((x), float : __builtin_fabsf, double : __builtin_fabs)(x)
/* -|x|: gcc makes two instructions of -fabsf(x). */
ALWAYS_INLINE float minus_abs_float(float x) { return bits_float(float_bits(x) | 0x80000000u); }
ALWAYS_INLINE double minus_abs_double(double x) { return -__builtin_fabs(x); }
#define MINUS_ABS(x) _Generic((x), float : minus_abs_float, double : minus_abs_double)(x)
/* NaN stays NaN. */
#define AT_LEAST(x, limit) ((x) < (limit) ? (limit) : (x))
/* The sign bit, which a blend needs no comparison for. */
ALWAYS_INLINE int is_negative_float(float x) { return (int32_t)float_bits(x) < 0; }
ALWAYS_INLINE int is_negative_double(double x) { return x < 0; }
#define IS_NEGATIVE(x) _Generic((x), float : is_negative_float, double : is_negative_double)(x)

/* exp(-z^2 / 2) over EXP_UNSCALE, for -15 <= z <= 15, as exp_scaled_float computes it, but with r
 * twice as large, so that z^2 is not halved. z^2's rounding error is taken into account. */
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

/* Calls f(kind, ...) with a constant kind, for functions that are inlined. */
#define DISPATCH_ACTIVATION(kind, f, ...)             \
  switch (kind) {                                     \
    case SILU: f(SILU, __VA_ARGS__); break;           \
    case GELU: f(GELU, __VA_ARGS__); break;           \
    case GELU_TANH: f(GELU_TANH, __VA_ARGS__); break; \
  }

#endif

/* exp and fused multiply-add for lane loops, in plain C that gcc and clang vectorise. tests/c
 * checks exp over every float.
 *
 * exp(x) = 2^n * p(r), n = round(x / ln 2), r = x - n ln 2 in two parts (Cody and Waite), |r| <=
 * ln2/2. The polynomial is Sollya's fpminimax for exp's relative error on that interval
 * (scripts/exp_polynomial.sollya). */
#ifndef EXTENSION_CPP_CPU_MATH_H
#define EXTENSION_CPP_CPU_MATH_H

#include <math.h>
#include <stdint.h>

#include "common/cpu_block.h"

/* One rounding where the instruction exists. The baseline rounds twice: a call of libm's fmaf would
 * be far too slow. */
#if defined(__FMA__) || defined(__aarch64__)
ALWAYS_INLINE float fma_float(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ALWAYS_INLINE double fma_double(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
ALWAYS_INLINE float fma_float(float a, float b, float c) { return a * b + c; }
ALWAYS_INLINE double fma_double(double a, double b, double c) { return a * b + c; }
#endif
#define FMA(a, b, c) _Generic((a) + (b) + (c), float : fma_float, double : fma_double)(a, b, c)

/* exp(x) * 2^64. Results whose exponent is far below float's keep all their digits until the last
 * multiplication, by EXP_UNSCALE. Valid for -131 <= x <= 44, the range in which callers use it. Any
 * other x, NaN included, gives an unspecified value; the caller replaces it by a selection or
 * multiplies it by x. */
#define EXP_UNSCALE_FLOAT 0x1p-64f
ALWAYS_INLINE float exp_scaled_float(float x) {
  const float shifted = fma_float(x, 0x1.715476p0f, 0x1.8p23f); /* n in the low bits */
  const float n = shifted - 0x1.8p23f;
  const float r = fma_float(n, -0x1.7f7d1cp-20f, fma_float(n, -0x1.62e4p-1f, x));
  float p = fma_float(r, 0x1.695428p-10f, 0x1.123b08p-7f);
  p = fma_float(r, p, 0x1.555a22p-5f);
  p = fma_float(r, p, 0x1.55549p-3f);
  p = fma_float(r, p, 0x1.fffffap-2f);
  p = 1.0f + fma_float(r * r, p, r);
  return bits_float(float_bits(p) + (float_bits(shifted) << 23) + (64u << 23));
}

/* float64 exists for gradcheck, which should run the real kernels. libm is fast enough for that. */
#define EXP_UNSCALE_DOUBLE 1.0
ALWAYS_INLINE double exp_scaled_double(double x) { return exp(x); }

#define EXP_SCALED(x) _Generic((x), float : exp_scaled_float, double : exp_scaled_double)(x)
#define EXP_UNSCALE(x) _Generic((x), float : EXP_UNSCALE_FLOAT, double : EXP_UNSCALE_DOUBLE)

#endif

/* exp, log, tanh and fused multiply-add for loops over lanes, in plain C that gcc and clang
 * vectorise. The tests in tests/c check exp and tanh for every float.
 *
 * exp(x) = 2^n * p(r), with n = round(x / ln 2) and r = x - n ln 2, so that |r| <= ln2/2. The
 * product n ln 2 is subtracted in two parts to keep its digits (Cody and Waite). The polynomial p
 * minimises the relative error on that interval (fpminimax in exp_polynomial.sollya). */
#ifndef EXTENSION_CPP_CPU_MATH_H
#define EXTENSION_CPP_CPU_MATH_H

#include <math.h>
#include <stdint.h>

#include "common/cpu/block.h"

/* Computes a * b + c with one rounding if the processor has the instruction. The baseline level
 * rounds twice, because a call of libm's fmaf would be far too slow. */
#if defined(__FMA__) || defined(__aarch64__)
#define HAS_FMA 1
ALWAYS_INLINE float fma_float(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ALWAYS_INLINE double fma_double(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
#define HAS_FMA 0
ALWAYS_INLINE float fma_float(float a, float b, float c) { return a * b + c; }
ALWAYS_INLINE double fma_double(double a, double b, double c) { return a * b + c; }
#endif
#define FMA(a, b, c) _Generic((a) + (b) + (c), float : fma_float, double : fma_double)(a, b, c)

/* Returns exp(x) * 2^64. Because of this factor, results far below float's smallest normal number
 * keep all their digits until the caller multiplies by EXP_UNSCALE. Valid for -131 <= x <= 44, the
 * range that callers need. For any other x, NaN included, the result is unspecified. The caller
 * must select another value in its place, or for NaN multiply it by x. */
#define EXP_UNSCALE_FLOAT 0x1p-64f
ALWAYS_INLINE float exp_scaled_float(float x) {
  const float shifted = fma_float(x, 0x1.715476p0f, 0x1.8p23f + 64); /* its low bits are n + 64 */
  const float n = shifted - (0x1.8p23f + 64);
  const float r = fma_float(n, -0x1.7f7d1cp-20f, fma_float(n, -0x1.62e4p-1f, x));
  float p = fma_float(r, 0x1.695428p-10f, 0x1.123b08p-7f);
  p = fma_float(r, p, 0x1.555a22p-5f);
  p = fma_float(r, p, 0x1.55549p-3f);
  p = fma_float(r, p, 0x1.fffffap-2f);
  p = 1.0f + fma_float(r * r, p, r);
  return bits_float(float_bits(p) + (float_bits(shifted) << 23));
}

/* Does the same as exp_scaled_float, with the accuracy that 16-bit results need. It computes
 * 2^(x / ln 2), which takes a third fewer operations. The relative error is
 * 2^-18.4 + 1.25 |x| 2^-24, and less with FMA (exp2_polynomial.sollya). */
ALWAYS_INLINE float exp_scaled_short_float(float x) {
  const float shifted = fma_float(x, 0x1.715476p0f, 0x1.8p23f + 64); /* its low bits are n + 64 */
  const float r = fma_float(x, 0x1.715476p0f, (0x1.8p23f + 64) - shifted);
  float p = fma_float(r, 0x1.3a02fp-7f, 0x1.c9fc9cp-5f);
  p = fma_float(r, p, 0x1.ec0378p-3f);
  p = fma_float(r, p, 0x1.62e12cp-1f);
  p = fma_float(r, p, 1.0f);
  return bits_float(float_bits(p) + (float_bits(shifted) << 23));
}

/* float64 exists so that gradcheck can run the real kernels. libm is fast enough for that. */
#define EXP_UNSCALE_DOUBLE 1.0
ALWAYS_INLINE double exp_scaled_double(double x) { return exp(x); }

#define EXP_SCALED(x) _Generic((x), float : exp_scaled_float, double : exp_scaled_double)(x)
#define EXP_UNSCALE(x) _Generic((x), float : EXP_UNSCALE_FLOAT, double : EXP_UNSCALE_DOUBLE)

/* The values are, in this order, -88, -126, -110, 44 and -15. common/cpu/math.c defines them and
 * says why they are variables. */
extern const float exp_zero_float, exp2_zero_float, logistic_zero_float, logistic_one_float;
extern const float gelu_zero_float;
/* Returns exp(x) for x <= 88, as softmax needs it. The result is 0 for x below about -87.7, where
 * it would be subnormal, and for -infinity. NaN stays NaN. In this range, one multiplication by 2^n
 * is enough. The low bits of `shifted` hold n + 127, the exponent field of 2^n. For the least x,
 * -88, the field is 0, so the result is 0. */
ALWAYS_INLINE float exp_softmax_float(float x) {
  x = x < exp_zero_float ? exp_zero_float : x;
  const float shifted = fma_float(x, 0x1.715476p0f, 0x1.8p23f + 127);
  const float n = shifted - (0x1.8p23f + 127);
  const float r = fma_float(n, -0x1.7f7d1cp-20f, fma_float(n, -0x1.62e4p-1f, x));
  float p = fma_float(r, 0x1.695428p-10f, 0x1.123b08p-7f);
  p = fma_float(r, p, 0x1.555a22p-5f);
  p = fma_float(r, p, 0x1.55549p-3f);
  p = fma_float(r, p, 0x1.fffffap-2f);
  p = 1.0f + fma_float(r * r, p, r);
  return p * bits_float(float_bits(shifted) << 23);
}

/* Returns 2^r for |r| <= 1/2. The relative error is 2^-22.7 with degree 5 and 2^-18.4 with degree
 * 4, which suffices for 16-bit types (exp2_polynomial.sollya). */
ALWAYS_INLINE float exp2_polynomial(float r, int degree) {
  float p;
  if (degree == 5) {
    p = fma_float(r, 0x1.5bfc72p-10f, 0x1.3ceb06p-7f);
    p = fma_float(r, p, 0x1.c6b69cp-5f);
    p = fma_float(r, p, 0x1.ebf9bap-3f);
    p = fma_float(r, p, 0x1.62e42ap-1f);
  } else {
    p = fma_float(r, 0x1.3a02fp-7f, 0x1.c9fc9cp-5f);
    p = fma_float(r, p, 0x1.ec0378p-3f);
    p = fma_float(r, p, 0x1.62e12cp-1f);
  }
  return fma_float(r, p, 1.0f);
}

/* Returns x rounded to an integer (ties to even), for |x| < 2^22. */
ALWAYS_INLINE float round_float(float x) {
#if defined(__SSE4_1__) || defined(__aarch64__)
  return __builtin_rintf(x); /* one instruction */
#else
  return (x + 0x1.8p23f) - 0x1.8p23f;
#endif
}

/* Computes exp(x) as exp_softmax_float does, but by 2^(x / ln 2), which takes a quarter fewer
 * operations. Beside the error of the polynomial, the result has a relative error of up to 1.25 |x|
 * 2^-24, which is negligible in a sum whose largest term is 1. The function returns 2^r and stores
 * 2^n in *power, so that a caller can multiply the two and add the product to a sum in one FMA. */
ALWAYS_INLINE float exp_parts_float(float x, int degree, float *power) {
  x = x < exp_zero_float ? exp_zero_float : x;
  const float shifted = fma_float(x, 0x1.715476p0f, 0x1.8p23f + 127);
  const float r = fma_float(x, 0x1.715476p0f, (0x1.8p23f + 127) - shifted);
  *power = bits_float(float_bits(shifted) << 23);
  return exp2_polynomial(r, degree);
}

/* Computes 2^x / 2 for x <= 127 as two factors, of which it returns one and stores the other in
 * *power. The result is 0 for x <= -126. 126 is even, so that ties round as in round_float. */
ALWAYS_INLINE float exp2_parts_float(float x, int degree, float *power) {
  x = x < exp2_zero_float ? exp2_zero_float : x;
  *power = bits_float(float_bits(x + (0x1.8p23f + 126)) << 23);
  return exp2_polynomial(x - round_float(x), degree);
}

/* The float64 versions only serve gradcheck, for which libm is fast enough. */
ALWAYS_INLINE double exp_softmax_double(double x) { return exp(x); }
ALWAYS_INLINE double exp_parts_double(double x, int degree, double *power) {
  (void)degree;
  *power = 1;
  return exp(x);
}

/* Computes exp(x) / 2, not 2^x / 2, because LOG2E, by which callers multiply, is 1 for double. */
ALWAYS_INLINE double exp2_parts_double(double x, int degree, double *power) {
  const double p = exp_parts_double(x, degree, power);
  *power = 0.5;
  return p;
}

#define EXP_SOFTMAX(x) _Generic((x), float : exp_softmax_float, double : exp_softmax_double)(x)
#define EXP_PARTS(x, degree, power) \
  _Generic((x), float : exp_parts_float, double : exp_parts_double)(x, degree, power)
/* exp(x) = 2^(x LOG2E). For float64 the EXP2 functions compute exp, so LOG2E is 1. */
#define LN2 0.6931471805599453
#define LOG2E(x) _Generic((x), float : 0x1.715476p0f, double : 1.0)
#define EXP2_PARTS(x, degree, power) \
  _Generic((x), float : exp2_parts_float, double : exp2_parts_double)(x, degree, power)
/* The functions above return exactly 0 for this argument and for all smaller ones. */
#define EXP_ZERO(x) _Generic((x), float : exp_zero_float, double : -750.0)

/* Returns log(x) for normal x > 0. NaN stays NaN. x = 2^n (1 + r) with |log(1 + r)| <= ln2/2
 * (log_polynomial.py). */
ALWAYS_INLINE float log_float(float x) {
  const uint32_t above = float_bits(x) - 0x3f3504f3; /* 0x3f3504f3 are the bits of sqrt(1/2) */
  const float n = (float)((int32_t)above >> 23);
  const float r = bits_float((above & 0x7fffff) + 0x3f3504f3) - 1;
  float p = fma_float(r, -0x1.38b576p-4f, 0x1.055b68p-3f);
  p = fma_float(r, p, -0x1.0d8542p-3f);
  p = fma_float(r, p, 0x1.22da1ep-3f);
  p = fma_float(r, p, -0x1.547244p-3f);
  p = fma_float(r, p, 0x1.99a008p-3f);
  p = fma_float(r, p, -0x1.000226p-2f);
  p = fma_float(r, p, 0x1.555554p-2f);
  p = fma_float(r, p, -0.5f);
  p = fma_float(n, 0x1.7f7d1cp-20f, fma_float(r * r, p, r));
  return x == x ? fma_float(n, 0x1.62e4p-1f, p) : x;
}
ALWAYS_INLINE double log_double(double x) { return log(x); }
#define LOG(x) _Generic((x), float : log_float, double : log_double)(x)

/* Returns log(1 + x) for x >= 0. The second term corrects the rounding error of 1 + x. */
ALWAYS_INLINE float log1p_float(float x) {
  const float y = 1 + x;
  return log_float(y) + (x - (y - 1)) / y;
}
ALWAYS_INLINE double log1p_double(double x) { return log1p(x); }
#define LOG1P(x) _Generic((x), float : log1p_float, double : log1p_double)(x)

/* Returns tanh(x): by an odd polynomial for |x| < 0.65 (Sollya's fpminimax), otherwise by exp. */
ALWAYS_INLINE float tanh_float(float x) {
  const float square = x * x, size = x < 0 ? -x : x;
  float p = fma_float(square, -0x1.696b9cp-8f, 0x1.4f5dap-6f);
  p = fma_float(square, p, -0x1.b7cfbap-5f);
  p = fma_float(square, p, 0x1.1103fp-3f);
  p = fma_float(square, p, -0x1.555524p-2f);
  const float near = fma_float(x * square, p, x);
  const float e = exp_softmax_float(-2 * size), far = 1 - 2 * e / (1 + e);
  const float far_signed = bits_float(float_bits(far) | (float_bits(x) & 0x80000000u));
  return size < 0.65f ? near : far_signed;
}
ALWAYS_INLINE double tanh_double(double x) { return tanh(x); }
#define TANH(x) _Generic((x), float : tanh_float, double : tanh_double)(x)

#endif

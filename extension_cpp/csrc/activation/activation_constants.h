/* Constants that the C and the CUDA code of the activations share. */
#ifndef EXTENSION_CPP_ACTIVATION_CONSTANTS_H
#define EXTENSION_CPP_ACTIVATION_CONSTANTS_H

#define SQRT_HALF 0.70710678118654752
#define INV_SQRT_2PI 0.39894228040143268
/* the factors in u = TANH_C x + TANH_D x^3 */
#define TANH_C 1.5957691216057308
#define TANH_D 0.071354816272600249
/* u' is computed from min(x^2, TANH_SQUARE) in place of x^2, so that no finite x overflows. CUDA
 * code limits x^2 in u, too. For a larger x^2, s(u) is exactly 0 or 1 in every dtype. */
#define TANH_SQUARE 1600

/* Coefficients of a polynomial G that approximates the tail of Phi: Phi(-z) = erfc(z / sqrt 2) / 2
 * = exp(-z^2 / 2) t G(t), with t = 1 / (z + shift), for 0 <= z <= 15. G(t) is between 0.4 and 2.
 * Sollya's fpminimax minimised its relative error (scripts/erfc_polynomial.sollya). This error is
 * 2^-26.7 with degree 9, and 2^-17.7 with degree 5 (for 16-bit types). The coefficient of degree 0
 * is first. */
#define ERFC_SHIFT 4.0f
#define ERFC_COEFFICIENTS                                                                    \
  {                                                                                          \
    0x1.988e5p-2f, 0x1.97bba4p0f, 0x1.8590b8p2f, 0x1.2e50f4p4f, 0x1.4e7af8p6f, 0x1.626c8p6f, \
        0x1.29007ep8f, 0x1.e42894p11f, -0x1.0dbb28p14f, 0x1.18941ep14f                       \
  }
#define ERFC_HALF_SHIFT 3.25f
#define ERFC_HALF_COEFFICIENTS \
  { 0x1.994b4cp-2f, 0x1.418b6ap0f, 0x1.2a7cap2f, 0x1.d64bf8p-1f, 0x1.12015cp6f, -0x1.611fd6p6f }

#endif

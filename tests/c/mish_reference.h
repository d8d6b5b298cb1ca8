/* Computes mish and its derivatives in double from e = exp(x), which keeps all its digits for very
 * negative x. For x > 40, adding 1 to e has no effect. The relative error is a few 2^-53, but
 * larger near the zeros of the derivatives, where terms cancel. test_mish.c compares these results
 * with tanh and log1p in long double. */
#ifndef EXTENSION_CPP_TESTS_MISH_REFERENCE_H
#define EXTENSION_CPP_TESTS_MISH_REFERENCE_H

#include <math.h>

typedef struct {
  double value, first, second;
} mish_t;

static inline mish_t mish_reference(double x) {
  if (x > 40) return (mish_t){x, 1, 0};
  if (x == -(double)INFINITY)
    return (mish_t){(double)NAN, (double)NAN, (double)NAN}; /* as in PyTorch: -inf * 0 */
  const double e = exp(x), d = e * (e + 2) + 2;
  const double w = e * (e + 2) / d;                   /* tanh(softplus(x)) */
  const double u = 4 * ((1 + e) / d) * ((1 + e) / d); /* 1 - w^2 */
  const double s = e / (1 + e);                       /* softplus' */
  return (mish_t){x * w, w + x * s * u, s * u * (2 + x * (1 / (1 + e) - 2 * w * s))};
}

#endif

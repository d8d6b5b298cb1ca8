/* The activations and their derivatives on the CPU. Included by files that are compiled once per
 * element type (common/for_each_dtype.h defines T, ACC and NAME). Formulas: activation.h.
 *
 * A function returns the value and both derivatives; the compiler removes what the caller does not
 * use. The argument of exp is 0 or less, so that exp does not overflow. Both tails keep their
 * relative accuracy: for u < 0, s(u) is computed as exp(u) / (1 + exp(u)). */

/* 16-bit results need shorter polynomials. */
#define HALF (sizeof(T) == 2)

typedef struct {
  ACC value, first, second;
} NAME(jet_t);

/* exp(-size). Above ACTIVATION_ZERO it is 0, as every result is; there the scaled exp may not be
 * valid. */
ALWAYS_INLINE ACC NAME(exp_minus)(ACC size) {
  const ACC scaled = HALF ? (ACC)exp_scaled_short_float((float)-size) : EXP_SCALED(-size);
  const ACC e = scaled * EXP_UNSCALE(size);
  return size > ACTIVATION_ZERO(size) ? 0 : e;
}

/* s(u), s (1 - s) and |1 - 2 s|. */
typedef struct {
  ACC value, slope, balance;
} NAME(logistic_t);

ALWAYS_INLINE NAME(logistic_t) NAME(logistic)(ACC u) {
  const ACC t = NAME(exp_minus)(u < 0 ? -u : u), r = 1 / (1 + t), small = t * r;
  return (NAME(logistic_t)){u < 0 ? small : r, small * r, (1 - t) * r};
}

ALWAYS_INLINE NAME(jet_t) NAME(silu)(ACC x) {
  const NAME(logistic_t) s = NAME(logistic)(x);
  return (NAME(jet_t)){x * s.value, FMA(x, s.slope, s.value),
                       s.slope * (2 - (x < 0 ? -x : x) * s.balance)};
}

ALWAYS_INLINE NAME(jet_t) NAME(gelu_tanh)(ACC x) {
  const ACC all = x * x, square = all > TANH_SQUARE ? TANH_SQUARE : all;
  const NAME(logistic_t) s = NAME(logistic)(x * FMA(square, (ACC)TANH_D, (ACC)TANH_C));
  const ACC u1 = FMA(square, (ACC)(3 * TANH_D), (ACC)TANH_C), xu2 = (ACC)(6 * TANH_D) * square;
  const ACC bend = (x < 0 ? -x : x) * s.slope * s.balance;
  /* x s.slope comes first: it is 0 for every x for which x u' would overflow. */
  return (NAME(jet_t)){x * s.value, FMA(x * s.slope, u1, s.value),
                       s.slope * (2 * u1 + xu2) - bend * (u1 * u1)};
}

/* Phi(-size), where gauss = exp(-size^2 / 2). */
ALWAYS_INLINE float NAME(erfc_float)(float size, float gauss) {
  static const float c[] = ERFC_COEFFICIENTS, h[] = ERFC_HALF_COEFFICIENTS;
  const float t = 1 / (size + (HALF ? ERFC_HALF_SHIFT : ERFC_SHIFT));
  /* Unrolled by hand: gcc does not vectorise a loop that contains a loop. */
  float g = HALF ? h[5] : c[9];
  if (!HALF) {
    g = fma_float(g, t, c[8]);
    g = fma_float(g, t, c[7]);
    g = fma_float(g, t, c[6]);
    g = fma_float(g, t, c[5]);
  }
  g = fma_float(g, t, HALF ? h[4] : c[4]);
  g = fma_float(g, t, HALF ? h[3] : c[3]);
  g = fma_float(g, t, HALF ? h[2] : c[2]);
  g = fma_float(g, t, HALF ? h[1] : c[1]);
  g = fma_float(g, t, HALF ? h[0] : c[0]);
  return gauss * (t * g);
}
ALWAYS_INLINE double NAME(erfc_double)(double size, double gauss) {
  (void)gauss;
  return erfc(size * SQRT_HALF) / 2;
}
#define GELU_TAIL(size, gauss) \
  _Generic((size), float : NAME(erfc_float), double : NAME(erfc_double))(size, gauss)

ALWAYS_INLINE NAME(jet_t) NAME(gelu)(ACC x) {
  const ACC all = x < 0 ? -x : x, size = all > GELU_ZERO(x) ? GELU_ZERO(x) : all;
  /* exp(-x^2 / 2), corrected for the rounding error of x^2. */
  const ACC square = size * size, low = FMA(size, size, -square);
  const ACC rounded = NAME(exp_minus)(square / 2);
  const ACC gauss = HALF ? rounded : FMA(rounded, low / -2, rounded);
  const ACC tail = GELU_TAIL(size, gauss), phi = x < 0 ? tail : 1 - tail;
  const ACC density = (ACC)INV_SQRT_2PI * gauss;
  return (NAME(jet_t)){x * phi, FMA(x, density, phi), density * (2 - square)};
}
#undef GELU_TAIL

/* Callers pass a constant `kind`: inlining leaves one branch. */
ALWAYS_INLINE NAME(jet_t) NAME(activation)(activation_t kind, ACC x) {
  return kind == SILU ? NAME(silu)(x) : kind == GELU ? NAME(gelu)(x) : NAME(gelu_tanh)(x);
}
#undef HALF

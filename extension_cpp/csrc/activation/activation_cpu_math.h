/* The activations and their derivatives on the CPU. The files that include this one are compiled
 * once per element type (for_each_dtype.h defines T, ACC and NAME). activation.h has the formulas.
 *
 * The functions return an activation's value, first and second derivative. The compiler removes
 * what the caller does not use. The argument of exp is never positive (at most 44 in
 * logistic_float), so exp does not overflow. Results for large negative x keep their relative
 * accuracy: for u < 0, s(u) is computed as exp(u) / (1 + exp(u)). */

/* True for 16-bit types, whose results need only shorter polynomials than float32. */
#define HALF (sizeof(T) == 2)

typedef struct {
  ACC value, first, second;
} NAME(jet_t);

/* Returns exp(x) / EXP_UNSCALE for a result of type T. */
ALWAYS_INLINE ACC NAME(exp_scaled)(ACC x) {
  return HALF ? (ACC)exp_scaled_short_float((float)x) : EXP_SCALED(x);
}

/* The logistic function s(u), its slope s (1 - s), and |1 - 2 s|. */
typedef struct {
  ACC value, slope, balance;
} NAME(logistic_t);

ALWAYS_INLINE NAME(logistic_t) NAME(logistic)(ACC u) {
  const ACC scaled = NAME(exp_scaled)(AT_LEAST(MINUS_ABS(u), LOGISTIC_ZERO(u)));
  /* The operands of this division do not depend on t, so the division need not wait for t. */
  const ACC t = scaled * EXP_UNSCALE(u), r = 1 / FMA(scaled, EXP_UNSCALE(u), (ACC)1);
  const ACC small = t * r;
  return (NAME(logistic_t)){IS_NEGATIVE(u) ? small : r, small * r, (1 - t) * r};
}

/* Returns only s(u) = e / (e + 1), where e = exp(u) and 1 are both scaled by 2^64. This takes three
 * operations fewer than logistic(). */
ALWAYS_INLINE float NAME(logistic_float)(float u) {
  const float low = u > logistic_zero_float ? u : logistic_zero_float;
  const float e = NAME(exp_scaled)(low < logistic_one_float ? low : logistic_one_float);
  return e / (e + 1 / EXP_UNSCALE_FLOAT);
}
ALWAYS_INLINE double NAME(logistic_double)(double u) { return NAME(logistic)((ACC)u).value; }
#define LOGISTIC(u) _Generic((u), float : NAME(logistic_float), double : NAME(logistic_double))(u)

ALWAYS_INLINE NAME(jet_t) NAME(silu)(ACC x) {
  const NAME(logistic_t) s = NAME(logistic)(x);
  return (NAME(jet_t)){x * s.value, FMA(x, s.slope, s.value), s.slope * (2 - ABS(x) * s.balance)};
}

ALWAYS_INLINE NAME(jet_t) NAME(gelu_tanh)(ACC x) {
  const ACC all = x * x, square = all > TANH_SQUARE ? TANH_SQUARE : all;
  const NAME(logistic_t) s = NAME(logistic)(x * FMA(all, (ACC)TANH_D, (ACC)TANH_C));
  const ACC u1 = FMA(square, (ACC)(3 * TANH_D), (ACC)TANH_C), xu2 = (ACC)(6 * TANH_D) * square;
  const ACC bend = ABS(x) * s.slope * s.balance;
  /* x is first multiplied by s.slope, which is 0 for every x for which x u' would overflow. */
  return (NAME(jet_t)){x * s.value, FMA(x * s.slope, u1, s.value),
                       s.slope * (2 * u1 + xu2) - bend * (u1 * u1)};
}

/* Returns Phi(z) for z <= 0. `gauss` is exp(-z^2 / 2) / EXP_UNSCALE. */
ALWAYS_INLINE float NAME(tail_float)(float z, float gauss) {
  static const float c[] = ERFC_COEFFICIENTS, h[] = ERFC_HALF_COEFFICIENTS;
  const float scale = EXP_UNSCALE_FLOAT;
  const float t = 1 / ((HALF ? ERFC_HALF_SHIFT : ERFC_SHIFT) - z);
  /* This loop over the coefficients is unrolled by hand, because gcc does not vectorise the loop
   * over elements if it contains another loop. */
  float g = scale * (HALF ? h[5] : c[9]);
  if (!HALF) {
    g = fma_float(g, t, scale * c[8]);
    g = fma_float(g, t, scale * c[7]);
    g = fma_float(g, t, scale * c[6]);
    g = fma_float(g, t, scale * c[5]);
  }
  g = fma_float(g, t, scale * (HALF ? h[4] : c[4]));
  g = fma_float(g, t, scale * (HALF ? h[3] : c[3]));
  g = fma_float(g, t, scale * (HALF ? h[2] : c[2]));
  g = fma_float(g, t, scale * (HALF ? h[1] : c[1]));
  g = fma_float(g, t, scale * (HALF ? h[0] : c[0]));
  return gauss * (t * g);
}
ALWAYS_INLINE double NAME(tail_double)(double z, double gauss) {
  (void)gauss;
  return erfc(-z * SQRT_HALF) / 2;
}
#define TAIL(z, gauss) _Generic((z), float : NAME(tail_float), double : NAME(tail_double))(z, gauss)

ALWAYS_INLINE NAME(jet_t) NAME(gelu)(ACC x) {
  const ACC z = AT_LEAST(MINUS_ABS(x), GELU_ZERO(x)), square = z * z;
  const ACC gauss = HALF ? NAME(exp_scaled)(square / -2) : GAUSS_SCALED(z);
  const ACC tail = TAIL(z, gauss), phi = IS_NEGATIVE(x) ? tail : 1 - tail;
  const ACC density = (ACC)(INV_SQRT_2PI * EXP_UNSCALE(x)) * gauss;
  return (NAME(jet_t)){x * phi, FMA(x, density, phi), density * (2 - square)};
}
#undef TAIL

/* Callers pass a constant `kind`, so that only one branch remains after inlining. */
ALWAYS_INLINE NAME(jet_t) NAME(activation)(activation_t kind, ACC x) {
  return kind == SILU ? NAME(silu)(x) : kind == GELU ? NAME(gelu)(x) : NAME(gelu_tanh)(x);
}

/* Returns only the value. */
ALWAYS_INLINE ACC NAME(activation_value)(activation_t kind, ACC x) {
  if (kind == SILU) return x * LOGISTIC(x);
  if (kind == GELU) return NAME(gelu)(x).value;
  return x * LOGISTIC(x * FMA(x * x, (ACC)TANH_D, (ACC)TANH_C));
}
#undef LOGISTIC
#undef HALF

/* CPU kernels of mish. mish_cpu.c compiles this file once per element type (for_each_dtype.h
 * defines T, ACC, NAME, LOAD and STORE).
 *
 * `scaled` is exp(x) times a power of two (EXP_SCALED in common/cpu/math.h). `scaled` keeps its
 * digits where exp(x) itself underflows. The last multiplication removes the power of two, so x
 * exp(x) is accurate wherever float can represent the result. */

/* Returns the scaled exp(x), or 0 for x so small that every result is 0. */
ALWAYS_INLINE ACC NAME(mish_exp)(ACC x) {
  const ACC scaled = EXP_SCALED(x);
  return x < MISH_ZERO(x) ? 0 : scaled;
}

ALWAYS_INLINE ACC NAME(mish_value)(ACC x) {
  const ACC scaled = NAME(mish_exp)(x), e = scaled * EXP_UNSCALE(x);
  const ACC denominator = FMA(e, e + 2, (ACC)2);
  const ACC y = x * ((e + 2) / denominator) * scaled * EXP_UNSCALE(x);
  return x > MISH_LINEAR(x) ? x : y;
}

ALWAYS_INLINE ACC NAME(mish_derivative)(ACC x) {
  const ACC scaled = NAME(mish_exp)(x), e = scaled * EXP_UNSCALE(x);
  const ACC denominator = FMA(e, e + 2, (ACC)2);
  /* A quarter of mish.h's numerator, so that no finite x overflows. The factors 1/4 and 4 are
   * exact. */
  const ACC numerator = FMA((e + 2) / 4, denominator, x * (1 + e));
  const ACC derivative = numerator / (denominator * denominator) * scaled * (4 * EXP_UNSCALE(x));
  return x > MISH_LINEAR(x) ? 1 : derivative;
}

ALWAYS_INLINE ACC NAME(mish_second_derivative)(ACC x) {
  const ACC scaled = NAME(mish_exp)(x), e = scaled * EXP_UNSCALE(x);
  const ACC denominator = FMA(e, e + 2, (ACC)2);
  const ACC bracket = 2 + x * ((denominator - 2 * e * e * (e + 2)) / (denominator * (1 + e)));
  const ACC second =
      (1 + e) / (denominator * denominator) * bracket * scaled * (4 * EXP_UNSCALE(x));
  return x > MISH_LINEAR(x) ? 0 : second;
}

ALWAYS_INLINE void NAME(mish_forward_block)(const mish_forward_args *args, int64_t i, int n,
                                            int stream) {
  ACC x[BLOCK];
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = NAME(mish_value)(x[k]);
  STORE((T *)args->y + i, x, n, stream);
}

static void NAME(mish_forward)(const mish_forward_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(2 * args->numel * (int64_t)sizeof(T));
  FOR_LONG_BLOCKS(NAME(mish_forward_block), args, begin, end, (T *)args->y + begin, stream);
}

ALWAYS_INLINE void NAME(mish_backward_block)(const mish_backward_args *args, int64_t i, int n,
                                             int stream) {
  ACC grad_out[BLOCK], x[BLOCK];
  READ(grad_out, (const T *)args->grad_out + i, n);
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = grad_out[k] * NAME(mish_derivative)(x[k]);
  STORE((T *)args->grad_x + i, x, n, stream);
}

static void NAME(mish_backward)(const mish_backward_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(3 * args->numel * (int64_t)sizeof(T));
  FOR_LONG_BLOCKS(NAME(mish_backward_block), args, begin, end, (T *)args->grad_x + begin, stream);
}

ALWAYS_INLINE void NAME(mish_double_backward_block)(const mish_double_backward_args *args,
                                                    int64_t i, int n, int stream) {
  ACC grad_grad_x[BLOCK], grad_out[BLOCK], x[BLOCK];
  READ(grad_grad_x, (const T *)args->grad_grad_x + i, n);
  READ(grad_out, (const T *)args->grad_out + i, n);
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k)
    x[k] = grad_grad_x[k] * grad_out[k] * NAME(mish_second_derivative)(x[k]);
  STORE((T *)args->grad_x + i, x, n, stream);
}

static void NAME(mish_double_backward)(const mish_double_backward_args *args, int64_t begin,
                                       int64_t end) {
  const int stream = cpu_should_stream(4 * args->numel * (int64_t)sizeof(T));
  FOR_LONG_BLOCKS(NAME(mish_double_backward_block), args, begin, end, (T *)args->grad_x + begin,
                  stream);
}

/* CPU kernels of kernel_template. kernel_template_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */

ALWAYS_INLINE ACC NAME(value)(ACC x) { return x * x; }
ALWAYS_INLINE ACC NAME(derivative)(ACC x) { return 2 * x; }

ALWAYS_INLINE void NAME(forward_block)(const forward_args *args, int64_t i, int n, int stream) {
  ACC x[BLOCK];
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = NAME(value)(x[k]);
  STORE((T *)args->y + i, x, n, stream);
}

static void NAME(forward)(const forward_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(2 * args->numel * (int64_t)sizeof(T));
  FOR_BLOCKS(NAME(forward_block), args, begin, end, (T *)args->y + begin, stream);
}

ALWAYS_INLINE void NAME(backward_block)(const backward_args *args, int64_t i, int n, int stream) {
  ACC grad_out[BLOCK], x[BLOCK];
  READ(grad_out, (const T *)args->grad_out + i, n);
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = grad_out[k] * NAME(derivative)(x[k]);
  STORE((T *)args->grad_x + i, x, n, stream);
}

static void NAME(backward)(const backward_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(3 * args->numel * (int64_t)sizeof(T));
  FOR_BLOCKS(NAME(backward_block), args, begin, end, (T *)args->grad_x + begin, stream);
}

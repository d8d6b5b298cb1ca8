/* CPU kernel of kernel_template. kernel_template_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */

ALWAYS_INLINE void NAME(multiply_block)(const kernel_template_tensor *tensor, int64_t i, int n,
                                        int stream) {
  ACC x[BLOCK], y[BLOCK];
  READ(x, (const T *)tensor->x + i, n);
  READ(y, (const T *)tensor->y + i, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = x[k] * y[k];
  STORE((T *)tensor->out + i, x, n, stream);
}

static void NAME(multiply)(const kernel_template_args *args, const kernel_template_tensor *tensor,
                           int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(3 * args->chunks * CHUNK * (int64_t)sizeof(T));
  FOR_BLOCKS(NAME(multiply_block), tensor, begin, end, (T *)tensor->out + begin, stream);
}

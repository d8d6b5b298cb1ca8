/* CPU kernel of kernel_template. kernel_template_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). Each block is read before it is written.
 * Stores do not bypass the caches, because the cache lines of the results have just been read. */

ALWAYS_INLINE void NAME(step_block)(const kernel_template_args *args, int64_t i, int n,
                                    int stream) {
  const ACC lr = (ACC)args->lr, beta = (ACC)args->beta;
  ACC param[BLOCK], grad[BLOCK], momentum[BLOCK];
  READ(param, (const T *)args->param + i, n);
  READ(grad, (const T *)args->grad + i, n);
  READ(momentum, (const T *)args->momentum + i, n);
  for (int k = 0; k < BLOCK; ++k) momentum[k] = beta * momentum[k] + grad[k];
  for (int k = 0; k < BLOCK; ++k) param[k] = param[k] - lr * momentum[k];
  STORE((T *)args->param_out + i, param, n, stream);
  STORE((T *)args->momentum_out + i, momentum, n, stream);
}

static void NAME(step)(const kernel_template_args *args, int64_t begin, int64_t end) {
  FOR_BLOCKS(NAME(step_block), args, begin, end, (T *)args->param_out + begin, 0);
}

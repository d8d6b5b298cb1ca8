/* CPU kernels of muladd. muladd_cpu.c compiles this file once per element type (for_each_dtype.h
 * defines T, ACC, NAME, LOAD and STORE). */

ALWAYS_INLINE void NAME(muladd_forward_block)(const muladd_forward_args *args, int64_t i, int n,
                                              int stream) {
  const ACC c = (ACC)args->c;
  ACC a[BLOCK], b[BLOCK], out[BLOCK];
  READ(a, (const T *)args->a + i, n);
  READ(b, (const T *)args->b + i, n);
  for (int k = 0; k < BLOCK; ++k) out[k] = FMA(a[k], b[k], c);
  STORE((T *)args->out + i, out, n, stream);
}

static void NAME(muladd_forward)(const muladd_forward_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(3 * args->numel * (int64_t)sizeof(T));
  FOR_BLOCKS(NAME(muladd_forward_block), args, begin, end, (T *)args->out + begin, stream);
}

ALWAYS_INLINE void NAME(muladd_backward_block)(const muladd_backward_args *args, int64_t i, int n,
                                               int stream) {
  ACC grad_out[BLOCK], a[BLOCK], b[BLOCK];
  READ(grad_out, (const T *)args->grad_out + i, n);
  READ(a, (const T *)args->a + i, n);
  READ(b, (const T *)args->b + i, n);
  for (int k = 0; k < BLOCK; ++k) a[k] *= grad_out[k];
  for (int k = 0; k < BLOCK; ++k) b[k] *= grad_out[k];
  STORE((T *)args->grad_a + i, b, n, stream);
  STORE((T *)args->grad_b + i, a, n, stream);
}

static void NAME(muladd_backward)(const muladd_backward_args *args, int64_t begin, int64_t end) {
  /* FOR_BLOCKS checks only grad_a's alignment. grad_b usually has the same alignment, because the
   * allocator aligns new tensors alike. */
  const int stream =
      cpu_should_stream(5 * args->numel * (int64_t)sizeof(T)) && (uintptr_t)args->grad_b % 64 == 0;
  FOR_BLOCKS(NAME(muladd_backward_block), args, begin, end, (T *)args->grad_a + begin, stream);
}

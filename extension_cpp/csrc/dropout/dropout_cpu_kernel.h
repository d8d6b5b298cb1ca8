/* CPU kernel of dropout. dropout_cpu.c compiles this file once per element type (for_each_dtype.h
 * defines T, ACC, NAME, LOAD and STORE). */

typedef struct {
  const T *x;
  T *y;
  cpu_dropout_t *dropout;
} NAME(dropout_range_t);

ALWAYS_INLINE void NAME(dropped_block)(const NAME(dropout_range_t) * range, int64_t i, int n,
                                       int stream) {
  ACC x[BLOCK];
  READ(x, range->x + i, n);
  NAME(dropout_block)(x, range->dropout, i);
  STORE(range->y + i, x, n, stream);
}

static void NAME(dropout_forward)(const dropout_forward_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(2 * args->numel * (int64_t)sizeof(T));
  cpu_dropout_t dropout;
  cpu_dropout_init(&dropout, &args->dropout, end);
  const NAME(dropout_range_t) range = {args->x, args->y, &dropout};
  FOR_BLOCKS(NAME(dropped_block), &range, begin, end, range.y + begin, stream);
}

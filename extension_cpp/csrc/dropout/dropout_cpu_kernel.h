/* Compiled once per element type by dropout_cpu.c (common/for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */

/* The arguments in locals: what is read through a pointer would be read again after every store. */
typedef struct {
  const T *x;
  T *y;
  int64_t seed;
  ACC scale;
  uint32_t last_dropped;
} NAME(dropout_range_t);

ALWAYS_INLINE void NAME(dropout_block)(const NAME(dropout_range_t) * range, int64_t i, int n, int stream) {
  ACC x[BLOCK];
  uint32_t bits[BLOCK];
  LOAD(x, range->x + i, n);
  NAME(philox_block)(bits, i, range->seed);
  for (int k = 0; k < BLOCK; ++k) x[k] = bits[k] > range->last_dropped ? x[k] * range->scale : 0;
  STORE(range->y + i, x, n, stream);
}

static void NAME(dropout_forward)(const dropout_forward_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(2 * args->numel * (int64_t)sizeof(T));
  const NAME(dropout_range_t) range = {.x = args->x,
                                       .y = args->y,
                                       .seed = *args->dropout.seed,
                                       .scale = (ACC)args->dropout.scale,
                                       .last_dropped = args->dropout.last_dropped};
  FOR_BLOCKS(NAME(dropout_block), &range, begin, end, range.y + begin, stream);
}

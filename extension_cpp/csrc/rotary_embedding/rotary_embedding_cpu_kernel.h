/* CPU kernels of rotary_embedding. rotary_embedding_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */

/* A row, and the factors of its token. */
typedef struct {
  const T *x;
  T *y;
  const void *cos;
  const void *sin;
} NAME(row_t);

/* Loads the n factors (cos or sin) that begin at index i, in the block order of T. `wide` says that
 * the factors are floats and not of type T. */
ALWAYS_INLINE void NAME(load_factors)(ACC *restrict v, const void *p, int64_t i, int n, int wide) {
  if (!wide) {
    LOAD(v, (const T *)p + i, n);
  } else {
    float padded[BLOCK];
    const float *from = (const float *)p + i;
    if (n != BLOCK) from = (const float *)pad_4(padded, from, n);
    for (int k = 0; k < BLOCK; ++k) v[k] = from[NAME(column)(k)];
  }
}

/* Rotates n pairs (i, i + half), (i + 1, i + 1 + half) and so on. sin[i + low] is the factor for
 * y[i], and sin[i + high] the factor for y[i + half]. */
ALWAYS_INLINE void NAME(half_block)(const NAME(row_t) * row, int64_t i, int64_t half, int64_t low,
                                    int64_t high, ACC sign, int n, int wide, int stream) {
  ACC a[BLOCK], b[BLOCK], cos_a[BLOCK], cos_b[BLOCK], sin_a[BLOCK], sin_b[BLOCK], y[BLOCK];
  LOAD(a, row->x + i, n);
  LOAD(b, row->x + i + half, n);
  NAME(load_factors)(cos_a, row->cos, i, n, wide);
  NAME(load_factors)(cos_b, row->cos, i + half, n, wide);
  NAME(load_factors)(sin_a, row->sin, i + low, n, wide);
  NAME(load_factors)(sin_b, row->sin, i + high, n, wide);
  for (int k = 0; k < BLOCK; ++k) y[k] = FMA(cos_a[k], a[k], -(sign * sin_a[k] * b[k]));
  STORE(row->y + i, y, n, stream);
  for (int k = 0; k < BLOCK; ++k) y[k] = FMA(cos_b[k], b[k], sign * sin_b[k] * a[k]);
  STORE(row->y + i + half, y, n, stream);
}

/* Returns the lane of a pair's first or second element. In a bfloat16 block the even elements come
 * first and then the odd ones. Blocks of other types are in memory order. */
ALWAYS_INLINE int NAME(lane_of)(int pair, int second) {
  return NAME(column)(1) == 1 ? 2 * pair + second : pair + second * (BLOCK / 2);
}

/* Rotates the n elements that begin at index i, where the two elements of a pair are neighbours. */
ALWAYS_INLINE void NAME(neighbour_block)(const NAME(row_t) * row, int64_t i, ACC sign,
                                         int is_transposed, int n, int wide, int stream) {
  ACC x[BLOCK], cos[BLOCK], sin[BLOCK], y[BLOCK];
  LOAD(x, row->x + i, n);
  NAME(load_factors)(cos, row->cos, i, n, wide);
  NAME(load_factors)(sin, row->sin, i, n, wide);
  for (int k = 0; k < BLOCK / 2; ++k) {
    const int a = NAME(lane_of)(k, 0), b = NAME(lane_of)(k, 1);
    const ACC sin_a = is_transposed ? sin[b] : sin[a], sin_b = is_transposed ? sin[a] : sin[b];
    y[a] = FMA(cos[a], x[a], -(sign * sin_a * x[b]));
    y[b] = FMA(cos[b], x[b], sign * sin_b * x[a]);
  }
  STORE(row->y + i, y, n, stream);
}

ALWAYS_INLINE void NAME(rotate_row)(const rotary_embedding_args *args, const NAME(row_t) * row,
                                    int wide, int stream) {
  const int64_t rotated = args->rotated, half = rotated / 2;
  const ACC sign = args->transposed ? -1 : 1;
  if (args->interleaved) {
    int64_t i = 0;
    for (; i + BLOCK <= rotated; i += BLOCK)
      NAME(neighbour_block)(row, i, sign, args->transposed, BLOCK, wide, stream);
    if (i < rotated)
      NAME(neighbour_block)(row, i, sign, args->transposed, (int)(rotated - i), wide, 0);
    return;
  }
  const int64_t low = args->transposed ? half : 0, high = half - low;
  int64_t i = 0;
  for (; i + BLOCK <= half; i += BLOCK)
    NAME(half_block)(row, i, half, low, high, sign, BLOCK, wide, stream);
  if (i < half) NAME(half_block)(row, i, half, low, high, sign, (int)(half - i), wide, 0);
}

static void NAME(rotate_rows)(const rotary_embedding_args *args, const rotary_tensor *tensor,
                              int64_t begin, int64_t end) {
  const int64_t rotated = args->rotated, rows = rotary_rows(args, 0) + rotary_rows(args, 1);
  const int64_t factor_size = args->wide_factors ? sizeof(float) : sizeof(T);
  const int wide = sizeof(T) == 2 && args->wide_factors;
  const int should_stream = cpu_should_stream(2 * rows * args->cols * (int64_t)sizeof(T));
  place_t place = place_of(args, tensor, begin);
  for (int64_t r = begin; r < end; ++r, advance(&place, args, tensor)) {
    const int64_t of_cos =
        place.batch * args->cos_batch_stride + place.token * args->cos_token_stride;
    const int64_t of_sin =
        place.batch * args->sin_batch_stride + place.token * args->sin_token_stride;
    const NAME(row_t) row = {(const T *)tensor->x + offset_of(tensor->x_strides, place),
                             (T *)tensor->y + offset_of(tensor->y_strides, place),
                             (const char *)args->cos + of_cos * factor_size,
                             (const char *)args->sin + of_sin * factor_size};
    /* Non-temporal stores need both halves of the row aligned to 64 bytes. */
    const int stream =
        should_stream && (uintptr_t)row.y % 64 == 0 && rotated / 2 * sizeof(T) % 64 == 0;
    if (wide)
      NAME(rotate_row)(args, &row, 1, stream);
    else
      NAME(rotate_row)(args, &row, 0, stream);
    if (args->cols > rotated)
      memcpy(row.y + rotated, row.x + rotated, (size_t)(args->cols - rotated) * sizeof(T));
  }
  if (should_stream) stream_fence();
}

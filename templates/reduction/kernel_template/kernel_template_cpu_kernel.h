/* CPU kernels of kernel_template. kernel_template_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). Blocks begin at multiples of BLOCK
 * columns in every tensor. A block that extends past the row's end is filled with zeros, which add
 * nothing to a sum. */

/* Returns the sum of the lanes, added in a fixed order. */
ALWAYS_INLINE double NAME(fold)(const ACC *lanes) {
  double sum = 0;
  for (int k = 0; k < BLOCK; ++k) sum += (double)lanes[k];
  return sum;
}

/* Loads the block of weight that begins at column c, or ones if there is no weight. */
ALWAYS_INLINE void NAME(load_weight)(ACC *v, const void *weight, int64_t c, int n) {
  if (weight) {
    LOAD(v, (const T *)weight + c, n);
  } else {
    for (int k = 0; k < BLOCK; ++k) v[k] = 1;
  }
}

static void NAME(forward_row)(const forward_args *args, int64_t row) {
  const T *x = (const T *)args->x + row * args->cols;
  T *y = (T *)args->y + row * args->cols;
  ACC lanes[BLOCK] = {0}, v[BLOCK], weight[BLOCK];
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    LOAD(v, x + c, block_size(c, args->cols));
    for (int k = 0; k < BLOCK; ++k) lanes[k] += v[k] * v[k];
  }
  const ACC rstd = (ACC)(1 / sqrt(NAME(fold)(lanes) / (double)args->cols + args->eps));
  ((ACC *)args->rstd)[row] = rstd;
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    const int n = block_size(c, args->cols);
    LOAD(v, x + c, n);
    NAME(load_weight)(weight, args->weight, c, n);
    for (int k = 0; k < BLOCK; ++k) v[k] = v[k] * rstd * weight[k];
    STORE(y + c, v, n, 0);
  }
}

/* Computes grad_x of one row, and adds the row's terms of grad_weight to `sums`. Either gradient is
 * computed only if it is needed. */
static void NAME(backward_row)(const backward_args *args, int64_t row, double *restrict sums) {
  const T *x = (const T *)args->x + row * args->cols,
          *grad_out = (const T *)args->grad_out + row * args->cols;
  const ACC rstd = ((const ACC *)args->rstd)[row];
  ACC lanes[BLOCK] = {0}, v[BLOCK], g[BLOCK], weight[BLOCK];
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    const int n = block_size(c, args->cols);
    LOAD(v, x + c, n);
    LOAD(g, grad_out + c, n);
    NAME(load_weight)(weight, args->weight, c, n);
    for (int k = 0; k < BLOCK; ++k) v[k] *= rstd;
    for (int k = 0; sums && k < BLOCK; ++k) sums[c + k] += (double)(g[k] * v[k]);
    for (int k = 0; k < BLOCK; ++k) lanes[k] += g[k] * weight[k] * v[k];
  }
  if (!args->grad_x) return;
  const ACC mean = (ACC)(NAME(fold)(lanes) / (double)args->cols);
  T *grad_x = (T *)args->grad_x + row * args->cols;
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    const int n = block_size(c, args->cols);
    LOAD(v, x + c, n);
    LOAD(g, grad_out + c, n);
    NAME(load_weight)(weight, args->weight, c, n);
    for (int k = 0; k < BLOCK; ++k) v[k] = rstd * (g[k] * weight[k] - v[k] * rstd * mean);
    STORE(grad_x + c, v, n, 0);
  }
}

static void NAME(backward_part)(const backward_args *args, int64_t part) {
  const int64_t first = part * args->part_rows, next = first + args->part_rows;
  const int64_t last = next < args->rows ? next : args->rows;
  double *sums = args->grad_weight ? args->partial + part * args->wide_cols : NULL;
  for (int64_t c = 0; sums && c < args->wide_cols; ++c) sums[c] = 0;
  for (int64_t row = first; row < last; ++row) NAME(backward_row)(args, row, sums);
}

static void NAME(grad_weight)(const backward_args *args, int64_t c) {
  double sums[BLOCK] = {0};
  ACC total[BLOCK];
  for (int64_t part = 0; part < args->parts; ++part) {
    for (int k = 0; k < BLOCK; ++k) sums[k] += args->partial[part * args->wide_cols + c + k];
  }
  for (int k = 0; k < BLOCK; ++k) total[k] = (ACC)sums[k];
  STORE((T *)args->grad_weight + c, total, block_size(c, args->cols), 0);
}

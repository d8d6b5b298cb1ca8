/* CPU kernels of the scans. scan_cpu.c compiles this file once per element type (for_each_dtype.h
 * defines T, ACC, NAME, LOAD and STORE). */

/* ---- blocks with any stride ----
 * Elements that are not neighbours in memory, or fill no whole block, are copied to or from a block
 * in memory. A kernel's arithmetic is then compiled only once, and lanes stay in registers. */

/* Copies n elements, which are `stride` apart at p, to the array `block`, and fills the rest of the
 * array with `rest`. Returns the array. */
NOINLINE const T *NAME(gather)(T *restrict block, const T *restrict p, int64_t stride, int n,
                               ACC rest) {
  const T filling = NAME(narrow)(rest);
  if (stride == 1 && sizeof(T) >= 4) { /* gcc compiles this loop to masked loads */
    for (int k = 0; k < BLOCK; ++k) block[k] = k < n ? p[k] : filling;
    return block;
  }
  for (int k = n; k < BLOCK; ++k) block[k] = filling;
  if (stride == 1) {
    memcpy(block, p, (size_t)n * sizeof(T));
  } else if (stride == 0) {
    for (int k = 0; k < n; ++k) block[k] = *p;
  } else {
    for (int k = 0; k < n; ++k) block[k] = p[k * stride];
  }
  return block;
}

NOINLINE void NAME(scatter)(T *restrict p, int64_t stride, const T *restrict block, int n) {
  if (stride == 1) {
    memcpy(p, block, (size_t)n * sizeof(T));
  } else {
    for (int k = 0; k < n; ++k) p[k * stride] = block[k];
  }
}

ALWAYS_INLINE void NAME(reverse_block)(ACC *v) {
  for (int k = 0; k < BLOCK / 2; ++k) {
    const ACC x = v[k];
    v[k] = v[BLOCK - 1 - k];
    v[BLOCK - 1 - k] = x;
  }
}

/* Loads the first n elements of a block, and sets the other lanes to `rest`. p may have any
 * stride. */
ALWAYS_INLINE void NAME(load_stride)(ACC *v, const T *p, int64_t stride, int n, ACC rest) {
  const int is_down = n == BLOCK && stride == -1;
  T block[BLOCK];
  prefetch(p, is_down ? -2048 : 2048, BLOCK * (int64_t)sizeof(T));
  const T *from = p - (BLOCK - 1);
  if (!is_down) from = n == BLOCK && stride == 1 ? p : NAME(gather)(block, p, stride, n, rest);
  LOAD(v, from, BLOCK);
  if (is_down) NAME(reverse_block)(v);
}

/* Returns how many steps ahead columns of a tile are prefetched. These steps take about 4 KiB. */
ALWAYS_INLINE int64_t NAME(steps_ahead)(int width) {
  return 1 + 4096 / (width * (int64_t)sizeof(T));
}

/* Loads a block of columns, and prefetches the block that is `ahead` elements later. */
ALWAYS_INLINE void NAME(load_columns)(ACC *v, const T *p, int64_t ahead, int64_t inner, int n) {
  T block[BLOCK];
  prefetch(p, ahead * (int64_t)sizeof(T), BLOCK * (int64_t)sizeof(T));
  LOAD(v, n == BLOCK && inner == 1 ? p : NAME(gather)(block, p, inner, n, 0), BLOCK);
}

/* Stores a block of columns. If is_clean is set, store_clean of common/cpu/block.h may be used. */
ALWAYS_INLINE void NAME(store_columns)(T *p, int64_t inner, const ACC *v, int n, int stream,
                                       int is_clean) {
  const int whole = n == BLOCK && inner == 1;
  T block[BLOCK];
  if (is_clean) {
    NAME(store_clean)(whole ? p : block, v, BLOCK, stream && whole);
  } else {
    STORE(whole ? p : block, v, BLOCK, stream && whole);
  }
  if (!whole) NAME(scatter)(p, inner, block, n);
}

ALWAYS_INLINE void NAME(store_stride)(T *p, int64_t stride, ACC *v, int n, int stream,
                                      int is_clean) {
  if (n == BLOCK && stride == -1) {
    NAME(reverse_block)(v);
    NAME(store_columns)(p - (BLOCK - 1), 1, v, BLOCK, stream, is_clean);
  } else {
    NAME(store_columns)(p, stride, v, n, stream, is_clean);
  }
}

/* Returns an operand whose data begins at the first line and step of an item's current part. */
ALWAYS_INLINE scan_input NAME(input_part)(scan_input x, const scan_item_t *item) {
  x.data = (const T *)x.data + scan_offset(item, x.outer, x.inner, x.step, x.index);
  return x;
}

ALWAYS_INLINE scan_output NAME(output_part)(scan_output y, const scan_item_t *item) {
  y.data = (T *)y.data + scan_offset(item, y.outer, y.inner, y.step, y.index);
  return y;
}

/* Returns whether results should bypass the caches. `moves` counts reads and writes per element. */
ALWAYS_INLINE int NAME(streams)(const scan_shape *shape, int64_t moves) {
  return cpu_should_stream(moves * shape->outer * shape->length * shape->inner *
                           (int64_t)sizeof(T));
}

/* Return whether every block of a row, or of a tile, consists of whole cache lines of 64 bytes. */
ALWAYS_INLINE int NAME(row_streams)(scan_output y) {
  const uintptr_t p = (uintptr_t)y.data;
  return (y.step == 1 && p % 64 == 0) || (y.step == -1 && (p + sizeof(T)) % 64 == 0);
}

ALWAYS_INLINE int NAME(tile_streams)(scan_output y) {
  return y.inner == 1 && (uintptr_t)y.data % 64 == 0 && y.step * (int64_t)sizeof(T) % 64 == 0;
}

/* ---- cumsum ---- */

/* Scans n steps of a row with any strides. */
ALWAYS_INLINE NAME(carry)
    NAME(cumsum_steps)(const T *x, int64_t x_step, T *y, int64_t y_step, int64_t n,
                       NAME(carry) carry, int only_total, int stream) {
  for (int64_t i = 0; i < n; i += BLOCK) {
    const int count = n - i < BLOCK ? (int)(n - i) : BLOCK;
    ACC v[BLOCK];
    NAME(load_stride)(v, x + i * x_step, x_step, count, 0);
    carry = NAME(scan_block)(v, carry);
    if (!only_total) NAME(store_stride)(y + i * y_step, y_step, v, count, stream, 1);
  }
  return carry;
}

/* Scans n steps, which are whole blocks of neighbours in memory. */
ALWAYS_INLINE NAME(carry) NAME(cumsum_blocks)(const T *x, T *y, int64_t n, NAME(carry) carry,
                                              int only_total, int stream) {
  for (int64_t i = 0; i < n; i += BLOCK) {
    ACC v[BLOCK];
    READ(v, x + i, BLOCK);
    carry = NAME(scan_block)(v, carry);
    if (!only_total) NAME(store_clean)(y + i, v, BLOCK, stream);
  }
  return carry;
}

/* Scans a row, and adds `start` to each result. Returns the sum of the steps without `start`. */
NOINLINE double NAME(cumsum_row)(const T *x, int64_t x_step, T *y, int64_t y_step, int64_t n,
                                 double start, int only_total, int stream) {
  const int64_t whole = x_step == 1 && y_step == 1 ? n / BLOCK * BLOCK : 0;
  NAME(carry) carry = NAME(carry_from)(start);
  carry = NAME(cumsum_blocks)(x, y, whole, carry, only_total, stream);
  carry = NAME(cumsum_steps)(x + whole * x_step, x_step, y + whole * y_step, y_step, n - whole,
                             carry, only_total, stream);
  return NAME(carried)(carry);
}

/* The type of the sums of columns: double, but float for half types, as scan.h permits. */
typedef __typeof__(_Generic((T){0}, uint16_t : 0.0f, default : 0.0)) NAME(sum_t);

/* Scans a part of a tile of columns, whose lanes are in block order. The loop reads one step at a
 * time, because reading and streaming two or four rows of memory at a time takes twice as long. */
NOINLINE void NAME(cumsum_tile)(scan_input x, scan_output y, int width, int64_t steps,
                                const double *start, double *total, int only_total, int stream) {
  NAME(sum_t) from[SCAN_TILE], sums[SCAN_TILE];
  const int lanes = (width + BLOCK - 1) / BLOCK * BLOCK;
  const int64_t ahead = NAME(steps_ahead)(width) * x.step;
  for (int k = 0; k < lanes; ++k) {
    from[k] = (NAME(sum_t))start[k];
    sums[k] = 0;
  }
  for (int64_t i = 0; i < steps; ++i) {
    for (int c = 0; c < width; c += BLOCK) {
      const int n = width - c < BLOCK ? width - c : BLOCK;
      NAME(sum_t) *restrict sum = sums + c;
      ACC v[BLOCK];
      NAME(load_columns)
      (v, (const T *)x.data + i * x.step + c * x.inner, ahead, x.inner, n);
      for (int k = 0; k < BLOCK; ++k) sum[k] += (NAME(sum_t))v[k];
      if (only_total) continue;
      for (int k = 0; k < BLOCK; ++k) v[k] = (ACC)(from[c + k] + sum[k]);
      NAME(store_columns)((T *)y.data + i * y.step + c * y.inner, y.inner, v, n, stream, 1);
    }
  }
  for (int k = 0; k < lanes; ++k) total[k] = sums[k];
}

static void NAME(zero_start)(const void *args, const scan_item_t *item, scan_state_t *state) {
  (void)args;
  for (int k = 0; k < item->lanes; ++k) state->a[k] = 0;
}

static void NAME(cumsum_part)(const void *cumsum, const scan_item_t *item,
                              const scan_state_t *state, scan_state_t *total, int only_total) {
  const cumsum_args *args = (const cumsum_args *)cumsum;
  const scan_input x = NAME(input_part)(args->x, item);
  scan_output y = NAME(output_part)(args->y, item);
  const int stream = NAME(streams)(&args->shape, 2);
  if (args->exclusive) { /* writes the same sums one step later */
    for (int k = 0; k < item->width && item->first == 0 && !only_total; ++k)
      ((T *)y.data)[k * y.inner] = 0;
    y.data = (T *)y.data + y.step;
  }
  if (args->shape.inner == 1) {
    total->a[0] = NAME(cumsum_row)((const T *)x.data, x.step, (T *)y.data, y.step, item->steps,
                                   state->a[0], only_total, stream && NAME(row_streams)(y));
  } else {
    NAME(cumsum_tile)
    (x, y, item->width, item->steps, state->a, total->a, only_total,
     stream && NAME(tile_streams)(y));
  }
  if (stream) stream_fence();
}

static void NAME(cumsum_narrow)(const cumsum_args *args, int64_t begin, int64_t end) {
  for (int64_t o = begin; o < end; ++o) {
    const scan_item_t item = {.shape = &args->shape, .outer = o};
    const scan_input x = NAME(input_part)(args->x, &item);
    const scan_output y = NAME(output_part)(args->y, &item);
    NAME(sum_t) sum[SCAN_NARROW] = {0};
    for (int64_t k = 0; k < args->shape.length; ++k) {
      const T *from = (const T *)x.data + k * x.step;
      T *to = (T *)y.data + k * y.step;
      for (int64_t i = 0; i < args->shape.inner; ++i) {
        const NAME(sum_t) before = sum[i];
        sum[i] += (NAME(sum_t))NAME(widen)(from[i * x.inner]);
        to[i * y.inner] = NAME(narrow)((ACC)(args->exclusive ? before : sum[i]));
      }
    }
  }
}

static void NAME(cumsum)(const cumsum_args *args, int64_t begin, int64_t end, int only_total) {
  if (scan_is_narrow(&args->shape)) {
    NAME(cumsum_narrow)(args, begin, end);
    return;
  }
  const scan_op_t op = {NAME(zero_start), NAME(cumsum_part), join_sums};
  const int64_t steps = args->shape.length - (args->exclusive != 0);
  scan_run(op, args, &args->shape, steps, begin, end, only_total);
}

#include "scan/scan_cpu_recurrence_kernel.h"

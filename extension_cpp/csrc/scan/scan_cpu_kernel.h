/* Compiled once per element type by scan_cpu.c (common/for_each_dtype.h defines T, ACC, NAME, LOAD
 * and STORE). */

/* ---- blocks with any stride ---- */

/* The first n elements of a block, 0 in the other lanes. A stride of -1 goes down in memory. */
NOINLINE void NAME(load_each)(ACC *restrict v, const T *p, int64_t stride, int n) {
  for (int k = 0; k < BLOCK; ++k) {
    const int i = NAME(column)(k);
    v[k] = i < n ? (ACC)NAME(widen)(p[i * stride]) : 0;
  }
}

NOINLINE void NAME(store_each)(T *p, int64_t stride, const ACC *restrict v, int n) {
  T block[BLOCK];
  STORE(block, v, BLOCK, 0);
  for (int i = 0; i < n; ++i) p[i * stride] = block[i];
}

ALWAYS_INLINE void NAME(reverse_block)(ACC *v) {
  for (int k = 0; k < BLOCK / 2; ++k) {
    const ACC x = v[k];
    v[k] = v[BLOCK - 1 - k];
    v[BLOCK - 1 - k] = x;
  }
}

ALWAYS_INLINE void NAME(load_stride)(ACC *v, const T *p, int64_t stride, int n) {
  if (n == BLOCK && stride == 1) {
    READ(v, p, BLOCK);
  } else if (n == BLOCK && stride == -1) {
    prefetch(p, -2048, BLOCK * (int64_t)sizeof(T));
    LOAD(v, p - (BLOCK - 1), BLOCK);
    NAME(reverse_block)(v);
  } else {
    NAME(load_each)(v, p, stride, n);
  }
}

ALWAYS_INLINE void NAME(store_stride)(T *p, int64_t stride, ACC *v, int n, int stream) {
  if (n == BLOCK && stride == 1) {
    STORE(p, v, BLOCK, stream);
  } else if (n == BLOCK && stride == -1) {
    NAME(reverse_block)(v);
    STORE(p - (BLOCK - 1), v, BLOCK, stream);
  } else {
    NAME(store_each)(p, stride, v, n);
  }
}

/* Whether every block of a row is stored to whole lines of 64 bytes. */
ALWAYS_INLINE int NAME(row_streams)(const T *y, int64_t step) {
  return (step == 1 && (uintptr_t)y % 64 == 0) || (step == -1 && (uintptr_t)(y + 1) % 64 == 0);
}

/* ---- cumsum ---- */

/* Scans n steps of a row, and adds `start` to each result; a double is added as the sum of two
 * floats, so that only the last addition rounds. Returns the sum of the steps. */
ALWAYS_INLINE double NAME(cumsum_steps)(const T *x, int64_t x_step, T *y, int64_t y_step, int64_t n,
                                        double start, int only_total, int stream) {
  double total = 0;
  for (int64_t i = 0; i < n; i += BLOCK) {
    const int count = n - i < BLOCK ? (int)(n - i) : BLOCK;
    ACC v[BLOCK];
    NAME(load_stride)(v, x + i * x_step, x_step, count);
    NAME(scan_block)(v);
    const double sum = v[BLOCK - 1];
    if (!only_total) {
      const ACC high = (ACC)(start + total);
      const ACC low = high - high == 0 ? (ACC)(start + total - (double)high) : 0;
      for (int k = 0; k < BLOCK; ++k) v[k] = high + (low + v[k]);
      NAME(store_stride)(y + i * y_step, y_step, v, count, stream);
    }
    total += sum;
  }
  return total;
}

NOINLINE double NAME(cumsum_row)(const T *x, int64_t x_step, T *y, int64_t y_step, int64_t n,
                                 double start, int only_total, int stream) {
  if (only_total) {
    if (x_step == 1) return NAME(cumsum_steps)(x, 1, y, 1, n, start, 1, 0);
    return NAME(cumsum_steps)(x, x_step, y, y_step, n, start, 1, 0);
  }
  if (x_step == 1 && y_step == 1) {
    if (stream) return NAME(cumsum_steps)(x, 1, y, 1, n, start, 0, 1);
    return NAME(cumsum_steps)(x, 1, y, 1, n, start, 0, 0);
  }
  if (x_step == -1 && y_step == -1 && stream)
    return NAME(cumsum_steps)(x, -1, y, -1, n, start, 0, 1);
  return NAME(cumsum_steps)(x, x_step, y, y_step, n, start, 0, 0);
}

/* One step of a block of columns. */
ALWAYS_INLINE void NAME(cumsum_block)(const T *x, int64_t x_inner, T *y, int64_t y_inner,
                                      const double *restrict start, double *restrict total, int n,
                                      int only_total, int stream) {
  ACC v[BLOCK];
  NAME(load_stride)(v, x, x_inner, n);
  for (int k = 0; k < BLOCK; ++k) total[k] += (double)v[k];
  if (only_total) return;
  for (int k = 0; k < BLOCK; ++k) v[k] = (ACC)(start[k] + total[k]);
  NAME(store_stride)(y, y_inner, v, n, stream);
}

/* n steps of a tile of columns; its lanes are in block order. */
ALWAYS_INLINE void NAME(cumsum_tile_steps)(scan_input x, scan_output y, int width, int64_t n,
                                           const double *start, double *total, int only_total,
                                           int stream) {
  for (int64_t i = 0; i < n; ++i) {
    const T *from = (const T *)x.data + i * x.step;
    T *to = (T *)y.data + i * y.step;
    int c = 0;
    for (; c + BLOCK <= width; c += BLOCK) NAME(cumsum_block)
    (from + c * x.inner, x.inner, to + c * y.inner, y.inner, start + c, total + c, BLOCK,
     only_total, stream);
    if (c < width) NAME(cumsum_block)
    (from + c * x.inner, x.inner, to + c * y.inner, y.inner, start + c, total + c, width - c,
     only_total, 0);
  }
}

NOINLINE void NAME(cumsum_tile)(scan_input x, scan_output y, int width, int64_t n,
                                const double *start, double *total, int only_total, int stream) {
  for (int k = 0; k < SCAN_TILE; ++k) total[k] = 0;
  if (x.inner == 1 && y.inner == 1) {
    x.inner = y.inner = 1;
    if (only_total) return NAME(cumsum_tile_steps)(x, y, width, n, start, total, 1, 0);
    if (stream) return NAME(cumsum_tile_steps)(x, y, width, n, start, total, 0, 1);
    return NAME(cumsum_tile_steps)(x, y, width, n, start, total, 0, 0);
  }
  if (only_total) return NAME(cumsum_tile_steps)(x, y, width, n, start, total, 1, 0);
  NAME(cumsum_tile_steps)(x, y, width, n, start, total, 0, 0);
}

/* One part of an item; total[k] is set to the sums. */
ALWAYS_INLINE void NAME(cumsum_part)(const scan_shape *shape, scan_input x, scan_output y,
                                     scan_item_t item, int64_t n, const double *start,
                                     double *total, int only_total, int stream) {
  if (shape->inner == 1) {
    const int aligned = NAME(row_streams)((const T *)y.data, y.step);
    total[0] = NAME(cumsum_row)((const T *)x.data, x.step, (T *)y.data, y.step, n, start[0],
                                only_total, stream && aligned);
  } else {
    const int aligned = (uintptr_t)y.data % 64 == 0 && y.step * (int64_t)sizeof(T) % 64 == 0;
    NAME(cumsum_tile)(x, y, item.width, n, start, total, only_total, stream && aligned);
  }
}

static void NAME(cumsum)(const cumsum_args *args, int64_t begin, int64_t end, int only_total) {
  const scan_shape *shape = &args->shape;
  const int64_t steps = shape->length - (args->exclusive != 0);
  const int stream =
      cpu_should_stream(2 * shape->outer * shape->length * shape->inner * (int64_t)sizeof(T));
  double start[SCAN_TILE], total[SCAN_TILE];
  for (int64_t i = begin; i < end; ++i) {
    const scan_item_t item = scan_item(shape, steps, i);
    const int lanes = scan_lanes_of(shape, item);
    scan_input x = args->x;
    scan_output y = args->y;
    x.data = (const T *)x.data + item.outer * x.outer + item.inner * x.inner;
    y.data = (T *)y.data + item.outer * y.outer + item.inner * y.inner;
    if (i == begin || item.part == 0) {
      for (int k = 0; k < lanes; ++k) start[k] = 0;
      for (int64_t part = 0; part < item.part && !only_total; ++part) {
        const double *before = scan_totals(shape, item, part);
        for (int k = 0; k < lanes; ++k) start[k] += before[k];
      }
    }
    if (args->exclusive) { /* the same sums one step later */
      for (int k = 0; k < item.width && item.part == 0 && !only_total; ++k)
        ((T *)y.data)[k * y.inner] = 0;
      y.data = (T *)y.data + y.step;
    }
    for (int64_t part = item.part; part < item.parts_end; ++part) {
      const int64_t first = part * SCAN_PART, rest = steps - first;
      scan_input from = x;
      scan_output to = y;
      from.data = (const T *)x.data + first * x.step;
      to.data = (T *)y.data + first * y.step;
      NAME(cumsum_part)
      (shape, from, to, item, rest < SCAN_PART ? rest : SCAN_PART, start, total, only_total,
       stream);
      if (only_total) {
        memcpy(scan_totals(shape, item, part), total, (size_t)lanes * sizeof *total);
      } else {
        for (int k = 0; k < lanes; ++k) start[k] += total[k];
      }
    }
  }
  if (stream) stream_fence();
}

/* Computes the maximum of z over the columns, the sum of exp(z - max), and for the entropy also the
 * sum of exp(z - max) * (z - max). softmax and the losses include this file in their kernel
 * headers, which are compiled once per element type.
 *
 * A row is processed in chunks of SUM_EXP_COLS columns. The loop that computes the chunk's maximum
 * reads the chunk from memory. The loop that computes the sums then reads it from the L1 cache, and
 * prefetches the next chunk. Memory is therefore read once, however long the row is. If a chunk
 * raises the maximum, the sums so far are scaled down.
 *
 * NaN and infinities. A NaN does not become the maximum, but it makes the sum NaN. So does +inf,
 * because inf - inf is NaN. While the maximum is -inf, 0 is subtracted from z in place of the
 * maximum, so that -inf adds exp(-inf) = 0. */

/* The map from x to z: z = x * scale, or z = softcap * tanh(x * inverse) with SOFTCAP. scale and
 * softcap are positive, so the largest x has the largest z. */
typedef struct {
  ACC scale, softcap, inverse;
} NAME(map_t);

/* Replaces x by z - shift. The product x * scale is rounded before the subtraction, as it was when
 * shift was computed, so the largest x gives exactly 0. A fused multiply-subtract would leave the
 * rounding error of the product. For huge z this error is large, and its exp may overflow. */
ALWAYS_INLINE void NAME(map_block)(ACC *restrict x, NAME(map_t) map, const ACC *restrict shift,
                                   int form) {
  if (form & SOFTCAP) {
    for (int k = 0; k < BLOCK; ++k) x[k] = map.softcap * TANH(x[k] * map.inverse) - shift[k];
  } else if (map.scale == 1) {
    for (int k = 0; k < BLOCK; ++k) x[k] -= shift[k];
  } else {
    for (int k = 0; k < BLOCK; ++k) x[k] = x[k] * map.scale - shift[k];
  }
}

ALWAYS_INLINE ACC NAME(map_one)(ACC x, NAME(map_t) map, int form) {
  return form & SOFTCAP ? map.softcap * TANH(x * map.inverse) : x * map.scale;
}

/* Returns exp(x) for a result of type T. float32 needs a more accurate exp than 16-bit types. */
ALWAYS_INLINE ACC NAME(exp_value)(ACC x) {
  if (sizeof(T) > 2) return EXP_SOFTMAX(x);
  ACC power;
  const ACC p = EXP_PARTS(x, 4, &power);
  return p * power;
}

NOINLINE void NAME(load_zeros)(ACC *restrict v, const T *restrict p, int n) { LOAD(v, p, n); }

/* Loads n elements and sets the other lanes to -inf, which changes no maximum and no sum. */
NOINLINE void NAME(load_part)(ACC *restrict v, const T *restrict p, int n) {
  NAME(load_zeros)(v, p, n);
  for (int k = 0; k < BLOCK; ++k) v[k] = NAME(column)(k) < n ? v[k] : -(ACC)INFINITY;
}

/* Loads the last n elements of a row, which end at p + n, into the last n columns of the block, and
 * sets the other columns to -inf. The row must have at least BLOCK elements, to allow a full
 * load. */
ALWAYS_INLINE void NAME(load_last)(ACC *restrict v, const T *restrict p, int n) {
  LOAD(v, p + n - BLOCK, BLOCK);
  for (int k = 0; k < BLOCK; ++k) v[k] = NAME(column)(k) >= BLOCK - n ? v[k] : -(ACC)INFINITY;
}

/* Loads n elements. A partial block takes a function call, which costs little and saves much
 * code. */
ALWAYS_INLINE void NAME(load_block)(ACC *restrict v, const T *restrict p, int n) {
  if (n == BLOCK) {
    LOAD(v, p, BLOCK);
  } else {
    NAME(load_part)(v, p, n);
  }
}

ALWAYS_INLINE void NAME(max_block)(ACC *restrict max, const T *p, int n) {
  ACC v[BLOCK];
  NAME(load_block)(v, p, n);
  for (int k = 0; k < BLOCK; ++k) max[k] = v[k] > max[k] ? v[k] : max[k];
}

/* Adds the exponentials of a block to the sums. d is z - shift. */
ALWAYS_INLINE void NAME(add_exp)(ACC *restrict sum, ACC *restrict products, const ACC *restrict d,
                                 int form) {
  if (form & ENTROPY) {
    for (int k = 0; k < BLOCK; ++k) {
      /* 0 * -inf would be NaN */
      const ACC least = d[k] < EXP_ZERO(d[k]) ? EXP_ZERO(d[k]) : d[k];
      ACC power;
      const ACC p = EXP_PARTS(least, sizeof(T) > 2 ? 5 : 4, &power), e = p * power;
      products[k] = FMA(e, least, products[k]);
      sum[k] += e;
    }
  } else {
    for (int k = 0; k < BLOCK; ++k) {
      ACC power;
      const ACC p = EXP_PARTS(d[k], sizeof(T) > 2 ? 5 : 4, &power);
      sum[k] = FMA(p, power, sum[k]);
    }
  }
}

/* ---- rows: the lanes of a block are columns ---- */

typedef struct {
  ACC max;
  double sum, products;
} NAME(sums_t);

/* Returns the largest of `cols` elements at x. `last` says that the row has at least BLOCK elements
 * up to x + cols, so that load_last() may be used. */
ALWAYS_INLINE ACC NAME(chunk_max)(const T *x, int64_t cols, int last) {
  ACC max[BLOCK];
  int64_t c = 0;
  for (int k = 0; k < BLOCK; ++k) max[k] = -(ACC)INFINITY;
  for (; c + BLOCK <= cols; c += BLOCK) NAME(max_block)(max, x + c, BLOCK);
  if (c < cols && last) {
    ACC v[BLOCK];
    NAME(load_last)(v, x + c, (int)(cols - c));
    for (int k = 0; k < BLOCK; ++k) max[k] = v[k] > max[k] ? v[k] : max[k];
  } else if (c < cols) {
    NAME(max_block)(max, x + c, (int)(cols - c));
  }
  return FOLD_MAX(max);
}

/* Adds a block of n elements to the sums, with any flags. The function is not inlined. */
NOINLINE void NAME(chunk_part)(ACC *restrict sum, ACC *restrict products, const T *p, int n,
                               const ACC *restrict shift, NAME(map_t) map, int form) {
  ACC v[BLOCK];
  NAME(load_part)(v, p, n);
  NAME(map_block)(v, map, shift, form);
  /* Sets the lanes to -inf again, because softcap has turned -inf into a finite number. */
  for (int k = 0; k < BLOCK; ++k) v[k] = NAME(column)(k) < n ? v[k] : -(ACC)INFINITY;
  NAME(add_exp)(sum, products, v, form);
}

/* Makes the sums so far relative to the new maximum `max`. */
ALWAYS_INLINE void NAME(raise)(NAME(sums_t) * row, ACC max) {
  if (row->max != max && row->max != -(ACC)INFINITY) {
    const double step = (double)row->max - (double)max, factor = exp(step);
    row->products = factor * (row->products + step * row->sum);
    row->sum *= factor;
  }
  row->max = max;
}

/* Adds columns [begin, end), which are at most one chunk, to the sums of the row. With SOFTCAP or
 * CALLS every block takes a function call. */
ALWAYS_INLINE void NAME(chunk_sums)(NAME(sums_t) * row, const T *x, int64_t begin, int64_t end,
                                    ahead_t ahead, NAME(map_t) map, int form) {
  ACC shift[BLOCK], sum[BLOCK] = {0}, products[BLOCK] = {0};
  int64_t c = begin;
  for (int k = 0; k < BLOCK; ++k) shift[k] = row->max == -(ACC)INFINITY ? 0 : row->max;
  for (; c + BLOCK <= end && !(form & (SOFTCAP | CALLS)); c += BLOCK) {
    ACC v[BLOCK];
    prefetch_later(x + c, BLOCK * sizeof(T), ahead);
    LOAD(v, x + c, BLOCK);
    NAME(map_block)(v, map, shift, form);
    NAME(add_exp)(sum, products, v, form);
  }
  if (c < end && end >= BLOCK && !(form & (SOFTCAP | CALLS))) {
    ACC v[BLOCK];
    NAME(load_last)(v, x + c, (int)(end - c));
    NAME(map_block)(v, map, shift, form);
    NAME(add_exp)(sum, products, v, form);
  } else if (c < end) {
    /* The call gets copies, so that `sum` and `products` stay in registers in the loop above. */
    ACC last_sum[BLOCK], last_products[BLOCK];
    for (int k = 0; k < BLOCK; ++k) last_sum[k] = sum[k], last_products[k] = products[k];
    for (; c < end; c += BLOCK) {
      const int n = end - c < BLOCK ? (int)(end - c) : BLOCK;
      NAME(chunk_part)(last_sum, last_products, x + c, n, shift, map, form);
    }
    for (int k = 0; k < BLOCK; ++k) sum[k] = last_sum[k], products[k] = last_products[k];
  }
  row->sum += FOLD(sum);
  if (form & ENTROPY) row->products += FOLD(products);
}

ALWAYS_INLINE NAME(sums_t) NAME(row_sums)(const T *x, int64_t cols, NAME(map_t) map, int form) {
  const ahead_t ahead = sum_exp_ahead(cols, sizeof(T));
  NAME(sums_t) row = {-(ACC)INFINITY, 0, 0};
  for (int64_t c = 0; c < cols; c += SUM_EXP_COLS) {
    const int64_t end = cols - c < SUM_EXP_COLS ? cols : c + SUM_EXP_COLS;
    const ACC x_max = NAME(chunk_max)(x + c, end - c, cols >= BLOCK);
    const ACC max = NAME(map_one)(x_max, map, form);
    NAME(raise)(&row, max > row.max ? max : row.max);
    NAME(chunk_sums)(&row, x, c, end, ahead, map, form);
  }
  return row;
}

/* Computes the sums of any row, but more slowly than plain_sums(). */
NOINLINE NAME(sums_t) NAME(rare_sums)(const T *x, int64_t cols, NAME(map_t) map) {
  return NAME(row_sums)(x, cols, map, CALLS);
}

/* Computes exp(x - max) / 2 in two factors, as 2^(x * LOG2E - shift). `shift` is max * LOG2E,
 * rounded. This saves one operation in eight, compared with 2^((x - max) * LOG2E). */
ALWAYS_INLINE ACC NAME(power_of)(ACC x, ACC max, ACC shift, ACC *power) {
  const ACC y = HAS_FMA ? FMA(x, LOG2E(x), -shift) : (x - max) * LOG2E(x);
  return EXP2_PARTS(y, NAME(DEGREE), power);
}

/* Adds a block to POWER_LANES sums. Of 32 sums, not all would stay in the registers of AVX2. */
ALWAYS_INLINE void NAME(add_powers)(ACC *restrict sum, const ACC *restrict x, ACC max, ACC shift) {
  for (int first = 0; first < BLOCK; first += POWER_LANES) {
    for (int k = 0; k < POWER_LANES; ++k) {
      ACC power;
      const ACC p = NAME(power_of)(x[first + k], max, shift, &power);
      sum[k] = FMA(p, power, sum[k]);
    }
  }
}

/* Returns the sum of exp(x - max) over columns [begin, end), at most one chunk. `has_max` says that
 * one of these elements is max. */
ALWAYS_INLINE double NAME(chunk_powers)(const T *x, int64_t begin, int64_t end, ahead_t ahead,
                                        ACC max, int has_max) {
  const ACC shift = max * LOG2E(max);
  ACC sum[POWER_LANES] = {0}, power;
  int64_t c = begin;
  for (; c + BLOCK <= end; c += BLOCK) {
    ACC v[BLOCK];
    prefetch_later(x + c, BLOCK * sizeof(T), ahead);
    LOAD(v, x + c, BLOCK);
    NAME(add_powers)(sum, v, max, shift);
  }
  if (c < end) {
    ACC v[BLOCK];
    NAME(load_last)(v, x + c, (int)(end - c));
    NAME(add_powers)(sum, v, max, shift);
  }
  /* Multiplying by exp(k) corrects the rounding of `shift`. |k| < 0.003, so two terms suffice. */
  const double k = HAS_FMA ? LN2 * ((double)shift - (double)max * (double)LOG2E(max)) : 0;
  const double total = FOLD_POWERS(sum), factor = 2 * (1 + k * (1 + k / 2));
  /* The term of max becomes exactly 1, so that a loss is exactly 0 if all other terms vanish. */
  const ACC of_max = NAME(power_of)(max, max, shift, &power);
  return has_max ? (total - (double)(of_max * power)) * factor + 1 : total * factor;
}

/* Computes the sums of a row without softcap and entropy. */
NOINLINE NAME(sums_t) NAME(plain_sums)(const T *x, int64_t cols, NAME(map_t) map) {
  const ahead_t ahead = sum_exp_ahead(cols, sizeof(T));
  NAME(sums_t) row = {-(ACC)INFINITY, 0, 0};
  if (cols < BLOCK || map.scale != 1) return NAME(rare_sums)(x, cols, map);
  for (int64_t c = 0; c < cols; c += SUM_EXP_COLS) {
    const int64_t end = cols - c < SUM_EXP_COLS ? cols : c + SUM_EXP_COLS;
    const ACC max = NAME(chunk_max)(x + c, end - c, 1);
    NAME(raise)(&row, max > row.max ? max : row.max);
    /* For a larger |max|, the rounding error of `shift` would be noticeable. */
    if (!(row.max > -POWER_MAX && row.max < POWER_MAX)) return NAME(rare_sums)(x, cols, map);
    row.sum += NAME(chunk_powers)(x, c, end, ahead, row.max, max == row.max);
  }
  return row;
}

/* ---- tiles: the lanes of a block are inner elements, in block order ---- */

typedef struct {
  ACC max[SUM_EXP_TILE];
  double sum[SUM_EXP_TILE], products[SUM_EXP_TILE];
} NAME(tile_sums_t);

/* Adds one column to the sums of a block of inner elements. x has the elements of the column. */
ALWAYS_INLINE void NAME(tile_column)(ACC *restrict sum, ACC *restrict products,
                                     const ACC *restrict shift, const ACC *restrict x,
                                     NAME(map_t) map, int form) {
  ACC v[BLOCK];
  for (int k = 0; k < BLOCK; ++k) v[k] = x[k];
  NAME(map_block)(v, map, shift, form);
  NAME(add_exp)(sum, products, v, form);
}

/* Does the same as tile_column() for any flags, as a function call instead of inlined code. */
NOINLINE void NAME(tile_column_part)(ACC *restrict sum, ACC *restrict products,
                                     const ACC *restrict shift, const ACC *restrict x,
                                     NAME(map_t) map, int form) {
  NAME(tile_column)(sum, products, shift, x, map, form);
}

/* Raises the maximum of each lane to `max` where that is larger, and rescales the lane's sums. */
NOINLINE void NAME(tile_raise)(ACC *restrict tile_max, double *restrict sum,
                               double *restrict products, const ACC *restrict max) {
  for (int k = 0; k < BLOCK; ++k) {
    const ACC old = tile_max[k], new = max[k] > old ? max[k] : old;
    /* In the first chunk `step` is -inf, and the sums are still 0. */
    const ACC step = old == new ? 0 : old - new, factor = EXP_SOFTMAX(step);
    products[k] = factor == 0 ? 0 : (double)factor * (products[k] + (double)step * sum[k]);
    sum[k] *= (double)factor;
    tile_max[k] = new;
  }
}

/* Adds `cols` columns of n inner elements to the tile's sums, beginning at the tile's lane
 * `first`. */
ALWAYS_INLINE void NAME(tile_chunk)(NAME(tile_sums_t) * tile, int first, const T *x, int64_t cols,
                                    int64_t inner, int n, NAME(map_t) map, int form) {
  ACC max[BLOCK], shift[BLOCK], sum[BLOCK] = {0}, products[BLOCK] = {0};
  /* Columns are copied, because with a stride of a power of 2 they evict each other from caches. */
  ACC copy[SUM_EXP_TILE_COLS][BLOCK];
  for (int k = 0; k < BLOCK; ++k) max[k] = -(ACC)INFINITY;
  for (int64_t c = 0; c < cols; ++c) {
    ACC v[BLOCK];
    NAME(load_block)(v, x + c * inner, n);
    for (int k = 0; k < BLOCK; ++k) copy[c][k] = v[k];
    for (int k = 0; k < BLOCK; ++k) max[k] = v[k] > max[k] ? v[k] : max[k];
  }
  for (int k = 0; k < BLOCK; ++k) shift[k] = NAME(map_one)(max[k], map, form);
  NAME(tile_raise)(tile->max + first, tile->sum + first, tile->products + first, shift);
  for (int k = 0; k < BLOCK; ++k) {
    const ACC largest = tile->max[first + k];
    shift[k] = largest == -(ACC)INFINITY ? 0 : largest;
  }
  for (int64_t c = 0; c < cols; ++c) {
    if (form & CALLS) {
      NAME(tile_column_part)(sum, products, shift, copy[c], map, form);
    } else {
      NAME(tile_column)(sum, products, shift, copy[c], map, 0);
    }
  }
  for (int k = 0; k < BLOCK; ++k) tile->sum[first + k] += (double)sum[k];
  for (int k = 0; k < BLOCK; ++k) tile->products[first + k] += (double)products[k];
}

NOINLINE void NAME(tile_chunk_whole)(NAME(tile_sums_t) * tile, int first, const T *x, int64_t cols,
                                     int64_t inner, NAME(map_t) map) {
  NAME(tile_chunk)(tile, first, x, cols, inner, BLOCK, map, 0);
}

/* Does the same as tile_chunk() with less code: with CALLS every column takes a function call. */
NOINLINE void NAME(tile_chunk_part)(NAME(tile_sums_t) * tile, int first, const T *x, int64_t cols,
                                    int64_t inner, int n, NAME(map_t) map, int form) {
  NAME(tile_chunk)(tile, first, x, cols, inner, n, map, form | CALLS);
}

/* Computes the sums of `width` <= SUM_EXP_TILE inner elements. Lanes past the width are
 * undefined. */
static void NAME(tile_sums)(NAME(tile_sums_t) * tile, const T *x, int64_t cols, int64_t inner,
                            int width, NAME(map_t) map, int form) {
  for (int k = 0; k < SUM_EXP_TILE; ++k) {
    tile->max[k] = -(ACC)INFINITY;
    tile->sum[k] = tile->products[k] = 0;
  }
  for (int64_t c = 0; c < cols; c += SUM_EXP_TILE_COLS) {
    const int64_t n_cols = cols - c < SUM_EXP_TILE_COLS ? cols - c : SUM_EXP_TILE_COLS;
    const T *p = x + c * inner;
    for (int k = 0; k < width; k += BLOCK) {
      const int n = width - k < BLOCK ? width - k : BLOCK;
      if (n == BLOCK && form == 0) {
        NAME(tile_chunk_whole)(tile, k, p + k, n_cols, inner, map);
      } else {
        NAME(tile_chunk_part)(tile, k, p + k, n_cols, inner, n, map, form);
      }
    }
  }
}

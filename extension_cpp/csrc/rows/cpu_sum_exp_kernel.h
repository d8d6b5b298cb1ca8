/* The maximum of z over the columns, the sum of exp(z - max), and for the entropy the sum of
 * exp(z - max) * (z - max). softmax and the losses include this file in their kernel headers, which
 * are compiled once per element type.
 *
 * A row is taken in chunks of SUM_EXP_COLS columns. The maximum of a chunk reads memory; its sum
 * reads the first-level cache and prefetches the next chunk. So memory is read once, however long
 * the row is. If a chunk raises the maximum, the sums so far are scaled down.
 *
 * NaN. The maximum skips NaN, but the sum has it. +inf - inf makes the sum NaN as well. While the
 * maximum is -inf, the sums take 0 in its place, so that -inf adds exp(-inf) = 0. */

/* z = x * scale, or softcap * tanh(x * inverse). scale and softcap are positive, so the largest x
 * has the largest z. */
typedef struct {
  ACC scale, softcap, inverse;
} NAME(map_t);

/* x becomes z - shift. The product x * scale is rounded before the subtraction, as it was for
 * shift: so the largest x gives exactly 0. A fused subtraction would give the rounding error of its
 * z, and exp of that may overflow if z is huge. */
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

/* exp(x) for a result of type T. float32 needs the more exact one. */
ALWAYS_INLINE ACC NAME(exp_value)(ACC x) {
  if (sizeof(T) > 2) return EXP_SOFTMAX(x);
  ACC power;
  const ACC p = EXP_PARTS(x, 4, &power);
  return p * power;
}

NOINLINE void NAME(load_zeros)(ACC *restrict v, const T *restrict p, int n) { LOAD(v, p, n); }

/* Loads n elements and sets the lanes past them to -inf, which changes no maximum and no sum. */
NOINLINE void NAME(load_part)(ACC *restrict v, const T *restrict p, int n) {
  NAME(load_zeros)(v, p, n);
  for (int k = 0; k < BLOCK; ++k) v[k] = NAME(column)(k) < n ? v[k] : -(ACC)INFINITY;
}

/* Loads the last n elements of a row, which end at p + n, into the last n columns of the block.
 * At least BLOCK elements end there, so one full load suffices. Sets the other columns to -inf. */
ALWAYS_INLINE void NAME(load_last)(ACC *restrict v, const T *restrict p, int n) {
  LOAD(v, p + n - BLOCK, BLOCK);
  for (int k = 0; k < BLOCK; ++k) v[k] = NAME(column)(k) >= BLOCK - n ? v[k] : -(ACC)INFINITY;
}

/* A partial block takes a function call, which is cheap there and saves most of the code size. */
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

/* Adds a block of z - shift. */
ALWAYS_INLINE void NAME(add_exp)(ACC *restrict sum, ACC *restrict products, const ACC *restrict d,
                                 int form) {
  if (form & ENTROPY) {
    for (int k = 0; k < BLOCK; ++k) {
      /* 0 * -inf would be NaN. */
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

/* ---- rows: lanes are columns ---- */

typedef struct {
  ACC max;
  double sum, products;
} NAME(sums_t);

/* The largest of `cols` elements at x. `last`: the row has at least BLOCK elements up to
 * x + cols. */
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

/* Adds a block of any width, with any flags. */
NOINLINE void NAME(chunk_part)(ACC *restrict sum, ACC *restrict products, const T *p, int n,
                               const ACC *restrict shift, NAME(map_t) map, int form) {
  ACC v[BLOCK];
  NAME(load_part)(v, p, n);
  NAME(map_block)(v, map, shift, form);
  /* Again, because softcap turns -inf into a number. */
  for (int k = 0; k < BLOCK; ++k) v[k] = NAME(column)(k) < n ? v[k] : -(ACC)INFINITY;
  NAME(add_exp)(sum, products, v, form);
}

/* Makes `max` the maximum of the sums so far. */
ALWAYS_INLINE void NAME(raise)(NAME(sums_t) * row, ACC max) {
  if (row->max != max && row->max != -(ACC)INFINITY) {
    const double step = (double)row->max - (double)max, factor = exp(step);
    row->products = factor * (row->products + step * row->sum);
    row->sum *= factor;
  }
  row->max = max;
}

/* The sums over columns [begin, end), at most a chunk. With SOFTCAP or CALLS every block takes a
 * call. */
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
    /* Copies, so that the sums above stay in registers. */
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

/* Any row, at less speed. */
NOINLINE NAME(sums_t) NAME(rare_sums)(const T *x, int64_t cols, NAME(map_t) map) {
  return NAME(row_sums)(x, cols, map, CALLS);
}

/* exp(x - max) / 2 in two parts, as 2^(x * LOG2E - shift), which saves an operation in eight.
 * `shift` is the rounded max * LOG2E. */
ALWAYS_INLINE ACC NAME(power_of)(ACC x, ACC max, ACC shift, ACC *power) {
  const ACC y = HAS_FMA ? FMA(x, LOG2E(x), -shift) : (x - max) * LOG2E(x);
  return EXP2_PARTS(y, NAME(DEGREE), power);
}

/* Adds a block. The lanes are 16: of 32, not all would stay in AVX2's registers. */
ALWAYS_INLINE void NAME(add_powers)(ACC *restrict sum, const ACC *restrict x, ACC max, ACC shift) {
  for (int first = 0; first < BLOCK; first += POWER_LANES) {
    for (int k = 0; k < POWER_LANES; ++k) {
      ACC power;
      const ACC p = NAME(power_of)(x[first + k], max, shift, &power);
      sum[k] = FMA(p, power, sum[k]);
    }
  }
}

/* The sum of exp(x - max) over columns [begin, end), at most a chunk. `has_max`: one of them is
 * max. */
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
  /* exp(k) makes up for the rounding of `shift`; |k| < 0.003. */
  const double k = HAS_FMA ? LN2 * ((double)shift - (double)max * (double)LOG2E(max)) : 0;
  const double total = FOLD_POWERS(sum), factor = 2 * (1 + k * (1 + k / 2));
  /* The term of max becomes exactly 1: where all others vanish, a loss is 0. */
  const ACC of_max = NAME(power_of)(max, max, shift, &power);
  return has_max ? (total - (double)(of_max * power)) * factor + 1 : total * factor;
}

/* A row with neither softcap nor entropy. */
NOINLINE NAME(sums_t) NAME(plain_sums)(const T *x, int64_t cols, NAME(map_t) map) {
  const ahead_t ahead = sum_exp_ahead(cols, sizeof(T));
  NAME(sums_t) row = {-(ACC)INFINITY, 0, 0};
  if (cols < BLOCK || map.scale != 1) return NAME(rare_sums)(x, cols, map);
  for (int64_t c = 0; c < cols; c += SUM_EXP_COLS) {
    const int64_t end = cols - c < SUM_EXP_COLS ? cols : c + SUM_EXP_COLS;
    const ACC max = NAME(chunk_max)(x + c, end - c, 1);
    NAME(raise)(&row, max > row.max ? max : row.max);
    /* Beyond, the rounding of `shift` is felt. */
    if (!(row.max > -POWER_MAX && row.max < POWER_MAX)) return NAME(rare_sums)(x, cols, map);
    row.sum += NAME(chunk_powers)(x, c, end, ahead, row.max, max == row.max);
  }
  return row;
}

/* ---- tiles: lanes are inner elements, in block order ---- */

typedef struct {
  ACC max[SUM_EXP_TILE];
  double sum[SUM_EXP_TILE], products[SUM_EXP_TILE];
} NAME(tile_sums_t);

/* Adds a column, the x of a block's inner elements. */
ALWAYS_INLINE void NAME(tile_column)(ACC *restrict sum, ACC *restrict products,
                                     const ACC *restrict shift, const ACC *restrict x,
                                     NAME(map_t) map, int form) {
  ACC v[BLOCK];
  for (int k = 0; k < BLOCK; ++k) v[k] = x[k];
  NAME(map_block)(v, map, shift, form);
  NAME(add_exp)(sum, products, v, form);
}

/* tile_column() for any flags `form`, as a call instead of inlined code. */
NOINLINE void NAME(tile_column_part)(ACC *restrict sum, ACC *restrict products,
                                     const ACC *restrict shift, const ACC *restrict x,
                                     NAME(map_t) map, int form) {
  NAME(tile_column)(sum, products, shift, x, map, form);
}

/* Makes `max` the maximum of n lanes' sums so far, as far as it is larger. */
NOINLINE void NAME(tile_raise)(ACC *restrict tile_max, double *restrict sum,
                               double *restrict products, const ACC *restrict max) {
  for (int k = 0; k < BLOCK; ++k) {
    const ACC old = tile_max[k], new = max[k] > old ? max[k] : old;
    /* step is -inf in the first chunk, where the sums are 0. */
    const ACC step = old == new ? 0 : old - new, factor = EXP_SOFTMAX(step);
    products[k] = factor == 0 ? 0 : (double)factor * (products[k] + (double)step * sum[k]);
    sum[k] *= (double)factor;
    tile_max[k] = new;
  }
}

/* Adds `cols` columns of a block of n inner elements to the sums of tile lanes `first` and on. */
ALWAYS_INLINE void NAME(tile_chunk)(NAME(tile_sums_t) * tile, int first, const T *x, int64_t cols,
                                    int64_t inner, int n, NAME(map_t) map, int form) {
  ACC max[BLOCK], shift[BLOCK], sum[BLOCK] = {0}, products[BLOCK] = {0};
  /* A copy: where the stride is a power of 2, the columns push each other out of the caches. */
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

/* CALLS: every column takes a call. */
NOINLINE void NAME(tile_chunk_part)(NAME(tile_sums_t) * tile, int first, const T *x, int64_t cols,
                                    int64_t inner, int n, NAME(map_t) map, int form) {
  NAME(tile_chunk)(tile, first, x, cols, inner, n, map, form | CALLS);
}

/* Sums of `width` <= SUM_EXP_TILE inner elements. Lanes past the width hold rubbish. */
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

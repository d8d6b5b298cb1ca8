/* The losses for inner > 1, in tiles of inner elements. loss_cpu_kernel.h includes this file. */

/* What the gradients of a tile's inner elements are computed from: an array for each member of
 * gradient_t (loss_cpu.c), with an entry for each lane. Lane k has inner element element_of(k) of
 * the tile. */
typedef struct {
  ACC shift[LOSS_TILE], factor[LOSS_TILE], at_target[LOSS_TILE], smooth[LOSS_TILE];
  ACC entropy_factor[LOSS_TILE], entropy[LOSS_TILE];
  ACC constant[LOSS_TILE]; /* 1 if the whole gradient is `factor` */
  int64_t target[LOSS_TILE];
} NAME(tile_t);

/* The location of a tile. */
typedef struct {
  int64_t o, i; /* outer index of the tile, and inner index of its first element */
  int width;
} NAME(place_t);

ALWAYS_INLINE NAME(place_t) NAME(place_of)(const loss_rows *rows, int64_t item) {
  const int64_t tiles = ceil_div(rows->inner, LOSS_TILE), i = item % tiles * LOSS_TILE;
  const int64_t left = rows->inner - i;
  return (NAME(place_t)){item / tiles, i, left < LOSS_TILE ? (int)left : LOSS_TILE};
}

/* Returns the index, within its tile, of the inner element that lane k holds. */
ALWAYS_INLINE int NAME(element_of)(int k) { return k / BLOCK * BLOCK + NAME(column)(k % BLOCK); }

ALWAYS_INLINE void NAME(set_lane)(NAME(tile_t) * tile, int k, gradient_t g) {
  tile->shift[k] = (ACC)g.shift;
  tile->factor[k] = (ACC)g.factor;
  tile->at_target[k] = (ACC)g.at_target;
  tile->smooth[k] = (ACC)g.smooth;
  tile->entropy_factor[k] = (ACC)g.entropy_factor;
  tile->entropy[k] = (ACC)g.entropy;
  tile->constant[k] = g.target < 0;
  tile->target[k] = g.target;
}

/* Computes column c of the gradient for n lanes, beginning with lane `first`. at[k] is the column
 * of the target of lane first + k. c and at[k] count from the first column of the current chunk. */
ALWAYS_INLINE void NAME(tile_gradient_column)(const NAME(tile_t) * tile, const T *x, T *out,
                                              NAME(map_t) map, ACC weight, const int32_t *at,
                                              int32_t c, int first, int n, int form, int stream) {
  ACC v[BLOCK], slope[BLOCK];
  LOAD(v, x, n);
  NAME(map_with_slope)(v, slope, map, tile->shift + first, form);
  if (form & ENTROPY) {
    for (int k = 0; k < BLOCK; ++k) {
      const ACC d = v[k] < EXP_ZERO(v[k]) ? EXP_ZERO(v[k]) : v[k];
      v[k] = NAME(exp_value)(d) * FMA(tile->entropy_factor[first + k], d + tile->entropy[first + k],
                                      tile->factor[first + k]);
    }
  } else {
    for (int k = 0; k < BLOCK; ++k) v[k] = NAME(exp_value)(v[k]) * tile->factor[first + k];
  }
  if (form & SMOOTH) {
    for (int k = 0; k < BLOCK; ++k) v[k] = FMA(-tile->smooth[first + k], weight, v[k]);
  }
  for (int k = 0; k < BLOCK; ++k) v[k] -= at[k] == c ? tile->at_target[first + k] : 0;
  if (form & SOFTCAP) {
    for (int k = 0; k < BLOCK; ++k) v[k] *= slope[k];
  }
  for (int k = 0; k < BLOCK; ++k)
    v[k] = tile->constant[first + k] != 0 ? tile->factor[first + k] : v[k];
  STORE(out, v, n, stream);
}

/* Does the same as tile_gradient_column() for any flags and any n, without being inlined. */
NOINLINE void NAME(tile_gradient_part)(const NAME(tile_t) * tile, const T *x, T *out,
                                       NAME(map_t) map, ACC weight, const int32_t *at, int32_t c,
                                       int first, int n, int form) {
  NAME(tile_gradient_column)(tile, x, out, map, weight, at, c, first, n, form, 0);
}

/* Computes all columns of the gradient for a block of lanes. */
ALWAYS_INLINE void NAME(tile_gradient_block)(const loss_rows *rows, const NAME(tile_t) * tile,
                                             const T *x, T *out, NAME(map_t) map, int first, int n,
                                             int form, int stream) {
  const int64_t inner = rows->inner;
  for (int64_t chunk = 0; chunk < rows->cols; chunk += SUM_EXP_TILE_COLS) {
    const int64_t left = rows->cols - chunk;
    const int32_t cols = left < SUM_EXP_TILE_COLS ? (int32_t)left : SUM_EXP_TILE_COLS;
    int32_t at[BLOCK];
    for (int k = 0; k < BLOCK; ++k) {
      const int64_t c = tile->target[first + k] - chunk;
      at[k] = c >= 0 && c < cols ? (int32_t)c : -1;
    }
    for (int32_t c = 0; c < cols; ++c) {
      const int64_t i = (chunk + c) * inner;
      if (form & CALLS) {
        NAME(tile_gradient_part)
        (tile, x + i, out + i, map, NAME(weight_of)(rows, chunk + c), at, c, first, n, form);
      } else {
        NAME(tile_gradient_column)(tile, x + i, out + i, map, 1, at, c, first, BLOCK, 0, stream);
      }
    }
  }
}

static void NAME(tile_gradient)(const loss_rows *rows, const NAME(tile_t) * tile, const T *x,
                                T *out, NAME(place_t) place, const NAME(call_t) * call, int form) {
  /* Non-temporal stores need every column of the tile to begin at a multiple of 64 bytes. */
  const int stream =
      call->stream && rows->inner * (int64_t)sizeof(T) % 64 == 0 && (uintptr_t)out % 64 == 0;
  for (int k = 0; k < place.width; k += BLOCK) {
    const int n = place.width - k < BLOCK ? place.width - k : BLOCK;
    if (form || n < BLOCK) {
      NAME(tile_gradient_block)(rows, tile, x + k, out + k, call->map, k, n, form | CALLS, 0);
    } else {
      NAME(tile_gradient_block)(rows, tile, x + k, out + k, call->map, k, BLOCK, 0, stream);
    }
  }
}

/* Sets smooth[k] to the sum of w_c * (z_c - max) of lane k. */
NOINLINE void NAME(tile_smooth_sums)(double *smooth, const loss_rows *rows,
                                     const NAME(tile_sums_t) * sums, const T *x, int width,
                                     NAME(map_t) map, int form) {
  for (int first = 0; first < width; first += BLOCK) {
    const int n = width - first < BLOCK ? width - first : BLOCK;
    for (int k = 0; k < BLOCK; ++k) smooth[first + k] = 0;
    for (int64_t c = 0; c < rows->cols; ++c) {
      const ACC weight = NAME(weight_of)(rows, c);
      ACC v[BLOCK];
      NAME(load_zeros)(v, x + c * rows->inner + first, n);
      NAME(map_block)(v, map, sums->max + first, form);
      for (int k = 0; k < BLOCK; ++k) smooth[first + k] += (double)(weight * v[k]);
    }
  }
}

static void NAME(forward_tile)(const loss_forward_args *args, const NAME(call_t) * call,
                               int64_t item) {
  const loss_rows *rows = &args->rows;
  const NAME(place_t) place = NAME(place_of)(rows, item);
  const T *x = (const T *)rows->logits + place.o * rows->outer_stride + place.i;
  NAME(tile_sums_t) sums;
  NAME(tile_t) tile = {0};
  double smooth[LOSS_TILE] = {0};
  NAME(tile_sums)
  (&sums, x, rows->cols, rows->inner, place.width, call->map, call->form & (SOFTCAP | ENTROPY));
  if (call->form & SMOOTH)
    NAME(tile_smooth_sums)(smooth, rows, &sums, x, place.width, call->map, call->form & SOFTCAP);
  for (int k = 0; k < LOSS_TILE; ++k) {
    const int i = NAME(element_of)(k);
    if (i >= place.width) continue;
    const NAME(sums_t) lane = {sums.max[k], sums.sum[k], sums.products[k]};
    NAME(set_lane)
    (&tile, k,
     NAME(finish_row)(args, call, place.o * rows->inner + place.i + i, x + i, lane, smooth[k]));
  }
  if (args->grad_logits) {
    T *out = (T *)args->grad_logits + place.o * rows->cols * rows->inner + place.i;
    NAME(tile_gradient)(rows, &tile, x, out, place, call, call->form & ~ENTROPY);
  }
}

static void NAME(backward_tile)(const loss_backward_args *args, const NAME(call_t) * call,
                                int64_t item) {
  const loss_rows *rows = &args->rows;
  const NAME(place_t) place = NAME(place_of)(rows, item);
  NAME(tile_t) tile = {0};
  for (int k = 0; k < LOSS_TILE; ++k) {
    const int i = NAME(element_of)(k);
    if (i >= place.width) continue;
    NAME(set_lane)
    (&tile, k, NAME(backward_gradient)(args, call, place.o * rows->inner + place.i + i));
  }
  NAME(tile_gradient)
  (rows, &tile, (const T *)rows->logits + place.o * rows->outer_stride + place.i,
   (T *)args->grad_logits + place.o * rows->cols * rows->inner + place.i, place, call, call->form);
}

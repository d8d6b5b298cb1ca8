/* Compares each fused norm with the same computation by separate kernels. With p = 0.5, dropout
 * scales kept elements by 2, which is exact, so both must give the same bits. There are two
 * exceptions. In 16-bit types only the separate kernels round the norm's grad_x before grad_sum is
 * added. Small float16 numbers may differ in the last bit (see same()). */
#include "check.h"
#include "dropout/dropout.h"
#include "norm/norm.h"

typedef struct {
  int64_t rows, cols;
  dtype_t dtype;
  int centered, add, drop, offset; /* buffers begin `offset` elements past a multiple of 64 bytes */
  int64_t seed;
} fused_case;

enum { X, RESIDUAL, GRAD_OUT, GRAD_SUM, INPUTS };
enum { SUM, Y, MEAN, RSTD, GRAD_X, GRAD_DROPPED, GRAD_WEIGHT, GRAD_BIAS, OUTPUTS };

static dtype_t computed_in(const fused_case *c) {
  return c->dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
}
static size_t size_of(const fused_case *c) { return formats[c->dtype].size; }

static size_t output_size_of(const fused_case *c, int k) {
  return k == MEAN || k == RSTD ? formats[computed_in(c)].size : size_of(c);
}

static size_t output_bytes(const fused_case *c, int k) {
  if (k == MEAN || k == RSTD) return (size_t)c->rows * output_size_of(c, k);
  return (size_t)(k >= GRAD_WEIGHT ? c->cols : c->rows * c->cols) * size_of(c);
}

static dropout_t dropout_if(const fused_case *c, int wanted) {
  return c->drop && wanted ? dropout_of(0.5, &c->seed) : (dropout_t){0};
}

static norm_forward_args forward_args(const fused_case *c, const void *x, void *const *wide,
                                      const buffer_t *out) {
  return (norm_forward_args){.x = x,
                             .weight = wide[0],
                             .bias = c->centered ? wide[1] : NULL,
                             .y = out[Y].data,
                             .mean = c->centered ? out[MEAN].data : NULL,
                             .rstd = out[RSTD].data,
                             .eps = 1e-5,
                             .rows = c->rows,
                             .cols = c->cols,
                             .x_stride = c->cols,
                             .dtype = c->dtype,
                             .weight_dtype = c->dtype,
                             .centered = c->centered};
}

static norm_backward_args backward_args(const fused_case *c, const void *x, const void *grad_out,
                                        void *const *wide, const buffer_t *out) {
  return (norm_backward_args){.grad_out = grad_out,
                              .x = x,
                              .mean = c->centered ? out[MEAN].data : NULL,
                              .rstd = out[RSTD].data,
                              .weight = wide[0],
                              .grad_x = out[GRAD_X].data,
                              .grad_weight = out[GRAD_WEIGHT].data,
                              .grad_bias = c->centered ? out[GRAD_BIAS].data : NULL,
                              .rows = c->rows,
                              .cols = c->cols,
                              .x_stride = c->cols,
                              .grad_out_stride = c->cols,
                              .dtype = c->dtype,
                              .weight_dtype = c->dtype};
}

static void run_backward(norm_backward_args *args) {
  buffer_t partial = buffer_new((size_t)norm_partial_cpu(args), 0);
  args->partial = partial.data;
  for (int64_t part = norm_parts(args->rows, args->cols) - 1; part >= 0; --part)
    norm_backward_cpu(part, part + 1, args);
  norm_grad_weight_cpu(0, ceil_div(args->cols, NORM_TILE), args);
  buffer_free(&partial);
}

static void run_fused(const fused_case *c, const buffer_t *in, void *const *wide,
                      const buffer_t *out) {
  norm_forward_args forward = forward_args(c, in[X].data, wide, out);
  norm_backward_args backward =
      backward_args(c, c->add ? out[SUM].data : in[X].data, in[GRAD_OUT].data, wide, out);
  if (c->add) {
    forward.residual = in[RESIDUAL].data, forward.residual_stride = c->cols,
    forward.sum = out[SUM].data;
    backward.grad_sum = in[GRAD_SUM].data, backward.grad_sum_stride = c->cols;
    if (c->drop) backward.grad_dropped = out[GRAD_DROPPED].data;
  }
  forward.dropout_x = backward.dropout_x = dropout_if(c, c->add);
  forward.dropout_y = backward.dropout_y = dropout_if(c, !c->add);
  for (int64_t r = c->rows - 1; r >= 0; --r) norm_forward_cpu(r, r + 1, &forward);
  run_backward(&backward);
}

static void drop(const fused_case *c, const void *x, void *y) {
  const int64_t numel = c->rows * c->cols;
  dropout_forward_args args = {x, y, dropout_of(0.5, &c->seed), numel, c->dtype};
  if (c->drop) dropout_forward_cpu(0, ceil_div(numel, CHUNK), &args);
  if (!c->drop) memcpy(y, x, (size_t)numel * size_of(c));
}

static void add(const fused_case *c, void *sum, const void *a, const void *b) {
  for (int64_t i = 0; i < c->rows * c->cols; ++i) {
    set_element(c->dtype, sum, i, element(c->dtype, a, i) + element(c->dtype, b, i));
  }
}

static void run_composed(const fused_case *c, const buffer_t *in, void *const *wide,
                         const buffer_t *out) {
  const size_t bytes = output_bytes(c, Y);
  buffer_t dropped = buffer_new(bytes, 0);
  if (c->add)
    drop(c, in[X].data, dropped.data), add(c, out[SUM].data, in[RESIDUAL].data, dropped.data);
  const void *x = c->add ? out[SUM].data : in[X].data;
  norm_forward_args forward = forward_args(c, x, wide, out);
  norm_forward_cpu(0, c->rows, &forward);
  if (!c->add) memcpy(dropped.data, out[Y].data, bytes), drop(c, dropped.data, out[Y].data);
  if (!c->add) drop(c, in[GRAD_OUT].data, dropped.data);
  norm_backward_args backward =
      backward_args(c, x, c->add ? in[GRAD_OUT].data : dropped.data, wide, out);
  run_backward(&backward);
  if (c->add) add(c, out[GRAD_X].data, out[GRAD_X].data, in[GRAD_SUM].data);
  buffer_free(&dropped);
}

/* Returns 1 if a and b have the same bits. float16 numbers below 2^-14 are subnormal. Rounding them
 * before dropout doubles them loses one bit more than after it, so these may differ by 2^-24. */
static int same(const fused_case *c, const buffer_t *a, const buffer_t *b) {
  if (c->dtype != DTYPE_FLOAT16 || a->bytes != output_bytes(c, Y))
    return memcmp(a->data, b->data, a->bytes) == 0;
  for (int64_t i = 0; i < c->rows * c->cols; ++i) {
    const double x = element(c->dtype, a->data, i), y = element(c->dtype, b->data, i);
    if (x != y && !(fabs(x) < 0x1p-13 && fabs(x - y) <= 0x1p-24)) return 0;
  }
  return 1;
}

static void check_outputs(const fused_case *c, const buffer_t *got, const buffer_t *want) {
  static const char *const names[] = {"sum",          "y",           "mean",     "rstd", "grad_x",
                                      "grad_dropped", "grad_weight", "grad_bias"};
  for (int k = 0; k < OUTPUTS; ++k) {
    if (k == GRAD_DROPPED) continue;
    if (k == GRAD_X && c->add && size_of(c) == 2) {
      for (int64_t i = 0; i < c->rows * c->cols; ++i) {
        const double a = element(c->dtype, got[k].data, i), b = element(c->dtype, want[k].data, i);
        /* The separate kernels also round the norm's gradient. The fused and the separate kernels
         * round the sum. */
        CHECK(fabs(a - b) <= 2 * unit_at(&formats[c->dtype], 8),
              "fused norm: grad_x %lld is %a, not %a", (long long)i, a, b);
      }
    } else {
      CHECK(same(c, &got[k], &want[k]),
            "fused norm %s (%lld, %lld), add %d, drop %d, centered %d: %s has other bits",
            dtype_names[c->dtype], (long long)c->rows, (long long)c->cols, c->add, c->drop,
            c->centered, names[k]);
    }
    buffer_check(&got[k], NULL, names[k]);
  }
  if (!c->add || !c->drop) return;
  buffer_t dropped = buffer_new(got[GRAD_X].bytes, 0);
  drop(c, got[GRAD_X].data, dropped.data);
  CHECK(same(c, &dropped, &got[GRAD_DROPPED]), "fused norm: grad_dropped has other bits");
  buffer_free(&dropped);
}

static uint64_t run_case(const fused_case *c) {
  uint64_t hash = 0;
  buffer_t in[INPUTS], out[2][OUTPUTS], wide_buffers[2];
  void *wide[2];
  for (int k = 0; k < INPUTS; ++k) {
    void *values = random_elements(c->dtype, c->rows * c->cols, 2, 0, (uint64_t)(k + 1));
    in[k] = buffer_copy(values, output_bytes(c, Y), (size_t)c->offset * size_of(c));
    free(values);
  }
  for (int k = 0; k < 2; ++k) {
    void *values = random_elements(c->dtype, c->cols, 1, 0, (uint64_t)(k + 9));
    wide_buffers[k] = buffer_new((size_t)norm_wide_cols(c->cols) * formats[computed_in(c)].size, 0);
    wide[k] = wide_buffers[k].data;
    norm_widen_args args = {values, wide[k], k == 0, c->cols, c->dtype, c->dtype};
    norm_widen_cpu(0, c->cols, &args);
    free(values);
  }
  for (int way = 0; way < 2; ++way) {
    for (int k = 0; k < OUTPUTS; ++k)
      out[way][k] = buffer_new(output_bytes(c, k), (size_t)c->offset * output_size_of(c, k));
    (way ? run_composed : run_fused)(c, in, wide, out[way]);
  }
  check_outputs(c, out[0], out[1]);
  for (int k = 0; k < OUTPUTS; ++k) {
    const dtype_t dtype = k == MEAN || k == RSTD ? computed_in(c) : c->dtype;
    hash = hash_elements(hash, dtype, out[0][k].data,
                         (int64_t)(out[0][k].bytes / formats[dtype].size));
    buffer_free(&out[0][k]), buffer_free(&out[1][k]);
  }
  for (int k = 0; k < INPUTS; ++k)
    buffer_check(&in[k], NULL, "fused norm, input"), buffer_free(&in[k]);
  for (int k = 0; k < 2; ++k) buffer_free(&wide_buffers[k]);
  return hash;
}

/* Tests the ops with a residual, with and without dropout, and dropout of y. The widths give every
 * alignment of a row's first element. A dropout mask covers one row, two rows, or more elements
 * than its state holds. */
void test_norm_fused(uint32_t step) {
  static const int64_t shapes[][2] = {{1, 1},    {3, 31},   {2, 32},   {5, 66},
                                      {9, 1023}, {4, 1024}, {3, 1026}, {2, 4100},
                                      {3, 224},  {3, 300},  {3, 20001}};
  static const int forms[][2] = {{1, 0}, {1, 1}, {0, 1}};
  for (int dtype = 0; dtype < DTYPES; ++dtype) {
    uint64_t hash = 0;
    for (int i = 0; i < 11 * 3 * 2; ++i) {
      fused_case c = {shapes[i / 6][0],
                      shapes[i / 6][1],
                      (dtype_t)dtype,
                      i % 2,
                      forms[i / 2 % 3][0],
                      forms[i / 2 % 3][1],
                      0,
                      0x0123456789abcdef + i};
      if (!c.add && !c.centered) continue;         /* no op applies dropout to rms_norm's y */
      if (step > 1000 && c.cols > 16384) continue; /* takes minutes under sanitizers */
      hash = 31 * hash + run_case(&c);
      should_stream = 1;
      for (c.offset = 0; c.offset < OFFSETS; ++c.offset) run_case(&c);
      should_stream = 0;
    }
    printf("bits norm_fused %s %016llx\n", dtype_names[dtype], (unsigned long long)hash);
  }
}

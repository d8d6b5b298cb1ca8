/* Tests scale_bias_relu: sizes below, at and above a block, a tile and a part; guards, offsets,
 * streaming, and splits of the work. */
#include "check.h"
#include "scale_bias_relu/scale_bias_relu.h"

enum { Y, GRAD_X, GRAD_BIAS, OUTPUTS };
static const char *const output_names[OUTPUTS] = {"y", "grad_x", "grad_bias"};

typedef struct {
  int64_t rows, cols;
  dtype_t dtype;
  double scale;
  void *x, *grad_out, *bias;
  double *want[OUTPUTS], *slack[OUTPUTS];
} sbr_case;

static int64_t count(const sbr_case *c, int output) {
  return output == GRAD_BIAS ? c->cols : c->rows * c->cols;
}

static size_t bytes_of(const sbr_case *c, int output) {
  return (size_t)count(c, output) * formats[c->dtype].size;
}

/* Computes the expected results. Exact data needs no slack, because products and sums are all exact
 * in float. Random data has an error of one or two roundings per element. If scale * x + bias is
 * nearly 0, rounding may flip the mask. A sum of at most 64 rows in float is off by at most 64
 * roundings, relative to the sum of the terms' magnitudes. */
static void set_wants(sbr_case *c, int exact) {
  const double unit = exact ? 0 : rounding(c->dtype);
  for (int k = 0; k < OUTPUTS; ++k)
    c->want[k] = doubles(count(c, k)), c->slack[k] = doubles(count(c, k));
  for (int64_t i = 0; i < c->rows * c->cols; ++i) {
    const int64_t column = i % c->cols;
    const double bias = element(c->dtype, c->bias, column),
                 product = element(c->dtype, c->x, i) * c->scale;
    const double v = product + bias, g = v <= 0 ? 0 : element(c->dtype, c->grad_out, i);
    const int unsure = fabs(v) <= 2 * unit * (fabs(product) + fabs(bias)) && !exact;
    const double slack = unsure ? fabs(element(c->dtype, c->grad_out, i)) : unit * fabs(g);
    c->want[Y][i] = v < 0 ? 0 : v;
    c->slack[Y][i] = exact ? 0 : unit * (fabs(product) + fabs(v));
    c->want[GRAD_X][i] = g * c->scale;
    c->slack[GRAD_X][i] = exact ? 0 : slack * fabs(c->scale);
    c->want[GRAD_BIAS][column] += g;
    c->slack[GRAD_BIAS][column] += exact ? 0 : 64 * unit * fabs(g) + slack;
  }
}

static sbr_case new_case(int64_t rows, int64_t cols, dtype_t dtype, int exact) {
  sbr_case c = {rows, cols, dtype, exact ? -1.5 : 0.7001953125, NULL, NULL, NULL, {NULL}, {NULL}};
  c.x = exact ? random_exact(dtype, rows * cols, 1) : random_elements(dtype, rows * cols, 3, 0, 1);
  c.grad_out =
      exact ? random_exact(dtype, rows * cols, 2) : random_elements(dtype, rows * cols, 3, 0, 2);
  c.bias = exact ? random_exact(dtype, cols, 3) : random_elements(dtype, cols, 3, 0, 3);
  /* Sets some elements to NaN and infinity, of which some propagate. relu removes the others. */
  if (exact && rows > 1) {
    set_element(dtype, c.x, 0, (double)NAN);
    set_element(dtype, c.grad_out, (rows / 2) * cols, (double)NAN);
    set_element(dtype, c.x, (rows / 2) * cols, -(double)INFINITY);
    set_element(dtype, c.x, rows * cols - 1, -(double)INFINITY);
    set_element(dtype, c.grad_out, cols, (double)INFINITY);
    set_element(dtype, c.x, cols, (double)INFINITY);
  }
  set_wants(&c, exact);
  return c;
}

static void free_case(sbr_case *c) {
  free(c->x), free(c->grad_out), free(c->bias);
  for (int k = 0; k < OUTPUTS; ++k) free(c->want[k]), free(c->slack[k]);
}

static void check_output(const sbr_case *c, int output, const buffer_t *got) {
  for (int64_t i = 0; i < count(c, output); ++i) {
    const double value = element(c->dtype, got->data, i);
    CHECK(close_to(c->dtype, value, c->want[output][i], c->slack[output][i]),
          "scale_bias_relu %s (%lld, %lld): element %lld of %s is %a, not %a",
          dtype_names[c->dtype], (long long)c->rows, (long long)c->cols, (long long)i,
          output_names[output], value, c->want[output][i]);
  }
}

/* Calls the kernel over [0, n): in one range, item by item from the last to the first, or in two
 * ranges, the second first. */
enum { WHOLE, REVERSED, TWO, WAYS };
static void split(void (*kernel)(int64_t, int64_t, void *), int64_t n, void *args, int way) {
  if (way == WHOLE) kernel(0, n, args);
  for (int64_t i = n - 1; way == REVERSED && i >= 0; --i) kernel(i, i + 1, args);
  if (way == TWO) kernel(n / 3, n, args), kernel(0, n / 3, args);
}

static void run_forward(const sbr_case *c, const buffer_t *in, int way, buffer_t *y) {
  scale_bias_relu_forward_args args = {in[0].data, in[2].data, y->data, c->scale,
                                       c->rows,    c->cols,    c->dtype};
  split(scale_bias_relu_forward_cpu, ceil_div(c->rows * c->cols, CHUNK), &args, way);
}

/* Runs backward. grad_x or grad_bias may be NULL, if it is not wanted. */
static void run_backward(const sbr_case *c, const buffer_t *in, int way, buffer_t *grad_x,
                         buffer_t *grad_bias) {
  const int64_t tiles = column_sums_tiles(c->cols), parts = column_sums_parts(c->rows, c->cols);
  buffer_t partial =
      buffer_new((size_t)column_sums_partial_cpu(c->rows, c->cols) * sizeof(double), 0);
  scale_bias_relu_backward_args args = {
      .grad_out = in[1].data,
      .x = in[0].data,
      .bias = in[2].data,
      .grad_x = grad_x ? grad_x->data : NULL,
      .grad_bias = grad_bias ? grad_bias->data : NULL,
      .partial = grad_bias ? (double *)(void *)partial.data : NULL,
      .scale = c->scale,
      .rows = c->rows,
      .cols = c->cols,
      .dtype = c->dtype};
  split(scale_bias_relu_backward_cpu, parts * tiles, &args, way);
  if (grad_bias) split(scale_bias_relu_grad_bias_cpu, tiles, &args, way);
  buffer_check(&partial, NULL, "scale_bias_relu partial");
  buffer_free(&partial);
}

/* Runs forward, and backward for one or both gradients. Buffers begin `offset` elements past a
 * multiple of 64 bytes. */
static void run_case(const sbr_case *c, int offset) {
  const size_t at = (size_t)offset * formats[c->dtype].size;
  const void *const data[3] = {c->x, c->grad_out, c->bias};
  buffer_t in[3], out[OUTPUTS];
  for (int k = 0; k < 3; ++k) in[k] = buffer_copy(data[k], bytes_of(c, k == 2 ? GRAD_BIAS : Y), at);
  for (int form = 0; form < 4; ++form) {
    const int wanted[OUTPUTS] = {form == 0, form == 1 || form == 2, form == 1 || form == 3};
    for (int k = 0; k < OUTPUTS; ++k) out[k] = buffer_new(bytes_of(c, k), at);
    if (form == 0) run_forward(c, in, WHOLE, &out[Y]);
    if (form > 0)
      run_backward(c, in, WHOLE, wanted[GRAD_X] ? &out[GRAD_X] : NULL,
                   wanted[GRAD_BIAS] ? &out[GRAD_BIAS] : NULL);
    for (int k = 0; k < OUTPUTS; ++k) {
      if (wanted[k]) check_output(c, k, &out[k]);
      buffer_check(&out[k], NULL, "scale_bias_relu");
      buffer_free(&out[k]);
    }
  }
  for (int k = 0; k < 3; ++k) buffer_check(&in[k], data[k], "scale_bias_relu"), buffer_free(&in[k]);
}

void test_scale_bias_relu_sizes(uint32_t step) {
  static const int64_t rows[] = {0, 1, 33, 65},
                       cols[] = {1, 31, 32, 33, 1023, 1025, 2047, 2048, 2049, 3584};
  /* sanitizer runs skip large shapes, but test each height and width */
  const int sanitized = step > 1000;
  for (int dtype = 0; dtype < DTYPES; ++dtype) {
    for (int r = 0; r < 4; ++r) {
      for (int k = 0; k < 10; ++k) {
        if (sanitized && rows[r] * cols[k] > 70000) continue;
        sbr_case c = new_case(rows[r], cols[k], (dtype_t)dtype, 1);
        run_case(&c, 0);
        should_stream = 1;
        run_case(&c, 0);
        for (int offset = 1; offset < OFFSETS; ++offset) {
          if (r < 2 || offset == 1 + k % 3) run_case(&c, offset);
        }
        should_stream = 0;
        free_case(&c);
      }
    }
  }
}

static uint64_t check_ranges(const sbr_case *c) {
  const buffer_t in[3] = {{.data = c->x}, {.data = c->grad_out}, {.data = c->bias}};
  uint64_t hash = 0;
  buffer_t out[WAYS][OUTPUTS];
  for (int way = 0; way < WAYS; ++way) {
    for (int k = 0; k < OUTPUTS; ++k) out[way][k] = buffer_new(bytes_of(c, k), 0);
    run_forward(c, in, way, &out[way][Y]);
    run_backward(c, in, way, &out[way][GRAD_X], &out[way][GRAD_BIAS]);
    for (int k = 0; k < OUTPUTS; ++k) {
      buffer_check(&out[way][k], out[0][k].data, "scale_bias_relu, split");
      if (way > 0) continue;
      check_output(c, k, &out[way][k]);
      hash = hash_elements(hash, c->dtype, out[way][k].data, count(c, k));
    }
  }
  /* Forward on one chunk alone must write nothing outside this chunk. */
  const size_t chunk = CHUNK * formats[c->dtype].size;
  buffer_t alone = buffer_new(bytes_of(c, Y), 0);
  scale_bias_relu_forward_args args = {c->x,    c->bias, alone.data, c->scale,
                                       c->rows, c->cols, c->dtype};
  scale_bias_relu_forward_cpu(3, 4, &args);
  scale_bias_relu_forward_cpu(2, 2, &args);
  buffer_check_part(&alone, out[0][Y].data, 3 * chunk, 4 * chunk, "scale_bias_relu");
  buffer_free(&alone);
  for (int way = 0; way < WAYS; ++way) {
    for (int k = 0; k < OUTPUTS; ++k) buffer_free(&out[way][k]);
  }
  return hash;
}

/* Tests many rows of equal elements. The kernel divides rows into parts. If float held the column
 * sums of a whole part, the error would exceed the slack. */
static void check_long_columns(void) {
  sbr_case c = new_case(1 << 18, 1, DTYPE_FLOAT32, 0);
  for (int64_t i = 0; i < c.rows; ++i) ((float *)c.x)[i] = 1, ((float *)c.grad_out)[i] = 4.0f / 3;
  ((float *)c.bias)[0] = 1;
  for (int k = 0; k < OUTPUTS; ++k) free(c.want[k]), free(c.slack[k]);
  set_wants(&c, 0);
  /* A float sum of 64 equal terms is off by a few roundings, but one of 1000 terms by many. The
   * smaller slack fails the second sum. */
  c.slack[GRAD_BIAS][0] /= 32;
  run_case(&c, 0);
  free_case(&c);
}

void test_scale_bias_relu_ranges(uint32_t step) {
  static const int64_t shapes[][2] = {{4000, 33}, {70, 5001}, {1, 40001}};
  (void)step;
  for (int dtype = 0; dtype < DTYPES; ++dtype) {
    for (int s = 0; s < 3; ++s) {
      sbr_case c = new_case(shapes[s][0], shapes[s][1], (dtype_t)dtype, 0);
      const uint64_t hash = check_ranges(&c);
      should_stream = 1;
      CHECK(check_ranges(&c) == hash, "scale_bias_relu %s: other bits when streamed",
            dtype_names[dtype]);
      should_stream = 0;
      printf("bits scale_bias_relu %d %s %016llx\n", s, dtype_names[dtype],
             (unsigned long long)hash);
      free_case(&c);
    }
  }
  check_long_columns();
}

/* Tests layer_norm and rms_norm: widths around the block, FLUSH_COLS and the tile; layouts, missing
 * gradients, inaccurate variances, guards, streaming, and splits of the work. */
#include "check.h"
#include "norm/norm.h"

enum { Y, MEAN, RSTD, GRAD_X, GRAD_WEIGHT, GRAD_BIAS, OUTPUTS };
static const char *const output_names[OUTPUTS] = {"y",      "mean",        "rstd",
                                                  "grad_x", "grad_weight", "grad_bias"};

enum { X, GRAD_OUT, WEIGHT, BIAS, INPUTS };

typedef struct {
  int64_t rows, cols, x_stride, grad_out_stride;
  dtype_t dtype, weight_dtype;
  int centered;      /* true for layer_norm */
  int offset;        /* by how many elements buffers begin past a multiple of 64 bytes */
  double eps, value; /* x varies around `value` */
  void *in[INPUTS];  /* weight and bias may be NULL */
  double *want[OUTPUTS], *slack[OUTPUTS];
} norm_case;

static dtype_t computed_in(const norm_case *c) {
  return c->dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
}

static dtype_t output_dtype(const norm_case *c, int output) {
  return output == Y || output == GRAD_X    ? c->dtype
         : output == MEAN || output == RSTD ? computed_in(c)
                                            : c->weight_dtype;
}

static int64_t count(const norm_case *c, int output) {
  return output == Y || output == GRAD_X    ? c->rows * c->cols
         : output == MEAN || output == RSTD ? c->rows
                                            : c->cols;
}

static int64_t input_count(const norm_case *c, int input) {
  if (input >= WEIGHT) return c->cols;
  return c->rows == 0 ? 0
                      : (c->rows - 1) * (input == X ? c->x_stride : c->grad_out_stride) + c->cols;
}

static dtype_t input_dtype(const norm_case *c, int input) {
  return input >= WEIGHT ? c->weight_dtype : c->dtype;
}

static size_t bytes_of(const norm_case *c, int output) {
  return (size_t)count(c, output) * formats[output_dtype(c, output)].size;
}

static double input(const norm_case *c, int which, int64_t i) {
  if (!c->in[which]) return which == WEIGHT ? 1 : 0;
  return element(input_dtype(c, which), c->in[which], i);
}

/* ---- the reference in long double, and bounds of float's errors ---- */

typedef struct {
  long double mean, rstd, largest; /* largest |x - mean| */
} row_t;

static row_t row_of(const norm_case *c, int64_t r) {
  long double sum = 0, squares = 0, largest = 0;
  for (int64_t k = 0; k < c->cols && c->centered; ++k)
    sum += (long double)input(c, X, r * c->x_stride + k);
  const long double mean = c->centered ? sum / (long double)c->cols : 0;
  for (int64_t k = 0; k < c->cols; ++k) {
    const long double d = (long double)input(c, X, r * c->x_stride + k) - mean;
    squares += d * d;
    largest = fabsl(d) > largest ? fabsl(d) : largest;
  }
  return (row_t){mean, 1 / sqrtl(squares / (long double)c->cols + (long double)c->eps), largest};
}

/* Returns the number of roundings in a sum along a row: one for each column that a lane adds (at
 * most 128), and those of the sum over lanes. */
static double row_roundings(const norm_case *c) {
  return (double)(c->cols < 4096 ? ceil_div(c->cols, 32) : 128) + 4 +
         (c->dtype == DTYPE_FLOAT64 ? 16 : 0);
}

/* Computes the expected results of forward. The mean's error is that of a sum of differences, each
 * up to twice the largest. The variance's error is that of a sum of squares, which may exceed the
 * variance by a factor of 2 (17 for 16-bit types). */
static void set_forward(norm_case *c) {
  const double unit = rounding(c->dtype), roundings = row_roundings(c);
  for (int64_t r = 0; r < c->rows; ++r) {
    const row_t row = row_of(c, r);
    /* Other types compute the mean in double, whose rounding error is negligible here. */
    const double rounded = c->dtype == DTYPE_FLOAT64 ? unit * fabs((double)row.mean) : 0;
    const double rstd = (double)row.rstd,
                 mean_slack = 2 * roundings * unit * (double)row.largest + 2 * rounded;
    const double factor = formats[c->dtype].size == 2 ? 17 : 2,
                 rstd_slack = factor * roundings * unit;
    c->want[MEAN][r] = (double)row.mean, c->slack[MEAN][r] = mean_slack;
    c->want[RSTD][r] = rstd, c->slack[RSTD][r] = rstd_slack * rstd;
    for (int64_t k = 0; k < c->cols; ++k) {
      const double weight = input(c, WEIGHT, k), bias = c->centered ? input(c, BIAS, k) : 0;
      const long double xhat =
          ((long double)input(c, X, r * c->x_stride + k) - row.mean) * row.rstd;
      const long double y = xhat * (long double)weight + (long double)bias;
      const double scaled = fabs((double)xhat * weight);
      c->want[Y][r * c->cols + k] = (double)y;
      c->slack[Y][r * c->cols + k] = (rstd_slack + 4 * unit) * scaled +
                                     mean_slack * rstd * fabs(weight) +
                                     unit * (fabs((double)y) + fabs(bias));
    }
  }
}

/* Computes the expected results of backward from the mean and rstd that the kernel gets. A column
 * is summed in float for 64 rows at a time. */
static void set_backward(norm_case *c) {
  const double unit = rounding(c->dtype), roundings = row_roundings(c);
  const double column_roundings = (c->rows < 64 ? (double)c->rows : 64) + 4 + (double)c->rows / 64;
  for (int64_t r = 0; r < c->rows; ++r) {
    const long double mean = (long double)c->want[MEAN][r], rstd = (long double)c->want[RSTD][r];
    long double sum[2] = {0}, sizes[2] = {0};
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t k = 0; k < c->cols; ++k) {
        const long double g = (long double)input(c, GRAD_OUT, r * c->grad_out_stride + k);
        const long double xhat =
            ((long double)input(c, X, r * c->x_stride + k) - (c->centered ? mean : 0)) * rstd;
        const long double gw = g * (long double)input(c, WEIGHT, k);
        const long double level = c->centered ? sum[0] : 0, product = xhat * sum[1];
        if (pass == 0) {
          sum[0] += gw / (long double)c->cols, sizes[0] += fabsl(gw) / (long double)c->cols;
          sum[1] += gw * xhat / (long double)c->cols,
              sizes[1] += fabsl(gw * xhat) / (long double)c->cols;
          c->want[GRAD_WEIGHT][k] += (double)(g * xhat);
          c->slack[GRAD_WEIGHT][k] += column_roundings * unit * (double)fabsl(g * xhat);
          c->want[GRAD_BIAS][k] += (double)g;
          c->slack[GRAD_BIAS][k] += column_roundings * unit * (double)fabsl(g);
          continue;
        }
        const long double of_sums =
            (sizes[0] + fabsl(xhat) * sizes[1]) * (long double)(roundings + 4);
        c->want[GRAD_X][r * c->cols + k] = (double)((gw - level - product) * rstd);
        c->slack[GRAD_X][r * c->cols + k] =
            unit * (double)(rstd * (of_sums + 4 * (fabsl(gw) + fabsl(level) + fabsl(product))));
      }
    }
  }
}

/* ---- one case ---- */

static norm_case new_case(int64_t rows, int64_t cols, dtype_t dtype, int centered, int variant) {
  norm_case c = {.rows = rows,
                 .cols = cols,
                 .dtype = dtype,
                 .weight_dtype = dtype,
                 .centered = centered,
                 .eps = 1e-5};
  c.x_stride = cols + (variant % 3 == 1 ? 7 : 0);
  c.grad_out_stride = cols + (variant % 3 == 2 ? 64 : 0);
  if (formats[dtype].size == 2 && variant % 2) c.weight_dtype = DTYPE_FLOAT32;
  for (int k = 0; k < INPUTS; ++k) {
    if (k >= WEIGHT && variant % 4 == k) continue; /* left NULL */
    c.in[k] = random_elements(input_dtype(&c, k), input_count(&c, k), 3, 0, (uint64_t)(k + 1));
    const int64_t stride = k == X ? c.x_stride : c.grad_out_stride;
    /* Elements between the rows must not be read. */
    for (int64_t i = 0; k < WEIGHT && i < input_count(&c, k); ++i) {
      if (i % stride >= cols) set_element(dtype, c.in[k], i, (double)NAN);
    }
  }
  return c;
}

static void set_wants(norm_case *c) {
  for (int k = 0; k < OUTPUTS; ++k) {
    free(c->want[k]), free(c->slack[k]);
    c->want[k] = doubles(count(c, k)), c->slack[k] = doubles(count(c, k));
  }
  set_forward(c);
  for (int k = MEAN; k <= RSTD; ++k) { /* backward gets the rounded statistics */
    for (int64_t r = 0; r < c->rows && computed_in(c) == DTYPE_FLOAT32; ++r)
      c->want[k][r] = (double)(float)c->want[k][r];
  }
  set_backward(c);
}

static void free_case(norm_case *c) {
  for (int k = 0; k < INPUTS; ++k) free(c->in[k]);
  for (int k = 0; k < OUTPUTS; ++k) free(c->want[k]), free(c->slack[k]);
}

static void check_output(const norm_case *c, int output, const buffer_t *got) {
  const dtype_t dtype = output_dtype(c, output);
  for (int64_t i = 0; i < count(c, output); ++i) {
    const double value = element(dtype, got->data, i), want = c->want[output][i];
    CHECK(close_to(dtype, value, want, c->slack[output][i]),
          "%s %s (%lld, %lld): element %lld of %s is %a, not %a within %a",
          c->centered ? "layer_norm" : "rms_norm", dtype_names[c->dtype], (long long)c->rows,
          (long long)c->cols, (long long)i, output_names[output], value, want, c->slack[output][i]);
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

static buffer_t widen(const norm_case *c, const buffer_t *in, int which, int way) {
  const int64_t cols = c->cols, middle = cols / 64 * 32;
  buffer_t wide = buffer_new((size_t)norm_wide_cols(cols) * formats[computed_in(c)].size, 0);
  norm_widen_args args = {c->in[which] ? in[which].data : NULL,
                          wide.data,
                          which == WEIGHT,
                          cols,
                          c->dtype,
                          c->weight_dtype};
  if (way == WHOLE) norm_widen_cpu(0, cols, &args);
  if (way != WHOLE) norm_widen_cpu(middle, cols, &args), norm_widen_cpu(0, middle, &args);
  buffer_check(&wide, NULL, "norm, wide");
  return wide;
}

static void run_forward(const norm_case *c, const buffer_t *in, int way, const buffer_t *out) {
  buffer_t weight = widen(c, in, WEIGHT, way), bias = widen(c, in, BIAS, way);
  norm_forward_args args = {.x = in[X].data,
                            .weight = weight.data,
                            .bias = c->centered ? bias.data : NULL,
                            .y = out[Y].data,
                            .mean = c->centered ? out[MEAN].data : NULL,
                            .rstd = out[RSTD].data,
                            .eps = c->eps,
                            .rows = c->rows,
                            .cols = c->cols,
                            .x_stride = c->x_stride,
                            .dtype = c->dtype,
                            .weight_dtype = c->weight_dtype,
                            .centered = c->centered};
  split(norm_forward_cpu, c->rows, &args, way);
  buffer_free(&weight), buffer_free(&bias);
}

/* Runs backward. Gradients that are not wanted are NULL. */
static void run_backward(const norm_case *c, const buffer_t *in, int way, const int *wanted,
                         const buffer_t *out) {
  buffer_t weight = widen(c, in, WEIGHT, way), statistics[2];
  for (int k = 0; k < 2; ++k) {
    statistics[k] = buffer_new(bytes_of(c, MEAN + k), 0);
    for (int64_t r = 0; r < c->rows; ++r)
      set_element(computed_in(c), statistics[k].data, r, c->want[MEAN + k][r]);
  }
  norm_backward_args args = {.grad_out = in[GRAD_OUT].data,
                             .x = in[X].data,
                             .mean = c->centered ? statistics[0].data : NULL,
                             .rstd = statistics[1].data,
                             .weight = weight.data,
                             .grad_x = wanted[GRAD_X] ? out[GRAD_X].data : NULL,
                             .grad_weight = wanted[GRAD_WEIGHT] ? out[GRAD_WEIGHT].data : NULL,
                             .grad_bias = wanted[GRAD_BIAS] ? out[GRAD_BIAS].data : NULL,
                             .rows = c->rows,
                             .cols = c->cols,
                             .x_stride = c->x_stride,
                             .grad_out_stride = c->grad_out_stride,
                             .dtype = c->dtype,
                             .weight_dtype = c->weight_dtype};
  buffer_t partial = buffer_new((size_t)norm_partial_cpu(&args), 0);
  const int sums = wanted[GRAD_WEIGHT] || wanted[GRAD_BIAS];
  args.partial = sums ? partial.data : NULL;
  split(norm_backward_cpu, norm_parts(c->rows, c->cols), &args, way);
  if (sums) split(norm_grad_weight_cpu, ceil_div(c->cols, NORM_TILE), &args, way);
  buffer_check(&partial, NULL, "norm, scratch");
  buffer_free(&partial), buffer_free(&weight), buffer_free(&statistics[0]),
      buffer_free(&statistics[1]);
}

static void new_inputs(const norm_case *c, buffer_t *in) {
  for (int k = 0; k < INPUTS; ++k) {
    const size_t size = formats[input_dtype(c, k)].size,
                 bytes = c->in[k] ? (size_t)input_count(c, k) * size : 0;
    in[k] = c->in[k] ? buffer_copy(c->in[k], bytes, (size_t)c->offset * size) : buffer_new(0, 0);
  }
}

static void new_outputs(const norm_case *c, buffer_t *out) {
  for (int k = 0; k < OUTPUTS; ++k) {
    out[k] = buffer_new(bytes_of(c, k), (size_t)c->offset * formats[output_dtype(c, k)].size);
  }
}

/* Runs forward, then backward for every set of wanted gradients. If stores are streamed, only
 * forward and the set of all gradients run at every offset. Returns a hash of all results. */
static uint64_t run_case(const norm_case *c) {
  const int forms = c->centered ? 8 : 4;
  uint64_t hash = 0;
  buffer_t in[INPUTS], out[OUTPUTS];
  new_inputs(c, in);
  for (int form = 0; form < forms; ++form) {
    if (should_stream && form > 0 && form < forms - 1 && form % OFFSETS != c->offset) continue;
    const int wanted[OUTPUTS] = {
        form == 0, form == 0 && c->centered, form == 0, form & 1, form >> 1 & 1, form >> 2};
    new_outputs(c, out);
    if (form == 0) run_forward(c, in, WHOLE, out);
    if (form > 0) run_backward(c, in, WHOLE, wanted, out);
    for (int k = 0; k < OUTPUTS; ++k) {
      if (wanted[k]) check_output(c, k, &out[k]);
      if (wanted[k]) hash = hash_elements(hash, output_dtype(c, k), out[k].data, count(c, k));
      buffer_check_part(&out[k], out[k].data, 0, wanted[k] ? out[k].bytes : 0, "norm");
      buffer_check(&out[k], NULL, "norm");
      buffer_free(&out[k]);
    }
  }
  for (int k = 0; k < INPUTS; ++k) buffer_check(&in[k], c->in[k], "norm"), buffer_free(&in[k]);
  return hash;
}

void test_norm_sizes(uint32_t step) {
  static const int64_t rows[] = {0, 1, 2, 3, 65},
                       cols[] = {0, 1, 31, 32, 33, 63, 1023, 1024, 1025, 4097};
  /* sanitizer runs skip large shapes, but test each height and width */
  const int sanitized = step > 1000;
  int variant = 0;
  for (int r = 0; r < 5; ++r) {
    for (int k = 0; k < 10; ++k) {
      if (sanitized && rows[r] * cols[k] > 100000) continue;
      for (int kind = 0; kind < 2 * DTYPES; ++kind, ++variant) {
        norm_case c = new_case(rows[r], cols[k], (dtype_t)(kind / 2), kind % 2, variant / 3);
        set_wants(&c);
        run_case(&c);
        should_stream = 1;
        for (int offset = 0; offset < OFFSETS; ++offset) {
          if (rows[r] * cols[k] > 9999 && offset != variant / 5 % OFFSETS) continue;
          c.offset = offset;
          run_case(&c);
        }
        should_stream = 0;
        free_case(&c);
      }
    }
  }
}

/* Tests rows of `at` +- `spread`, whose variance a simple formula makes inaccurate. The first `far`
 * columns are 0. */
void test_norm_hostile(uint32_t step) {
  static const struct {
    double at, spread;
    int64_t far;
    double eps;
  } rows[] = {{4e4, 1, 0, 1e-5},      {4e4, 1, 1, 1e-5},  {1000, 1, 40, 1e-5}, {-7, 1e-3, 32, 0},
              {1e30, 1e29, 33, 1e-5}, {0, 1e30, 0, 1e-5}, {3e19, 0, 32, 1e-5}, {0, 1e-39, 0, 1e-5},
              {0, 1e-30, 0, 0.0},     {0.1, 0, 0, 1e-5}};
  (void)step;
  for (int dtype = 0; dtype < DTYPES; ++dtype) {
    uint64_t hash = 0;
    for (int i = 0; i < 20; ++i) {
      norm_case c = new_case(2, 1023, (dtype_t)dtype, i % 2, 0);
      if (dtype == DTYPE_FLOAT16 && fabs(rows[i / 2].at) + rows[i / 2].spread > 65000) c.rows = 0;
      uint64_t state = (uint64_t)i;
      for (int64_t k = 0; k < input_count(&c, X); ++k) {
        const double value =
            rows[i / 2].at + random_between(&state, -rows[i / 2].spread, rows[i / 2].spread);
        set_element(c.dtype, c.in[X], k, k % c.x_stride < rows[i / 2].far ? 0 : value);
      }
      c.eps = rows[i / 2].eps;
      if (dtype == DTYPE_FLOAT16 && rows[i / 2].spread < 1e-9 && c.eps == 0)
        c.eps = 1; /* all elements are 0 */
      set_wants(&c);
      hash = 31 * hash + run_case(&c);
      free_case(&c);
    }
    /* NaN and infinity must affect their whole row, and no other row */
    for (int i = 0; i < 12; ++i) {
      norm_case c = new_case(2, 67, (dtype_t)dtype, i % 2, 0);
      set_element(c.dtype, c.in[X], (const int64_t[]){0, 31, 66}[i / 4],
                  i / 2 % 2 ? (double)NAN : -(double)INFINITY);
      set_wants(&c);
      for (int k = 0; k < OUTPUTS; ++k) {
        for (int64_t j = 0; j < count(&c, k); ++j)
          c.slack[k][j] = isfinite(c.slack[k][j]) ? c.slack[k][j] : 0;
      }
      hash = 31 * hash + run_case(&c);
      free_case(&c);
    }
    printf("bits norm_hostile %s %016llx\n", dtype_names[dtype], (unsigned long long)hash);
  }
}

static uint64_t check_ranges(const norm_case *c) {
  static const int all[OUTPUTS] = {1, 1, 1, 1, 1, 1}, no_bias[OUTPUTS] = {1, 0, 1, 1, 1, 0};
  const int *wanted = c->centered ? all : no_bias;
  uint64_t hash = 0;
  buffer_t in[INPUTS], out[WAYS][OUTPUTS];
  new_inputs(c, in);
  for (int way = 0; way < WAYS; ++way) {
    new_outputs(c, out[way]);
    run_forward(c, in, way, out[way]);
    run_backward(c, in, way, wanted, out[way]);
    for (int k = 0; k < OUTPUTS; ++k) {
      buffer_check(&out[way][k], out[0][k].data, "norm, split");
      if (way > 0 || !wanted[k]) continue;
      check_output(c, k, &out[way][k]);
      hash = hash_elements(hash, output_dtype(c, k), out[way][k].data, count(c, k));
    }
  }
  for (int way = 0; way < WAYS; ++way) {
    for (int k = 0; k < OUTPUTS; ++k) buffer_free(&out[way][k]);
  }
  for (int k = 0; k < INPUTS; ++k) buffer_free(&in[k]);
  return hash;
}

/* Checks that forward for one row writes only this row, and no statistics if they are NULL. An
 * empty range must write nothing. */
static void check_alone(const norm_case *c) {
  buffer_t in[INPUTS], out[2][OUTPUTS], wide[2];
  new_inputs(c, in), new_outputs(c, out[0]), new_outputs(c, out[1]);
  run_forward(c, in, WHOLE, out[0]);
  for (int k = 0; k < 2; ++k) wide[k] = widen(c, in, WEIGHT + k, WHOLE);
  norm_forward_args args = {.x = in[X].data,
                            .weight = wide[0].data,
                            .bias = wide[1].data,
                            .y = out[1][Y].data,
                            .mean = out[1][MEAN].data,
                            .rstd = out[1][RSTD].data,
                            .eps = c->eps,
                            .rows = c->rows,
                            .cols = c->cols,
                            .x_stride = c->x_stride,
                            .dtype = c->dtype,
                            .weight_dtype = c->weight_dtype,
                            .centered = true};
  norm_forward_cpu(3, 4, &args);
  norm_forward_cpu(2, 2, &args);
  args.mean = args.rstd = NULL;
  norm_forward_cpu(4, 5, &args);
  for (int k = Y; k <= RSTD; ++k) {
    const size_t row = bytes_of(c, k) / (size_t)c->rows;
    buffer_check_part(&out[1][k], out[0][k].data, 3 * row, (k == Y ? 5 : 4) * row, "norm");
  }
  for (int k = 0; k < INPUTS; ++k) buffer_free(&in[k]);
  for (int k = 0; k < OUTPUTS; ++k) buffer_free(&out[0][k]), buffer_free(&out[1][k]);
  for (int k = 0; k < 2; ++k) buffer_free(&wide[k]);
}

/* Tests many rows of equal elements. The kernel divides rows into parts. If float held the column
 * sums of a whole part, the error would exceed the slack. */
static void check_long_columns(void) {
  norm_case c = new_case(1 << 17, 2, DTYPE_FLOAT32, 1, 0);
  for (int64_t i = 0; i < 2 * c.rows; ++i)
    ((float *)c.in[X])[i] = i % 2 ? 2 : 0, ((float *)c.in[GRAD_OUT])[i] = 4.0f / 3;
  set_wants(&c);
  /* A float sum of 64 equal terms is off by a few roundings, and one of hundreds by hundreds. */
  for (int k = 0; k < 2; ++k) {
    c.slack[GRAD_BIAS][k] = c.slack[GRAD_WEIGHT][k] = 24 * 0x1p-24 * fabs(c.want[GRAD_BIAS][k]);
  }
  run_case(&c);
  free_case(&c);
}

/* Tests a long row of equal elements. Lanes summed in float alone would have a larger error. */
static void check_long_row(void) {
  norm_case c = new_case(1, 1 << 18, DTYPE_FLOAT32, 0, 0);
  for (int64_t i = 0; i < c.cols; ++i) ((float *)c.in[X])[i] = 4.0f / 3;
  set_wants(&c);
  run_case(&c);
  free_case(&c);
}

void test_norm_ranges(uint32_t step) {
  static const int64_t shapes[][2] = {{150, 1024}, {4000, 33}, {70, 5001}, {3, 40001}};
  const int sanitized = step > 1000; /* sanitizers are slow, so fewer cases are run */
  for (int kind = 0; kind < 2 * DTYPES; ++kind) {
    for (int s = 0; s < (sanitized ? 1 : 4); ++s) {
      norm_case c = new_case(shapes[s][0], shapes[s][1], (dtype_t)(kind / 2), kind % 2, s);
      set_wants(&c);
      const uint64_t hash = check_ranges(&c);
      should_stream = 1;
      CHECK(check_ranges(&c) == hash, "norm %s: other bits when streamed", dtype_names[c.dtype]);
      if (c.centered && c.rows > 4) check_alone(&c);
      should_stream = 0;
      c.offset = 1;
      CHECK(check_ranges(&c) == hash, "norm %s: other bits from an odd address",
            dtype_names[c.dtype]);
      printf("bits norm %d %s %d %016llx\n", s, dtype_names[c.dtype], c.centered,
             (unsigned long long)hash);
      free_case(&c);
    }
  }
  if (sanitized) return;
  check_long_columns();
  check_long_row();
}

/* Tests cross_entropy and token_log_probs against a reference in double: shapes around the block,
 * the chunk and the tile, with every option; ignored targets and targets outside the classes,
 * gradients in place, streaming, guards, NaN and infinities, splits of the work, and the
 * reduction. */
#include "check.h"
#include "loss/loss.h"

typedef struct {
  int weighted, entropy;
  double smoothing, z_loss, softcap, scale;
} options_t;

static const options_t options[] = {
    {0, 0, 0, 0, 0, 1},  {1, 0, 0, 0, 0, 1},      {0, 0, 0.1, 0, 0, 1}, {1, 0, 0.2, 1e-2, 0, 0.7},
    {0, 0, 0, 0, 30, 1}, {1, 0, 0.1, 1e-3, 5, 1}, {0, 1, 0, 0, 0, 1},   {0, 1, 0, 0, 0, 1.3}};
enum { OPTIONS = 8, IGNORED = -100 };

enum { LOSS, ENTROPY, LSE, FORWARD_GRAD, BACKWARD_GRAD, OUTPUTS };
static const char *const output_names[OUTPUTS] = {"loss", "entropy", "lse", "forward's gradient",
                                                  "backward's gradient"};

typedef struct {
  int64_t outer, cols, inner, outer_stride;
  dtype_t dtype, acc;
  options_t options;
  int offset; /* by how many elements buffers begin past a multiple of 64 bytes */
  void *logits, *weight, *weight_sum, *grad_scale, *grad_loss, *grad_entropy, *total;
  int64_t *target;
  double *want[OUTPUTS], *slack[OUTPUTS];
} loss_case;

static int64_t rows_of(const loss_case *c) { return c->outer * c->inner; }

static int64_t count(const loss_case *c, int output) {
  return rows_of(c) * (output >= FORWARD_GRAD ? c->cols : output == LSE ? 2 : 1);
}

static dtype_t dtype_of(const loss_case *c, int output) {
  return output >= FORWARD_GRAD ? c->dtype : c->acc;
}

static size_t bytes_of(const loss_case *c, int output) {
  return (size_t)count(c, output) * formats[dtype_of(c, output)].size;
}

static int64_t grad_at(const loss_case *c, int64_t row, int64_t column) {
  return (row / c->inner * c->cols + column) * c->inner + row % c->inner;
}

static int64_t logits_count(const loss_case *c) { return c->outer * c->outer_stride; }

/* ---- the reference ---- */

static double weight_of(const loss_case *c, int64_t column) {
  return c->weight ? element(c->acc, c->weight, column) : 1;
}

/* Returns the z of a logit x (x after softcap or scale), and sets *slope to dz/dx. */
static double z_of(const loss_case *c, int64_t row, int64_t column, double *slope) {
  const int64_t i = row / c->inner * c->outer_stride + column * c->inner + row % c->inner;
  const double x = element(c->dtype, c->logits, i), cap = c->options.softcap;
  const double t = cap > 0 ? tanh(x / cap) : 0;
  *slope = cap > 0 ? 1 - t * t : c->options.scale;
  return cap > 0 ? cap * t : x * c->options.scale;
}

typedef struct {
  double lse, entropy, weights;
  double error;               /* absolute error of lse, and a third of the relative error of p_c */
  double largest;             /* the sum of p_c * |z_c - lse| */
  double smooth, smooth_size; /* the sum of w_c * (lse - z_c), and the sum of the terms' sizes */
} row_t;

static row_t row_of(const loss_case *c, int64_t row) {
  row_t r = {0};
  double max = -(double)INFINITY, size = 0, sum = 0, slope;
  for (int64_t k = 0; k < c->cols; ++k) {
    const double z = z_of(c, row, k, &slope);
    max = z > max || isnan(z) ? z : max;
    size = isfinite(z) && fabs(z) > size ? fabs(z) : size;
  }
  for (int64_t k = 0; k < c->cols; ++k) sum += exp(z_of(c, row, k, &slope) - max);
  r.lse = max == -(double)INFINITY ? max : max + log(sum); /* in a row of -inf, lse is log(0) */
  for (int64_t k = 0; k < c->cols; ++k) {
    const double d = z_of(c, row, k, &slope) - max - log(sum), p = exp(d);
    if (p != 0) r.entropy -= p * d, r.largest += p * fabs(d);
    r.weights += weight_of(c, k);
    if (c->options.smoothing > 0)
      r.smooth -= weight_of(c, k) * d, r.smooth_size += weight_of(c, k) * fabs(d);
  }
  const double lane = (double)ceil_div(c->cols, 32),
               sums = c->inner > 1 ? 40 + 4 * lane : (lane < 256 ? lane : 256) + 8;
  r.error = rounding(c->dtype) * (sums + 8 * size) + (c->dtype == DTYPE_FLOAT64   ? 0
                                                      : c->dtype == DTYPE_FLOAT32 ? 0x1p-22
                                                                                  : 0x1p-18);
  return r;
}

/* Computes the expected gradient of a row, given the gradients of its loss and of its entropy. */
static void set_gradient(loss_case *c, int output, int64_t row, row_t r, double grad,
                         double grad_entropy) {
  const options_t *o = &c->options;
  const int64_t target = c->target[row];
  const double unit = rounding(c->dtype), s = o->smoothing, w = weight_of(c, target);
  for (int64_t k = 0; k < c->cols; ++k) {
    double slope;
    const double z = z_of(c, row, k, &slope), d = z - r.lse, p = exp(d);
    const double bracket = p == 0 ? 0 : d + r.entropy;
    const double factor =
        o->entropy ? -grad - grad_entropy * bracket
                   : grad * (w * (1 - s + 2 * o->z_loss * r.lse) + s / (double)c->cols * r.weights);
    const double hit = k != target ? 0 : o->entropy ? -grad : grad * w * (1 - s);
    const double smooth = grad * s / (double)c->cols * weight_of(c, k);
    const double size = p * fabs(factor) + fabs(hit) + fabs(smooth);
    double slack = p * fabs(factor) * (3 * r.error + 2 * fabs(w * o->z_loss * grad) * r.error) +
                   8 * unit * size;
    slack += p * fabs(grad_entropy) * (4 * r.error * (3 + r.largest) + 8 * unit * fabs(bracket));
    const int64_t i = grad_at(c, row, k);
    c->want[output][i] = (p * factor - hit - smooth) * slope;
    c->slack[output][i] = slack * fabs(slope) + (o->softcap > 0 ? 16 * unit * size : 0);
    /* A kernel may compute a p_c below 2^-126 as 0. */
    c->slack[output][i] += 0x1p-126 * (1 + 2 * fabs(factor));
  }
}

static void set_constant(loss_case *c, int64_t row, double value) {
  c->want[LOSS][row] = c->want[ENTROPY][row] = value;
  for (int64_t k = 0; k < c->cols; ++k)
    c->want[FORWARD_GRAD][grad_at(c, row, k)] = c->want[BACKWARD_GRAD][grad_at(c, row, k)] = value;
}

static void set_row(loss_case *c, int64_t row) {
  const options_t *o = &c->options;
  const int64_t target = c->target[row];
  const row_t r = row_of(c, row);
  c->want[LSE][row] = r.lse, c->slack[LSE][row] = r.error;
  if (target == IGNORED && !o->entropy) {
    set_constant(c, row, 0);
    return;
  }
  if (target < 0 || target >= c->cols) {
    set_constant(c, row, (double)NAN);
    return;
  }
  double slope;
  const double log_prob = z_of(c, row, target, &slope) - r.lse, w = weight_of(c, target);
  const double s = o->smoothing, share = s / (double)c->cols;
  c->want[ENTROPY][row] = r.entropy, c->slack[ENTROPY][row] = 4 * r.error * (2 + r.largest);
  c->want[LOSS][row] =
      o->entropy ? log_prob
                 : w * ((1 - s) * -log_prob + o->z_loss * r.lse * r.lse) + share * r.smooth;
  c->slack[LOSS][row] =
      r.error * (2 * (o->entropy ? 1 : w) + w * o->z_loss * (2 * fabs(r.lse) + 1) +
                 2 * share * (r.weights + r.smooth_size));
  const double scale = element(c->acc, c->grad_scale, 0), total = element(c->acc, c->total, 0);
  set_gradient(c, FORWARD_GRAD, row, r, scale, 0);
  set_gradient(c, BACKWARD_GRAD, row, r, element(c->acc, c->grad_loss, row) / total,
               o->entropy ? element(c->acc, c->grad_entropy, row) : 0);
}

/* ---- one case ---- */

static void set_wants(loss_case *c) {
  for (int64_t row = 0; row < rows_of(c); ++row) set_row(c, row);
}

/* Makes a case. One row is ignored, and two have targets outside the classes. */
static loss_case new_case(int64_t outer, int64_t cols, int64_t inner, dtype_t dtype,
                          options_t chosen, int64_t padding, double range) {
  loss_case c = {.outer = outer, .cols = cols, .inner = inner, .dtype = dtype, .options = chosen};
  uint64_t state = (uint64_t)cols;
  c.outer_stride = cols * inner + padding;
  c.acc = dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
  c.logits = random_elements(dtype, logits_count(&c), range, 0, (uint64_t)cols);
  for (int64_t i = 0; i < logits_count(&c); ++i) { /* elements between the rows must not be read */
    if (i % c.outer_stride >= cols * inner) set_element(dtype, c.logits, i, (double)NAN);
  }
  c.grad_scale = random_elements(c.acc, 1, 1, 0, 1), c.total = random_elements(c.acc, 1, 9, 0, 2);
  c.grad_loss = random_elements(c.acc, rows_of(&c), 1, 0, 3);
  c.grad_entropy = random_elements(c.acc, rows_of(&c), 1, 0, 4);
  c.weight_sum = doubles(1);
  if (chosen.weighted) {
    double sum = 0;
    c.weight = random_elements(c.acc, cols, 1, 0, 5);
    for (int64_t k = 0; k < cols; ++k) {
      set_element(c.acc, c.weight, k, fabs(element(c.acc, c.weight, k)));
      sum += element(c.acc, c.weight, k);
    }
    set_element(c.acc, c.weight_sum, 0, sum);
  }
  c.target = (int64_t *)doubles(rows_of(&c));
  for (int64_t row = 0; row < rows_of(&c); ++row) {
    const uint64_t kind = random_bits(&state) % 8;
    c.target[row] = (int64_t)(random_bits(&state) % (uint64_t)cols);
    if (row == 1 || kind == 0) c.target[row] = IGNORED;
    if (row == 2) c.target[row] = cols;
    if (row == 3) c.target[row] = kind % 2 ? INT64_MIN : INT64_MAX;
  }
  for (int k = 0; k < OUTPUTS; ++k)
    c.want[k] = doubles(count(&c, k)), c.slack[k] = doubles(count(&c, k));
  return c;
}

static void free_case(loss_case *c) {
  free(c->logits), free(c->weight), free(c->weight_sum), free(c->grad_scale), free(c->grad_loss);
  free(c->grad_entropy), free(c->total), free(c->target);
  for (int k = 0; k < OUTPUTS; ++k) free(c->want[k]), free(c->slack[k]);
}

static loss_rows args_of(const loss_case *c, const void *logits) {
  const options_t *o = &c->options;
  return (loss_rows){.logits = logits,
                     .target = c->target,
                     .weight = c->weight,
                     .weight_sum = c->weight && o->smoothing > 0 ? c->weight_sum : NULL,
                     .outer = c->outer,
                     .cols = c->cols,
                     .inner = c->inner,
                     .outer_stride = c->outer_stride,
                     .options = {.ignore_index = o->entropy ? -1 : IGNORED,
                                 .label_smoothing = o->smoothing,
                                 .z_loss = o->z_loss,
                                 .softcap = o->softcap},
                     .scale = o->scale,
                     .dtype = c->dtype};
}

/* Runs forward for work items [begin, end). grad_logits may be NULL. */
static void forward(const loss_case *c, int64_t begin, int64_t end, const void *logits,
                    buffer_t out[], void *grad_logits) {
  loss_forward_args args = {
      args_of(c, logits), out[LOSS].data, c->options.entropy ? out[ENTROPY].data : NULL,
      out[LSE].data,      grad_logits,    c->grad_scale};
  loss_forward_cpu(begin, end, &args);
}

static void backward(const loss_case *c, int64_t begin, int64_t end, const void *logits,
                     buffer_t out[], void *grad_logits) {
  loss_backward_args args = {.rows = args_of(c, logits),
                             .lse = out[LSE].data,
                             .grad_loss = c->grad_loss,
                             .total = c->total,
                             .entropy = c->options.entropy ? out[ENTROPY].data : NULL,
                             .grad_entropy = c->grad_entropy,
                             .grad_logits = grad_logits,
                             .grad_stride = 1,
                             .grad_dtype = c->acc};
  loss_backward_cpu(begin, end, &args);
}

static void new_outputs(const loss_case *c, buffer_t out[]) {
  const size_t size = formats[c->dtype].size;
  for (int k = 0; k < OUTPUTS; ++k)
    out[k] = buffer_new(bytes_of(c, k), k >= FORWARD_GRAD ? (size_t)c->offset * size : 0);
}

/* Returns element i of an output as a double. lse is stored as two numbers, of which this returns
 * the sum. If the first is infinite, the second is NaN, and this returns the first. */
static double value_of(const loss_case *c, int output, const void *data, int64_t i) {
  if (output != LSE) return element(dtype_of(c, output), data, i);
  const double lse = element(c->acc, data, 2 * i);
  return isfinite(lse) ? lse + element(c->acc, data, 2 * i + 1) : lse;
}

static void check_outputs(const loss_case *c, const buffer_t out[]) {
  for (int k = 0; k < OUTPUTS; ++k) {
    buffer_check(&out[k], NULL, output_names[k]);
    if (k == ENTROPY && !c->options.entropy) continue;
    const dtype_t dtype = k == LSE ? DTYPE_FLOAT64 : dtype_of(c, k);
    for (int64_t i = 0; i < (k == LSE ? rows_of(c) : count(c, k)); ++i) {
      const double value = value_of(c, k, out[k].data, i);
      CHECK(close_to(dtype, value, c->want[k][i], c->slack[k][i]),
            "%s %s (%lld, %lld, %lld), smoothing %g, softcap %g: element %lld of %s is %a, not %a "
            "within %a",
            c->options.entropy ? "token_log_probs" : "cross_entropy", dtype_names[c->dtype],
            (long long)c->outer, (long long)c->cols, (long long)c->inner, c->options.smoothing,
            c->options.softcap, (long long)i, output_names[k], value, c->want[k][i],
            c->slack[k][i]);
    }
  }
}

/* Runs forward alone, with its gradient, with streamed stores, and in place. All must give the same
 * bits. Returns the hash of the gradients. */
static uint64_t run_case(const loss_case *c) {
  const size_t size = formats[c->dtype].size, bytes = (size_t)logits_count(c) * size,
               offset = (size_t)c->offset * size;
  const int64_t items = loss_items(c->outer, c->inner);
  buffer_t logits = buffer_copy(c->logits, bytes, offset), out[3][OUTPUTS];
  for (int way = 0; way < 3; ++way) {
    buffer_t *to = out[way];
    new_outputs(c, to);
    should_stream = way == 1;
    forward(c, 0, items, logits.data, to, way == 2 ? NULL : to[FORWARD_GRAD].data);
    backward(c, 0, items, logits.data, to, to[BACKWARD_GRAD].data);
    for (int k = 0; k < OUTPUTS; ++k) {
      const void *expected = way == 2 && k == FORWARD_GRAD ? NULL : out[0][k].data;
      buffer_check_elements(&to[k], dtype_of(c, k), expected, output_names[k]);
    }
  }
  should_stream = 0;
  check_outputs(c, out[0]);
  buffer_check(&logits, c->logits, "loss");
  if (c->outer_stride == c->cols * c->inner) {
    buffer_t in_place = buffer_copy(c->logits, bytes, offset);
    forward(c, 0, items, in_place.data, out[2], in_place.data);
    for (int k = LOSS; k <= LSE; ++k) buffer_check(&out[2][k], out[0][k].data, output_names[k]);
    buffer_check_elements(&in_place, c->dtype, out[0][FORWARD_GRAD].data, "gradient in place");
    buffer_free(&in_place);
  }
  uint64_t hash = 0;
  for (int k = FORWARD_GRAD; k < OUTPUTS; ++k)
    hash = hash_elements(hash, c->dtype, out[0][k].data, count(c, k));
  for (int way = 0; way < 3; ++way) {
    for (int k = 0; k < OUTPUTS; ++k) buffer_free(&out[way][k]);
  }
  buffer_free(&logits);
  return hash;
}

void test_loss_sizes(uint32_t step) {
  static const int64_t shapes[][3] = {{5, 1, 1},    {7, 5, 1},     {5, 31, 1},   {5, 32, 1},
                                      {5, 100, 1},  {5, 285, 1},   {4, 1052, 1}, {4, 1024, 1},
                                      {2, 8193, 1}, {1, 20011, 1}, {3, 5, 2},    {2, 33, 31},
                                      {2, 31, 64},  {1, 70, 160},  {2, 7, 300},  {0, 3, 1}};
  (void)step;
  for (int s = 0; s < 16; ++s) {
    for (int k = 0; k < OPTIONS; ++k) {
      for (int dtype = 0; dtype < DTYPES; ++dtype) {
        loss_case c = new_case(shapes[s][0], shapes[s][1], shapes[s][2], (dtype_t)dtype, options[k],
                               k % 3 == 1 ? 5 : 0, s % 3 ? 8 : 40);
        c.offset = (s + k) % OFFSETS;
        set_wants(&c);
        run_case(&c);
        free_case(&c);
      }
    }
  }
}

/* Tests NaN, +inf, -inf and a large number in a row, and a row of -inf, whose lse is log(0). */
void test_loss_hostile(uint32_t step) {
  static const int64_t shapes[][3] = {{16, 7, 1}, {16, 100, 1}, {16, 9000, 1}, {1, 70, 16}};
  static const double values[] = {NAN, INFINITY, -INFINITY, 3e4};
  (void)step;
  for (int s = 0; s < 4; ++s) {
    for (int k = 0; k < 2 * DTYPES; ++k) {
      const options_t *chosen = &options[k < DTYPES ? 0 : 6];
      loss_case c =
          new_case(shapes[s][0], shapes[s][1], shapes[s][2], (dtype_t)(k % DTYPES), *chosen, 0, 4);
      for (int64_t row = 4; row < 16; ++row) {
        const int64_t end = row < 12 ? row % 2 + 1 : row == 14 ? c.cols : c.cols / 2;
        for (int64_t i = 0; i < end; ++i)
          set_element(c.dtype, c.logits, grad_at(&c, row, i), values[row % 4]);
        if (row >= 8) c.target[row] = 0;
      }
      c.target[4] = IGNORED; /* a row with NaN */
      set_wants(&c);
      printf("bits loss_hostile %d %d %016llx\n", s, k, (unsigned long long)run_case(&c));
      free_case(&c);
    }
  }
}

/* Tests that one range, single items from the last on, and two ranges give the same bits. */
void test_loss_ranges(uint32_t step) {
  static const int64_t shapes[][3] = {{9, 1000, 1}, {3, 20001, 1}, {3, 100, 300}, {40, 24, 3}};
  (void)step;
  for (int s = 0; s < 4; ++s) {
    for (int k = 0; k < OPTIONS * DTYPES; ++k) {
      loss_case c = new_case(shapes[s][0], shapes[s][1], shapes[s][2], (dtype_t)(k % DTYPES),
                             options[k / DTYPES], 0, 9);
      const int64_t n = loss_items(c.outer, c.inner);
      buffer_t out[3][OUTPUTS];
      for (int way = 0; way < 3; ++way) {
        buffer_t *to = out[way];
        new_outputs(&c, to);
        const int64_t parts = way == 0 ? 1 : way == 1 ? n : 2;
        for (int64_t p = parts - 1; p >= 0; --p) {
          const int64_t begin = n * p / parts, end = n * (p + 1) / parts;
          forward(&c, begin, end, c.logits, to, to[FORWARD_GRAD].data);
          backward(&c, begin, end, c.logits, to, to[BACKWARD_GRAD].data);
        }
        for (int o = 0; o < OUTPUTS; ++o) buffer_check(&to[o], out[0][o].data, output_names[o]);
      }
      uint64_t hash = 0;
      for (int o = 0; o < OUTPUTS; ++o) {
        if (o != ENTROPY || c.options.entropy)
          hash = hash_elements(hash, dtype_of(&c, o), out[0][o].data, count(&c, o));
        for (int way = 0; way < 3; ++way) buffer_free(&out[way][o]);
      }
      printf("bits loss %d %d %s %016llx\n", s, k / DTYPES, dtype_names[c.dtype],
             (unsigned long long)hash);
      free_case(&c);
    }
  }
}

/* Tests sums and means of row losses: with targets, with targets and weights, with neither. */
void test_loss_reduce(uint32_t step) {
  static const int64_t sizes[] = {0, 1, 5, 8192, 20001};
  (void)step;
  for (int s = 0; s < 5; ++s) {
    for (int k = 0; k < 6 * DTYPES; ++k) {
      const dtype_t dtype = (dtype_t)(k % DTYPES),
                    acc = dtype == DTYPE_FLOAT64 ? dtype : DTYPE_FLOAT32;
      const int64_t rows = sizes[s], cols = 11;
      /* 0: target; 1: target and weight; 2: neither */
      const int is_mean = k / DTYPES % 2, kind = k / DTYPES / 2;
      void *loss = random_elements(acc, rows, 3, 0, 1),
           *weight = random_elements(acc, cols, 1, 0, 2);
      int64_t *target = (int64_t *)doubles(rows);
      uint64_t state = 3;
      double sum = 0, size = 0, total = 0;
      for (int64_t r = 0; r < rows; ++r) {
        target[r] = (int64_t)(random_bits(&state) % 14) - 2;
        const int counts = target[r] >= 0 && target[r] < cols && target[r] != 4;
        sum += element(acc, loss, r), size += fabs(element(acc, loss, r));
        total += kind == 2 ? 1 : !counts ? 0 : kind == 1 ? element(acc, weight, target[r]) : 1;
      }
      buffer_t out = buffer_new(formats[dtype].size, 0), of = buffer_new(formats[acc].size, 0);
      double *partial = doubles(loss_partials(rows));
      loss_reduce_args args = {loss,
                               kind == 2 ? NULL : target,
                               kind == 1 ? weight : NULL,
                               partial,
                               out.data,
                               of.data,
                               rows,
                               cols,
                               4,
                               dtype,
                               dtype,
                               is_mean};
      loss_reduce_cpu(0, 1, &args);
      const double want = is_mean ? sum / total : sum, error = 0x1p-50 * (double)rows;
      const double got = element(dtype, out.data, 0);
      CHECK(close_to(dtype, got, want, error * (1 + size) * (is_mean ? 1 + 1 / fabs(total) : 1)),
            "loss_reduce %s of %lld: %a, not %a", dtype_names[dtype], (long long)rows, got, want);
      CHECK(close_to(acc, element(acc, of.data, 0), total, error), "loss_reduce: the total is %a",
            element(acc, of.data, 0));
      printf("bits loss_reduce %016llx\n",
             (unsigned long long)hash_elements(0, dtype, out.data, 1));
      buffer_check(&out, NULL, "loss_reduce"), buffer_check(&of, NULL, "loss_reduce");
      buffer_free(&out), buffer_free(&of);
      free(loss), free(weight), free(target), free(partial);
    }
  }
}

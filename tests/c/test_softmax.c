/* Tests softmax and log_softmax against a reference in double: shapes around the block, the chunk
 * and the tile; in place, streaming, guards, rows with NaN and infinities, and splits of the
 * work. */
#include "check.h"
#include "softmax/softmax.h"

typedef struct {
  int64_t outer, cols, inner;
  dtype_t dtype;
  int is_log;
  int offset;             /* by how many elements buffers begin past a multiple of 64 bytes */
  void *x, *grad_out, *y; /* y is random data for backward */
  double *want_y, *slack_y, *want_grad, *slack_grad;
} softmax_case;

static int64_t count(const softmax_case *c) { return c->outer * c->cols * c->inner; }
static size_t bytes_of(const softmax_case *c) { return (size_t)count(c) * formats[c->dtype].size; }

/* Returns the index of element (o, column, i), where row is o * inner + i. */
static int64_t at(const softmax_case *c, int64_t row, int64_t column) {
  return (row / c->inner * c->cols + column) * c->inner + row % c->inner;
}

/* Returns the roundings in a sum: one for each column that a lane adds, and one for each chunk that
 * raises the maximum. */
static double roundings(const softmax_case *c) {
  const double lane = (double)ceil_div(c->cols, 32);
  return c->inner > 1 ? 40 + 4 * lane : (lane < 256 ? lane : 256) + 8;
}

/* Returns a bound of exp's relative error. The kernels of 16-bit types use a less accurate exp. */
static double exp_error(dtype_t dtype) {
  return dtype == DTYPE_FLOAT64 ? 0 : dtype == DTYPE_FLOAT32 ? 0x1p-22 : 0x1p-18;
}

static void set_forward(softmax_case *c) {
  const double unit = rounding(c->dtype), sum_error = roundings(c) * unit + exp_error(c->dtype);
  for (int64_t r = 0; r < c->outer * c->inner; ++r) {
    double max = -(double)INFINITY, sum = 0;
    for (int64_t k = 0; k < c->cols; ++k) {
      const double x = element(c->dtype, c->x, at(c, r, k));
      max = x > max || isnan(x) ? x : max;
    }
    for (int64_t k = 0; k < c->cols; ++k) sum += exp(element(c->dtype, c->x, at(c, r, k)) - max);
    for (int64_t k = 0; k < c->cols; ++k) {
      const int64_t i = at(c, r, k);
      const double d = element(c->dtype, c->x, i) - max, y = exp(d) / sum, log_y = d - log(sum);
      c->want_y[i] = c->is_log ? log_y : y;
      if (!isfinite(log_y)) continue; /* -inf and NaN are exact */
      c->slack_y[i] = c->is_log ? sum_error + unit * (2 * fabs(d) + fabs(log_y) + 8)
                                : y * (sum_error + unit * (8 + 3 * fabs(d))) + 0x1p-126;
    }
  }
}

static void set_backward(softmax_case *c) {
  const double unit = rounding(c->dtype);
  for (int64_t r = 0; r < c->outer * c->inner; ++r) {
    double sum = 0, size = 0;
    for (int64_t k = 0; k < c->cols; ++k) {
      const double g = element(c->dtype, c->grad_out, at(c, r, k)),
                   y = element(c->dtype, c->y, at(c, r, k)), term = c->is_log ? g : g * y;
      sum += term, size += fabs(term);
    }
    for (int64_t k = 0; k < c->cols; ++k) {
      const int64_t i = at(c, r, k);
      const double g = element(c->dtype, c->grad_out, i), y = element(c->dtype, c->y, i);
      const double p = c->is_log ? exp(y) : y, sum_slack = p * unit * roundings(c) * size;
      c->want_grad[i] = c->is_log ? g - p * sum : (g - sum) * p;
      c->slack_grad[i] = sum_slack + 4 * unit * (fabs(g) * (c->is_log ? 1 : p) + p * fabs(sum));
      if (c->is_log)
        c->slack_grad[i] += p * fabs(sum) * (exp_error(c->dtype) + 3 * unit * fabs(y)) + 0x1p-126;
    }
  }
}

static softmax_case new_case(int64_t outer, int64_t cols, int64_t inner, dtype_t dtype, int is_log,
                             double range) {
  softmax_case c = {.outer = outer, .cols = cols, .inner = inner, .dtype = dtype, .is_log = is_log};
  const int64_t n = count(&c);
  c.x = random_elements(dtype, n, range, 0, (uint64_t)cols);
  c.grad_out = random_elements(dtype, n, 2, 0, (uint64_t)cols + 1);
  c.y = random_elements(dtype, n, 1, 0, (uint64_t)cols + 2);
  for (int64_t i = 0; i < n; ++i) {
    const double size = fabs(element(dtype, c.y, i));
    set_element(dtype, c.y, i, is_log ? -10 * size : size);
  }
  c.want_y = doubles(n), c.slack_y = doubles(n), c.want_grad = doubles(n),
  c.slack_grad = doubles(n);
  set_forward(&c);
  set_backward(&c);
  return c;
}

static void free_case(softmax_case *c) {
  free(c->x), free(c->grad_out), free(c->y);
  free(c->want_y), free(c->slack_y), free(c->want_grad), free(c->slack_grad);
}

static void check_output(const softmax_case *c, const buffer_t *got, const double *want,
                         const double *slack, const char *what) {
  for (int64_t i = 0; i < count(c); ++i) {
    const double value = element(c->dtype, got->data, i);
    CHECK(close_to(c->dtype, value, want[i], slack[i]),
          "%s%s %s (%lld, %lld, %lld): element %lld is %a, not %a within %a",
          c->is_log ? "log_" : "", what, dtype_names[c->dtype], (long long)c->outer,
          (long long)c->cols, (long long)c->inner, (long long)i, value, want[i], slack[i]);
  }
}

/* ---- one case ---- */

static void forward(const softmax_case *c, int64_t begin, int64_t end, const void *x, void *y) {
  softmax_forward_args args = {x, y, c->outer, c->cols, c->inner, c->dtype, c->is_log};
  softmax_forward_cpu(begin, end, &args);
}

static void backward(const softmax_case *c, int64_t begin, int64_t end, const void *grad_out,
                     const void *y, void *grad_x) {
  softmax_backward_args args = {grad_out, y,        grad_x,   c->outer,
                                c->cols,  c->inner, c->dtype, c->is_log};
  softmax_backward_cpu(begin, end, &args);
}

/* Checks that plain, streamed and in-place stores give the same bits. Returns their hash. */
static uint64_t run_case(const softmax_case *c) {
  const size_t size = formats[c->dtype].size, bytes = bytes_of(c),
               offset = (size_t)c->offset * size;
  const int64_t items = softmax_items(c->outer, c->inner);
  buffer_t x = buffer_copy(c->x, bytes, offset), grad_out = buffer_copy(c->grad_out, bytes, offset),
           y = buffer_copy(c->y, bytes, 0), out[2], grad[2];
  for (should_stream = 0; should_stream < 2; ++should_stream) {
    const int s = should_stream;
    out[s] = buffer_new(bytes, offset), grad[s] = buffer_new(bytes, offset);
    forward(c, 0, items, x.data, out[s].data);
    CHECK(streaming_bytes == 2 * (int64_t)bytes, "softmax: %lld", (long long)streaming_bytes);
    backward(c, 0, items, grad_out.data, y.data, grad[s].data);
    CHECK(streaming_bytes == 3 * (int64_t)bytes, "softmax: %lld", (long long)streaming_bytes);
    buffer_check(&out[s], out[0].data, "softmax, streamed");
    buffer_check(&grad[s], grad[0].data, "softmax_backward, streamed");
  }
  should_stream = 0;
  check_output(c, &out[0], c->want_y, c->slack_y, "softmax");
  check_output(c, &grad[0], c->want_grad, c->slack_grad, "softmax_backward");
  buffer_check(&x, c->x, "softmax");
  buffer_check(&grad_out, c->grad_out, "softmax_backward");
  buffer_check(&y, c->y, "softmax_backward");
  buffer_t again[3] = {buffer_copy(c->x, bytes, offset), buffer_copy(c->grad_out, bytes, offset),
                       buffer_copy(c->y, bytes, offset)};
  forward(c, 0, items, again[0].data, again[0].data);
  backward(c, 0, items, again[1].data, y.data, again[1].data);
  backward(c, 0, items, grad_out.data, again[2].data, again[2].data);
  buffer_check(&again[0], out[0].data, "softmax in place");
  buffer_check(&again[1], grad[0].data, "softmax_backward in grad_out");
  buffer_check(&again[2], grad[0].data, "softmax_backward in y");
  uint64_t hash = hash_elements(0, c->dtype, out[0].data, count(c));
  hash = hash_elements(hash, c->dtype, grad[0].data, count(c));
  for (int k = 0; k < 3; ++k) buffer_free(&again[k]);
  for (int s = 0; s < 2; ++s) buffer_free(&out[s]), buffer_free(&grad[s]);
  buffer_free(&x), buffer_free(&grad_out), buffer_free(&y);
  return hash;
}

void test_softmax_sizes(uint32_t step) {
  static const int64_t shapes[][3] = {
      {3, 1, 1},    {5, 2, 1},    {4, 31, 1},   {3, 32, 1},   {3, 33, 1},    {3, 64, 1},
      {3, 100, 1},  {5, 255, 1},  {3, 257, 1},  {3, 285, 1},  {3, 1023, 1},  {3, 1024, 1},
      {2, 1052, 1}, {2, 8191, 1}, {2, 8192, 1}, {2, 8193, 1}, {1, 20011, 1}, {3, 5, 2},
      {2, 33, 31},  {2, 32, 32},  {2, 31, 33},  {2, 70, 128}, {2, 65, 160},  {1, 7, 300},
      {1, 1, 129},  {0, 3, 1},    {2, 3, 0}};
  (void)step;
  for (int s = 0; s < 27; ++s) {
    for (int k = 0; k < 2 * DTYPES; ++k) {
      const double range = (s + k) % 3 == 0 ? 40 : (s + k) % 3 == 1 ? 3 : 300;
      softmax_case c = new_case(shapes[s][0], shapes[s][1], shapes[s][2], (dtype_t)(k % DTYPES),
                                k / DTYPES, range);
      for (c.offset = 0; c.offset < OFFSETS; c.offset += s % 2 ? 1 : 3) run_case(&c);
      free_case(&c);
    }
  }
}

/* The softmax of -inf must be 0. A row of -inf, and a row with +inf or NaN, must give NaN. Large
 * values must not overflow. */
void test_softmax_hostile(uint32_t step) {
  static const int64_t shapes[][3] = {
      {8, 7, 1}, {8, 100, 1}, {8, 9000, 1}, {1, 70, 8}, {1, 40, 40}};
  static const double values[] = {NAN, INFINITY, -INFINITY, 3e4};
  (void)step;
  for (int s = 0; s < 5; ++s) {
    for (int k = 0; k < 2 * DTYPES; ++k) {
      const int64_t cols = shapes[s][1];
      softmax_case c =
          new_case(shapes[s][0], cols, shapes[s][2], (dtype_t)(k % DTYPES), k / DTYPES, 4);
      for (int64_t row = 0; row < 8; ++row) {
        /* Sets one element near the end, or the first half, or all elements. */
        const int64_t begin = row < 4 ? cols - 2 : 0, end = row < 4    ? cols - 1
                                                            : row == 6 ? cols
                                                                       : cols / 2;
        for (int64_t i = begin; i < end; ++i)
          set_element(c.dtype, c.x, at(&c, row, i), values[row % 4]);
      }
      set_forward(&c);
      printf("bits softmax_hostile %d %d %016llx\n", s, k, (unsigned long long)run_case(&c));
      free_case(&c);
    }
  }
}

/* Tests that one range, single items from the last on, and two ranges give the same bits. */
void test_softmax_ranges(uint32_t step) {
  static const int64_t shapes[][3] = {{7, 1000, 1}, {3, 20001, 1}, {3, 100, 300}, {40, 24, 3}};
  (void)step;
  for (int s = 0; s < 4; ++s) {
    for (int k = 0; k < 2 * DTYPES; ++k) {
      softmax_case c =
          new_case(shapes[s][0], shapes[s][1], shapes[s][2], (dtype_t)(k % DTYPES), k / DTYPES, 9);
      const int64_t n = softmax_items(c.outer, c.inner);
      buffer_t y[3], grad[3];
      for (int way = 0; way < 3; ++way) {
        y[way] = buffer_new(bytes_of(&c), 0), grad[way] = buffer_new(bytes_of(&c), 0);
        const int64_t parts = way == 0 ? 1 : way == 1 ? n : 2;
        for (int64_t p = parts - 1; p >= 0; --p) {
          forward(&c, n * p / parts, n * (p + 1) / parts, c.x, y[way].data);
          backward(&c, n * p / parts, n * (p + 1) / parts, c.grad_out, c.y, grad[way].data);
        }
        buffer_check(&y[way], y[0].data, "softmax, split");
        buffer_check(&grad[way], grad[0].data, "softmax_backward, split");
      }
      uint64_t hash = hash_elements(0, c.dtype, y[0].data, count(&c));
      hash = hash_elements(hash, c.dtype, grad[0].data, count(&c));
      printf("bits softmax %d %d %s %016llx\n", s, c.is_log, dtype_names[c.dtype],
             (unsigned long long)hash);
      for (int way = 0; way < 3; ++way) buffer_free(&y[way]), buffer_free(&grad[way]);
      free_case(&c);
    }
  }
}

/* Tests bias_gelu and its gradients: widths around the block and the tile, wanted and unwanted
 * gradients, offsets, streaming, guards, and splits of the work. */
#include "bias_gelu/bias_gelu.h"
#include "check.h"

typedef struct {
  int64_t rows, cols;
  dtype_t dtype;
  activation_t kind;
  int want_x, want_bias;
  void *x, *bias, *grad_out;
} gelu_case;

static int64_t numel(const gelu_case *c) { return c->rows * c->cols; }
static size_t bytes_of(const gelu_case *c, int64_t n) { return (size_t)n * formats[c->dtype].size; }

typedef struct {
  double value, first;
} gelu_t;

static gelu_t gelu(activation_t kind, double x) {
  if (kind == GELU) {
    const double phi = erfc(-x / sqrt(2)) / 2;
    return (gelu_t){x * phi, phi + x * exp(-x * x / 2) / sqrt(2 * 3.14159265358979323846)};
  }
  const double c = sqrt(2 / 3.14159265358979323846), t = tanh(c * (x + 0.044715 * x * x * x));
  const double slope = c * (1 + 3 * 0.044715 * x * x);
  return (gelu_t){x * (1 + t) / 2, (1 + t + x * (1 - t * t) * slope) / 2};
}

/* Returns a bound of the activation functions' error, for results of size 1. */
static double error_of(dtype_t dtype) {
  return dtype == DTYPE_FLOAT64 ? 0x1p-48 : dtype == DTYPE_FLOAT32 ? 0x1p-20 : 0x1p-14;
}

static double argument(const gelu_case *c, int64_t i) {
  return element(c->dtype, c->x, i) + element(c->dtype, c->bias, i % c->cols);
}

static void check(const gelu_case *c, const char *what, const void *results, int64_t i, double want,
                  double slack) {
  const double got = element(c->dtype, results, i);
  CHECK(close_to(c->dtype, got, want, slack),
        "bias_gelu %s (%lld, %lld), kind %d: element %lld of %s is %a, not %a within %a",
        dtype_names[c->dtype], (long long)c->rows, (long long)c->cols, (int)c->kind, (long long)i,
        what, got, want, slack);
}

static void check_forward(const gelu_case *c, const void *y) {
  for (int64_t i = 0; i < numel(c); ++i) {
    const double u = argument(c, i);
    check(c, "y", y, i, gelu(c->kind, u).value, error_of(c->dtype) * (1 + fabs(u)));
  }
}

static void check_backward(const gelu_case *c, const void *grad_x, const void *grad_bias) {
  for (int64_t column = 0; column < c->cols; ++column) {
    double sum = 0, size = 0;
    for (int64_t i = column; i < numel(c); i += c->cols) {
      const double g = element(c->dtype, c->grad_out, i),
                   want = g * gelu(c->kind, argument(c, i)).first;
      sum += want, size += fabs(g);
      if (c->want_x) check(c, "grad_x", grad_x, i, want, 2 * error_of(c->dtype) * fabs(g));
    }
    if (c->want_bias) check(c, "grad_bias", grad_bias, column, sum, 2 * error_of(c->dtype) * size);
  }
}

typedef void (*range_fn)(int64_t begin, int64_t end, void *args);

static void split(range_fn kernel, int64_t items, void *args, int one_by_one) {
  if (!one_by_one) kernel(0, items, args);
  for (int64_t i = items - 1; one_by_one && i >= 0; --i) kernel(i, i + 1, args);
}

/* Runs a case with buffers `offset` elements past a multiple of 64 bytes. Returns a hash of the
 * results. */
static uint64_t run_case(const gelu_case *c, int offset, int one_by_one) {
  const size_t bytes = bytes_of(c, numel(c)), row = bytes_of(c, c->cols);
  const size_t at = bytes_of(c, offset);
  buffer_t x = buffer_copy(c->x, bytes, at), bias = buffer_copy(c->bias, row, at);
  buffer_t grad_out = buffer_copy(c->grad_out, bytes, at), y = buffer_new(bytes, at);
  buffer_t grad_x = buffer_new(bytes, at), grad_bias = buffer_new(row, at);
  double *partial = doubles(column_sums_partial_cpu(c->rows, c->cols));
  bias_gelu_forward_args forward = {x.data, bias.data, y.data, c->rows, c->cols, c->kind, c->dtype};
  bias_gelu_backward_args backward = {.grad_out = grad_out.data,
                                      .x = x.data,
                                      .bias = bias.data,
                                      .grad_x = c->want_x ? grad_x.data : NULL,
                                      .grad_bias = c->want_bias ? grad_bias.data : NULL,
                                      .partial = c->want_bias ? partial : NULL,
                                      .rows = c->rows,
                                      .cols = c->cols,
                                      .kind = c->kind,
                                      .dtype = c->dtype};
  const int64_t tiles = column_sums_tiles(c->cols);
  split(bias_gelu_forward_cpu, ceil_div(numel(c), CHUNK), &forward, one_by_one);
  split(bias_gelu_backward_cpu, column_sums_parts(c->rows, c->cols) * tiles, &backward, one_by_one);
  if (c->want_bias) split(bias_gelu_grad_bias_cpu, tiles, &backward, one_by_one);
  check_forward(c, y.data);
  check_backward(c, grad_x.data, grad_bias.data);
  uint64_t hash = hash_elements(0, c->dtype, y.data, numel(c));
  if (c->want_x) hash = hash_elements(hash, c->dtype, grad_x.data, numel(c));
  if (c->want_bias) hash = hash_elements(hash, c->dtype, grad_bias.data, c->cols);
  const void *const inputs[] = {c->x, c->bias, c->grad_out, NULL, NULL, NULL};
  buffer_t *const buffers[] = {&x, &bias, &grad_out, &y, &grad_x, &grad_bias};
  for (int i = 0; i < 6; ++i) {
    buffer_check(buffers[i], inputs[i], "bias_gelu"), buffer_free(buffers[i]);
  }
  free(partial);
  return hash;
}

void test_bias_gelu(uint32_t step) {
  static const int64_t shapes[][2] = {{3, 1},    {5, 31},   {4, 32},   {2, 33},
                                      {130, 65}, {2, 2049}, {70, 100}, {1, 4128}};
  (void)step;
  for (int dtype = 0; dtype < DTYPES; ++dtype) {
    uint64_t hash = 0;
    for (int i = 0; i < 8 * 6; ++i) {
      gelu_case c = {.rows = shapes[i / 6][0],
                     .cols = shapes[i / 6][1],
                     .dtype = (dtype_t)dtype,
                     .kind = i % 2 ? GELU : GELU_TANH,
                     .want_x = i % 6 / 2 != 1,
                     .want_bias = i % 6 / 2 != 2};
      c.x = random_elements(c.dtype, numel(&c), 3, 0, 1);
      c.bias = random_elements(c.dtype, c.cols, 1, 0, 2);
      c.grad_out = random_elements(c.dtype, numel(&c), 1, 0, 3);
      const uint64_t bits = run_case(&c, 0, 0);
      CHECK(run_case(&c, 1, 1) == bits, "bias_gelu: other bits when split");
      should_stream = 1;
      CHECK(run_case(&c, 0, 0) == bits, "bias_gelu: other bits when streamed");
      CHECK(run_case(&c, 3, 0) == bits, "bias_gelu: other bits when streamed, offset 3");
      should_stream = 0;
      hash = hash * 31 + bits;
      free(c.x), free(c.bias), free(c.grad_out);
    }
    printf("bits bias_gelu %s %016llx\n", dtype_names[dtype], (unsigned long long)hash);
  }
}

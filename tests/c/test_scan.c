/* Tests cumsum, logcumsumexp and linear_recurrence: lengths around the block and around the length
 * up to which rows are scanned element by element, rows and columns, both directions, streaming,
 * guards, and lines (rows or columns) of several parts, whole and part by part. */
#include "check.h"
#include "scan/scan.h"

enum { CUMSUM, LOGCUMSUMEXP, RECURRENCE, RECURRENCE_BACKWARD, OPS };
static const char *const op_names[OPS] = {"cumsum", "logcumsumexp", "linear_recurrence",
                                          "linear_recurrence_backward"};
enum { INPUTS = 3, RESULTS = 2 };

/* `option` makes cumsum exclusive. In linear_recurrence it makes all lines share `a`, and passes
 * h0. */
typedef struct {
  int op;
  int64_t outer, length, inner;
  dtype_t dtype;
  int is_reverse, option;
  void *inputs[INPUTS]; /* x; or a and b; or a, grad_h and h; each (outer, length, inner) */
  void *h0;             /* (outer, inner) */
} scan_case;

static int64_t numel(const scan_case *c) { return c->outer * c->length * c->inner; }
static int64_t lines(const scan_case *c) { return c->outer * c->inner; }
static int inputs_of(const scan_case *c) {
  return c->op == RECURRENCE ? 2 : c->op == RECURRENCE_BACKWARD ? 3 : 1;
}
static int results_of(const scan_case *c) { return c->op == RECURRENCE_BACKWARD ? 2 : 1; }
static int has_h0(const scan_case *c) { return c->op >= RECURRENCE && c->option; }

/* Returns the index of step k of a line, in the order of the scan. */
static int64_t at(const scan_case *c, int64_t line, int64_t k) {
  const int64_t step = c->is_reverse ? c->length - 1 - k : k;
  return (line / c->inner * c->length + step) * c->inner + line % c->inner;
}

static double input(const scan_case *c, int i, int64_t line, int64_t k) {
  const int is_shared = i == 0 && has_h0(c);
  return element(c->dtype, c->inputs[i], at(c, is_shared ? 0 : line, k));
}

static scan_case new_case(int op, int64_t outer, int64_t length, int64_t inner, dtype_t dtype,
                          int kind) {
  scan_case c = {op, outer, length, inner, dtype, kind & 1, kind >> 1, {NULL}, NULL};
  for (int i = 0; i < inputs_of(&c); ++i) {
    c.inputs[i] = op == CUMSUM ? random_exact(dtype, numel(&c), 1)
                               : random_elements(dtype, numel(&c), op == LOGCUMSUMEXP ? 9 : 1, 0,
                                                 1 + (uint64_t)i);
  }
  if (has_h0(&c)) c.h0 = random_elements(dtype, lines(&c), 1, 0, 5);
  return c;
}

static void free_case(scan_case *c) {
  for (int i = 0; i < INPUTS; ++i) free(c->inputs[i]);
  free(c->h0);
}

/* ---- the reference ---- */

static void check(const scan_case *c, const void *results, int64_t i, double want, double slack) {
  const double got = element(c->dtype, results, i);
  CHECK(close_to(c->dtype, got, want, slack),
        "%s %s (%lld, %lld, %lld), reverse %d, option %d: element %lld is %a, not %a within %a",
        op_names[c->op], dtype_names[c->dtype], (long long)c->outer, (long long)c->length,
        (long long)c->inner, c->is_reverse, c->option, (long long)i, got, want, slack);
}

/* The inputs are from random_exact(), whose sums are exact, so no slack is needed. */
static void check_cumsum(const scan_case *c, int64_t line, void *const *results) {
  double sum = 0;
  for (int64_t k = 0; k < c->length; ++k) {
    const double before = sum;
    sum += input(c, 0, line, k);
    check(c, results[0], at(c, line, k), c->option ? before : sum, 0);
  }
}

/* Each of the k steps may round, and exp has an error of its own. */
static void check_logcumsumexp(const scan_case *c, int64_t line, void *const *results) {
  const double unit = rounding(c->dtype), of_exp = c->dtype == DTYPE_FLOAT64 ? 0 : 0x1p-17;
  double sum = 0;
  for (int64_t k = 0; k < c->length; ++k) {
    sum += exp(input(c, 0, line, k));
    check(c, results[0], at(c, line, k), log(sum), (double)(k + 64) * unit + of_exp);
  }
}

static double first_state(const scan_case *c, int64_t line) {
  return c->h0 ? element(c->dtype, c->h0, line) : 0;
}

static void check_recurrence(const scan_case *c, int64_t line, void *const *results) {
  double h = first_state(c, line), size = fabs(h);
  for (int64_t k = 0; k < c->length; ++k) {
    const double a = input(c, 0, line, k), b = input(c, 1, line, k);
    h = a * h + b, size = fabs(a) * size + fabs(b);
    check(c, results[0], at(c, line, k), h, (double)(k + 16) * rounding(c->dtype) * size);
  }
}

/* `is_reverse` is the direction of the backward kernel, which begins with forward's last step. */
static void check_backward(const scan_case *c, int64_t line, void *const *results,
                           const void *grad_h0) {
  double u = 0, size = 0, a = 0;
  for (int64_t k = 0; k < c->length; ++k) {
    const double g = input(c, 1, line, k), unit = (double)(k + 16) * rounding(c->dtype);
    u = a * u + g, size = fabs(a) * size + fabs(g);
    a = input(c, 0, line, k);
    const double h = k + 1 < c->length ? input(c, 2, line, k + 1) : first_state(c, line);
    check(c, results[0], at(c, line, k), u * h, unit * size * fabs(h));
    check(c, results[1], at(c, line, k), u, unit * size);
  }
  if (c->h0)
    check(c, grad_h0, line, a * u, (double)(c->length + 16) * rounding(c->dtype) * fabs(a) * size);
}

/* ---- runs ---- */

static scan_input input_view(const scan_case *c, void *data, int is_shared, int64_t index) {
  const size_t size = formats[c->dtype].size;
  unsigned char *first = data;
  if (c->is_reverse) first += (size_t)((c->length - 1) * c->inner) * size;
  return (scan_input){first, is_shared ? 0 : c->length * c->inner,
                      c->is_reverse ? -c->inner : c->inner, is_shared ? 0 : 1, index};
}

static scan_output output_view(const scan_case *c, void *data, int64_t index) {
  const scan_input view = input_view(c, data, 0, index);
  return (scan_output){(void *)(uintptr_t)view.data, view.outer, view.step, view.inner, index};
}

/* Replaces the stride `outer` by a jump of the same distance at every outer index. */
static void to_jump(scan_jump *jump, int64_t *outer, int64_t index) {
  jump->by[index] = *outer;
  *outer = 0;
}

typedef void (*range_fn)(int64_t begin, int64_t end, void *args);

/* Runs the work items of a plan in one range, or one by one from the last to the first. With
 * several parts, the totals of all parts are computed first. */
static void run_plan(const scan_case *c, void *args, const scan_shape *shape, int one_by_one) {
  static const range_fn kernels[OPS] = {cumsum_cpu, logcumsumexp_cpu, linear_recurrence_cpu,
                                        linear_recurrence_backward_cpu};
  static const range_fn totals[OPS] = {cumsum_totals_cpu, logcumsumexp_totals_cpu,
                                       linear_recurrence_totals_cpu,
                                       linear_recurrence_backward_totals_cpu};
  const scan_cpu_plan *plan = shape->state;
  const int64_t items = scan_items(shape, plan);
  if (!one_by_one) {
    if (plan->parts > 1) totals[c->op](0, items, args);
    kernels[c->op](0, items, args);
    return;
  }
  for (int64_t i = items - 1; i >= 0 && plan->parts > 1; --i) totals[c->op](i, i + 1, args);
  for (int64_t i = items - 1; i >= 0; --i) kernels[c->op](i, i + 1, args);
}

/* Runs one case with buffers that begin `offset` elements past a multiple of 64 bytes. If items run
 * one by one, jumps replace the outer strides. Returns a hash of the results. */
static uint64_t run_case(const scan_case *c, int offset, int64_t width, int64_t parts,
                         int one_by_one) {
  const size_t size = formats[c->dtype].size, at_byte = (size_t)offset * size;
  const size_t bytes = (size_t)numel(c) * size, line_bytes = (size_t)lines(c) * size;
  buffer_t in[INPUTS], out[RESULTS], h0 = {0}, grad_h0 = {0};
  scan_cpu_plan plan = {width < c->inner ? width : c->inner, parts, NULL};
  scan_jump jump = {1, {0}};
  const scan_shape shape = {c->outer, c->length, c->inner, c->dtype, &plan, one_by_one, &jump};
  enum { H0 = INPUTS + RESULTS };
  scan_input views[INPUTS], first = {NULL, c->inner, 0, 1, H0};
  scan_output y[RESULTS], grad_first = {NULL, c->inner, 0, 1, H0 + 1};
  void *results[RESULTS];
  plan.totals = doubles(2 * parts * scan_lines(&shape));
  for (int i = 0; i < inputs_of(c); ++i) {
    in[i] = buffer_copy(c->inputs[i], bytes, at_byte);
    views[i] = input_view(c, in[i].data, i == 0 && has_h0(c), i);
    if (one_by_one) to_jump(&jump, &views[i].outer, i);
  }
  for (int i = 0; i < results_of(c); ++i) {
    out[i] = buffer_new(bytes, at_byte);
    y[i] = output_view(c, results[i] = out[i].data, INPUTS + i);
    if (one_by_one) to_jump(&jump, &y[i].outer, INPUTS + i);
  }
  if (c->h0) {
    h0 = buffer_copy(c->h0, line_bytes, at_byte), grad_h0 = buffer_new(line_bytes, at_byte);
    first.data = h0.data, grad_first.data = grad_h0.data;
    if (one_by_one) to_jump(&jump, &first.outer, H0), to_jump(&jump, &grad_first.outer, H0 + 1);
  }
  cumsum_args cumsum = {shape, views[0], y[0], c->option};
  logcumsumexp_args log_sum = {shape, views[0], y[0]};
  linear_recurrence_args forward = {shape, views[0], views[1], first, y[0]};
  linear_recurrence_backward_args backward = {shape, views[1], views[0], views[2],
                                              first, y[0],     y[1],     grad_first};
  void *const args[OPS] = {&cumsum, &log_sum, &forward, &backward};
  run_plan(c, args[c->op], &shape, one_by_one);
  for (int64_t line = 0; line < lines(c); ++line) {
    if (c->op == CUMSUM) check_cumsum(c, line, results);
    if (c->op == LOGCUMSUMEXP) check_logcumsumexp(c, line, results);
    if (c->op == RECURRENCE) check_recurrence(c, line, results);
    if (c->op == RECURRENCE_BACKWARD) check_backward(c, line, results, grad_h0.data);
  }
  uint64_t hash = 0;
  for (int i = 0; i < results_of(c); ++i) {
    hash = hash_elements(hash, c->dtype, results[i], numel(c));
    buffer_check(&out[i], NULL, op_names[c->op]), buffer_free(&out[i]);
  }
  for (int i = 0; i < inputs_of(c); ++i) {
    buffer_check(&in[i], c->inputs[i], op_names[c->op]), buffer_free(&in[i]);
  }
  if (c->h0) {
    buffer_check(&h0, c->h0, op_names[c->op]), buffer_free(&h0);
    buffer_check(&grad_h0, NULL, op_names[c->op]), buffer_free(&grad_h0);
  }
  free(plan.totals);
  return hash;
}

void test_scan_sizes(uint32_t step) {
  static const int64_t shapes[][3] = {{3, 1, 1},  {3, 16, 1}, {3, 17, 1}, {2, 31, 1},
                                      {2, 32, 1}, {2, 64, 1}, {3, 65, 1}, {2, 1025, 1},
                                      {3, 5, 2},  {2, 40, 8}, {2, 1, 9},  {2, 5, 31},
                                      {2, 7, 32}, {1, 9, 64}, {2, 6, 130}};
  (void)step;
  for (int op = 0; op < OPS; ++op) {
    for (int dtype = 0; dtype < DTYPES; ++dtype) {
      uint64_t hash = 0;
      for (size_t i = 0; i < 4 * sizeof shapes / sizeof *shapes; ++i) {
        const int64_t *s = shapes[i / 4];
        scan_case c = new_case(op, s[0], s[1], s[2], (dtype_t)dtype, (int)(i % 4));
        const uint64_t bits = run_case(&c, 0, SCAN_TILE, 1, 0);
        CHECK(run_case(&c, 1, 64, 1, 1) == bits, "%s: other bits when split", op_names[op]);
        should_stream = 1;
        CHECK(run_case(&c, 0, SCAN_TILE, 1, 0) == bits, "%s: other bits streamed", op_names[op]);
        CHECK(run_case(&c, 3, 64, 1, 0) == bits, "%s: other bits at offset 3", op_names[op]);
        should_stream = 0;
        hash = hash * 31 + bits;
        free_case(&c);
      }
      printf("bits %s %s %016llx\n", op_names[op], dtype_names[dtype], (unsigned long long)hash);
    }
  }
}

/* Tests lines of three parts. In some cases one work item scans a whole line, in others each part
 * is a work item. */
void test_scan_parts(uint32_t step) {
  static const int64_t inner[] = {1, 9};
  const int64_t length = 2 * SCAN_PART + 33;
  (void)step;
  for (int op = 0; op < OPS; ++op) {
    for (int dtype = 0; dtype < DTYPES; ++dtype) {
      uint64_t hash = 0;
      for (int i = 0; i < 4; ++i) {
        scan_case c = new_case(op, 1, length, inner[i % 2], (dtype_t)dtype, i / 2 * 3);
        const uint64_t bits = run_case(&c, 0, SCAN_TILE, 1, 0);
        CHECK(run_case(&c, 0, SCAN_TILE, 3, 0) == bits, "%s: other bits in parts", op_names[op]);
        CHECK(run_case(&c, 0, SCAN_TILE, 3, 1) == bits, "%s: other bits by part", op_names[op]);
        hash = hash * 31 + bits;
        free_case(&c);
      }
      printf("bits %s %s %016llx\n", op_names[op], dtype_names[dtype], (unsigned long long)hash);
    }
  }
}

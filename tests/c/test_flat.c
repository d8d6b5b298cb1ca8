/* Tests the element-wise ops, and the gates with a single row: sizes around the tail, storage
 * offsets, streaming, guards, and splits of the work. */
#include "activation/activation.h"
#include "check.h"
#include "gate/gate.h"
#include "mish/mish.h"
#include "mish_reference.h"
#include "muladd/muladd.h"
#include "relu/relu.h"

enum { INPUTS = 3, OUTPUTS = 2 };
static const double muladd_c = 0.7001953125; /* exact in float */

typedef struct {
  const void *in[INPUTS];
  void *out[OUTPUTS];
  int64_t numel;
  dtype_t dtype;
  activation_t kind;
} flat_call;

/* The expected values of an element. `slack` bounds the errors of the arithmetic before the result
 * is rounded to its type. */
typedef struct {
  double want[OUTPUTS], slack[OUTPUTS];
} flat_want;

typedef struct {
  double in[INPUTS];
  double unit; /* the error of one rounding */
  dtype_t dtype;
  activation_t kind;
} flat_element;

typedef struct {
  const char *name;
  int inputs, outputs;
  void (*call)(const flat_call *c, int64_t begin, int64_t end);
  flat_want (*want)(const flat_element *e);
  activation_t kind; /* only for activations and gates; their inputs are between -30 and 30 */
} flat_op;

static void call_muladd(const flat_call *c, int64_t begin, int64_t end) {
  muladd_forward_args args = {c->in[0], c->in[1], c->out[0], muladd_c, c->numel, c->dtype};
  muladd_forward_cpu(begin, end, &args);
}

/* Without fma the product is rounded, too. 16-bit types round the sum first to float. */
static flat_want want_muladd(const flat_element *e) {
  const double product = e->in[0] * e->in[1], want = fma(e->in[0], e->in[1], muladd_c);
  return (flat_want){{want}, {e->unit * (fabs(product) + fabs(want)) + 0x1p-149}};
}

static void call_muladd_backward(const flat_call *c, int64_t begin, int64_t end) {
  muladd_backward_args args = {c->in[0],  c->in[1], c->in[2], c->out[0],
                               c->out[1], c->numel, c->dtype};
  muladd_backward_cpu(begin, end, &args);
}

static flat_want want_muladd_backward(const flat_element *e) {
  const double a = e->in[0] * e->in[2], b = e->in[0] * e->in[1];
  return (flat_want){{a, b}, {e->unit * fabs(a) + 0x1p-149, e->unit * fabs(b) + 0x1p-149}};
}

static void call_relu(const flat_call *c, int64_t begin, int64_t end) {
  relu_forward_args args = {c->in[0], c->out[0], c->numel, c->dtype};
  relu_forward_cpu(begin, end, &args);
}

static flat_want want_relu(const flat_element *e) {
  return (flat_want){{e->in[0] < 0 ? 0 : e->in[0]}, {0}};
}

static void call_relu_backward(const flat_call *c, int64_t begin, int64_t end) {
  relu_backward_args args = {c->in[0], c->in[1], c->out[0], c->numel, c->dtype};
  relu_backward_cpu(begin, end, &args);
}

static flat_want want_relu_backward(const flat_element *e) {
  return (flat_want){{e->in[1] <= 0 ? 0 : e->in[0]}, {0}};
}

/* Returns the slack of mish. test_mish.c bounds float's errors by 4.3, 9 and 12.5 units of the
 * result. This slack allows twice as many roundings. Near the zeros of the derivatives, terms of
 * size |x| exp(x) cancel, and the errors are a few roundings of these terms. */
static double mish_slack(double x, double want, double unit) {
  return unit * (25 * fabs(want) + 4 * fmin(1, fabs(x) * exp(fmin(x, 1)))) + 0x1p-148;
}

static mish_t mish_of(double x, double unit) {
  return x > (unit == 0x1p-24 ? 20 : 24) ? (mish_t){x, 1, 0} : mish_reference(x);
}

static void call_mish(const flat_call *c, int64_t begin, int64_t end) {
  mish_forward_args args = {c->in[0], c->out[0], c->numel, c->dtype};
  mish_forward_cpu(begin, end, &args);
}

static flat_want want_mish(const flat_element *e) {
  const double want = mish_of(e->in[0], e->unit).value;
  return (flat_want){{want}, {mish_slack(e->in[0], want, e->unit)}};
}

static void call_mish_backward(const flat_call *c, int64_t begin, int64_t end) {
  mish_backward_args args = {c->in[0], c->in[1], c->out[0], c->numel, c->dtype};
  mish_backward_cpu(begin, end, &args);
}

static flat_want want_mish_backward(const flat_element *e) {
  const double first = mish_of(e->in[1], e->unit).first;
  return (flat_want){{e->in[0] * first},
                     {fabs(e->in[0]) * mish_slack(e->in[1], first, e->unit) + 0x1p-149}};
}

static void call_mish_double_backward(const flat_call *c, int64_t begin, int64_t end) {
  mish_double_backward_args args = {c->in[0], c->in[1], c->in[2], c->out[0], c->numel, c->dtype};
  mish_double_backward_cpu(begin, end, &args);
}

static flat_want want_mish_double_backward(const flat_element *e) {
  const double second = mish_of(e->in[2], e->unit).second, grad = e->in[0] * e->in[1];
  return (flat_want){{grad * second},
                     {fabs(grad) * mish_slack(e->in[2], second, e->unit) + 0x1p-149}};
}

/* ---- activations and gates ---- */

/* The value and two derivatives of an activation, and the slack of each. */
typedef struct {
  double f[3], slack[3];
} jet_t;

static double logistic(double u) { return u < 0 ? exp(u) / (1 + exp(u)) : 1 / (1 + exp(-u)); }

static jet_t of_logistic(double x, double u, double u1, double u2) {
  const double s = logistic(u), rest = logistic(-u), slope = s * rest;
  return (jet_t){{x * s, s + x * slope * u1, slope * (2 * u1 + x * u2 + x * u1 * u1 * (rest - s))},
                 {0}};
}

/* Computes the formulas of activation.h. tests/test_activation.py derives the slack. Errors are
 * relative to the result, or in derivatives to terms that cancel. u and x^2 / 2 are rounded
 * before exp multiplies their errors. The approximations for 16-bit types are within 2^-15. */
static jet_t jet_of(activation_t kind, double x, dtype_t dtype) {
  const double pi = 3.14159265358979323846;
  const double c = 2 * sqrt(2 / pi), d = 0.044715 * c, u = c * x + d * x * x * x;
  const double phi = erfc(-x / sqrt(2)) / 2, density = exp(-x * x / 2) / sqrt(2 * pi);
  jet_t jet = {{x * phi, phi + x * density, density * (2 - x * x)}, {0}};
  if (kind == SILU) jet = of_logistic(x, x, 1, 0);
  if (kind == GELU_TANH) jet = of_logistic(x, u, c + 3 * d * x * x, 6 * d * x);
  const int is_half = formats[dtype].size == 2;
  const double terms = exp(kind == SILU ? -fabs(x) : -x * x / 2) * (1 + x * x);
  const double exponent = kind == GELU_TANH ? fabs(u) : kind == GELU ? x * x : 0;
  const double units = 24 + 8 * exponent;
  const double relative = units * rounding(dtype) + (is_half ? 0x1p-15 : 0);
  for (int order = 0; order < 3; ++order) {
    jet.slack[order] = relative * (fabs(jet.f[order]) + (order > 0) * terms) + 0x1p-122;
  }
  return jet;
}

static void call_activation(const flat_call *c, int64_t begin, int64_t end) {
  activation_forward_args args = {c->in[0], c->out[0], c->numel, c->kind, c->dtype};
  activation_forward_cpu(begin, end, &args);
}

static void call_activation_backward(const flat_call *c, int64_t begin, int64_t end) {
  activation_backward_args args = {c->in[0], c->in[1], c->out[0], c->numel, c->kind, c->dtype};
  activation_backward_cpu(begin, end, &args);
}

static void call_activation_double_backward(const flat_call *c, int64_t begin, int64_t end) {
  activation_double_backward_args args = {c->in[0], c->in[1], c->in[2], c->out[0],
                                          c->numel, c->kind,  c->dtype};
  activation_double_backward_cpu(begin, end, &args);
}

static void call_gate(const flat_call *c, int64_t begin, int64_t end) {
  gate_forward_args args = {c->in[0], c->in[1], c->out[0], c->numel, c->numel,
                            1,        c->numel, c->kind,   c->dtype};
  gate_forward_cpu(begin, end, &args);
}

static void call_gate_backward(const flat_call *c, int64_t begin, int64_t end) {
  gate_backward_args args = {c->in[0], c->in[1], c->in[2], c->out[0], c->out[1], c->numel,
                             c->numel, c->numel, 1,        c->numel,  c->kind,   c->dtype};
  gate_backward_cpu(begin, end, &args);
}

/* Computes `factor` times a derivative (order 0 is the value), and its slack. */
static void scaled(const jet_t *jet, int order, double factor, double unit, double *want,
                   double *slack) {
  *want = factor * jet->f[order];
  *slack = fabs(factor) * jet->slack[order] + 4 * unit * fabs(*want) + 0x1p-149;
}

static flat_want want_derivative(const flat_element *e, int order, int is_gate) {
  const jet_t jet = jet_of(e->kind, e->in[order], e->dtype);
  flat_want w = {{0}, {0}};
  double factor = is_gate ? e->in[order + 1] : 1;
  for (int k = 0; k < order; ++k) factor *= e->in[k];
  scaled(&jet, order, factor, e->unit, &w.want[0], &w.slack[0]);
  if (is_gate && order == 1) scaled(&jet, 0, e->in[0], e->unit, &w.want[1], &w.slack[1]);
  return w;
}

static flat_want want_activation(const flat_element *e) { return want_derivative(e, 0, 0); }
static flat_want want_activation_backward(const flat_element *e) {
  return want_derivative(e, 1, 0);
}
static flat_want want_activation_double_backward(const flat_element *e) {
  return want_derivative(e, 2, 0);
}
static flat_want want_gate(const flat_element *e) { return want_derivative(e, 0, 1); }
static flat_want want_gate_backward(const flat_element *e) { return want_derivative(e, 1, 1); }

#define ACTIVATION(name, kind)                                                              \
  {name, 1, 1, call_activation, want_activation, kind},                                     \
      {name "_backward", 2, 1, call_activation_backward, want_activation_backward, kind}, { \
    name "_double_backward", 3, 1, call_activation_double_backward,                         \
        want_activation_double_backward, kind                                               \
  }
#define GATE(name, kind)                                                 \
  {name, 2, 1, call_gate, want_gate, kind}, {                            \
    name "_backward", 3, 2, call_gate_backward, want_gate_backward, kind \
  }
#define NONE ((activation_t)-1)

static const flat_op ops[] = {
    {"muladd", 2, 1, call_muladd, want_muladd, NONE},
    {"muladd_backward", 3, 2, call_muladd_backward, want_muladd_backward, NONE},
    {"relu", 1, 1, call_relu, want_relu, NONE},
    {"relu_backward", 2, 1, call_relu_backward, want_relu_backward, NONE},
    {"mish", 1, 1, call_mish, want_mish, NONE},
    {"mish_backward", 2, 1, call_mish_backward, want_mish_backward, NONE},
    {"mish_double_backward", 3, 1, call_mish_double_backward, want_mish_double_backward, NONE},
    ACTIVATION("silu", SILU),
    ACTIVATION("gelu", GELU),
    ACTIVATION("gelu_tanh", GELU_TANH),
    GATE("swiglu", SILU),
    GATE("geglu", GELU),
    GATE("geglu_tanh", GELU_TANH),
};
enum { OPS = sizeof ops / sizeof *ops };

/* One op on one set of inputs, with the expected values of every element. */
typedef struct {
  const flat_op *op;
  dtype_t dtype;
  int64_t numel;
  void *in[INPUTS];
  double *want[OUTPUTS], *slack[OUTPUTS];
} flat_case;

static flat_case new_case(const flat_op *op, dtype_t dtype, int64_t numel) {
  flat_case c = {.op = op, .dtype = dtype, .numel = numel};
  const int specials = op->kind == NONE;
  for (int k = 0; k < INPUTS; ++k)
    c.in[k] = random_elements(dtype, numel, 30, specials, (uint64_t)(100 * k + dtype));
  for (int k = 0; k < OUTPUTS; ++k) c.want[k] = doubles(numel), c.slack[k] = doubles(numel);
  for (int64_t i = 0; i < numel; ++i) {
    flat_element e = {.unit = rounding(dtype), .dtype = dtype, .kind = op->kind};
    for (int k = 0; k < INPUTS; ++k) e.in[k] = element(dtype, c.in[k], i);
    const flat_want want = op->want(&e);
    for (int k = 0; k < OUTPUTS; ++k) c.want[k][i] = want.want[k], c.slack[k][i] = want.slack[k];
  }
  return c;
}

static void free_case(flat_case *c) {
  for (int k = 0; k < INPUTS; ++k) free(c->in[k]);
  for (int k = 0; k < OUTPUTS; ++k) free(c->want[k]), free(c->slack[k]);
}

static void check_output(const flat_case *c, int k, const void *got) {
  for (int64_t i = 0; i < c->numel; ++i) {
    const double value = element(c->dtype, got, i);
    CHECK(close_to(c->dtype, value, c->want[k][i], c->slack[k][i]),
          "%s %s: element %lld of %lld of output %d is %a, not %a (inputs %a %a %a)", c->op->name,
          dtype_names[c->dtype], (long long)i, (long long)c->numel, k, value, c->want[k][i],
          element(c->dtype, c->in[0], i), element(c->dtype, c->in[1], i),
          element(c->dtype, c->in[2], i));
  }
}

/* Runs a case. Buffer j begins offsets[j] elements past a multiple of 64 bytes, inputs first. */
static void run_case(const flat_case *c, const int *offsets) {
  const size_t size = formats[c->dtype].size, bytes = (size_t)c->numel * size;
  const int inputs = c->op->inputs, outputs = c->op->outputs;
  buffer_t in[INPUTS], out[OUTPUTS];
  flat_call call = {.numel = c->numel, .dtype = c->dtype, .kind = c->op->kind};
  for (int k = 0; k < inputs; ++k) {
    in[k] = buffer_copy(c->in[k], bytes, (size_t)offsets[k] * size);
    call.in[k] = in[k].data;
  }
  for (int k = 0; k < outputs; ++k) {
    out[k] = buffer_new(bytes, (size_t)offsets[inputs + k] * size);
    call.out[k] = out[k].data;
  }
  streaming_bytes = -1;
  c->op->call(&call, 0, ceil_div(c->numel, CHUNK));
  CHECK(streaming_bytes == (int64_t)bytes * (inputs + outputs),
        "%s asks whether to stream for %lld bytes", c->op->name, (long long)streaming_bytes);
  for (int k = 0; k < inputs; ++k) buffer_check(&in[k], c->in[k], c->op->name), buffer_free(&in[k]);
  for (int k = 0; k < outputs; ++k) {
    check_output(c, k, out[k].data);
    buffer_check(&out[k], NULL, c->op->name);
    buffer_free(&out[k]);
  }
}

/* Runs muladd with a or b itself as out. */
static void run_in_place(const flat_case *c) {
  for (int k = 0; k < 2; ++k) {
    buffer_t in[2];
    for (int j = 0; j < 2; ++j)
      in[j] = buffer_copy(c->in[j], (size_t)c->numel * formats[c->dtype].size, 0);
    const flat_call call = {
        {in[0].data, in[1].data}, {in[k].data}, c->numel, c->dtype, c->op->kind};
    c->op->call(&call, 0, ceil_div(c->numel, CHUNK));
    check_output(c, 0, in[k].data);
    for (int j = 0; j < 2; ++j)
      buffer_check(&in[j], j == k ? NULL : c->in[j], c->op->name), buffer_free(&in[j]);
  }
}

void test_flat_sizes(uint32_t step) {
  static const int64_t sizes[] = {0, 1, 31, 32, 33, 63, 64, 65, 1023, 1025, 4095, 4096, 4097, 8193};
  (void)step;
  for (int op = 0; op < OPS; ++op) {
    for (int dtype = 0; dtype < DTYPES; ++dtype) {
      for (size_t s = 0; s < sizeof sizes / sizeof *sizes; ++s) {
        flat_case c = new_case(&ops[op], (dtype_t)dtype, sizes[s]);
        for (should_stream = 0; should_stream < 2; ++should_stream) {
          for (int offset = 0; offset < OFFSETS; ++offset) {
            /* With skew 0 all offsets are equal. With skew 1 they differ, so that an aligned output
             * is beside one that is not. This matters only if stores are streamed. */
            for (int skew = 0; skew <= should_stream; ++skew) {
              int offsets[INPUTS + OUTPUTS];
              for (int j = 0; j < INPUTS + OUTPUTS; ++j) offsets[j] = (offset + j * skew) % OFFSETS;
              run_case(&c, offsets);
            }
          }
          if (ops[op].call == call_muladd) run_in_place(&c);
        }
        should_stream = 0;
        free_case(&c);
      }
    }
  }
}

/* Runs the chunks in one range, one by one from the last to the first, and in two ranges. All must
 * give the same bits. One chunk alone must write only this chunk, and an empty range nothing. */
static uint64_t check_ranges(const flat_case *c) {
  const size_t bytes = (size_t)c->numel * formats[c->dtype].size;
  const int64_t chunks = ceil_div(c->numel, CHUNK);
  uint64_t hash = 0;
  void *whole[OUTPUTS] = {0};
  for (int way = 0; way < 4; ++way) {
    buffer_t out[OUTPUTS];
    flat_call call = {.numel = c->numel, .dtype = c->dtype, .kind = c->op->kind};
    for (int k = 0; k < INPUTS; ++k) call.in[k] = c->in[k];
    for (int k = 0; k < c->op->outputs; ++k)
      out[k] = buffer_new(bytes, 0), call.out[k] = out[k].data;
    if (way == 0) c->op->call(&call, 0, chunks);
    for (int64_t chunk = chunks - 1; way == 1 && chunk >= 0; --chunk)
      c->op->call(&call, chunk, chunk + 1);
    if (way == 2) c->op->call(&call, 2, chunks), c->op->call(&call, 0, 2);
    if (way == 3) c->op->call(&call, 2, 3), c->op->call(&call, 1, 1);
    for (int k = 0; k < c->op->outputs; ++k) {
      if (way == 0) {
        hash = hash_elements(hash, c->dtype, out[k].data, c->numel);
        check_output(c, k, out[k].data);
        whole[k] = doubles(c->numel);
        memcpy(whole[k], out[k].data, bytes);
      }
      const size_t chunk = CHUNK * formats[c->dtype].size;
      if (way == 3) buffer_check_part(&out[k], whole[k], 2 * chunk, 3 * chunk, c->op->name);
      CHECK(way == 3 || memcmp(whole[k], out[k].data, bytes) == 0, "%s %s: other bits when split",
            c->op->name, dtype_names[c->dtype]);
      buffer_check(&out[k], NULL, c->op->name);
      buffer_free(&out[k]);
    }
  }
  for (int k = 0; k < OUTPUTS; ++k) free(whole[k]);
  return hash;
}

void test_flat_ranges(uint32_t step) {
  (void)step;
  for (int op = 0; op < OPS; ++op) {
    for (int dtype = 0; dtype < DTYPES; ++dtype) {
      flat_case c = new_case(&ops[op], (dtype_t)dtype, 6 * CHUNK + 1025);
      const uint64_t hash = check_ranges(&c);
      should_stream = 1;
      CHECK(check_ranges(&c) == hash, "%s %s: other bits when streamed", ops[op].name,
            dtype_names[dtype]);
      should_stream = 0;
      printf("bits %s %s %016llx\n", ops[op].name, dtype_names[dtype], (unsigned long long)hash);
      free_case(&c);
    }
  }
}

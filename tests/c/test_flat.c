/* The elementwise ops: sizes around the tail, storage offsets, streaming, guards, and how work is
 * split. */
#include "check.h"
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
} flat_call;

/* The expected values of an element. `slack` bounds the errors of the arithmetic before the result
 * is rounded to its type. `unit` is the error of one rounding. */
typedef struct {
  double want[OUTPUTS], slack[OUTPUTS];
} flat_want;

typedef struct {
  const char *name;
  int inputs, outputs;
  void (*call)(const flat_call *c, int64_t begin, int64_t end);
  flat_want (*want)(const double *in, double unit);
} flat_op;

static void call_muladd(const flat_call *c, int64_t begin, int64_t end) {
  muladd_forward_args args = {c->in[0], c->in[1], c->out[0], muladd_c, c->numel, c->dtype};
  muladd_forward_cpu(begin, end, &args);
}

/* Without fma the product is rounded. The sum always is, to float first if the type has 16 bits. */
static flat_want want_muladd(const double *in, double unit) {
  const double product = in[0] * in[1], want = fma(in[0], in[1], muladd_c);
  return (flat_want){{want}, {unit * (fabs(product) + fabs(want)) + 0x1p-149}};
}

static void call_muladd_backward(const flat_call *c, int64_t begin, int64_t end) {
  muladd_backward_args args = {c->in[0],  c->in[1], c->in[2], c->out[0],
                               c->out[1], c->numel, c->dtype};
  muladd_backward_cpu(begin, end, &args);
}

static flat_want want_muladd_backward(const double *in, double unit) {
  const double a = in[0] * in[2], b = in[0] * in[1];
  return (flat_want){{a, b}, {unit * fabs(a) + 0x1p-149, unit * fabs(b) + 0x1p-149}};
}

static void call_relu(const flat_call *c, int64_t begin, int64_t end) {
  relu_forward_args args = {c->in[0], c->out[0], c->numel, c->dtype};
  relu_forward_cpu(begin, end, &args);
}

static flat_want want_relu(const double *in, double unit) {
  (void)unit;
  return (flat_want){{in[0] < 0 ? 0 : in[0]}, {0}};
}

static void call_relu_backward(const flat_call *c, int64_t begin, int64_t end) {
  relu_backward_args args = {c->in[0], c->in[1], c->out[0], c->numel, c->dtype};
  relu_backward_cpu(begin, end, &args);
}

static flat_want want_relu_backward(const double *in, double unit) {
  (void)unit;
  return (flat_want){{in[1] <= 0 ? 0 : in[0]}, {0}};
}

/* test_mish.c bounds float's errors: 4.3, 9 and 12.5 units of the result; this allows twice as many
 * roundings. Near the zeros of the derivatives, the errors are a few roundings of the terms that
 * cancel, of size |x| exp(x). */
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

static flat_want want_mish(const double *in, double unit) {
  const double want = mish_of(in[0], unit).value;
  return (flat_want){{want}, {mish_slack(in[0], want, unit)}};
}

static void call_mish_backward(const flat_call *c, int64_t begin, int64_t end) {
  mish_backward_args args = {c->in[0], c->in[1], c->out[0], c->numel, c->dtype};
  mish_backward_cpu(begin, end, &args);
}

static flat_want want_mish_backward(const double *in, double unit) {
  const double first = mish_of(in[1], unit).first;
  return (flat_want){{in[0] * first}, {fabs(in[0]) * mish_slack(in[1], first, unit) + 0x1p-149}};
}

static void call_mish_double_backward(const flat_call *c, int64_t begin, int64_t end) {
  mish_double_backward_args args = {c->in[0], c->in[1], c->in[2], c->out[0], c->numel, c->dtype};
  mish_double_backward_cpu(begin, end, &args);
}

static flat_want want_mish_double_backward(const double *in, double unit) {
  const double second = mish_of(in[2], unit).second, grad = in[0] * in[1];
  return (flat_want){{grad * second}, {fabs(grad) * mish_slack(in[2], second, unit) + 0x1p-149}};
}

static const flat_op ops[] = {
    {"muladd", 2, 1, call_muladd, want_muladd},
    {"muladd_backward", 3, 2, call_muladd_backward, want_muladd_backward},
    {"relu", 1, 1, call_relu, want_relu},
    {"relu_backward", 2, 1, call_relu_backward, want_relu_backward},
    {"mish", 1, 1, call_mish, want_mish},
    {"mish_backward", 2, 1, call_mish_backward, want_mish_backward},
    {"mish_double_backward", 3, 1, call_mish_double_backward, want_mish_double_backward},
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
  for (int k = 0; k < INPUTS; ++k)
    c.in[k] = random_elements(dtype, numel, 30, 1, (uint64_t)(100 * k + dtype));
  for (int k = 0; k < OUTPUTS; ++k) c.want[k] = doubles(numel), c.slack[k] = doubles(numel);
  for (int64_t i = 0; i < numel; ++i) {
    double in[INPUTS];
    for (int k = 0; k < INPUTS; ++k) in[k] = element(dtype, c.in[k], i);
    const flat_want want = op->want(in, rounding(dtype));
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

/* Buffer j begins offsets[j] elements past a multiple of 64 bytes. The inputs come first. */
static void run_case(const flat_case *c, const int *offsets) {
  const size_t size = formats[c->dtype].size, bytes = (size_t)c->numel * size;
  const int inputs = c->op->inputs, outputs = c->op->outputs;
  buffer_t in[INPUTS], out[OUTPUTS];
  flat_call call = {.numel = c->numel, .dtype = c->dtype};
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

/* out may be a or b itself. */
static void run_in_place(const flat_case *c) {
  for (int k = 0; k < 2; ++k) {
    buffer_t in[2];
    for (int j = 0; j < 2; ++j)
      in[j] = buffer_copy(c->in[j], (size_t)c->numel * formats[c->dtype].size, 0);
    const flat_call call = {{in[0].data, in[1].data}, {in[k].data}, c->numel, c->dtype};
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
            /* First all alike, then each different: an output that is aligned beside one that is
             * not. */
            for (int skew = 0; skew < 2; ++skew) {
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

/* The chunks in one range, one by one from the last to the first, and in two ranges give the same
 * bits. One chunk alone writes nothing else, and an empty range writes nothing. */
static uint64_t check_ranges(const flat_case *c) {
  const size_t bytes = (size_t)c->numel * formats[c->dtype].size;
  const int64_t chunks = ceil_div(c->numel, CHUNK);
  uint64_t hash = 0;
  void *whole[OUTPUTS] = {0};
  for (int way = 0; way < 4; ++way) {
    buffer_t out[OUTPUTS];
    flat_call call = {.numel = c->numel, .dtype = c->dtype};
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

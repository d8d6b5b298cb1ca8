/* Tests mish and its first and second derivatives over the floats, and over all bfloat16 and
 * float16 numbers. */
#include "check.h"
#include "mish/mish.h"
#include "mish_reference.h"

enum { FORWARD, BACKWARD, DOUBLE_BACKWARD, FUNCTIONS };
static const char *const names[FUNCTIONS] = {"mish", "mish'", "mish''"};

/* Returns whether x is near a zero of the function. There only the absolute error is bounded, not
 * the error in units of the result. */
static int near_zero(int function, double x) {
  if (function == BACKWARD) return x > -1.6 && x < -0.7; /* the zero is -1.1924 */
  if (function == DOUBLE_BACKWARD)
    return (x > -2.9 && x < -1.6) || (x > 0.85 && x < 2.6); /* the zeros are -2.2564 and 1.4906 */
  return 0;
}

/* From 20 on, the derivatives in float and the 16-bit types are 1 and 0, as mish.h says. The
 * reference does the same, which neglects less than 1e-15. */
static mish_t reference(double x) { return x > 20 ? (mish_t){x, 1, 0} : mish_reference(x); }

static void check_reference(void) {
  uint64_t seed = 1;
  for (int i = 0; i < 20000; ++i) {
    const double x = random_between(&seed, i % 2 ? -100 : -4, i % 2 ? 20 : 4);
    const long double w = tanhl(log1pl(expl(x))), u = (1 - w) * (1 + w), s = 1 / (1 + expl(-x));
    const long double want[FUNCTIONS] = {x * w, w + x * s * u,
                                         s * u * (2 + x * (1 - s - 2 * w * s))};
    const mish_t mish = mish_reference(x);
    const double got[FUNCTIONS] = {mish.value, mish.first, mish.second};
    for (int f = 0; f < FUNCTIONS; ++f) {
      /* for x > 0 the subtraction 1 - w cancels most of the digits of long double */
      const long double slack =
          (near_zero(f, x) ? 4e-16L : 4e-15L * fabsl(want[f])) + (x > 0 ? 8e-19L * (1 + x) : 0);
      CHECK(fabsl(got[f] - want[f]) <= slack, "the reference of %s(%a) is %a, not %La", names[f], x,
            got[f], want[f]);
    }
    CHECK(x < 19 || fabsl(want[DOUBLE_BACKWARD]) < 1e-13L, "mish'' is not small at %a", x);
  }
}

/* Runs a kernel. With gradients of 1 the backward kernels return the derivatives themselves. */
static void run(int function, dtype_t dtype, const void *x, const void *ones, void *y, int64_t n) {
  mish_forward_args forward = {x, y, n, dtype};
  mish_backward_args backward = {ones, x, y, n, dtype};
  mish_double_backward_args double_backward = {ones, ones, x, y, n, dtype};
  if (function == FORWARD) mish_forward_cpu(0, ceil_div(n, CHUNK), &forward);
  if (function == BACKWARD) mish_backward_cpu(0, ceil_div(n, CHUNK), &backward);
  if (function == DOUBLE_BACKWARD)
    mish_double_backward_cpu(0, ceil_div(n, CHUNK), &double_backward);
}

typedef struct {
  worst_t normal; /* error in units in the last place of the result */
  worst_t tiny;   /* error in these units of subnormal results */
  worst_t zero;   /* error near a zero of the function, in units of 2^-24 */
  uint64_t hash;
} mish_sweep;

static void add_error(mish_sweep *all, int function, double x, double got, double want) {
  if (isnan(want)) {
    CHECK(isnan(got), "%s(%a) is %a, not NaN", names[function], x, got);
  } else if (isinf(want)) {
    CHECK(got == want, "%s(%a) is %a, not %a", names[function], x, got, want);
  } else if (near_zero(function, x)) {
    worst_add(&all->zero, fabs(got - want) * 0x1p24, x);
  } else {
    const double error = fabs(got - want) / unit_at(&formats[DTYPE_FLOAT32], want);
    worst_add(fabs(want) < 0x1p-126 ? &all->tiny : &all->normal, error, x);
  }
}

static void visit(const float *x, void *context) {
  mish_sweep *all = context;
  float ones[SWEEP], y[FUNCTIONS][SWEEP];
  for (int i = 0; i < SWEEP; ++i) ones[i] = 1;
  for (int f = 0; f < FUNCTIONS; ++f) {
    run(f, DTYPE_FLOAT32, x, ones, y[f], SWEEP);
    all[f].hash = hash_elements(all[f].hash, DTYPE_FLOAT32, y[f], SWEEP);
  }
  for (int i = 0; i < SWEEP; ++i) {
    const mish_t want = reference((double)x[i]);
    add_error(&all[FORWARD], FORWARD, (double)x[i], (double)y[FORWARD][i], want.value);
    add_error(&all[BACKWARD], BACKWARD, (double)x[i], (double)y[BACKWARD][i], want.first);
    add_error(&all[DOUBLE_BACKWARD], DOUBLE_BACKWARD, (double)x[i], (double)y[DOUBLE_BACKWARD][i],
              want.second);
  }
}

void test_mish(uint32_t step) {
  /* The largest errors over all floats, rounded up. They come from a few roundings that add up, in
   * mish at -5.13, in mish' at -1.78 and in mish'' at 8.67. Near -92, where results are below
   * 2^-126, the last multiplication rounds once more. */
  static const struct {
    double normal, tiny, zero;
  } bounds[FUNCTIONS] = {{4.3, 1.4, 0}, {9, 1.4, 1.3}, {12.5, 1.4, 2.2}};
  static const float specials[] = {NAN,   INFINITY,        -INFINITY,        0,
                                   -0.0f, 0x1.fffffep127f, -0x1.fffffep127f, 0x1p-149f};
  mish_sweep all[FUNCTIONS] = {0};
  float first[SWEEP] = {0};
  check_reference();
  memcpy(first, specials, sizeof specials);
  visit(first, all);
  sweep_floats(step, visit, all);
  for (int f = 0; f < FUNCTIONS; ++f) {
    const mish_sweep *m = &all[f];
    printf("%s: %.3f units at %.9g; tiny: %.3f at %.9g; near a zero: %.3f * 2^-24 at %.9g\n",
           names[f], m->normal.error, m->normal.at, m->tiny.error, m->tiny.at, m->zero.error,
           m->zero.at);
    printf("bits %s %016llx\n", names[f], (unsigned long long)m->hash);
  }
  for (int f = 0; f < FUNCTIONS; ++f) {
    CHECK(all[f].normal.error <= bounds[f].normal, "%s: %.3f units off", names[f],
          all[f].normal.error);
    CHECK(all[f].tiny.error <= bounds[f].tiny, "%s: %.3f of the smallest units off", names[f],
          all[f].tiny.error);
    CHECK(all[f].zero.error <= bounds[f].zero, "%s: %.3f * 2^-24 off", names[f], all[f].zero.error);
  }
}

/* Tests all 65536 values of a 16-bit type. Results may be off by the final rounding and by the
 * errors of float arithmetic. */
void test_mish_halves(uint32_t step) {
  enum { ALL = 1 << 16 };
  static uint16_t x[ALL], ones[ALL], y[ALL];
  (void)step;
  for (int d = DTYPE_BFLOAT16; d <= DTYPE_FLOAT16; ++d) {
    const dtype_t dtype = (dtype_t)d;
    for (int i = 0; i < ALL; ++i) x[i] = (uint16_t)i, ones[i] = half_bits(dtype, 1);
    for (int f = 0; f < FUNCTIONS; ++f) {
      worst_t worst = {0};
      run(f, dtype, x, ones, y, ALL);
      for (int i = 0; i < ALL; ++i) {
        const double at = half_value(dtype, x[i]), got = half_value(dtype, y[i]);
        const mish_t mish = reference(at);
        const double want = f == FORWARD ? mish.value : f == BACKWARD ? mish.first : mish.second;
        if (isnan(want) || isinf(want)) {
          CHECK(isnan(want) ? isnan(got) : got == want, "%s(%a) is %a, not %a", names[f], at, got,
                want);
        } else {
          worst_add(&worst, fabs(got - want) / unit_at(&formats[d], want), at);
        }
      }
      printf("%s %s: %.5f units at %.9g\n", names[f], dtype_names[d], worst.error, worst.at);
      printf("bits %s %s %016llx\n", names[f], dtype_names[d],
             (unsigned long long)hash_elements(0, dtype, y, ALL));
      /* Half a unit is the rounding to the type. float16's units are small near the derivatives'
       * zeros. */
      CHECK(worst.error <= 0.56, "%s %s: %.5f units off at %a", names[f], dtype_names[d],
            worst.error, worst.at);
    }
  }
}

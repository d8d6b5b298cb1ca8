/* Compares exp_scaled_float, over the arguments that kernels pass to it, and softmax's functions
 * with libm in double. */
#include "check.h"
#include "common/cpu/level.h"
#include "probe.h"

typedef struct {
  worst_t worst;
  uint64_t hash;
} exp_sweep;

static void visit(const float *sweep, void *context) {
  exp_sweep *all = context;
  float x[SWEEP], y[SWEEP];
  for (int i = 0; i < SWEEP; ++i) x[i] = sweep[i] >= -131 && sweep[i] <= 44 ? sweep[i] : 1;
  exp_args args = {x, y};
  exp_cpu(0, SWEEP, &args);
  for (int i = 0; i < SWEEP; ++i) {
    const double want = exp((double)x[i]) * 0x1p64;
    worst_add(&all->worst, fabs((double)y[i] - want) / unit_at(&formats[DTYPE_FLOAT32], want),
              (double)x[i]);
  }
  all->hash = hash_elements(all->hash, DTYPE_FLOAT32, y, SWEEP);
}

void test_exp(uint32_t step) {
  exp_sweep all = {0};
  sweep_floats(step, visit, &all);
  printf("exp: at most %.4f units, at %a\n", all.worst.error, all.worst.at);
  printf("bits exp %016llx\n", (unsigned long long)all.hash);
  /* The largest error over all floats is 0.986 at -5.86 without fma, and 1.009 at -5.85 with it. */
  CHECK(all.worst.error <= 1.01, "exp: %.4f units off at %a", all.worst.error, all.worst.at);
}

/* ---- the functions of softmax ---- */

typedef struct {
  int function;
  worst_t worst;
  uint64_t hash;
} math_sweep;

/* exp is tested up to 80, which is more than softmax and the gradient of a rounded lse need. */
static void visit_math(const float *sweep, void *context) {
  math_sweep *all = context;
  const int is_tanh = all->function == TANH_FLOAT, is_power = all->function >= EXP2_DEGREE_5;
  const double zero = is_power ? -126 : -88, least = is_power ? 0x1p-125 : 0x1p-126;
  const format_t *format = &formats[DTYPE_FLOAT32];
  float x[SWEEP], y[SWEEP];
  for (int i = 0; i < SWEEP; ++i) x[i] = is_tanh || !(sweep[i] > 80) ? sweep[i] : 1;
  math_args args = {x, y, all->function};
  math_cpu(0, SWEEP, &args);
  for (int i = 0; i < SWEEP; ++i) {
    const double number = (double)x[i];
    const double want = is_tanh ? tanh(number) : is_power ? exp2(number) : exp(number);
    if (isnan(x[i])) {
      CHECK(isnan(y[i]), "function %d of NaN is %a", all->function, (double)y[i]);
    } else if (!is_tanh && want < least) {
      CHECK(y[i] >= 0 && (double)y[i] <= least && (number > zero || y[i] == 0),
            "function %d of %a is %a", all->function, number, (double)y[i]);
    } else if (all->function == EXP_DEGREE_5 || all->function == EXP_DEGREE_4) {
      worst_add(&all->worst, fabs((double)y[i] / want - 1) / (0x1p-24 * (1 + fabs((double)x[i]))),
                (double)x[i]);
    } else if (is_power) {
      worst_add(&all->worst, fabs((double)y[i] / want - 1) / 0x1p-24, number);
    } else {
      worst_add(&all->worst, fabs((double)y[i] - want) / unit_at(format, want), (double)x[i]);
    }
  }
  all->hash = hash_elements(all->hash, DTYPE_FLOAT32, y, SWEEP);
}

/* The bounds of exp and tanh are in units in the last place. The other bounds are relative to the
 * result: in units of 2^-24 * (1 + |x|) for exp with a degree, and in units of 2^-24 for 2^x. */
void test_softmax_math(uint32_t step) {
  static const char *const names[MATH_FUNCTIONS] = {"exp",  "degree 5",      "degree 4",
                                                    "tanh", "2^x, degree 5", "2^x, degree 4"};
  static const double most[MATH_FUNCTIONS] = {1.01, 2.8, 49, 1.6, 3, 49};
  for (int function = 0; function < MATH_FUNCTIONS; ++function) {
    math_sweep all = {.function = function};
    sweep_floats(step, visit_math, &all);
    printf("%s: at most %.4f units, at %a\n", names[function], all.worst.error, all.worst.at);
    printf("bits softmax_math %d %016llx\n", function, (unsigned long long)all.hash);
    CHECK(all.worst.error <= most[function], "%s: %.4f units off at %a", names[function],
          all.worst.error, all.worst.at);
  }
}

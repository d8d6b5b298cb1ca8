/* exp_scaled_float over the range that its callers use, against libm's exp in double. */
#include "check.h"
#include "common/cpu_level.h"
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
  /* Over all floats in the range: 0.986 at -5.86 without fma, 1.009 at -5.85 with it. */
  CHECK(all.worst.error <= 1.01, "exp: %.4f units off at %a", all.worst.error, all.worst.at);
}

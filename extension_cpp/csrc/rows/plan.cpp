// Returns plans to `python -m extension_cpp info --plan` and to the tests, through ctypes.
#include "rows/plan.h"

#include <cstdio>

#define EXPORTED extern "C" __attribute__((visibility("default")))

std::atomic<uint64_t> rows::allowed_shapes{~uint64_t{0}};

EXPORTED void extension_cpp_norm_allow(uint64_t shapes) { rows::allowed_shapes = shapes; }

EXPORTED int extension_cpp_norm_plan_shapes() { return rows::SHAPE_COUNT; }

// Returns the plan on an H100 (SXM) for contiguous tensors, with all gradients and no dropout of x,
// as text "name=value name=value ...". The string is valid until the thread's next call.
EXPORTED const char *extension_cpp_norm_plan(rows::Form form, dtype_t dtype, int is_backward,
                                             int64_t rows, int64_t cols) {
  using namespace rows;
  static thread_local char text[256];
  const Device h100{132, 50 << 20, {132, 66, 30, 15, 7}, allowed_shapes, true};
  const Problem problem{is_backward != 0, form, dtype, rows, cols, true, true, true};
  const Plan plan = pick(problem, h100);
  constexpr const char *HINTS[] = {"none", "evict_first", "evict_last"};
  std::snprintf(text, sizeof text,
                "kernel=%s shape=%d aligned=%s threads_per_row=%d vectors_per_thread=%d "
                "rows_per_cta=%d cluster=%d stages=%d hint=%s",
                name_of(plan.kernel), plan.shape, plan.is_aligned ? "yes" : "no", plan.threads,
                plan.vectors, plan.rows_per_cta, plan.cluster, plan.stages,
                HINTS[static_cast<int>(plan.priority)]);
  return text;
}

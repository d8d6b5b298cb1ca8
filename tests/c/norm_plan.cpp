// norm_plan.h on the host: every row of the table is picked for some problem, a shape holds its
// row, a forward plan does not depend on the number of rows, and no thread of backward adds more
// than MOST_ROWS rows.
#include "norm/norm_plan.h"

#include <cstdio>
#include <set>

using namespace norms;

static bool same_shape(const Plan &a, const Plan &b) {
  return a.kernel == b.kernel && a.shape == b.shape && a.vectors == b.vectors &&
         a.threads == b.threads && a.rows_per_cta == b.rows_per_cta && a.cluster == b.cluster &&
         a.slice == b.slice && a.ahead == b.ahead;
}

// A sentence if the plan is wrong.
static const char *fault(const Problem &p, const Plan &plan) {
  if (plan.kernel == Kernel::GENERIC) return nullptr;
  const int64_t vector = vector_elements(p.dtype), slices = int64_t{plan.cluster} * plan.slice;
  if (slices < p.cols / vector * vector) return "the slices do not hold the row";
  if (int64_t{plan.threads} * plan.vectors * vector < plan.slice) return "the threads are too few";
  if (plan.threads > 32 ? plan.threads % 32 != 0 : (plan.threads & (plan.threads - 1)) != 0) {
    return "the number of threads cannot be summed over";
  }
  if (plan.threads * plan.rows_per_cta > 512) return "a CTA has more than 512 threads";
  if (p.cols % vector != 0 && plan.threads < 2 * (vector - 1)) return "an edge has no thread";
  if (plan.kernel == Kernel::PIPELINE && plan.stages < 3) return "the pipeline needs three stages";
  if (plan.shared_bytes > 216 << 10) return "the stages need too much shared memory";
  if (plan.groups > 0 && ceil_div(p.rows, plan.groups) > MOST_ROWS) return "a group has many rows";
  return nullptr;
}

int main() {
  const Device h100{132, 50 << 20, {132, 66, 30, 15, 7}, ~uint64_t{0}, true};
  const Device old{80, 0, {80, 0, 0, 0, 0}, ~uint64_t{0}, false};
  std::set<int> reached;
  int faults = 0;
  for (const Device &device : {h100, old}) {
    for (const bool is_backward : {false, true}) {
      for (const dtype_t dtype : {DTYPE_FLOAT32, DTYPE_BFLOAT16, DTYPE_FLOAT16}) {
        for (const Form form : {Form::PLAIN, Form::RESIDUAL, Form::DROPOUT_OF_Y}) {
          for (int64_t cols = 1; cols < 140000; cols += cols < 2200 ? 1 : 257) {
            Problem p{is_backward, form, dtype, 1, cols, true, true, true};
            const Plan one = pick(p, device);
            for (const int64_t rows : {1, 2, 7, 133, 1024, 4097, 300000, INT32_MAX}) {
              p.rows = rows;
              const Plan plan = pick(p, device);
              if (plan.shape >= 0) reached.insert(plan.shape);
              const char *wrong = fault(p, plan);
              if (!is_backward && !same_shape(one, plan)) wrong = "forward depends on the rows";
              if (wrong == nullptr) continue;
              if (++faults < 20) {
                std::printf("%s: backward %d, dtype %d, form %d, %ld x %ld\n", wrong, is_backward,
                            dtype, static_cast<int>(form), static_cast<long>(rows),
                            static_cast<long>(cols));
              }
            }
          }
        }
      }
    }
  }
  for (int shape = 0; shape < SHAPE_COUNT; ++shape) {
    if (reached.count(shape) > 0) continue;
    std::printf("row %d of the table (kernel %s) is not reached\n", shape,
                name_of(SHAPES[shape].kernel));
    ++faults;
  }
  return faults == 0 ? 0 : 1;
}

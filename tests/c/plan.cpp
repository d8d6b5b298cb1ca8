// Tests rows/plan.h on the host. Every kernel shape of the table must be picked for some problem,
// and must have room for a row of x. A forward plan must not depend on the number of rows. In
// backward, no thread may add more than MOST_ROWS rows, and these must have the same alignment.
// Problems that the fast kernels do not support must get the generic kernel.
#include "rows/plan.h"

#include <cstdio>
#include <set>

using namespace rows;

static bool same_shape(const Plan &a, const Plan &b) {
  return a.kernel == b.kernel && a.shape == b.shape && a.vectors == b.vectors &&
         a.threads == b.threads && a.rows_per_cta == b.rows_per_cta && a.cluster == b.cluster &&
         a.slice == b.slice && a.ahead == b.ahead;
}

// Returns an error message, or NULL, for the members that only backward plans have. A group adds up
// rows, which must begin at the same offset from a multiple of 16 bytes.
static const char *backward_fault(const Problem &p, const Plan &plan, int64_t vector) {
  if (plan.groups > 0 && p.rows > plan.groups && plan.groups * p.cols % vector != 0) {
    return "a group has rows of several alignments";
  }
  if (plan.kernel == Kernel::PERSISTENT) return nullptr;
  if (!plan.is_aligned) return "the pipeline and the split kernel need aligned rows";
  if (plan.kernel == Kernel::PIPELINE) return nullptr;
  const int64_t columns = plan.column_ctas * COLUMN_VECTORS * vector;
  if (p.wants_parameters ? columns < p.cols : columns != 0) return "wrong number of column CTAs";
  const int64_t row_ctas = plan.ctas - plan.column_ctas;
  if (p.wants_x ? row_ctas * plan.rows_per_cta < p.rows : row_ctas != 0) {
    return "wrong number of row CTAs";
  }
  return nullptr;
}

// Returns an error message if the plan is wrong, or NULL.
static const char *fault(const Problem &p, const Plan &plan) {
  if (plan.kernel == Kernel::GENERIC) return nullptr;
  const int64_t vector = p.dtype == DTYPE_FLOAT32 ? 4 : 8;  // elements in 16 bytes
  const int64_t slices = int64_t{plan.cluster} * plan.slice;
  if (plan.is_aligned != (p.cols % vector == 0)) return "wrong about the alignment";
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
  if (p.is_backward) return backward_fault(p, plan, vector);
  if (plan.ctas / plan.cluster * plan.rows_per_cta < p.rows) return "some rows have no CTA";
  if (plan.kernel == Kernel::ROW) {
    const bool is_dropout = p.form == Form::DROPOUT_OF_Y;
    const bool is_eight = plan.vectors == 8 && p.form != Form::RESIDUAL;
    const bool has_other = plan.vectors == (is_dropout ? 6 : 3) || is_eight;
    if (plan.vectors != 4 && !(plan.is_aligned && has_other))
      return "no kernel has so many vectors";
  }
  // At most a third of the vectors that the threads can hold may be unused.
  const int64_t room = int64_t{plan.threads} * plan.vectors, all = p.cols / vector;
  if (plan.is_aligned && plan.cluster == 1 && all > 16 && 2 * room > 3 * all)
    return "much of the room is idle";
  return nullptr;
}

// Checks the plans of problems that only the generic kernel supports, and of the gradient of x
// alone, which the split kernel computes for any number of rows.
static int special_faults(const Device &device) {
  struct Case {
    Problem p;
    Kernel kernel;
  };
  const Form plain = Form::PLAIN;
  const Case cases[] = {
      {{false, plain, DTYPE_FLOAT64, 8, 64, true, true, true}, Kernel::GENERIC},
      {{false, plain, DTYPE_FLOAT32, 8, 64, false, true, true}, Kernel::GENERIC},
      {{false, plain, DTYPE_FLOAT32, 0, 64, true, true, true}, Kernel::GENERIC},
      {{false, plain, DTYPE_FLOAT32, 8, 0, true, true, true}, Kernel::GENERIC},
      {{false, plain, DTYPE_FLOAT32, 8, (1 << 24) + 8, true, true, true}, Kernel::GENERIC},
      {{false, plain, DTYPE_FLOAT32, 8, 1, true, true, true}, Kernel::ROW},
      {{true, plain, DTYPE_FLOAT32, 8, 1, true, true, true}, Kernel::GENERIC},
      {{true, plain, DTYPE_FLOAT32, 8, 1024, true, true, true}, Kernel::SPLIT},
      {{true, plain, DTYPE_FLOAT32, 8, 1023, true, true, true}, Kernel::PERSISTENT},
      {{true, plain, DTYPE_BFLOAT16, 300000, 1024, true, true, true}, Kernel::PERSISTENT},
      {{true, plain, DTYPE_BFLOAT16, 300000, 1024, true, true, false}, Kernel::SPLIT},
      {{true, plain, DTYPE_BFLOAT16, 300000, 1023, true, true, false}, Kernel::PERSISTENT},
      {{true, plain, DTYPE_BFLOAT16, 8, 1024, true, false, true}, Kernel::SPLIT},
  };
  int faults = 0;
  for (const Case &c : cases) {
    const Plan plan = pick(c.p, device);
    const char *wrong = plan.kernel != c.kernel ? "another kernel" : fault(c.p, plan);
    if (wrong == nullptr) continue;
    std::printf("%s: case %d of special_faults, kernel %s\n", wrong, static_cast<int>(&c - cases),
                name_of(plan.kernel));
    ++faults;
  }
  return faults;
}

int main() {
  const Device h100{132, 50 << 20, {132, 66, 30, 15, 7}, ~uint64_t{0}, true};
  const Device old{80, 0, {80, 0, 0, 0, 0}, ~uint64_t{0}, false};
  std::set<int> reached;
  int faults = special_faults(h100);
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

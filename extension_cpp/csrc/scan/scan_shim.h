// Views of tensors as (outer, length, inner) with any strides, for the scans' shims.
#ifndef EXTENSION_CPP_SCAN_SHIM_H
#define EXTENSION_CPP_SCAN_SHIM_H

#include <vector>

#include "common/op.h"
#include "scan/scan.h"

namespace extension_cpp {

// Splits the dimensions of a dense result at the scanned dimension: dimensions with larger strides
// form `outer`, the others form `inner`. A kernel reads an input in place if a single stride steps
// through each of the two groups (0 if it is broadcast). Otherwise it reads a copy in the result's
// layout, which lives as long as the view.
class ScanView {
 public:
  // `like` is dense and has elements; dim is an index from 0.
  ScanView(const Tensor &like, int64_t dim, bool reverse, dtype_t dtype);

  scan_shape shape() const { return {outer_, length_, inner_, dtype_, nullptr}; }

  // x broadcasts to the result's shape.
  scan_input input(const Tensor &x);
  // y has the result's shape and strides.
  scan_output output(const Tensor &y) const;

  // The same for tensors without the scanned dimension. The kernel writes to the tensor that
  // line_output returns: y itself, or another one if no single stride steps through y's dimensions.
  scan_input line_input(const Tensor &x);
  Tensor line_output(const Tensor &y, scan_output *view) const;

 private:
  bool merge(const std::vector<int64_t> &dims, const std::vector<int64_t> &strides,
             int64_t *stride) const;
  bool describe(const std::vector<int64_t> &strides, scan_input *view) const;
  std::vector<int64_t> strides_of(const Tensor &x, bool has_dim) const;
  Tensor allocate_lines(const Tensor &like) const;

  std::vector<int64_t> sizes_, strides_;   // of the result; a 0-d one has one dimension here
  std::vector<int64_t> outside_, inside_;  // dimensions, the outermost in memory first
  int64_t dim_, outer_ = 1, length_, inner_ = 1;
  bool reverse_;
  dtype_t dtype_;
  std::vector<Tensor> copies_;
};

// A kernel and its helpers: `totals` computes the totals of parts on the CPU, if there are too few
// lines for the threads; `state_bytes` returns the size of the state on CUDA.
template <typename Args>
struct ScanKernels {
  Kernel<Args> kernel;
  void (*totals)(int64_t begin, int64_t end, void *args);
  int64_t (*state_bytes)(const Args *args);
};
#ifdef WITH_CUDA
#define SCAN_KERNELS(name) \
  ScanKernels<name##_args> { KERNEL(name), name##_totals_cpu, name##_state_bytes_cuda }
#else
#define SCAN_KERNELS(name) \
  ScanKernels<name##_args> { KERNEL(name), name##_totals_cpu, nullptr }
#endif

// Chooses the width of a work item and the number of parts of a line. `totals` is NULL.
scan_cpu_plan plan_cpu(const scan_shape &shape, int64_t steps);

// The fewest CPU work items per thread, with `bytes` bytes of traffic per element.
int64_t scan_grain(const scan_shape &shape, const scan_cpu_plan &plan, int64_t bytes);

// `steps` is the number of steps that the CPU kernel scans, and `bytes` the traffic per element.
template <typename Args>
void launch_scan(const char *op, const ScanKernels<Args> &kernels, Args &args, const Tensor &x,
                 int64_t steps, int64_t bytes) {
  if (x.is_cuda()) {
    const int64_t size = kernels.state_bytes(&args);
    Tensor state;
    if (size > 0) {
      state = allocate({ceil_div(size, 8)}, DTYPE_FLOAT64, x);
      args.shape.state = state.mutable_data_ptr();
    }
    return launch(op, kernels.kernel, args, x, 0, 0);
  }
  scan_cpu_plan plan = plan_cpu(args.shape, steps);
  std::vector<double> totals;
  args.shape.state = &plan;
  const int64_t items = scan_items(&args.shape, &plan), grain = scan_grain(args.shape, plan, bytes);
  if (plan.parts > 1) {
    totals.resize(2 * plan.parts * scan_lines(&args.shape));
    plan.totals = totals.data();
    parallel_for(items, grain, kernels.totals, &args);
  }
  launch(op, kernels.kernel, args, x, items, grain);
}

}  // namespace extension_cpp

#endif

// Views of tensors as (outer, length, inner) with any strides, for the shims of the scans.
#ifndef EXTENSION_CPP_SCAN_SHIM_H
#define EXTENSION_CPP_SCAN_SHIM_H

#include <vector>

#include "common/shim/op.h"
#include "scan/scan.h"

namespace extension_cpp::scan {

// Divides the dimensions of a dense result, except the scanned one, into `outer` and `inner`. A
// kernel can then read and write all operands in place. `inner` consists of dimensions with smaller
// strides than the scanned one. A single stride must step through them in each operand (0 if it is
// broadcast). The other dimensions form `outer`, with jumps where they have no single stride.
class ScanView {
 public:
  // `like` must be dense and have elements. dim is an index from 0.
  ScanView(const Tensor &like, int64_t dim, bool reverse, dtype_t dtype);

  // Adds an operand that broadcasts to the result's shape. has_dim: x has the scanned dimension.
  template <typename Operand>
  void add(const Tensor &x, Operand *operand, bool has_dim = true) {
    operands_.push_back({strides_of(x, has_dim), &operand->outer, &operand->inner});
    operand->step = operands_.back().strides[dim_] * (reverse_ ? -1 : 1);
    operand->data = const_cast<void *>(first_step(x, operand->step));
    operand->index = static_cast<int64_t>(operands_.size()) - 1;
  }

  // Sets the strides `outer` and `inner` of all operands, and returns the shape. Call it after all
  // operands have been added. The view owns the jumps of the shape.
  scan_shape divide();

 private:
  struct Operand {
    std::vector<int64_t> strides;
    int64_t *outer, *inner;
  };

  std::vector<int64_t> strides_of(const Tensor &x, bool has_dim) const;
  const void *first_step(const Tensor &x, int64_t step) const;
  bool has_one_stride(int64_t outside, int64_t inside) const;

  std::vector<int64_t> sizes_;  // sizes of the result; a 0-d result has one dimension here
  std::vector<int64_t> order_;  // all dimensions but the scanned one, the outermost in memory first
  size_t outside_ = 0;          // how many of order_ have larger strides than the scanned one
  int64_t dim_;
  bool reverse_;
  dtype_t dtype_;
  std::vector<Operand> operands_;
  std::vector<scan_jump> jumps_;
};

// A kernel and its helpers. `totals` computes the totals of parts on the CPU, if there are fewer
// work items than threads. `state_bytes` returns the size of the state on CUDA.
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

// Returns the smallest number of CPU work items per thread. `bytes` is the traffic per element.
int64_t scan_grain(const scan_shape &shape, const scan_cpu_plan &plan, int64_t bytes);

// Launches a scan. `steps` is how many steps the CPU scans, `bytes` the traffic per element.
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

}  // namespace extension_cpp::scan

#endif

/* kernel_template: y[r] = mean_c(x[r,c]^2)
 * kernel_template_backward: grad_x[r,c] = grad_out[r] * 2 x[r,c] / cols
 *   x, grad_x    (rows, cols)  contiguous, one dtype, no overlap
 *   y, grad_out  (rows)        the same dtype
 * With rows = 0 nothing is written. With cols = 0, y is NaN. NaN propagates. Results are computed
 * in float (double for float64). A row is always summed in the same order, so results are
 * deterministic, for any number of threads and rows. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  void *y;
  int64_t rows;
  int64_t cols;
  dtype_t dtype;
} kernel_template_forward_args;

typedef struct {
  const void *grad_out;
  const void *x;
  void *grad_x;
  int64_t rows;
  int64_t cols;
  dtype_t dtype;
} kernel_template_backward_args;

/* CPU kernels. They process rows [begin, end). `args` points to the argument struct. */
void kernel_template_forward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers for the current device. They take a cudaStream_t and return a cudaError_t. */
int kernel_template_forward_cuda(const kernel_template_forward_args *args, void *stream);
int kernel_template_backward_cuda(const kernel_template_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

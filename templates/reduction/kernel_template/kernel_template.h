/* kernel_template: y[r,c] = x[r,c] * rstd[r] * weight[c], rstd[r] = 1 / sqrt(mean_c(x[r,c]^2) +
 * eps)
 * kernel_template_backward, with g[r,c] = grad_out[r,c] * weight[c]:
 *   grad_x[r,c] = rstd[r] * (g[r,c] - x[r,c] * rstd[r]^2 * mean_c(g[r,c] * x[r,c]))
 *   grad_weight[c] = sum_r(grad_out[r,c] * x[r,c] * rstd[r])
 *   x, y, grad_out, grad_x  (rows, cols)  contiguous, one type, no overlap
 *   weight, grad_weight     (cols)        the same type; weight may be NULL, which stands for ones
 *   rstd                    (rows)        float, for float64 double; a result, which backward reads
 *   grad_x, grad_weight     either may be NULL: it is not computed
 *   partial                 (parts, wide_cols)  scratch; NULL if grad_weight is NULL
 * With rows = 0, grad_weight is 0 and nothing else is written. With cols = 0, rstd is NaN. NaN
 * propagates. Results are computed in float (double for float64). For grad_weight, the rows of each
 * part (part_rows rows) are summed in double, and these sums are added in order. Only the shape
 * determines the parts. Results are run-to-run deterministic, for any number of threads. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  const void *weight;
  void *y;
  void *rstd;
  double eps;
  int64_t rows;
  int64_t cols;
  dtype_t dtype;
} kernel_template_forward_args;

typedef struct {
  const void *grad_out;
  const void *x;
  const void *weight;
  const void *rstd;
  void *grad_x;
  void *grad_weight;
  double *partial;
  int64_t rows;
  int64_t cols;
  int64_t part_rows;
  int64_t parts;     /* ceil(rows / part_rows) */
  int64_t wide_cols; /* cols, rounded up to whole blocks of 32 (common/cpu/block.h) */
  dtype_t dtype;
} kernel_template_backward_args;

/* CPU kernels. Forward processes rows [begin, end), and backward parts [begin, end) of the rows.
 * After backward, kernel_template_grad_weight_cpu processes blocks [begin, end) of 32 columns.
 * `args` points to the argument struct. */
void kernel_template_forward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_backward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_grad_weight_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers for the current device. They take a cudaStream_t and return a cudaError_t. */
int kernel_template_forward_cuda(const kernel_template_forward_args *args, void *stream);
int kernel_template_backward_cuda(const kernel_template_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

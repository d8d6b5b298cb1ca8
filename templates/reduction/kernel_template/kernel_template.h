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
 * rows = 0 gives grad_weight = 0 and writes nothing else; cols = 0 gives rstd = NaN. NaN
 * propagates. Computes in float (float64: double). grad_weight: each part of part_rows rows is
 * summed in double, and then the parts are added in order. The shape alone fixes the parts:
 * run-to-run deterministic, at any number of threads. */
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

/* CPU: rows [begin, end); parts [begin, end); then, for grad_weight, blocks [begin, end) of 32
 * columns. `args` points to the kernel's argument struct. */
void kernel_template_forward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_backward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_grad_weight_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */
int kernel_template_forward_cuda(const kernel_template_forward_args *args, void *stream);
int kernel_template_backward_cuda(const kernel_template_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

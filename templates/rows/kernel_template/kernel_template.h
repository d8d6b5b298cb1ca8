/* kernel_template: y[r] = mean_c(x[r,c]^2)
 * kernel_template_backward: grad_x[r,c] = grad_out[r] * 2 x[r,c] / cols
 *   x, grad_x    (rows, cols)  contiguous, one type, no overlap
 *   y, grad_out  (rows)        the same type
 * rows = 0 writes nothing; cols = 0 gives y = NaN. NaN propagates. Computes in float (float64:
 * double). A row's sum is taken in one order: deterministic, at any number of threads and rows. */
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

/* CPU: rows [begin, end). args points to the struct. */
void kernel_template_forward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */
int kernel_template_forward_cuda(const kernel_template_forward_args *args, void *stream);
int kernel_template_backward_cuda(const kernel_template_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

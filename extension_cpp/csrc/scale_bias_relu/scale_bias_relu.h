/* scale_bias_relu: y[r,c] = relu(x[r,c] * scale + bias[c])
 * scale_bias_relu_backward, with g[r,c] = grad_out[r,c] where y[r,c] > 0 or y[r,c] is NaN, else 0:
 *   grad_x[r,c] = g[r,c] * scale,  grad_bias[c] = sum_r g[r,c]
 *   x, y, grad_out, grad_x  (rows, cols)  contiguous, one dtype, no overlap
 *   bias, grad_bias         (cols)        the same dtype
 *   grad_x, grad_bias       either may be NULL, if it is not wanted
 *   partial                 scratch of column_sums_partial_cpu() or _cuda() doubles; NULL if
 *                           grad_bias is NULL
 * With rows = 0, grad_bias is 0 and nothing else is written. NaN propagates. x * scale + bias is
 * one fma in float (double for float64). Backward computes this fma in the same way, so that it
 * finds the same elements positive as forward. For grad_bias, each float lane sums a range of rows,
 * and these partial sums are added in order in double. Only the shape determines the ranges.
 * Results are run-to-run deterministic, for any number of threads. */
#ifndef EXTENSION_CPP_SCALE_BIAS_RELU_H
#define EXTENSION_CPP_SCALE_BIAS_RELU_H

#include "common/column_sums.h"
#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  const void *bias;
  void *y;
  double scale;
  int64_t rows;
  int64_t cols;
  dtype_t dtype;
} scale_bias_relu_forward_args;

typedef struct {
  const void *grad_out;
  const void *x;
  const void *bias;
  void *grad_x;
  void *grad_bias;
  double *partial;
  double scale;
  int64_t rows;
  int64_t cols;
  dtype_t dtype;
} scale_bias_relu_backward_args;

/* CPU kernels. `args` points to the argument struct. Forward processes chunks [begin, end) of CHUNK
 * elements. Backward processes work items [begin, end), one per part and tile
 * (common/column_sums.h). After backward, scale_bias_relu_grad_bias_cpu processes tiles [begin,
 * end) of columns. */
void scale_bias_relu_forward_cpu(int64_t begin, int64_t end, void *args);
void scale_bias_relu_backward_cpu(int64_t begin, int64_t end, void *args);
void scale_bias_relu_grad_bias_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers. `stream` is a cudaStream_t. The functions return a cudaError_t. */
int scale_bias_relu_forward_cuda(const scale_bias_relu_forward_args *args, void *stream);
int scale_bias_relu_backward_cuda(const scale_bias_relu_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

/* scale_bias_relu: y[r,c] = relu(x[r,c] * scale + bias[c])
 * scale_bias_relu_backward, with g[r,c] = grad_out[r,c] where y[r,c] > 0 or y[r,c] is NaN, else 0:
 *   grad_x[r,c] = g[r,c] * scale,  grad_bias[c] = sum_r g[r,c]
 *   x, y, grad_out, grad_x  (rows, cols)  contiguous, one type, no overlap
 *   bias, grad_bias         (cols)        the same type
 *   grad_x, grad_bias       either may be NULL: it is not computed
 *   partial                 scratch of column_sums_partial_cpu() or _cuda() doubles; NULL if
 *                           grad_bias is NULL
 * rows = 0 gives grad_bias = 0 and writes nothing else. NaN propagates. x * scale + bias is one fma
 * in float (float64: double). Backward computes it in the same way, so that it has forward's mask.
 * grad_bias: float lanes sum parts of the rows, and the parts are added in order in double. The
 * shape alone fixes the parts. Run-to-run deterministic, for any number of threads. */
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

/* CPU; args points to the struct. Forward: chunks [begin, end) of CHUNK of the rows * cols
 * elements. Backward: items [begin, end) of parts * tiles (common/column_sums.h); then, for
 * grad_bias, tiles [begin, end). */
void scale_bias_relu_forward_cpu(int64_t begin, int64_t end, void *args);
void scale_bias_relu_backward_cpu(int64_t begin, int64_t end, void *args);
void scale_bias_relu_grad_bias_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t. Returns a cudaError_t. */
int scale_bias_relu_forward_cuda(const scale_bias_relu_forward_args *args, void *stream);
int scale_bias_relu_backward_cuda(const scale_bias_relu_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

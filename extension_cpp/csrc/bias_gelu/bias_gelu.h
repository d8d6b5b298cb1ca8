/* bias_gelu: y[r,c] = gelu(x[r,c] + bias[c]), gelu or gelu_tanh (activation.h)
 * bias_gelu_backward: grad_x[r,c] = grad_out[r,c] gelu'(x[r,c] + bias[c]),
 *   grad_bias[c] = sum_r grad_x[r,c]
 *   x, y, grad_out, grad_x  (rows, cols)  contiguous, one dtype, no overlap
 *   bias, grad_bias         (cols)        the same dtype
 *   grad_x, grad_bias       either may be NULL, if it is not wanted
 *   partial                 scratch of column_sums_partial_cpu() or _cuda() doubles; NULL if
 *                           grad_bias is NULL
 *   kind                    GELU or GELU_TANH
 * With rows = 0, grad_bias is 0 and nothing else is written. NaN propagates. Results are computed
 * in float (double for float64) and rounded once. grad_bias sums unrounded terms: each float lane
 * sums a range of rows, and these partial sums are added in order in double. Only the shape
 * determines the ranges. Results are run-to-run deterministic, for any number of threads. */
#ifndef EXTENSION_CPP_BIAS_GELU_H
#define EXTENSION_CPP_BIAS_GELU_H

#include "activation/activation.h"
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
  int64_t rows;
  int64_t cols;
  activation_t kind;
  dtype_t dtype;
} bias_gelu_forward_args;

typedef struct {
  const void *grad_out;
  const void *x;
  const void *bias;
  void *grad_x;
  void *grad_bias;
  double *partial;
  int64_t rows;
  int64_t cols;
  activation_t kind;
  dtype_t dtype;
} bias_gelu_backward_args;

/* CPU kernels. `args` points to the argument struct. Forward processes chunks [begin, end) of CHUNK
 * elements. Backward processes work items [begin, end), one per part and tile
 * (common/column_sums.h). After backward, bias_gelu_grad_bias_cpu processes tiles [begin, end) of
 * columns. */
void bias_gelu_forward_cpu(int64_t begin, int64_t end, void *args);
void bias_gelu_backward_cpu(int64_t begin, int64_t end, void *args);
void bias_gelu_grad_bias_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers. `stream` is a cudaStream_t. The functions return a cudaError_t. */
int bias_gelu_forward_cuda(const bias_gelu_forward_args *args, void *stream);
int bias_gelu_backward_cuda(const bias_gelu_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

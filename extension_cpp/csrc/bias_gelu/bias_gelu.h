/* bias_gelu: y[r,c] = gelu(x[r,c] + bias[c]), gelu or gelu_tanh (activation.h)
 * bias_gelu_backward: grad_x[r,c] = grad_out[r,c] gelu'(x[r,c] + bias[c]),
 *   grad_bias[c] = sum_r grad_x[r,c]
 *   x, y, grad_out, grad_x  (rows, cols)  contiguous, one type, no overlap
 *   bias, grad_bias         (cols)        the same type
 *   grad_x, grad_bias       either may be NULL: it is not computed
 *   partial                 scratch of column_sums_partial_cpu() or _cuda() doubles; NULL if
 *                           grad_bias is NULL
 *   kind                    GELU or GELU_TANH
 * rows = 0 gives grad_bias = 0 and writes nothing else. NaN propagates. Computed in float (float64:
 * double); a result is rounded to the type once, and grad_bias sums terms that are not rounded.
 * grad_bias: float lanes sum parts of the rows, and the parts are added in order in double. The
 * shape alone fixes the parts. Run-to-run deterministic, for any number of threads. */
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

/* CPU; args points to the struct. Forward: chunks [begin, end) of CHUNK of the rows * cols
 * elements. Backward: items [begin, end) of parts * tiles (common/column_sums.h); then, for
 * grad_bias, tiles [begin, end). */
void bias_gelu_forward_cpu(int64_t begin, int64_t end, void *args);
void bias_gelu_backward_cpu(int64_t begin, int64_t end, void *args);
void bias_gelu_grad_bias_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t. Returns a cudaError_t. */
int bias_gelu_forward_cuda(const bias_gelu_forward_args *args, void *stream);
int bias_gelu_backward_cuda(const bias_gelu_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

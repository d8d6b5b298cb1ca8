/* mish: y[i] = x tanh(softplus(x)), x = x[i]
 * mish_backward: grad_x[i] = grad_out[i] mish'(x)
 * mish_double_backward: grad_x[i] = grad_grad_x[i] grad_out[i] mish''(x)
 *   every pointer  (numel), dense, all of one dtype and one order of elements, no overlap
 * With numel = 0 nothing is written. NaN propagates. mish(-inf) is NaN, as in PyTorch. Results are
 * deterministic.
 *
 * With e = exp(x) and D = e^2 + 2 e + 2:
 *   tanh(log(1 + e)) = ((1 + e)^2 - 1) / ((1 + e)^2 + 1) = e (e + 2) / D
 *   mish'  = e ((e + 2) D + 4 x (1 + e)) / D^2
 *   mish'' = 4 e (1 + e) / D^2 * (2 + x (D - 2 e^2 (e + 2)) / (D (1 + e)))
 * Each formula takes one exp, and terms cancel only near the zeros of mish' and mish''. For x above
 * MISH_LINEAR, mish(x) equals x to the last bit, and its derivatives are 1 and 0. For x below
 * MISH_ZERO all three are 0. Source: Misra 2019, arXiv:1908.08681. */
#ifndef EXTENSION_CPP_MISH_H
#define EXTENSION_CPP_MISH_H

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  void *y;
  int64_t numel;
  dtype_t dtype;
} mish_forward_args;

typedef struct {
  const void *grad_out;
  const void *x;
  void *grad_x;
  int64_t numel;
  dtype_t dtype;
} mish_backward_args;

typedef struct {
  const void *grad_grad_x;
  const void *grad_out;
  const void *x;
  void *grad_x;
  int64_t numel;
  dtype_t dtype;
} mish_double_backward_args;

/* CPU kernels for chunks [begin, end) of CHUNK elements. `args` points to the argument struct. */
void mish_forward_cpu(int64_t begin, int64_t end, void *args);
void mish_backward_cpu(int64_t begin, int64_t end, void *args);
void mish_double_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers. `stream` is a cudaStream_t. The functions return a cudaError_t. */
int mish_forward_cuda(const mish_forward_args *args, void *stream);
int mish_backward_cuda(const mish_backward_args *args, void *stream);
int mish_double_backward_cuda(const mish_double_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

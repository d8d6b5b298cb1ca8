/* silu(x) = x s(x), with the logistic function s(u) = 1 / (1 + exp(-u))
 * gelu(x) = x Phi(x), with Phi(x) = erfc(-x / sqrt 2) / 2
 * gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 = x s(u), u = c x + d x^3,
 *   c = 2 sqrt(2 / pi), d = 0.044715 c
 * activation_forward: y[i] = f(x[i]), where f is one of these
 * activation_backward: grad_x[i] = grad_out[i] f'(x[i])
 * activation_double_backward: grad_x[i] = grad_grad_x[i] grad_out[i] f''(x[i])
 *   every pointer  (numel), dense, all of one dtype and one order of elements, no overlap
 * With numel = 0 nothing is written. NaN propagates. f(-inf) is NaN, as in PyTorch. Results are
 * deterministic.
 *
 * With S = s(1 - s), and phi(x) = exp(-x^2 / 2) / sqrt(2 pi):
 *   silu' = s + x S                  silu'' = S (2 + x (1 - 2 s))
 *   gelu' = Phi + x phi              gelu'' = phi (2 - x^2)
 *   gelu_tanh' = s + x S u'          gelu_tanh'' = S (2 u' + x u'' + x u'^2 (1 - 2 s))
 * The arithmetic is in activation_cpu_math.h and activation_math.cuh.
 * Source: Hendrycks and Gimpel 2016, arXiv:1606.08415 (gelu, silu). */
#ifndef EXTENSION_CPP_ACTIVATION_H
#define EXTENSION_CPP_ACTIVATION_H

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { SILU, GELU, GELU_TANH } activation_t;

typedef struct {
  const void *x;
  void *y;
  int64_t numel;
  activation_t kind;
  dtype_t dtype;
} activation_forward_args;

typedef struct {
  const void *grad_out;
  const void *x;
  void *grad_x;
  int64_t numel;
  activation_t kind;
  dtype_t dtype;
} activation_backward_args;

typedef struct {
  const void *grad_grad_x;
  const void *grad_out;
  const void *x;
  void *grad_x;
  int64_t numel;
  activation_t kind;
  dtype_t dtype;
} activation_double_backward_args;

/* CPU kernels for chunks [begin, end) of CHUNK elements. `args` points to the argument struct. */
void activation_forward_cpu(int64_t begin, int64_t end, void *args);
void activation_backward_cpu(int64_t begin, int64_t end, void *args);
void activation_double_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers. `stream` is a cudaStream_t. The functions return a cudaError_t. */
int activation_forward_cuda(const activation_forward_args *args, void *stream);
int activation_backward_cuda(const activation_backward_args *args, void *stream);
int activation_double_backward_cuda(const activation_double_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

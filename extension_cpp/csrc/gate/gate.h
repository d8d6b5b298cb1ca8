/* swiglu, geglu: y[r,c] = f(gate[r,c]) up[r,c], f = silu, gelu or gelu_tanh (activation.h)
 * backward: grad_gate[r,c] = grad_out[r,c] up[r,c] f'(gate[r,c])
 *           grad_up[r,c] = grad_out[r,c] f(gate[r,c])
 *   gate, up, grad_out     (rows, cols)  stride 1 within a row; each has its own stride between
 *                                        rows, at least cols, so they may be halves of one tensor
 *   y, grad_gate, grad_up  (rows, cols)  contiguous
 *   all of one dtype, no overlap
 * rows, cols >= 1. Results are computed in float (double for float64) and rounded once. NaN
 * propagates. Results are deterministic. Source: Shazeer 2020, arXiv:2002.05202. */
#ifndef EXTENSION_CPP_GATE_H
#define EXTENSION_CPP_GATE_H

#include "activation/activation.h"
#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *gate;
  const void *up;
  void *y;
  int64_t gate_stride;
  int64_t up_stride;
  int64_t rows;
  int64_t cols;
  activation_t kind;
  dtype_t dtype;
} gate_forward_args;

typedef struct {
  const void *grad_out;
  const void *gate;
  const void *up;
  void *grad_gate;
  void *grad_up;
  int64_t grad_stride;
  int64_t gate_stride;
  int64_t up_stride;
  int64_t rows;
  int64_t cols;
  activation_t kind;
  dtype_t dtype;
} gate_backward_args;

/* CPU kernels for chunks [begin, end) of CHUNK elements. `args` points to the argument struct. */
void gate_forward_cpu(int64_t begin, int64_t end, void *args);
void gate_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers. `stream` is a cudaStream_t. The functions return a cudaError_t. */
int gate_forward_cuda(const gate_forward_args *args, void *stream);
int gate_backward_cuda(const gate_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

/* muladd: out[i] = a[i] * b[i] + c
 * muladd_backward: grad_a[i] = grad_out[i] * b[i], grad_b[i] = grad_out[i] * a[i]
 *   every pointer  (numel), dense, all of one dtype and one order of elements; out may be a or b
 *                  itself, no other overlap
 *   c              any value; converted to float (double for float64), not to a half type
 * With numel = 0 nothing is written. NaN propagates. Forward is one fma in float (double for
 * float64). x86's baseline instruction set has no fma and rounds the product, too. Results are
 * deterministic. */
#ifndef EXTENSION_CPP_MULADD_H
#define EXTENSION_CPP_MULADD_H

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *a;
  const void *b;
  void *out;
  double c;
  int64_t numel;
  dtype_t dtype;
} muladd_forward_args;

typedef struct {
  const void *grad_out;
  const void *a;
  const void *b;
  void *grad_a;
  void *grad_b;
  int64_t numel;
  dtype_t dtype;
} muladd_backward_args;

/* CPU kernels for chunks [begin, end) of CHUNK elements. `args` points to the argument struct. */
void muladd_forward_cpu(int64_t begin, int64_t end, void *args);
void muladd_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers. `stream` is a cudaStream_t. The functions return a cudaError_t. */
int muladd_forward_cuda(const muladd_forward_args *args, void *stream);
int muladd_backward_cuda(const muladd_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

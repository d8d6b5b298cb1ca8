/* relu: y[i] = x[i] < 0 ? 0 : x[i]
 * relu_backward: grad_x[i] = y[i] <= 0 ? 0 : grad_out[i]
 *   every pointer  (numel), dense, all of one dtype and one order of elements, no overlap
 * With numel = 0 nothing is written. Where x is NaN, y is NaN and grad_x is grad_out, as in
 * PyTorch. Results are deterministic. */
#ifndef EXTENSION_CPP_RELU_H
#define EXTENSION_CPP_RELU_H

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
} relu_forward_args;

typedef struct {
  const void *grad_out;
  const void *y;
  void *grad_x;
  int64_t numel;
  dtype_t dtype;
} relu_backward_args;

/* CPU kernels for chunks [begin, end) of CHUNK elements. `args` points to the argument struct. */
void relu_forward_cpu(int64_t begin, int64_t end, void *args);
void relu_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers. `stream` is a cudaStream_t. The functions return a cudaError_t. */
int relu_forward_cuda(const relu_forward_args *args, void *stream);
int relu_backward_cuda(const relu_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

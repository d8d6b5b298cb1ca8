/* kernel_template: y[i] = x[i]^2
 * kernel_template_backward: grad_x[i] = grad_out[i] * 2 x[i]
 *   every pointer  (numel), dense, all of one dtype and one order of elements, no overlap
 * With numel = 0 nothing is written. NaN propagates. Results are computed in float (double for
 * float64). They are deterministic. */
#pragma once

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
} kernel_template_forward_args;

typedef struct {
  const void *grad_out;
  const void *x;
  void *grad_x;
  int64_t numel;
  dtype_t dtype;
} kernel_template_backward_args;

/* CPU kernels for chunks [begin, end) of CHUNK elements. `args` points to the argument struct. */
void kernel_template_forward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers for the current device. They take a cudaStream_t and return a cudaError_t. */
int kernel_template_forward_cuda(const kernel_template_forward_args *args, void *stream);
int kernel_template_backward_cuda(const kernel_template_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

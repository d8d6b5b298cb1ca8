/* kernel_template: momentum_out[i] = beta * momentum[i] + grad[i]
 *                  param_out[i] = param[i] - lr * momentum_out[i], before that is rounded
 *   param, grad, momentum    (numel)  one type
 *   param_out, momentum_out  (numel)  the same type; no overlap with each other
 * Each that is written may be one that is read, and in place it is: a thread reads element i of all
 * three before it writes one. It shares no part of its memory with another.
 * All have the same order of elements in memory, without gaps. numel = 0 is not allowed. NaN
 * propagates. Computes in float (float64: double); both results are rounded once. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *param;
  const void *grad;
  const void *momentum;
  void *param_out;
  void *momentum_out;
  double lr;
  double beta;
  int64_t numel;
  dtype_t dtype;
} kernel_template_args;

/* CPU: chunks [begin, end) of CHUNK elements. `args` points to the kernel's argument struct. */
void kernel_template_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */
int kernel_template_cuda(const kernel_template_args *args, void *stream);

#ifdef __cplusplus
}
#endif

/* kernel_template: momentum_out[i] = beta * momentum[i] + grad[i]
 *                  param_out[i] = param[i] - lr * momentum_out[i] (not yet rounded)
 *   param, grad, momentum    (numel)  one type
 *   param_out, momentum_out  (numel)  the same type; no overlap with each other
 * An output may be the same tensor as an input, and in the in-place operator it is: a thread reads
 * element i of all three inputs before it writes element i of an output. Otherwise an output
 * overlaps no other tensor. All tensors have the same order of elements in memory, without gaps.
 * numel = 0 is not allowed. NaN propagates. Results are computed in float (double for float64) and
 * rounded once. */
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

/* CPU kernel for chunks [begin, end) of CHUNK elements. `args` points to the argument struct. */
void kernel_template_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launcher for the current device. It takes a cudaStream_t and returns a cudaError_t. */
int kernel_template_cuda(const kernel_template_args *args, void *stream);

#ifdef __cplusplus
}
#endif

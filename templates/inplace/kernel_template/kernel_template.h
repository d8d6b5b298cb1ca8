/* kernel_template: momentum[i] = beta * momentum[i] + grad[i]
 *                  param[i] = param[i] - lr * momentum[i], with the new momentum, not yet rounded
 *   param, momentum  (numel)  one type; read and written; no overlap
 *   grad             (numel)  the same type; may be momentum or param itself
 * All have the same order of elements in memory, without gaps. numel = 0 is not allowed. NaN
 * propagates. Computes in float (float64: double); both results are rounded once. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  void *param;
  const void *grad;
  void *momentum;
  double lr;
  double beta;
  int64_t numel;
  dtype_t dtype;
} kernel_template_args;

/* CPU: chunks [begin, end) of CHUNK elements. args points to the struct. */
void kernel_template_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */
int kernel_template_cuda(const kernel_template_args *args, void *stream);

#ifdef __cplusplus
}
#endif

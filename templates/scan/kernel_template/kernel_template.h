/* kernel_template:          y[r,k] = decay * y[r,k-1] + x[r,k]                    y[r,-1] = 0
 * kernel_template_backward: grad_x[r,k] = decay * grad_x[r,k+1] + grad_out[r,k]   the same,
 * reversed
 *   x, y    (rows, steps)  contiguous, one type, no overlap
 *   decay   from 0 to 1
 *   reverse whether the scan goes from the last step to the first
 * rows = 0 or steps = 0 writes nothing. NaN and infinities spread to later steps only; an infinity
 * may become NaN there, where a power of decay is 0. Computes in float or better (float64: double)
 * and rounds once per element. A row's sums are taken in one order: deterministic, at any number of
 * threads and rows. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  void *y;
  int64_t rows;
  int64_t steps;
  double decay;
  int reverse;
  dtype_t dtype;
} kernel_template_args;

/* CPU: rows [begin, end). args points to the struct. */
void kernel_template_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */
int kernel_template_cuda(const kernel_template_args *args, void *stream);

#ifdef __cplusplus
}
#endif

/* kernel_template:          y[r,k] = decay * y[r,k-1] + x[r,k]                    y[r,-1] = 0
 * kernel_template_backward: grad_x[r,k] = decay * grad_x[r,k+1] + grad_out[r,k]   the same,
 * reversed
 *   x, y    (rows, steps)  contiguous, one dtype, no overlap
 *   decay   from 0 to 1
 *   reverse whether the scan goes from the last step to the first
 * With rows = 0 or steps = 0 nothing is written. NaN and infinities spread only to later steps. In
 * a later step, an infinity may become NaN if a power of decay is 0. Results are computed in float
 * (double for float64) or better, and rounded once per element. A row is always summed in the same
 * order, so results are deterministic, for any number of threads and rows. */
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

/* CPU kernel. It processes rows [begin, end). `args` points to the argument struct. */
void kernel_template_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launcher for the current device. It takes a cudaStream_t and returns a cudaError_t. */
int kernel_template_cuda(const kernel_template_args *args, void *stream);

#ifdef __cplusplus
}
#endif

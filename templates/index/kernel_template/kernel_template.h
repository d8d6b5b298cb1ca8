/* kernel_template: out[i,c] = x[index[i],c]
 * kernel_template_backward: grad_x[r,c] = sum of grad_out[i,c] over all i with index[i] = r
 *   x, grad_x      (rows, cols)   contiguous, one dtype, no overlap
 *   out, grad_out  (count, cols)  the same dtype
 *   index          (count)        int64, contiguous
 *   ends, order    (rows), (count)  scratch of backward on the CPU; NULL on the GPU
 * An index that is negative, or rows or more, reads no memory. For such an index, the row of out is
 * NaN, and the row of grad_out is left out. (On the CPU the shim rejects such an index.) rows = 0
 * is allowed if count = 0, and on the GPU. The shim returns early if a result is empty. NaN
 * propagates. Each row of grad_x adds its terms in the order of the index, in double, without
 * atomics, and is rounded once. Results are run-to-run deterministic, for any number of threads. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  const int64_t *index;
  void *out;
  int64_t rows;
  int64_t count;
  int64_t cols;
  dtype_t dtype;
} kernel_template_forward_args;

typedef struct {
  const void *grad_out;
  const int64_t *index;
  void *grad_x;
  int64_t *ends;  /* row r of grad_x adds rows order[ends[r-1]] to order[ends[r]-1] of grad_out */
  int64_t *order; /* the positions in the index, sorted by its values */
  int64_t rows;
  int64_t count;
  int64_t cols;
  dtype_t dtype;
} kernel_template_backward_args;

/* CPU kernels. `args` points to the argument struct. Forward processes rows [begin, end) of out.
 * kernel_template_sort_cpu has a single work item, which computes ends and order. Backward then
 * processes rows of grad_x. */
void kernel_template_forward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_sort_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers for the current device. They take a cudaStream_t and return a cudaError_t. */
int kernel_template_forward_cuda(const kernel_template_forward_args *args, void *stream);
int kernel_template_backward_cuda(const kernel_template_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

/* kernel_template: out[i,c] = x[index[i],c]
 * kernel_template_backward: grad_x[r,c] = sum of grad_out[i,c] over all i with index[i] = r
 *   x, grad_x      (rows, cols)   contiguous, one type, no overlap
 *   out, grad_out  (count, cols)  the same type
 *   index          (count)        int64, contiguous
 *   ends, order    (rows), (count)  scratch of backward on the CPU; on the GPU NULL
 * An index that is negative, or rows or more, reads no memory: its row of out is NaN, and its row
 * of grad_out is left out. (The shim refuses it on the CPU.) rows = 0 is allowed, if count = 0 or
 * on the GPU; the shim returns early if a result is empty. NaN propagates. Each row of grad_x adds
 * its terms in the order of the index, in double, and is rounded once: run-to-run deterministic, at
 * any number of threads, without atomics. */
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
  int64_t *ends;  /* row r adds the rows order[ends[r-1]] to order[ends[r]-1] of grad_out */
  int64_t *order; /* the places in the index, sorted by its numbers */
  int64_t rows;
  int64_t count;
  int64_t cols;
  dtype_t dtype;
} kernel_template_backward_args;

/* CPU: rows [begin, end) of out; the single work item 0, which fills ends and order; then rows
 * [begin, end) of grad_x. args points to the struct. */
void kernel_template_forward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_sort_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */
int kernel_template_forward_cuda(const kernel_template_forward_args *args, void *stream);
int kernel_template_backward_cuda(const kernel_template_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

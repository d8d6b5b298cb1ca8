/* kernel_template: out[s,c] = sum of x[r,c] over the rows r of segment s
 * kernel_template_backward: grad_x[r,c] = grad_out[s,c], s the segment of row r
 *   x, grad_x      (rows, cols)      contiguous, one dtype, no overlap
 *   out, grad_out  (segments, cols)  the same dtype
 *   offsets        (segments + 1)    int64, contiguous
 * Segment s consists of the rows from offsets[s] to below offsets[s+1]. An empty segment sums to 0.
 * Rows before the first and after the last segment belong to none, and their gradient is 0. On the
 * CPU the shim rejects offsets that decrease, are negative or exceed rows. On the GPU such offsets
 * read no memory outside the tensors, but it is undefined which rows belong to which segment. The
 * shim returns early if a result is empty. NaN propagates. A sum adds its rows in their order, in
 * double, and is rounded once. Results are run-to-run deterministic, for any number of threads. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  const int64_t *offsets;
  void *out;
  int64_t rows;
  int64_t segments;
  int64_t cols;
  dtype_t dtype;
} kernel_template_forward_args;

typedef struct {
  const void *grad_out;
  const int64_t *offsets;
  void *grad_x;
  int64_t rows;
  int64_t segments;
  int64_t cols;
  dtype_t dtype;
} kernel_template_backward_args;

/* CPU kernels. Forward processes segments [begin, end), and backward rows [begin, end). `args`
 * points to the argument struct. */
void kernel_template_forward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers for the current device. They take a cudaStream_t and return a cudaError_t. */
int kernel_template_forward_cuda(const kernel_template_forward_args *args, void *stream);
int kernel_template_backward_cuda(const kernel_template_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

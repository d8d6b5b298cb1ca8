/* kernel_template: out[s,c] = sum of x[r,c] over the rows r of segment s
 * kernel_template_backward: grad_x[r,c] = grad_out[s,c], s the segment of row r
 *   x, grad_x      (rows, cols)      contiguous, one type, no overlap
 *   out, grad_out  (segments, cols)  the same type
 *   offsets        (segments + 1)    int64, contiguous
 * Segment s has the rows from offsets[s] to below offsets[s+1]. An empty one sums to 0. Rows before
 * the first and behind the last segment belong to none: their gradient is 0. Offsets that fall, are
 * negative or more than rows are read as the nearest that are right, and so read no other memory;
 * which rows belong to which segment is then not defined. (The shim refuses them on the CPU.) The
 * shim returns early if a result is empty. NaN propagates. A sum adds its rows in their order, in
 * double, and is rounded once: run-to-run deterministic, at any number of threads. */
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

/* CPU: segments [begin, end); rows [begin, end). args points to the struct. */
void kernel_template_forward_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_backward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */
int kernel_template_forward_cuda(const kernel_template_forward_args *args, void *stream);
int kernel_template_backward_cuda(const kernel_template_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

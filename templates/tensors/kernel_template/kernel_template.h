/* kernel_template: out[i] = x[i] * y[i], for each tensor of three lists
 *   x, y, out  (numel) for each tensor, dense, all of one type; one element order for each i
 * out overlaps no input. A tensor without elements is not in the table, and the table is not empty.
 * The work is cut into chunks of CHUNK elements; no chunk has elements of two tensors, so that a
 * result does not depend on what else is in the list. NaN propagates. Computes in float (float64:
 * double), and rounds once. Deterministic. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One row of the table. */
typedef struct {
  const void *x;
  const void *y;
  void *out;
  int64_t numel;
  int64_t first_chunk; /* how many chunks the tensors before have */
} kernel_template_tensor;

typedef struct {
  const kernel_template_tensor *tensors; /* (count) in the memory of the CPU, on a GPU, too */
  int64_t count;
  int64_t chunks; /* of all tensors */
  dtype_t dtype;
} kernel_template_args;

/* CPU: chunks [begin, end). `args` points to the kernel's argument struct. */
void kernel_template_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t of the current device, which holds the tensors. The table is read before
 * the call returns. Returns a cudaError_t. */
int kernel_template_cuda(const kernel_template_args *args, void *stream);

#ifdef __cplusplus
}
#endif

/* kernel_template: out[i] = x[i] * y[i], for each tensor of three lists
 *   x, y, out (numel) for each tensor, dense, one type; x, y and out have one element order
 * out overlaps no input. A tensor without elements is not in the table, and the table is not empty.
 * The work is cut into chunks of CHUNK elements; no chunk has elements of two tensors, so that a
 * result does not depend on the other tensors in the list. NaN propagates. Results are computed in
 * float (double for float64), and rounded once. They are deterministic. */
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
  int64_t first_chunk; /* number of chunks of all earlier tensors */
} kernel_template_tensor;

typedef struct {
  const kernel_template_tensor *tensors; /* (count), in CPU memory even for CUDA tensors */
  int64_t count;
  int64_t chunks; /* of all tensors */
  dtype_t dtype;
} kernel_template_args;

/* CPU kernel for chunks [begin, end) of all tensors. `args` points to the argument struct. */
void kernel_template_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launcher for the current device, which holds the tensors. `stream` is a cudaStream_t. The
 * table is read before the call returns. The function returns a cudaError_t. */
int kernel_template_cuda(const kernel_template_args *args, void *stream);

#ifdef __cplusplus
}
#endif

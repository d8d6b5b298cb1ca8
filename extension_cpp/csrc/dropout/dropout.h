/* dropout: y[i] = x[i] / (1 - p) if element i is kept, else 0
 *   x, y  (numel)  contiguous, one dtype, no overlap
 *   seed  (1)      int64, in the device's memory: the host never reads it
 * 0 < p <= 1. Only the seed and i decide whether element i is kept (common/philox.h). The mask is
 * therefore not stored, and backward is the same op applied to grad_out. A dropped element is 0,
 * even if x is NaN. A kept element is scaled in float (double for float64). With numel = 0 nothing
 * is written. Results are deterministic.
 * Source: Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov 2014, JMLR 15. */
#ifndef EXTENSION_CPP_DROPOUT_H
#define EXTENSION_CPP_DROPOUT_H

#include "common/dtype.h"
#include "common/philox.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  void *y;
  dropout_t dropout;
  int64_t numel;
  dtype_t dtype;
} dropout_forward_args;

/* CPU kernel for chunks [begin, end) of CHUNK elements. `args` points to the argument struct. */
void dropout_forward_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launcher. `stream` is a cudaStream_t. The function returns a cudaError_t. */
int dropout_forward_cuda(const dropout_forward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

/* rotary_embedding of q and k. Of each row x of `cols` elements, the first `rotated` go in pairs
 * (i, j) through the matrix of their token, and the others are copied:
 *   y[i] = cos[i] * x[i] - sin[i] * x[j]    transposed:  y[i] = cos[i] * x[i] + sin[j] * x[j]
 *   y[j] = cos[j] * x[j] + sin[j] * x[i]                 y[j] = cos[j] * x[j] - sin[i] * x[i]
 * with j = i + rotated / 2, or interleaved: i even, j = i + 1. Backward is the transposed matrix.
 * tensors  q and k, each (batch, heads, tokens, cols) of type dtype, unit stride in cols and any
 *   other strides, at any address valid for that type; heads may be 0, and is each tensor's own.
 *   y has strides of its own, where no two elements share memory, and does not overlap x.
 * cos, sin  (batch, tokens, rotated), unit stride in rotated, stride 0 over batch where all share
 *   them; of type dtype, or float with wide_factors, which only 16-bit types may have.
 * rotated is even and at most cols. Any size may exceed 2^31; a call with no element is not
 * launched. Computed in float (float64: double): a product is rounded, and then the result. No
 * element depends on another pair, so that results are deterministic and batch-invariant.
 * Source: Su et al. 2021, arXiv:2104.09864, in the layouts of Hugging Face transformers. */
#ifndef EXTENSION_CPP_ROTARY_EMBEDDING_H
#define EXTENSION_CPP_ROTARY_EMBEDDING_H

#include <stdint.h>

#include "common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Strides in elements. */
typedef struct {
  int64_t batch, head, token;
} rotary_strides;

typedef struct {
  const void *x;
  void *y;
  int64_t heads;
  rotary_strides x_strides, y_strides;
} rotary_tensor;

typedef struct {
  rotary_tensor tensors[2];
  const void *cos;
  const void *sin;
  int64_t cos_batch_stride, cos_token_stride, sin_batch_stride, sin_token_stride;
  int64_t batch, tokens, cols, rotated;
  dtype_t dtype;
  int wide_factors, interleaved, transposed;
} rotary_embedding_args;

/* On the CPU an item is a row: those of q come first, then those of k. */
static inline int64_t rotary_rows(const rotary_embedding_args *args, int tensor) {
  return args->batch * args->tensors[tensor].heads * args->tokens;
}

void rotary_embedding_cpu(int64_t begin, int64_t end, void *args);

int rotary_embedding_cuda(const rotary_embedding_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

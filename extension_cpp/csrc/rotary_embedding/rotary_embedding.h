/* rotary_embedding of q and k. In each row x of `cols` elements, the first `rotated` elements are
 * rotated in pairs (i, j) by the angles of the row's token, and the others are copied:
 *   y[i] = cos[i] * x[i] - sin[i] * x[j]    transposed:  y[i] = cos[i] * x[i] + sin[j] * x[j]
 *   y[j] = cos[j] * x[j] + sin[j] * x[i]                 y[j] = cos[j] * x[j] - sin[i] * x[i]
 * with j = i + rotated / 2. If interleaved, i is even and j = i + 1. Backward is `transposed`.
 *   tensors   q and k, each (batch, heads, tokens, cols) of type dtype, with stride 1 in cols and
 *             any other strides, at any address valid for that type. q and k have their own numbers
 *             of heads, which may be 0. y has its own strides. No two elements of y overlap, and
 *             none overlaps x.
 *   cos, sin  (batch, tokens, rotated), with stride 1 in rotated, and batch stride 0 if all
 *             sequences share them. Of type dtype, or float if wide_factors (16-bit dtypes only).
 * rotated is even and at most cols. Any size may exceed 2^31. A call without elements is not
 * launched. Results are computed in float (double for float64): the product with sin is rounded,
 * the rest is one fma. A result depends only on its own pair, so it is deterministic and
 * batch-invariant. Source: Su et al. 2021, arXiv:2104.09864, in the layouts of Hugging Face
 * transformers. */
#ifndef EXTENSION_CPP_ROTARY_EMBEDDING_H
#define EXTENSION_CPP_ROTARY_EMBEDDING_H

#include <stdint.h>

#include "common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Strides are in elements. */
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

/* Returns the number of rows of a tensor. CPU work items are rows: those of q, then those of k. */
static inline int64_t rotary_rows(const rotary_embedding_args *args, int tensor) {
  return args->batch * args->tensors[tensor].heads * args->tokens;
}

void rotary_embedding_cpu(int64_t begin, int64_t end, void *args);

int rotary_embedding_cuda(const rotary_embedding_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

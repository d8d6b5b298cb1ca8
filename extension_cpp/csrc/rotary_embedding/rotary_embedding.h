/* rotary_embedding of q and k. In each row x of `cols` elements, the matrix of the row's token
 * multiplies the first `rotated` in pairs (i, j), and the others are copied:
 *   y[i] = cos[i] * x[i] - sin[i] * x[j]    transposed:  y[i] = cos[i] * x[i] + sin[j] * x[j]
 *   y[j] = cos[j] * x[j] + sin[j] * x[i]                 y[j] = cos[j] * x[j] - sin[i] * x[i]
 * with j = i + rotated / 2; if interleaved, i is even and j = i + 1. Backward is `transposed`.
 * tensors  q and k, each (batch, heads, tokens, cols) of type dtype, unit stride in cols and any
 *   other strides, at any address valid for that type. q and k have their own heads, which may be
 *   0. y has its own strides; no two of its elements overlap, and none overlaps x.
 * cos, sin  (batch, tokens, rotated), unit stride in rotated, batch stride 0 if all sequences share
 *   them; of type dtype, or float if wide_factors, which only 16-bit dtypes may have.
 * rotated is even and at most cols. Any size may exceed 2^31; a call with no element is not
 * launched. Computed in float (float64: double): the product with sin is rounded, the rest is one
 * fma. A result depends on its own pair alone: deterministic and batch-invariant.
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

/* The rows of a tensor. On the CPU an item is a row: first the rows of q, then the rows of k. */
static inline int64_t rotary_rows(const rotary_embedding_args *args, int tensor) {
  return args->batch * args->tensors[tensor].heads * args->tokens;
}

void rotary_embedding_cpu(int64_t begin, int64_t end, void *args);

int rotary_embedding_cuda(const rotary_embedding_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

/* layer_norm and rms_norm, plain or fused with a residual addition and dropout. Forward:
 *   xhat[r,c] = (x[r,c] - mean[r]) * rstd[r],  y = xhat * weight[c] + bias[c],
 *   mean[r] = mean_c(x),  rstd[r] = 1 / sqrt(mean_c((x - mean)^2) + eps)
 * rms_norm has mean = 0 and no bias. Backward, with g = grad_out * weight[c]:
 *   grad_x = rstd[r] * (g - mean_c(g) - xhat * mean_c(g * xhat))    rms_norm: without mean_c(g)
 *   grad_weight[c] = sum_r(grad_out * xhat),  grad_bias[c] = sum_r(grad_out)
 * A call may use one of two fused variants:
 *   residual   sum = residual + dropout_x(x), rounded to x's type, replaces x above. In backward, x
 *              is sum, and grad_x is the gradient of sum. It includes grad_sum, the gradient of the
 *              result sum. grad_dropped = dropout_x(grad_x) is the gradient of forward's x.
 *   dropout_y  y = dropout_y(norm(x)). Backward first applies dropout_y to grad_out.
 * Dropout of element r * cols + c uses the random bits of that index (common/philox.h). Outputs
 * must not overlap inputs. With rows = 0, the weight gradients are 0 and nothing else is written.
 * With cols = 0, mean and rstd are NaN. NaN propagates. Accumulation is in float (double for
 * float64). Results are run-to-run deterministic for any number of threads: the order of the sums
 * over rows depends only on the shape, the device and which gradients are computed. Sources: Ba,
 * Kiros, Hinton 2016, arXiv:1607.06450; Zhang, Sennrich 2019, arXiv:1910.07467. */
#ifndef EXTENSION_CPP_NORM_H
#define EXTENSION_CPP_NORM_H

#include <stdbool.h>
#include <stddef.h>

#include "common/dtype.h"
#include "common/philox.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Arguments of forward. Shapes are in parentheses. Matrices have dtype `dtype` and stride 1 within
 * a row. Where a comment names no stride between rows, the matrix is contiguous. Strides are in
 * elements. Statistics are float (double for float64). Weights have dtype weight_dtype. */
typedef struct {
  const void *x;      /* (rows, cols), stride x_stride */
  const void *weight; /* (cols); NULL means ones. CPU: output of norm_widen_cpu, never NULL */
  const void *bias;   /* (cols); NULL means zeros. CPU: like weight. Unused in rms_norm */
  void *y;            /* (rows, cols) */
  void *mean;         /* (rows); NULL if it is not wanted, and always in rms_norm */
  void *rstd;         /* (rows); NULL if it is not wanted */
  double eps;
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  dtype_t dtype;
  dtype_t weight_dtype;
  bool centered;        /* true for layer_norm, false for rms_norm */
  const void *residual; /* (rows, cols), stride residual_stride; NULL if there is none */
  void *sum;            /* (rows, cols); NULL without a residual */
  int64_t residual_stride;
  dropout_t dropout_x; /* used only with a residual */
  dropout_t dropout_y; /* used only in layer_norm without a residual */
} norm_forward_args;

/* Arguments of backward. grad_x, grad_weight and grad_bias are NULL if they are not computed. */
typedef struct {
  const void *grad_out; /* (rows, cols), stride grad_out_stride */
  const void *x;        /* (rows, cols), stride x_stride */
  const void *mean;     /* (rows); NULL in rms_norm */
  const void *rstd;     /* (rows) */
  const void *weight;   /* as in forward */
  void *grad_x;         /* (rows, cols) */
  void *grad_weight;    /* (cols) */
  void *grad_bias;      /* (cols) */
  void *partial;        /* scratch of norm_partial_cpu() or _cuda() bytes; NULL if that is 0 */
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  int64_t grad_out_stride;
  dtype_t dtype;
  dtype_t weight_dtype;
  const void *grad_sum; /* (rows, cols), stride grad_sum_stride; may be NULL; only with grad_x */
  int64_t grad_sum_stride;
  void *grad_dropped; /* (rows, cols); NULL if it is not computed; only with grad_x */
  dropout_t dropout_x;
  dropout_t dropout_y;
} norm_backward_args;

/* ---- CPU: each function processes a range of work items; args points to its struct ---- */

/* Arguments of norm_widen_cpu, which converts weight or bias to the format that the row kernels
 * read. The result is float (double for float64), padded with zeros so that a block may begin at
 * any column. For bfloat16 all even columns come before all odd ones (norm_cpu_kernel.h). */
typedef struct {
  const void *source; /* (cols), of weight_dtype; NULL sets every column to `value` */
  void *wide;         /* (norm_wide_cols(cols)) */
  double value;
  int64_t cols;
  dtype_t dtype;
  dtype_t weight_dtype;
} norm_widen_args;

enum { NORM_BLOCK = 32 };
static inline int64_t norm_wide_cols(int64_t cols) {
  return NORM_BLOCK * (ceil_div(cols, NORM_BLOCK) + 1);
}

/* Backward divides the rows into ranges (parts), and the columns of the weight gradients into
 * tiles. Both divisions depend only on the shape. There are at most 256 parts. If the sums of all
 * parts would exceed 16 MiB (21 MiB for float64), there are fewer parts, but for this reason never
 * fewer than 8. Adding up a part costs as much as several rows. A part therefore has at least 64
 * rows. In wide rows it has at least 2^18 elements instead, but never fewer than 8 rows. */
enum { NORM_TILE = 2048 };
static inline int64_t norm_part_rows(int64_t rows, int64_t cols) {
  const int64_t wide = norm_wide_cols(cols), fitting = (16 << 20) / (24 * wide);
  const int64_t parts = fitting < 8 ? 8 : fitting > 256 ? 256 : fitting;
  const int64_t part_rows = ceil_div(rows, parts), wide_rows = (1 << 18) / wide;
  const int64_t least = wide_rows < 8 ? 8 : wide_rows > 64 ? 64 : wide_rows;
  return part_rows < least ? least : part_rows;
}

static inline int64_t norm_parts(int64_t rows, int64_t cols) {
  return ceil_div(rows, norm_part_rows(rows, cols));
}

static inline int64_t norm_weight_gradients(const norm_backward_args *args) {
  return (args->grad_weight != NULL) + (args->grad_bias != NULL);
}

/* Returns the bytes of scratch memory per part. Each gradient needs a padded row of sums in double,
 * and one in the accumulation type for the most recent rows. */
static inline int64_t norm_partial_part(const norm_backward_args *args) {
  const int64_t bytes = 8 + (args->dtype == DTYPE_FLOAT64 ? 8 : 4);
  return norm_weight_gradients(args) * norm_wide_cols(args->cols) * bytes;
}

static inline int64_t norm_partial_cpu(const norm_backward_args *args) {
  return norm_parts(args->rows, args->cols) * norm_partial_part(args);
}

/* [begin, end) is a range of
 *  columns in norm_widen_cpu, where both are multiples of NORM_BLOCK or end is cols,
 *  rows in norm_forward_cpu,
 *  parts in norm_backward_cpu,
 *  tiles in norm_grad_weight_cpu, which runs after all parts and only for weight gradients. */
void norm_widen_cpu(int64_t begin, int64_t end, void *args);
void norm_forward_cpu(int64_t begin, int64_t end, void *args);
void norm_backward_cpu(int64_t begin, int64_t end, void *args);
void norm_grad_weight_cpu(int64_t begin, int64_t end, void *args);

/* ---- CUDA: `stream` is a cudaStream_t of the current device. The int results are cudaError_t.
 * ---- */

/* Returns the number of bytes of scratch memory. The number depends on the alignment of the
 * pointers, so all pointers except `partial` must be set before the call. */
int64_t norm_partial_cuda(const norm_backward_args *args);
int norm_forward_cuda(const norm_forward_args *args, void *stream);
int norm_backward_cuda(const norm_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

/* layer_norm and rms_norm, plain or fused with a residual addition and dropout. Forward:
 *   xhat[r,c] = (x[r,c] - mean[r]) * rstd[r],  y = xhat * weight[c] + bias[c],
 *   mean[r] = mean_c(x),  rstd[r] = 1 / sqrt(mean_c((x - mean)^2) + eps)
 * rms_norm has mean = 0 and no bias. Backward, with g = grad_out * weight[c]:
 *   grad_x = rstd[r] * (g - mean_c(g) - xhat * mean_c(g * xhat))    rms_norm: without mean_c(g)
 *   grad_weight[c] = sum_r(grad_out * xhat),  grad_bias[c] = sum_r(grad_out)
 * Fused forms; a call has at most one:
 *   residual   sum = residual + dropout_x(x), rounded to x's type, replaces x above. In backward x
 *              is sum, grad_x is the gradient of sum and includes grad_sum, the gradient of the
 *              result sum, and grad_dropped = dropout_x(grad_x) is the gradient of x.
 *   dropout_y  y = dropout_y(norm(x)); backward applies dropout_y to grad_out first.
 * Dropout of element r * cols + c uses the bits of that index (common/philox.h). Outputs must
 * not overlap inputs. rows = 0 gives weight gradients of 0 and writes nothing else; cols = 0 gives
 * mean and rstd of NaN. NaN propagates. Accumulates in float (float64: double). Run-to-run
 * deterministic for any number of threads: the order of the sums over rows depends only on the
 * shape, the device and which gradients are computed. Sources: Ba, Kiros, Hinton 2016,
 * arXiv:1607.06450; Zhang, Sennrich 2019, arXiv:1910.07467. */
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

/* Shapes are in parentheses. Matrices have x's type `dtype` and unit stride within a row. A stride
 * is the distance from row to row in elements; a matrix without one is contiguous. Statistics are
 * float (float64: double). Weights are of type weight_dtype. */
typedef struct {
  const void *x;      /* (rows, cols), x_stride */
  const void *weight; /* (cols); NULL: ones. CPU: output of norm_widen_cpu, never NULL */
  const void *bias;   /* (cols); NULL: zeros. CPU: like weight. Not read by rms_norm */
  void *y;            /* (rows, cols) */
  void *mean;         /* (rows); NULL: not written. NULL for rms_norm */
  void *rstd;         /* (rows); NULL: not written */
  double eps;
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  dtype_t dtype;
  dtype_t weight_dtype;
  bool centered;        /* true: layer_norm; false: rms_norm */
  const void *residual; /* (rows, cols), residual_stride; NULL: none */
  void *sum;            /* (rows, cols); NULL without residual */
  int64_t residual_stride;
  dropout_t dropout_x; /* only with residual */
  dropout_t dropout_y; /* only layer_norm without residual */
} norm_forward_args;

/* grad_x, grad_weight and grad_bias: NULL if not computed. */
typedef struct {
  const void *grad_out; /* (rows, cols), grad_out_stride */
  const void *x;        /* (rows, cols), x_stride */
  const void *mean;     /* (rows); NULL: rms_norm */
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
  const void *grad_sum; /* (rows, cols), grad_sum_stride; NULL: none. Only with grad_x */
  int64_t grad_sum_stride;
  void *grad_dropped; /* (rows, cols); NULL: not computed. Only with grad_x */
  dropout_t dropout_x;
  dropout_t dropout_y;
} norm_backward_args;

/* ---- CPU: each function takes a range of work items, and args points to its struct ---- */

/* Converts weight or bias to the format of the row kernels: float (float64: double), padded with
 * zeros so that a block may begin at any column. For bfloat16, even columns precede odd ones
 * (norm_cpu_kernel.h). */
typedef struct {
  const void *source; /* (cols), of weight_dtype; NULL: every column gets `value` */
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

/* Backward splits the rows into parts, and the columns of the weight gradients into tiles. Both
 * splits depend on the shape alone. There are at most 256 parts, fewer if their sums exceed 16 MiB
 * (float64: 21 MiB), but up to 8 in any case. Adding up a part costs as much as several rows, so a
 * part has at least 64 rows, or 2^18 elements of wide rows, but never fewer than 8 rows. */
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

/* Bytes of scratch per part: for each gradient, a padded row of sums in double and one in ACC,
 * which collects the most recent rows. */
static inline int64_t norm_partial_part(const norm_backward_args *args) {
  const int64_t bytes = 8 + (args->dtype == DTYPE_FLOAT64 ? 8 : 4);
  return norm_weight_gradients(args) * norm_wide_cols(args->cols) * bytes;
}

static inline int64_t norm_partial_cpu(const norm_backward_args *args) {
  return norm_parts(args->rows, args->cols) * norm_partial_part(args);
}

/* What [begin, end) counts. norm_widen_cpu: columns (begin and end are multiples of NORM_BLOCK, or
 * end is cols). norm_forward_cpu: rows. norm_backward_cpu: parts. norm_grad_weight_cpu: tiles; it
 * runs after all parts, and only for weight gradients. */
void norm_widen_cpu(int64_t begin, int64_t end, void *args);
void norm_forward_cpu(int64_t begin, int64_t end, void *args);
void norm_backward_cpu(int64_t begin, int64_t end, void *args);
void norm_grad_weight_cpu(int64_t begin, int64_t end, void *args);

/* ---- CUDA: `stream` is a cudaStream_t of the current device, which holds the tensors; the int
 * results are cudaError_t ---- */

/* Bytes of scratch. Reads the alignment of the pointers: set all but `partial` before. */
int64_t norm_partial_cuda(const norm_backward_args *args);
int norm_forward_cuda(const norm_forward_args *args, void *stream);
int norm_backward_cuda(const norm_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

/* layer_norm and rms_norm, which share their kernels, alone or with what stands beside them in a model.
 * With xhat[r,c] = (x[r,c] - mean[r]) * rstd[r]:
 *   y = xhat * weight[c] + bias[c],  mean[r] = mean_c(x),  rstd[r] = 1 / sqrt(mean_c((x - mean)^2) + eps)
 *   rms_norm: mean[r] = 0 and no bias
 * norm_backward, with g = grad_out * weight[c]:
 *   grad_x = rstd[r] * (g - mean_c(g) - xhat * mean_c(g * xhat))    rms_norm: without mean_c(g)
 *   grad_weight[c] = sum_r(grad_out * xhat),  grad_bias[c] = sum_r(grad_out)
 *   x, grad_out                    (rows, cols)  one type; unit stride in a row, rows x_stride, grad_out_stride apart
 *   y, grad_x                      (rows, cols)  contiguous, of x's type, no overlap with the inputs
 *   weight, bias, their gradients  (cols)        of weight_dtype; NULL weight is ones, NULL bias zeros
 *   mean, rstd                     (rows)        float, for float64 double; NULL mean in backward: rms_norm
 *   mean and rstd in forward                     both may be NULL: not written; rms_norm's mean is
 *   grad_x, grad_weight, grad_bias               each may be NULL: not computed
 * rows = 0 gives weight gradients of 0 and else writes nothing; cols = 0 gives mean and rstd of NaN. NaN propagates. Computes
 * in float (float64: double). The variance takes two passes over the row, or one over distances from a number that lies near the
 * mean: on the CPU where that loses no digits, on the GPU for half types. The rows are summed in an order that the shape, the
 * machine and which gradients are wanted fix: bit for bit the same in every run, at any number of threads.
 * Fused forms, of which one call has at most one:
 *   residual   sum = residual + dropout_x(x), rounded to x's type, takes the place of x above and in backward, where grad_sum,
 *              the gradient of sum itself, is added to grad_x, and grad_dropped = dropout_x(grad_x) is the gradient of x
 *   dropout_y  y is dropped after the norm; in backward grad_out is, before all else
 * Their element r * cols + c has the bits of that index (common/philox.h).
 * Sources: Ba, Kiros and Hinton 2016, arXiv:1607.06450; Zhang and Sennrich 2019, arXiv:1910.07467. */
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

typedef struct {
  const void *x;
  const void *weight; /* CPU: what norm_widen_cpu made */
  const void *bias;   /* CPU: likewise; not read by rms_norm */
  void *y;
  void *mean;
  void *rstd;
  double eps;
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  dtype_t dtype;
  dtype_t weight_dtype;
  bool centered;        /* layer_norm; else rms_norm */
  const void *residual; /* (rows, cols) like x, rows residual_stride apart; NULL: none */
  void *sum;            /* (rows, cols) contiguous; NULL without residual */
  int64_t residual_stride;
  dropout_t dropout_x; /* only with residual */
  dropout_t dropout_y; /* only of layer_norm, without residual */
} norm_forward_args;

typedef struct {
  const void *grad_out;
  const void *x;
  const void *mean;
  const void *rstd;
  const void *weight; /* CPU: what norm_widen_cpu made */
  void *grad_x;
  void *grad_weight;
  void *grad_bias;
  void *
      partial; /* scratch, norm_partial_cpu() or _cuda() bytes of it; NULL if 0, or both weight gradients are NULL */
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  int64_t grad_out_stride;
  dtype_t dtype;
  dtype_t weight_dtype;
  const void *grad_sum; /* (rows, cols), rows grad_sum_stride apart; NULL: none */
  int64_t grad_sum_stride;
  void *grad_dropped; /* (rows, cols) contiguous, only with grad_x; NULL: not computed */
  dropout_t dropout_x;
  dropout_t dropout_y;
} norm_backward_args;

/* ---- CPU ---- */

/* weight or bias as the row kernels read it: widened to float (float64: double), a NULL source as `value` in every column,
 * padded with zeros, so that a block may begin at any column; for bfloat16 the even columns first (norm_cpu.c says why). */
typedef struct {
  const void *source; /* (cols), of weight_dtype */
  void *wide;         /* norm_wide_cols(cols) of them */
  double value;
  int64_t cols;
  dtype_t dtype;
  dtype_t weight_dtype;
} norm_widen_args;

enum { NORM_BLOCK = 32 };
static inline int64_t norm_wide_cols(int64_t cols) {
  return NORM_BLOCK * (ceil_div(cols, NORM_BLOCK) + 1);
}
void norm_widen_cpu(int64_t begin, int64_t end,
                    void *args); /* columns [begin, end), multiples of 32 or cols */

/* Forward: rows [begin, end). Backward: parts [begin, end) of the rows; then, for the weight gradients, tiles [begin, end) of
 * NORM_TILE columns. args points to the struct. */
enum { NORM_TILE = 2048 };

/* At most 256 parts, and 8 or as many as 16 MiB of scratch hold (in float64 a third more). A part's sums cost as much as some rows,
 * so it has 64 rows or more, but of wide rows, which may be few, as many as have 2^18 elements, and 8 at least. */
static inline int64_t norm_part_rows(int64_t rows, int64_t cols) {
  int64_t parts = (16 << 20) / (24 * norm_wide_cols(cols));
  parts = parts < 8 ? 8 : parts > 256 ? 256 : parts;
  const int64_t part_rows = 2 * ceil_div(ceil_div(rows, parts), 2),
                of_elements = (1 << 17) / norm_wide_cols(cols) * 2;
  const int64_t least = of_elements < 8 ? 8 : of_elements > 64 ? 64 : of_elements;
  return part_rows < least ? least : part_rows;
}

static inline int64_t norm_parts(int64_t rows, int64_t cols) {
  return ceil_div(rows, norm_part_rows(rows, cols));
}

/* Bytes of scratch: for each part and gradient, sums of wide columns in double and of the last rows in ACC. */
static inline int64_t norm_partial_part(const norm_backward_args *args) {
  const int64_t gradients = (args->grad_weight != NULL) + (args->grad_bias != NULL);
  return gradients * norm_wide_cols(args->cols) * (8 + (args->dtype == DTYPE_FLOAT64 ? 8 : 4));
}

static inline int64_t norm_partial_cpu(const norm_backward_args *args) {
  return norm_parts(args->rows, args->cols) * norm_partial_part(args);
}

void norm_forward_cpu(int64_t begin, int64_t end, void *args);
void norm_backward_cpu(int64_t begin, int64_t end, void *args);
void norm_grad_weight_cpu(int64_t begin, int64_t end, void *args);

/* ---- CUDA: on a cudaStream_t, the current device being that of the tensors; returns a cudaError_t ---- */

/* Looks at the alignment of args' pointers, which are set but for `partial`. */
int64_t norm_partial_cuda(const norm_backward_args *args);
int norm_forward_cuda(const norm_forward_args *args, void *stream);
int norm_backward_cuda(const norm_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

/* cross_entropy and token_log_probs. For a row of logits x over cols classes c, with target t:
 *   z_c = x_c * scale, or with softcap > 0: softcap * tanh(x_c / softcap)
 *   lse = log(sum_c exp(z_c)),  p_c = exp(z_c - lse)
 * cross_entropy (entropy NULL), with class weights w, s = label_smoothing, W = sum_c w_c:
 *   loss = w_t * ((1 - s) * (lse - z_t) + z_loss * lse^2) + s / cols * sum_c w_c * (lse - z_c)
 *   dloss/dz_c = (w_t * (1 - s + 2 * z_loss * lse) + s / cols * W) * p_c - w_t * (1 - s) * [c = t]
 *                - s / cols * w_c
 * token_log_probs (weight NULL, s = z_loss = softcap = 0):
 *   loss = z_t - lse,  entropy = -sum_c p_c * (z_c - lse), where p_c = 0 adds 0
 *   dloss/dz_c = [c = t] - p_c,  dentropy/dz_c = -p_c * (z_c - lse + entropy)
 * dz_c/dx_c = scale, or 1 - (z_c / softcap)^2.
 *
 * Forward saves lse as an unevaluated sum of two numbers: the rounded lse, and its rounding error.
 * In one number, log(sum_c exp(z_c - max)) would be lost beside a large maximum, and in a row of
 * equal logits p_c would be 1.
 *
 * A row whose target is ignore_index has loss 0 and gradient 0, whatever its logits (lse is still
 * written). A row whose target is outside [0, cols) and not ignore_index has loss, entropy and
 * gradient NaN, and nothing outside the row is read. NaN in a row makes its lse and loss NaN, and
 * so does +inf without softcap. Sums in float (float64: double). Run-to-run deterministic;
 * batch-invariant at equal alignment. Source: torch.nn.functional.cross_entropy; z_loss: Chowdhery
 * et al. 2022, arXiv:2204.02311; softcap: Gemma Team 2024, arXiv:2408.00118. */
#ifndef EXTENSION_CPP_LOSS_H
#define EXTENSION_CPP_LOSS_H

#include <stdint.h>

#include "common/dtype.h"
#include "common/range.h"

/* The folder, from PyTorch down:
 *   loss.cpp, token_log_probs.cpp  schemas, checks, registration
 *   loss_shim.h, loss_shim.cpp     what the two share: checks, the layout of rows, launches
 *   loss.h                         this contract
 *   loss_cpu.c                     CPU entry points, compiled once per instruction set
 *   loss_cpu_kernel.h              CPU: rows and their gradients, once per dtype
 *   loss_cpu_tile_kernel.h         CPU: tiles of inner elements, for inner > 1
 *   loss_cuda.cu                   GPU entry points, and forward with the gradient
 *   loss_kernels.cuh               GPU: forward and backward without a row in registers, strips
 *   loss_math.cuh                  GPU: the logit, the results of a row, the gradient
 *   loss_scale_cuda.cu             GPU: the gradient times a number in GPU memory */

#ifdef __cplusplus
extern "C" {
#endif

/* The options of cross_entropy. For token_log_probs all are 0, and ignore_index is not read. */
typedef struct {
  int64_t ignore_index;
  double label_smoothing, z_loss;
  double softcap; /* 0: none */
} loss_options;

/* The input of forward and backward. ACC below is float, for float64 double. */
typedef struct {
  const void *logits;     /* element (o, c, i) at o * outer_stride + c * inner + i */
  const int64_t *target;  /* (outer, inner) */
  const void *weight;     /* (cols), ACC; NULL: ones */
  const void *weight_sum; /* W, one number, ACC, with weight and label_smoothing; else NULL */
  int64_t outer, cols, inner;
  int64_t outer_stride; /* at least cols * inner */
  loss_options options;
  double scale; /* 1 / temperature; 1 with softcap */
  dtype_t dtype;
} loss_rows;

/* grad_logits NULL: only forward. Otherwise also writes dloss/dx * *grad_scale to grad_logits, and
 * reads the row again unless it is still in registers. */
typedef struct {
  loss_rows rows;
  void *loss;             /* (outer, inner), ACC; token_log_probs: the log-probability */
  void *entropy;          /* (outer, inner), ACC; NULL: cross_entropy */
  void *lse;              /* (outer, inner, 2), ACC */
  void *grad_logits;      /* (outer, cols, inner), contiguous; may be contiguous logits */
  const void *grad_scale; /* one number, ACC */
} loss_forward_args;

/* Writes grad_logits = dloss/dx * grad_loss / total + dentropy/dx * grad_entropy. */
typedef struct {
  loss_rows rows;
  const void *lse;          /* (outer, inner, 2), ACC, from forward */
  const void *grad_loss;    /* of type grad_dtype; row r at r * grad_stride, which is 0 or 1 */
  const void *total;        /* one number, ACC; NULL: 1 */
  const void *entropy;      /* (outer, inner), ACC, from forward; NULL: cross_entropy */
  const void *grad_entropy; /* (outer, inner), of type grad_dtype */
  void *grad_logits;        /* (outer, cols, inner), contiguous */
  int64_t grad_stride;
  dtype_t grad_dtype;
} loss_backward_args;

/* out = the sum of loss over the rows, divided by *total if is_mean. total = the sum of w_t over
 * the rows whose target is a class and not ignore_index. Without rows out is 0 (mean: NaN). The
 * sums are in double; their order depends on `rows` alone. target NULL: every row counts 1, as for
 * the sum of the class weights. */
typedef struct {
  const void *loss;      /* (rows), ACC */
  const int64_t *target; /* (rows) */
  const void *weight;    /* (cols), ACC; NULL: ones */
  void *partial;         /* loss_partials(rows) doubles of scratch */
  void *out;             /* one number of type out_dtype */
  void *total;           /* one number, ACC */
  int64_t rows, cols, ignore_index;
  dtype_t dtype, out_dtype;
  int is_mean;
} loss_reduce_args;

/* y = x * *factor, for the gradients that linear_cross_entropy computed without grad_out. */
typedef struct {
  const void *x;      /* (numel) */
  const void *factor; /* one number, ACC */
  void *y;            /* (numel) */
  int64_t numel;
  dtype_t dtype;
} loss_scale_args;

/* On the CPU an item of forward and backward is a row, or with inner > 1 a tile of LOSS_TILE of the
 * inner elements; loss_reduce has one item. */
enum { LOSS_TILE = 128, LOSS_REDUCED_ROWS = 8192 };
static inline int64_t loss_items(int64_t outer, int64_t inner) {
  return outer * ceil_div(inner, LOSS_TILE);
}
/* Two sums for each LOSS_REDUCED_ROWS rows. */
static inline int64_t loss_partials(int64_t rows) { return 2 * ceil_div(rows, LOSS_REDUCED_ROWS); }

void loss_forward_cpu(int64_t begin, int64_t end, void *args);
void loss_backward_cpu(int64_t begin, int64_t end, void *args);
void loss_reduce_cpu(int64_t begin, int64_t end, void *args);
void loss_scale_cpu(int64_t begin, int64_t end, void *args); /* chunks of CHUNK elements */

int loss_forward_cuda(const loss_forward_args *args, void *stream);
int loss_backward_cuda(const loss_backward_args *args, void *stream);
int loss_reduce_cuda(const loss_reduce_args *args, void *stream);
int loss_scale_cuda(const loss_scale_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

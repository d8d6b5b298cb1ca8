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
 * In both, dz_c/dx_c = scale, or with softcap 1 - (z_c / softcap)^2.
 *
 * Forward saves lse as an unevaluated sum of two numbers: the rounded lse, and its rounding error.
 * A single number would lose log(sum_c exp(z_c - max)) beside a large maximum. In a row of equal
 * logits p_c would then be 1.
 *
 * A row whose target is ignore_index has loss 0 and gradient 0, whatever its logits (lse is still
 * written). A row whose target is outside [0, cols) and not ignore_index has loss, entropy and
 * gradient NaN, and nothing outside the row is read. NaN in a row makes its lse and loss NaN, and
 * so does +inf without softcap. Sums are in float (double for float64). Results are run-to-run
 * deterministic, and batch-invariant at equal alignment. Source: torch.nn.functional.cross_entropy;
 * z_loss: Chowdhery et al. 2022, arXiv:2204.02311; softcap: Gemma Team 2024, arXiv:2408.00118. */
#ifndef EXTENSION_CPP_LOSS_H
#define EXTENSION_CPP_LOSS_H

#include <stdint.h>

#include "common/dtype.h"
#include "common/range.h"

/* The files of this folder, from PyTorch down:
 *   loss.cpp, token_log_probs.cpp  schemas, checks, registration
 *   loss_shim.h, loss_shim.cpp     what the two share: checks, the layout of rows, launches
 *   loss.h                         formulas, arguments and entry points of the kernels
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

/* The options of cross_entropy. In token_log_probs they are 0, and ignore_index is not read. */
typedef struct {
  int64_t ignore_index;
  double label_smoothing, z_loss;
  double softcap; /* 0 means no softcap */
} loss_options;

/* The input of forward and backward. Below, ACC means double for float64 and float otherwise. */
typedef struct {
  const void *logits;     /* (o, c, i) is at o * outer_stride + c * inner + i */
  const int64_t *target;  /* (outer, inner) */
  const void *weight;     /* (cols), ACC; NULL means ones */
  const void *weight_sum; /* W, one number, ACC; NULL without weight or without label_smoothing */
  int64_t outer, cols, inner;
  int64_t outer_stride; /* at least cols * inner */
  loss_options options;
  double scale; /* 1 / temperature; 1 if softcap is used */
  dtype_t dtype;
} loss_rows;

/* Arguments of forward. If grad_logits is not NULL, forward also writes dloss/dx * *grad_scale to
 * it. Forward then reads the row a second time, unless the row is still in registers. */
typedef struct {
  loss_rows rows;
  void *loss;             /* (outer, inner), ACC; the log-probability in token_log_probs */
  void *entropy;          /* (outer, inner), ACC; NULL in cross_entropy */
  void *lse;              /* (outer, inner, 2), ACC */
  void *grad_logits;      /* (outer, cols, inner), contiguous; may be `logits` itself */
  const void *grad_scale; /* one number, ACC */
} loss_forward_args;

/* Arguments of backward: grad_logits = dloss/dx * grad_loss / total + dentropy/dx *
 * grad_entropy. */
typedef struct {
  loss_rows rows;
  const void *lse;          /* (outer, inner, 2), ACC, from forward */
  const void *grad_loss;    /* has grad_dtype; row r is at r * grad_stride (0 or 1) */
  const void *total;        /* one number, ACC; NULL means 1 */
  const void *entropy;      /* (outer, inner), ACC, from forward; NULL in cross_entropy */
  const void *grad_entropy; /* (outer, inner), of grad_dtype */
  void *grad_logits;        /* (outer, cols, inner), contiguous */
  int64_t grad_stride;
  dtype_t grad_dtype;
} loss_backward_args;

/* Arguments of a sum over rows: out = the sum of loss, divided by *total if is_mean. total = the
 * sum of w_t over the rows whose target is a class and not ignore_index. If target is NULL, every
 * row has the weight 1. With the class weights as `loss`, out is then W. Without rows, out is 0
 * (NaN for a mean). The sums are in double, and their order depends only on `rows`. */
typedef struct {
  const void *loss;      /* (rows), ACC */
  const int64_t *target; /* (rows) */
  const void *weight;    /* (cols), ACC; NULL means ones */
  void *partial;         /* scratch of loss_partials(rows) doubles */
  void *out;             /* one number of out_dtype */
  void *total;           /* one number, ACC */
  int64_t rows, cols, ignore_index;
  dtype_t dtype, out_dtype;
  int is_mean;
} loss_reduce_args;

/* Arguments of y = x * *factor. This op scales gradients that linear_cross_entropy has already
 * computed. */
typedef struct {
  const void *x;      /* (numel) */
  const void *factor; /* one number, ACC */
  void *y;            /* (numel) */
  int64_t numel;
  dtype_t dtype;
} loss_scale_args;

/* A CPU work item of forward and backward is a row or, if inner > 1, a tile of LOSS_TILE inner
 * elements. loss_reduce has one work item. */
enum { LOSS_TILE = 128, LOSS_REDUCED_ROWS = 8192 };
static inline int64_t loss_items(int64_t outer, int64_t inner) {
  return outer * ceil_div(inner, LOSS_TILE);
}
/* Returns the size of `partial`: two sums for each LOSS_REDUCED_ROWS rows. */
static inline int64_t loss_partials(int64_t rows) { return 2 * ceil_div(rows, LOSS_REDUCED_ROWS); }

void loss_forward_cpu(int64_t begin, int64_t end, void *args);
void loss_backward_cpu(int64_t begin, int64_t end, void *args);
void loss_reduce_cpu(int64_t begin, int64_t end, void *args);
void loss_scale_cpu(int64_t begin, int64_t end, void *args); /* over chunks of CHUNK elements */

int loss_forward_cuda(const loss_forward_args *args, void *stream);
int loss_backward_cuda(const loss_backward_args *args, void *stream);
int loss_reduce_cuda(const loss_reduce_args *args, void *stream);
int loss_scale_cuda(const loss_scale_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

/* cross_entropy and token_log_probs on the CPU.
 * If inner = 1, a work item is a row, and the lanes of a block are columns. Forward reads the row
 * from memory once, for the maximum and the sum (rows/cpu_sum_exp_kernel.h). If a gradient is
 * wanted, it reads the row again from the caches. Backward needs one pass, because lse is known.
 * If inner > 1, a work item is a tile of LOSS_TILE inner elements, which are the lanes.
 *
 * Values that are computed once per row are double. Softcap, label smoothing and the gradient of
 * the entropy share one function, which is called for each block. All other cases have their own
 * loops. */
#include "loss/loss.h"

#include "common/cpu/level.h"
#include "rows/cpu_sum_exp.h"

_Static_assert(LOSS_TILE == (int)SUM_EXP_TILE, "a tile's sums are one item");

/* Returns element i of an array whose dtype is known only at run time. */
static double number(dtype_t dtype, const void *p, int64_t i) {
  switch (dtype) {
    case DTYPE_FLOAT64: return widen_float64(((const double *)p)[i]);
    case DTYPE_FLOAT32: return widen_float32(((const float *)p)[i]);
    case DTYPE_BFLOAT16: return widen_bfloat16(((const uint16_t *)p)[i]);
    case DTYPE_FLOAT16: return widen_float16(((const uint16_t *)p)[i]);
  }
  return 0;
}

static void set_number(dtype_t dtype, void *p, double value) {
  switch (dtype) {
    case DTYPE_FLOAT64: *(double *)p = value; break;
    case DTYPE_FLOAT32: *(float *)p = (float)value; break;
    case DTYPE_BFLOAT16: *(uint16_t *)p = (uint16_t)(bfloat16_bits((float)value) >> 16); break;
    case DTYPE_FLOAT16: *(uint16_t *)p = float_to_float16((float)value); break;
  }
}

/* The gradient of a row:
 *   dloss/dz_c = exp(z_c - shift) * (factor + entropy_factor * (z_c - shift + entropy))
 *                - [c = target] * at_target - smooth * w_c
 * The factors include the gradient of the loss and, without softcap, `scale`. If target < 0, every
 * element of the row's gradient is `factor`. */
typedef struct {
  double shift, factor, at_target, smooth, entropy_factor, entropy;
  int64_t target;
} gradient_t;

/* Returns the gradient of a row that is ignored (0) or whose target is no class (NaN). */
static gradient_t constant_gradient(double value) {
  return (gradient_t){.factor = value, .target = -1};
}

static int is_ignored(const loss_rows *rows, int64_t target, int has_entropy) {
  return !has_entropy && target == rows->options.ignore_index;
}

static int is_outside(const loss_rows *rows, int64_t target) {
  return target < 0 || target >= rows->cols;
}

/* Returns the factor of dz/dx that is the same in all columns. */
static double chain(const loss_rows *rows) { return rows->options.softcap > 0 ? 1 : rows->scale; }

/* Returns the gradient of cross_entropy. exp(z_c - shift) * inverse is p_c. */
static gradient_t cross_entropy_gradient(const loss_rows *rows, int64_t target, double weight,
                                         double weights, double shift, double inverse, double lse,
                                         double grad) {
  const double s = rows->options.label_smoothing, smooth = s / (double)rows->cols;
  const double z_loss = rows->options.z_loss == 0 ? 0 : 2 * rows->options.z_loss * lse;
  grad *= chain(rows);
  return (gradient_t){.shift = shift,
                      .factor = (weight * (1 - s + z_loss) + smooth * weights) * inverse * grad,
                      .at_target = weight * (1 - s) * grad,
                      .smooth = smooth * grad,
                      .target = target};
}

/* Returns the gradient of token_log_probs. `grad` is the gradient of the final result with respect
 * to the log-probability, and `grad_entropy` with respect to the entropy. */
static gradient_t log_prob_gradient(const loss_rows *rows, int64_t target, double shift,
                                    double inverse, double entropy, double grad,
                                    double grad_entropy) {
  grad *= chain(rows), grad_entropy *= chain(rows);
  return (gradient_t){.shift = shift,
                      .factor = -inverse * grad,
                      .at_target = -grad,
                      .entropy_factor = -inverse * grad_entropy,
                      .entropy = entropy,
                      .target = target};
}

#define KERNEL_BODY "loss/loss_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void loss_forward_cpu_range(int64_t begin, int64_t end, const loss_forward_args *args) {
  DISPATCH_DTYPE(args->rows.dtype, loss_forward, args, begin, end)
}

static void loss_backward_cpu_range(int64_t begin, int64_t end, const loss_backward_args *args) {
  DISPATCH_DTYPE(args->rows.dtype, loss_backward, args, begin, end)
}

static void loss_scale_cpu_range(int64_t begin, int64_t end, const loss_scale_args *args) {
  DISPATCH_DTYPE(args->dtype, loss_scale, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

/* Sums over all rows in one work item, because it takes little time beside the losses. */
static void loss_reduce_cpu_range(int64_t begin, int64_t end, const loss_reduce_args *args) {
  const dtype_t acc = args->dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
  double sum = 0, total = 0;
  if (begin >= end) return;
  for (int64_t r = 0; r < args->rows; ++r) {
    sum += number(acc, args->loss, r);
    if (!args->target) {
      total += 1;
      continue;
    }
    const int64_t target = args->target[r];
    if (target == args->ignore_index || target < 0 || target >= args->cols) continue;
    total += args->weight ? number(acc, args->weight, target) : 1;
  }
  set_number(args->out_dtype, args->out, args->is_mean ? sum / total : sum);
  set_number(acc, args->total, total);
}

CPU_ENTRY_OF(loss_forward_cpu, loss_forward_args, rows.dtype)
CPU_ENTRY_OF(loss_backward_cpu, loss_backward_args, rows.dtype)
CPU_ENTRY(loss_reduce_cpu, loss_reduce_args)
CPU_ENTRY(loss_scale_cpu, loss_scale_args)

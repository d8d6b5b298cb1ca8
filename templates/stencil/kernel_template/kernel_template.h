/* kernel_template: y[r,t] = bias[c] + sum_k weight[c,k] * x[r,t-(taps-1)+k], c = r % channels;
 *   terms with elements of x before its first step are left out
 * kernel_template_backward:
 *   grad_x[r,t] = sum_k weight[c,k] * grad_out[r,t+(taps-1)-k], the same filter, reversed
 *   grad_weight[c,k] = sum_r,t grad_out[r,t] * x[r,t-(taps-1)+k] over the rows r of channel c
 *   grad_bias[c] = sum_r,t grad_out[r,t]
 *   x, y, grad_out, grad_x  (rows, steps), rows = batch * channels  contiguous, one dtype
 *   weight, grad_weight     (channels, taps)  the same dtype
 *   bias, grad_bias         (channels)        the same dtype
 *   bias may be NULL, which means 0; grad_weight and grad_bias may be NULL, if they are not wanted
 * Tensors do not overlap. taps = 0 is allowed. For the sums, so are batch = 0 and steps = 0; the
 * sums are then 0. NaN propagates. Results are computed in float (double for float64). The sums add
 * each row in float, and the rows in double, without atomics. Only the shape determines the order
 * of the terms. Results are run-to-run deterministic, for any number of threads. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x; /* grad_out, if reverse */
  const void *weight;
  const void *bias;
  void *y; /* grad_x, if reverse */
  int64_t rows;
  int64_t channels;
  int64_t steps;
  int64_t taps;
  int32_t reverse;
  dtype_t dtype;
} kernel_template_filter_args;

typedef struct {
  const void *grad_out;
  const void *x;
  void *grad_weight;
  void *grad_bias;
  int64_t batch;
  int64_t channels;
  int64_t steps;
  int64_t taps;
  dtype_t dtype;
} kernel_template_sums_args;

/* CPU kernels. The filter processes rows [begin, end), and the sums process channels [begin, end).
 * `args` points to the argument struct. */
void kernel_template_filter_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_sums_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launchers for the current device. They take a cudaStream_t and return a cudaError_t. */
int kernel_template_filter_cuda(const kernel_template_filter_args *args, void *stream);
int kernel_template_sums_cuda(const kernel_template_sums_args *args, void *stream);

#ifdef __cplusplus
}
#endif

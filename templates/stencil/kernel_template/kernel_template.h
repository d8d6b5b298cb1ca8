/* kernel_template: y[r,t] = bias[c] + sum_k weight[c,k] * x[r,t-(taps-1)+k], c = r % channels;
 *   terms with elements of x before its first step are left out
 * kernel_template_backward:
 *   grad_x[r,t] = sum_k weight[c,k] * grad_out[r,t+(taps-1)-k], the same filter, reversed
 *   grad_weight[c,k] = sum_r,t grad_out[r,t] * x[r,t-(taps-1)+k] over the rows r of channel c
 *   grad_bias[c] = sum_r,t grad_out[r,t]
 *   x, y, grad_out, grad_x  (rows, steps), rows = batch * channels  contiguous, one type
 *   weight, grad_weight     (channels, taps)  the same type
 *   bias, grad_bias         (channels)        the same type
 *   bias, grad_weight, grad_bias  may be NULL: 0, or not computed
 * No overlap. taps = 0 is allowed, and batch = 0 or steps = 0 for the sums, which are then 0. NaN
 * propagates. Computes in float (float64: double). The sums: each row in float, the rows in double.
 * The shape alone fixes the order of the terms: run-to-run deterministic, at any number of
 * threads, without atomics. */
#pragma once

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x; /* reverse: grad_out */
  const void *weight;
  const void *bias;
  void *y; /* reverse: grad_x */
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

/* CPU: rows [begin, end); channels [begin, end). args points to the struct. */
void kernel_template_filter_cpu(int64_t begin, int64_t end, void *args);
void kernel_template_sums_cpu(int64_t begin, int64_t end, void *args);

/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */
int kernel_template_filter_cuda(const kernel_template_filter_args *args, void *stream);
int kernel_template_sums_cuda(const kernel_template_sums_args *args, void *stream);

#ifdef __cplusplus
}
#endif

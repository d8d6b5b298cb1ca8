/* Scans over one dimension:
 *   cumsum             y_k = x_0 + ... + x_k          exclusive: y_k = x_0 + ... + x_(k-1), y_0 = 0
 *   logcumsumexp       y_k = log(exp(x_0) + ... + exp(x_k))
 *   linear_recurrence  h_k = a_k h_(k-1) + b_k          h_(-1) = h0, or 0 if h0 is NULL
 * and two gradients, which scan from the last step to the first:
 *   logcumsumexp       d_k = grad_out_k + exp(y_k - y_(k+1)) d_(k+1)  grad_x_k = exp(x_k - y_k) d_k
 *   linear_recurrence  u_k = grad_h_k + a_(k+1) u_(k+1)                grad_b_k = u_k
 *                      grad_a_k = u_k h_(k-1)                          grad_h0 = a_0 u_0
 * Every operand is (outer, length, inner) with any strides (0 for a broadcast input), and the scan
 * runs over length. A line is the elements with one outer and one inner index. `outer` may stand
 * for several dimensions without a common stride (scan_jump). h0 and grad_h0 are (outer, inner);
 * their stride `step` is 0. Kernels always scan from the first step to the last. To scan in the
 * other direction, `data` points to the last step and `step` is negative. Step k - 1 in the
 * formulas of the gradients is therefore step k + 1 of their kernels. Outputs overlap neither
 * inputs nor one another. Sizes may exceed 2^31, but on the GPU columns have at most 2^31 - 1 tiles
 * (scan_plan.h). A call without elements is not launched. Results are computed in float (double for
 * float64) or better, and rounded once per element. They are run-to-run deterministic. At equal
 * alignment they are batch-invariant: a line's result does not depend on the other lines or on the
 * number of threads. NaN and infinities spread only to later steps. In the gradient of
 * logcumsumexp, exp(x - y) is 0 where y is -inf, because such a result depends on no element.
 * Source: PyTorch; Blelloch, Prefix Sums and Their Applications, 1990. */
#ifndef EXTENSION_CPP_SCAN_H
#define EXTENSION_CPP_SCAN_H

#include <stdint.h>

#include "common/dtype.h"
#include "common/range.h"

/* The files of this folder, from PyTorch down:
 *   scan.cpp                         schemas, checks, allocation, registration
 *   scan_shim.h, scan_shim.cpp       a tensor as (outer, length, inner) with any strides
 *   scan.h                           formulas, arguments and entry points of the kernels
 *   scan_cpu.c                       CPU entry points, compiled once per instruction set
 *   scan_cpu.h                       CPU: the scans of a block in registers
 *   scan_cpu_items.h                 CPU: work items, lines and parts of lines
 *   scan_cpu_kernel.h                CPU: cumsum, and functions for the next two files
 *   scan_cpu_recurrence_kernel.h     CPU: linear_recurrence and its gradient
 *   scan_cpu_logcumsumexp_kernel.h   CPU: logcumsumexp and its gradient
 *   scan_cuda.cu                     GPU entry points
 *   scan_plan.h                      GPU: how a scan is divided into tiles
 *   scan_math.cuh                    GPU: the algebra (Part, State), what each op reads and writes
 *   scan_memory.cuh                  GPU: parameters, loads and stores
 *   scan_tile.cuh                    GPU: joins the tiles of a line, in a fixed order
 *   scan_rows.cuh, scan_columns.cuh  GPU: the kernels for inner = 1 and for inner > 1 */

#ifdef __cplusplus
extern "C" {
#endif

/* An operand. Its strides are in elements. */
typedef struct {
  const void *data;
  int64_t outer, step, inner;
  int64_t index; /* index of this operand in scan_jump::by */
} scan_input;

typedef struct {
  void *data;
  int64_t outer, step, inner;
  int64_t index;
} scan_output;

/* A correction of addresses for outer indices that stand for several dimensions. The stride `outer`
 * of an operand steps through the innermost of these dimensions. After every `span` outer indices
 * another dimension takes a step, and the operand's address moves by `by` more elements. */
enum { SCAN_OPERANDS = 7 };
typedef struct {
  int64_t span, by[SCAN_OPERANDS];
} scan_jump;

typedef struct {
  int64_t outer, length, inner;
  dtype_t dtype;
  void *state;        /* CUDA: memory of <op>_state_bytes_cuda(args) bytes; CPU: a scan_cpu_plan */
  int64_t jump_count; /* 0 if each operand needs only one stride for all outer indices */
  const scan_jump *jumps;
} scan_shape;

typedef struct {
  scan_shape shape;
  scan_input x;
  scan_output y;
  int exclusive;
} cumsum_args;

typedef struct {
  scan_shape shape;
  scan_input x;
  scan_output y;
} logcumsumexp_args;

typedef struct {
  scan_shape shape;
  scan_input grad_out, x, y;
  scan_output grad_x;
} logcumsumexp_backward_args;

typedef struct {
  scan_shape shape;
  scan_input a, b, h0; /* h0.data may be NULL */
  scan_output h;
} linear_recurrence_args;

typedef struct {
  scan_shape shape;
  scan_input grad_h, a, h, h0;         /* h0.data may be NULL */
  scan_output grad_a, grad_b, grad_h0; /* grad_h0.data is NULL if h0.data is */
} linear_recurrence_backward_args;

/* How the CPU divides a scan. A line (the elements with one outer and one inner index) is scanned
 * in parts of SCAN_PART steps. A part is scanned from 0 and then joined to the result of the parts
 * before it. This also holds if one thread scans the whole line, so the bits do not depend on the
 * number of threads. A work item is a row or, if inner > 1, a tile of `width` inner elements. If
 * parts > 1, a work item is one part of such a row or tile. <op>_totals_cpu then runs first and
 * writes the total of each part to `totals`. */
enum { SCAN_PART = 1 << 14, SCAN_TILE = 2048 };
typedef struct {
  int64_t width; /* at most SCAN_TILE */
  int64_t parts;
  double *totals; /* (parts, 2, scan_lines) */
} scan_cpu_plan;

/* Returns the number of lines in `totals`. inner > 1 is rounded up to a multiple of 32. */
static inline int64_t scan_lines(const scan_shape *shape) {
  return shape->outer * (shape->inner == 1 ? 1 : ceil_div(shape->inner, 32) * 32);
}

static inline int64_t scan_items(const scan_shape *shape, const scan_cpu_plan *plan) {
  return shape->outer * ceil_div(shape->inner, plan->width) * plan->parts;
}

void cumsum_cpu(int64_t begin, int64_t end, void *args);
void cumsum_totals_cpu(int64_t begin, int64_t end, void *args);
void linear_recurrence_cpu(int64_t begin, int64_t end, void *args);
void linear_recurrence_totals_cpu(int64_t begin, int64_t end, void *args);
void linear_recurrence_backward_cpu(int64_t begin, int64_t end, void *args);
void linear_recurrence_backward_totals_cpu(int64_t begin, int64_t end, void *args);

void logcumsumexp_cpu(int64_t begin, int64_t end, void *args);
void logcumsumexp_totals_cpu(int64_t begin, int64_t end, void *args);
void logcumsumexp_backward_cpu(int64_t begin, int64_t end, void *args);
void logcumsumexp_backward_totals_cpu(int64_t begin, int64_t end, void *args);

int cumsum_cuda(const cumsum_args *args, void *stream);
int logcumsumexp_cuda(const logcumsumexp_args *args, void *stream);
int logcumsumexp_backward_cuda(const logcumsumexp_backward_args *args, void *stream);
int linear_recurrence_cuda(const linear_recurrence_args *args, void *stream);
int linear_recurrence_backward_cuda(const linear_recurrence_backward_args *args, void *stream);

int64_t cumsum_state_bytes_cuda(const cumsum_args *args);
int64_t logcumsumexp_state_bytes_cuda(const logcumsumexp_args *args);
int64_t logcumsumexp_backward_state_bytes_cuda(const logcumsumexp_backward_args *args);
int64_t linear_recurrence_state_bytes_cuda(const linear_recurrence_args *args);
int64_t linear_recurrence_backward_state_bytes_cuda(const linear_recurrence_backward_args *args);

#ifdef __cplusplus
}
#endif

#endif

/* softmax and log_softmax over one dimension of a dense tensor:
 *   y = exp(x - max) / sum(exp(x - max))          log: y = x - max - log(sum(exp(x - max)))
 *   grad_x = (grad_out - sum(grad_out * y)) * y   log: grad_x = grad_out - exp(y) * sum(grad_out)
 * x, y, grad_out, grad_x  (outer, cols, inner), contiguous, of type dtype, at any address valid for
 *   that type. The maximum and the sums run over cols. y may be x, and grad_x may be grad_out or y;
 *   otherwise they do not overlap.
 * Any size may exceed 2^31. A call without elements is not launched. NaN or +inf makes all results
 * of the same (outer, inner) NaN. -inf gives 0 (-inf in log_softmax), but if all elements are -inf,
 * all results are NaN. Results are computed in float (double for float64) and rounded once. They
 * are run-to-run deterministic, and batch-invariant at equal alignment: they do not depend on the
 * number of threads, on the instruction set (if it has FMA), or on outer.
 * Source: PyTorch's definition, torch.nn.functional.softmax and log_softmax. */
#ifndef EXTENSION_CPP_SOFTMAX_H
#define EXTENSION_CPP_SOFTMAX_H

#include <stdint.h>

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  void *y;
  int64_t outer, cols, inner;
  dtype_t dtype;
  int is_log;
} softmax_forward_args;

typedef struct {
  const void *grad_out;
  const void *y;
  void *grad_x;
  int64_t outer, cols, inner;
  dtype_t dtype;
  int is_log;
} softmax_backward_args;

/* A CPU work item is a row or, if inner > 1, a tile of SOFTMAX_TILE inner elements. */
enum { SOFTMAX_TILE = 128 };
static inline int64_t softmax_items(int64_t outer, int64_t inner) {
  return outer * ceil_div(inner, SOFTMAX_TILE);
}

void softmax_forward_cpu(int64_t begin, int64_t end, void *args);
void softmax_backward_cpu(int64_t begin, int64_t end, void *args);

int softmax_forward_cuda(const softmax_forward_args *args, void *stream);
int softmax_backward_cuda(const softmax_backward_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

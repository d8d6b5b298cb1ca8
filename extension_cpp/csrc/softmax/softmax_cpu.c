/* softmax and log_softmax on the CPU. If inner = 1, a work item is a row, and the lanes of a block
 * are columns. Forward reads the row from memory once for the maximum, and then from the caches for
 * the sum (rows/cpu_sum_exp_kernel.h). In softmax of up to SUM_EXP_COLS columns, the exponentials
 * that are computed for the sum are kept for the result. All other rows compute their exponentials
 * again. Backward first sums over grad_out and y, and then reads both again for the result. In the
 * last pass, the next row is prefetched. If inner > 1, a work item is a tile of SOFTMAX_TILE inner
 * elements, which are the lanes. Each lane has its own maximum and sum over the columns. */
#include "softmax/softmax.h"

#include "common/cpu/level.h"
#include "rows/cpu_sum_exp.h"

_Static_assert(SOFTMAX_TILE == (int)SUM_EXP_TILE, "a tile's sums are one item");

/* Returns whether results should bypass the caches. Results that overwrite an input should not,
 * because their cache lines have just been read. */
ALWAYS_INLINE int streams(int64_t bytes, const void *out, const void *in, const void *other) {
  return out != in && out != other && cpu_should_stream(bytes);
}

#define KERNEL_BODY "softmax/softmax_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void softmax_forward_cpu_range(int64_t begin, int64_t end,
                                      const softmax_forward_args *args) {
  DISPATCH_DTYPE(args->dtype, softmax_forward, args, begin, end)
}

static void softmax_backward_cpu_range(int64_t begin, int64_t end,
                                       const softmax_backward_args *args) {
  DISPATCH_DTYPE(args->dtype, softmax_backward, args, begin, end)
}

CPU_ENTRY(softmax_forward_cpu, softmax_forward_args)
CPU_ENTRY(softmax_backward_cpu, softmax_backward_args)

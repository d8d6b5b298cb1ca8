/* scale_bias_relu on the CPU. Forward divides elements and not rows among threads, so that threads
 * can share one wide row. A work item of backward is a range of rows within one tile of columns
 * (common/cpu/column_sums_kernel.h). The arithmetic is in scale_bias_relu_cpu_kernel.h. */
#include "scale_bias_relu/scale_bias_relu.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/math.h"
#include "common/cpu/row.h"

#define KERNEL_BODY "scale_bias_relu/scale_bias_relu_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void scale_bias_relu_forward_cpu_range(int64_t begin, int64_t end,
                                              const scale_bias_relu_forward_args *args) {
  const int64_t numel = args->rows * args->cols;
  DISPATCH_DTYPE(args->dtype, scale_bias_relu_forward, args, chunk_begin(begin, numel),
                 chunk_begin(end, numel))
}

static void scale_bias_relu_backward_cpu_range(int64_t begin, int64_t end,
                                               const scale_bias_relu_backward_args *args) {
  for (int64_t item = begin; item < end; ++item)
    DISPATCH_DTYPE(args->dtype, scale_bias_relu_backward, args, item)
}

static void scale_bias_relu_grad_bias_cpu_range(int64_t begin, int64_t end,
                                                const scale_bias_relu_backward_args *args) {
  for (int64_t tile = begin; tile < end; ++tile)
    DISPATCH_DTYPE(args->dtype, scale_bias_relu_grad_bias, args, tile)
}

CPU_ENTRY(scale_bias_relu_forward_cpu, scale_bias_relu_forward_args)
CPU_ENTRY(scale_bias_relu_backward_cpu, scale_bias_relu_backward_args)
CPU_ENTRY(scale_bias_relu_grad_bias_cpu, scale_bias_relu_backward_args)

/* bias_gelu on the CPU. Forward divides the elements and not the rows among threads, so that
 * several threads can share one wide row. A work item of backward is a range of rows within one
 * tile of columns (common/cpu/column_sums_kernel.h). The arithmetic is in activation_cpu_math.h. */
#include "bias_gelu/bias_gelu.h"

#include "activation/activation_cpu.h"
#include "common/cpu/row.h"

#define KERNEL_BODY "bias_gelu/bias_gelu_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void bias_gelu_forward_cpu_range(int64_t begin, int64_t end,
                                        const bias_gelu_forward_args *args) {
  const int64_t numel = args->rows * args->cols;
  DISPATCH_DTYPE(args->dtype, bias_gelu_forward, args, chunk_begin(begin, numel),
                 chunk_begin(end, numel))
}

static void bias_gelu_backward_cpu_range(int64_t begin, int64_t end,
                                         const bias_gelu_backward_args *args) {
  for (int64_t item = begin; item < end; ++item)
    DISPATCH_DTYPE(args->dtype, bias_gelu_backward, args, item)
}

static void bias_gelu_grad_bias_cpu_range(int64_t begin, int64_t end,
                                          const bias_gelu_backward_args *args) {
  for (int64_t tile = begin; tile < end; ++tile)
    DISPATCH_DTYPE(args->dtype, column_sums_total, args, tile)
}

CPU_ENTRY(bias_gelu_forward_cpu, bias_gelu_forward_args)
CPU_ENTRY(bias_gelu_backward_cpu, bias_gelu_backward_args)
CPU_ENTRY(bias_gelu_grad_bias_cpu, bias_gelu_backward_args)

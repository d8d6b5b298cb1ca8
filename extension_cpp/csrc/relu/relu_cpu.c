/* relu on the CPU, element by element in blocks. The arithmetic is in relu_cpu_kernel.h. */
#include "relu/relu.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"

#define KERNEL_BODY "relu/relu_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void relu_forward_cpu_range(int64_t begin, int64_t end, const relu_forward_args *args) {
  DISPATCH_DTYPE(args->dtype, relu_forward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

static void relu_backward_cpu_range(int64_t begin, int64_t end, const relu_backward_args *args) {
  DISPATCH_DTYPE(args->dtype, relu_backward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

CPU_ENTRY(relu_forward_cpu, relu_forward_args)
CPU_ENTRY(relu_backward_cpu, relu_backward_args)

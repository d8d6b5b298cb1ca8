/* silu and gelu on the CPU, in blocks of elements. The arithmetic is in activation_cpu_math.h. */
#include "activation/activation_cpu.h"

#define KERNEL_BODY "activation/activation_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void activation_forward_cpu_range(int64_t begin, int64_t end,
                                         const activation_forward_args *args) {
  DISPATCH_DTYPE(args->dtype, activation_forward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

static void activation_backward_cpu_range(int64_t begin, int64_t end,
                                          const activation_backward_args *args) {
  DISPATCH_DTYPE(args->dtype, activation_backward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

static void activation_double_backward_cpu_range(int64_t begin, int64_t end,
                                                 const activation_double_backward_args *args) {
  DISPATCH_DTYPE(args->dtype, activation_double_backward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

CPU_ENTRY(activation_forward_cpu, activation_forward_args)
CPU_ENTRY(activation_backward_cpu, activation_backward_args)
CPU_ENTRY(activation_double_backward_cpu, activation_double_backward_args)

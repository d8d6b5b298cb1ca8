/* kernel_template on the CPU, in blocks of elements. Arithmetic: kernel_template_cpu_kernel.h. */
#include "kernel_template/kernel_template.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
/* includes <math.h>, and has exp, tanh and fma for loops that vectorise */
#include "common/cpu/math.h"

typedef kernel_template_forward_args forward_args;
typedef kernel_template_backward_args backward_args;

#define KERNEL_BODY "kernel_template/kernel_template_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void kernel_template_forward_cpu_range(int64_t begin, int64_t end,
                                              const forward_args *args) {
  DISPATCH_DTYPE(args->dtype, forward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel));
}

static void kernel_template_backward_cpu_range(int64_t begin, int64_t end,
                                               const backward_args *args) {
  DISPATCH_DTYPE(args->dtype, backward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel));
}

CPU_ENTRY(kernel_template_forward_cpu, forward_args)
CPU_ENTRY(kernel_template_backward_cpu, backward_args)

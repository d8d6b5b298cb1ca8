/* kernel_template on the CPU, one row at a time. Arithmetic: kernel_template_cpu_kernel.h. */
#include "kernel_template/kernel_template.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
/* includes <math.h>, and has exp, tanh and fma for loops that vectorise */
#include "common/cpu/math.h"

typedef kernel_template_forward_args forward_args;
typedef kernel_template_backward_args backward_args;

/* Returns the number of elements in the block that begins at column c. */
ALWAYS_INLINE int block_size(int64_t c, int64_t cols) {
  return cols - c < BLOCK ? (int)(cols - c) : BLOCK;
}

#define KERNEL_BODY "kernel_template/kernel_template_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void kernel_template_forward_cpu_range(int64_t begin, int64_t end,
                                              const forward_args *args) {
  for (int64_t row = begin; row < end; ++row) DISPATCH_DTYPE(args->dtype, forward_row, args, row);
}

static void kernel_template_backward_cpu_range(int64_t begin, int64_t end,
                                               const backward_args *args) {
  for (int64_t row = begin; row < end; ++row) DISPATCH_DTYPE(args->dtype, backward_row, args, row);
}

CPU_ENTRY(kernel_template_forward_cpu, forward_args)
CPU_ENTRY(kernel_template_backward_cpu, backward_args)

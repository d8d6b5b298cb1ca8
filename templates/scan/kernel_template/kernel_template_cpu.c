/* kernel_template on the CPU, one row at a time, because each step of a row needs the step before.
 * The arithmetic is in kernel_template_cpu_kernel.h. */
#include "kernel_template/kernel_template.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
/* includes <math.h>, and has exp, tanh and fma for loops that vectorise */
#include "common/cpu/math.h"

#define KERNEL_BODY "kernel_template/kernel_template_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void kernel_template_cpu_range(int64_t begin, int64_t end,
                                      const kernel_template_args *args) {
  for (int64_t row = begin; row < end; ++row) DISPATCH_DTYPE(args->dtype, scan_row, args, row);
}

CPU_ENTRY(kernel_template_cpu, kernel_template_args)

/* kernel_template on the CPU, element by element in blocks. The arithmetic is in
 * kernel_template_cpu_kernel.h. */
#include "kernel_template/kernel_template.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/math.h" /* <math.h>, and exp, tanh and fma for loops that vectorise */

#define KERNEL_BODY "kernel_template/kernel_template_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void kernel_template_cpu_range(int64_t begin, int64_t end,
                                      const kernel_template_args *args) {
  DISPATCH_DTYPE(args->dtype, step, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel));
}

CPU_ENTRY(kernel_template_cpu, kernel_template_args)

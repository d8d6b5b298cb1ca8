/* kernel_template on the CPU. Forward processes one row at a time, and reads it a second time from
 * the cache. Backward processes one part (a range of rows) at a time. It reads each row twice, and
 * adds the row's terms of grad_weight to the sums of the part. The arithmetic is in
 * kernel_template_cpu_kernel.h. */
#include "kernel_template/kernel_template.h"

#include <math.h>

#include "common/cpu/block.h"
#include "common/cpu/level.h"

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
  for (int64_t part = begin; part < end; ++part)
    DISPATCH_DTYPE(args->dtype, backward_part, args, part);
}

static void kernel_template_grad_weight_cpu_range(int64_t begin, int64_t end,
                                                  const backward_args *args) {
  for (int64_t block = begin; block < end; ++block)
    DISPATCH_DTYPE(args->dtype, grad_weight, args, block * BLOCK);
}

CPU_ENTRY(kernel_template_forward_cpu, forward_args)
CPU_ENTRY(kernel_template_backward_cpu, backward_args)
CPU_ENTRY(kernel_template_grad_weight_cpu, backward_args)

/* kernel_template on the CPU. The filter processes one row at a time, and reads a block of steps
 * from the cache for each tap. The sums process one channel at a time, whose rows are read once for
 * GROUP taps. The arithmetic is in kernel_template_cpu_kernel.h. */
#include "kernel_template/kernel_template.h"

#include <stddef.h>

#include "common/cpu/block.h"
#include "common/cpu/level.h"

typedef kernel_template_filter_args filter_args;
typedef kernel_template_sums_args sums_args;

enum { GROUP = 8 }; /* number of taps that are summed together */

/* Returns the number of elements in the block at step t, which ends at `end` at the latest. */
ALWAYS_INLINE int block_size(int64_t t, int64_t end) {
  return end - t < BLOCK ? (int)(end - t) : BLOCK;
}

#define KERNEL_BODY "kernel_template/kernel_template_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void kernel_template_filter_cpu_range(int64_t begin, int64_t end, const filter_args *args) {
  for (int64_t row = begin; row < end; ++row) DISPATCH_DTYPE(args->dtype, filter_row, args, row);
}

static void kernel_template_sums_cpu_range(int64_t begin, int64_t end, const sums_args *args) {
  for (int64_t c = begin; c < end; ++c) DISPATCH_DTYPE(args->dtype, channel_sums, args, c);
}

CPU_ENTRY(kernel_template_filter_cpu, filter_args)
CPU_ENTRY(kernel_template_sums_cpu, sums_args)

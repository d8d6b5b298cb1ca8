/* kernel_template on the CPU. Forward sums one segment at a time. Backward processes one row at a
 * time, and finds the row's segment by bisection. The arithmetic is in
 * kernel_template_cpu_kernel.h. */
#include "kernel_template/kernel_template.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"

typedef kernel_template_forward_args forward_args;
typedef kernel_template_backward_args backward_args;

/* Returns the number of elements in the block that begins at column c. */
ALWAYS_INLINE int block_size(int64_t c, int64_t cols) {
  return cols - c < BLOCK ? (int)(cols - c) : BLOCK;
}

/* Returns the segment of a row, or -1 or `segments` if the row is in none. */
static inline int64_t segment_of(const backward_args *args, int64_t row) {
  int64_t low = -1, high = args->segments + 1; /* offsets[low] <= row < offsets[high] */
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (args->offsets[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

#define KERNEL_BODY "kernel_template/kernel_template_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void kernel_template_forward_cpu_range(int64_t begin, int64_t end,
                                              const forward_args *args) {
  for (int64_t s = begin; s < end; ++s) DISPATCH_DTYPE(args->dtype, forward_segment, args, s);
}

static void kernel_template_backward_cpu_range(int64_t begin, int64_t end,
                                               const backward_args *args) {
  for (int64_t row = begin; row < end; ++row) DISPATCH_DTYPE(args->dtype, backward_row, args, row);
}

CPU_ENTRY(kernel_template_forward_cpu, forward_args)
CPU_ENTRY(kernel_template_backward_cpu, backward_args)

/* kernel_template on the CPU. Forward copies one row at a time. Backward first sorts the positions
 * in the index by the index values (a counting sort), so that each row of grad_x finds its terms.
 * Then it sums one row of grad_x at a time. The arithmetic is in kernel_template_cpu_kernel.h. */
#include "kernel_template/kernel_template.h"

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
  for (int64_t i = begin; i < end; ++i) DISPATCH_DTYPE(args->dtype, forward_row, args, i);
}

/* Positions with equal values keep their order, so that sums always add in the same order. */
static void kernel_template_sort_cpu_range(int64_t begin, int64_t end, const backward_args *args) {
  (void)begin, (void)end;
  int64_t *ends = args->ends, first = 0;
  for (int64_t r = 0; r < args->rows; ++r) ends[r] = 0;
  for (int64_t i = 0; i < args->count; ++i) ++ends[args->index[i]];
  for (int64_t r = 0; r < args->rows; ++r) { /* count -> position of the first term */
    const int64_t count = ends[r];
    ends[r] = first;
    first += count;
  }
  for (int64_t i = 0; i < args->count; ++i) args->order[ends[args->index[i]]++] = i;
}

static void kernel_template_backward_cpu_range(int64_t begin, int64_t end,
                                               const backward_args *args) {
  for (int64_t row = begin; row < end; ++row) DISPATCH_DTYPE(args->dtype, backward_row, args, row);
}

CPU_ENTRY(kernel_template_forward_cpu, forward_args)
CPU_ENTRY(kernel_template_sort_cpu, backward_args)
CPU_ENTRY(kernel_template_backward_cpu, backward_args)

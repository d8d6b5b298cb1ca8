/* kernel_template on the CPU: one loop over the chunks of all tensors, so that many small tensors
 * keep the threads as busy as a large one. The arithmetic is in kernel_template_cpu_kernel.h. */
#include "kernel_template/kernel_template.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"

#define KERNEL_BODY "kernel_template/kernel_template_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

/* Returns the tensor of a chunk, by bisection: the last with a first chunk not after this chunk. */
static const kernel_template_tensor *tensor_of(const kernel_template_args *args, int64_t chunk) {
  int64_t low = 0, high = args->count;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (args->tensors[middle].first_chunk <= chunk)
      low = middle;
    else
      high = middle;
  }
  return args->tensors + low;
}

static void kernel_template_cpu_range(int64_t begin, int64_t end,
                                      const kernel_template_args *args) {
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const kernel_template_tensor *tensor = tensor_of(args, chunk);
    const int64_t i = chunk - tensor->first_chunk;
    DISPATCH_DTYPE(args->dtype, multiply, args, tensor, chunk_begin(i, tensor->numel),
                   chunk_begin(i + 1, tensor->numel));
  }
}

CPU_ENTRY(kernel_template_cpu, kernel_template_args)

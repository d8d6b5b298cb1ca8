/* dropout on the CPU, element by element in blocks. The arithmetic is in dropout_cpu_kernel.h. The
 * random bits come from common/cpu/philox.h. */
#include "dropout/dropout.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/philox.h"

#define KERNEL_BODY "dropout/dropout_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void dropout_forward_cpu_range(int64_t begin, int64_t end,
                                      const dropout_forward_args *args) {
  DISPATCH_DTYPE(args->dtype, dropout_forward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

CPU_ENTRY(dropout_forward_cpu, dropout_forward_args)

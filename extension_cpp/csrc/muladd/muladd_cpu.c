/* muladd on the CPU, element by element in blocks. The arithmetic is in muladd_cpu_kernel.h. */
#include "muladd/muladd.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/math.h"

#define KERNEL_BODY "muladd/muladd_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void muladd_forward_cpu_range(int64_t begin, int64_t end, const muladd_forward_args *args) {
  DISPATCH_DTYPE(args->dtype, muladd_forward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

static void muladd_backward_cpu_range(int64_t begin, int64_t end,
                                      const muladd_backward_args *args) {
  DISPATCH_DTYPE(args->dtype, muladd_backward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

CPU_ENTRY(muladd_forward_cpu, muladd_forward_args)
CPU_ENTRY(muladd_backward_cpu, muladd_backward_args)

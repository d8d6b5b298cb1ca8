/* mish on the CPU, element by element in blocks. The arithmetic is in mish_cpu_kernel.h. */
#include "mish/mish.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/long_chains.h"
#include "common/cpu/math.h"

/* For x below MISH_ZERO, a selection replaces exp(x) by 0. In float, x exp(x) rounds to 0 below
 * -110, and the scaled exp is not valid below -131. In double, exp(x) is 0 below -746. */
#define MISH_ZERO(x) _Generic((x), float : -110.0f, double : -750.0)
#define MISH_LINEAR(x) _Generic((x), float : 20.0f, double : 24.0)

#define KERNEL_BODY "mish/mish_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void mish_forward_cpu_range(int64_t begin, int64_t end, const mish_forward_args *args) {
  DISPATCH_DTYPE(args->dtype, mish_forward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

static void mish_backward_cpu_range(int64_t begin, int64_t end, const mish_backward_args *args) {
  DISPATCH_DTYPE(args->dtype, mish_backward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

static void mish_double_backward_cpu_range(int64_t begin, int64_t end,
                                           const mish_double_backward_args *args) {
  DISPATCH_DTYPE(args->dtype, mish_double_backward, args, chunk_begin(begin, args->numel),
                 chunk_begin(end, args->numel))
}

CPU_ENTRY(mish_forward_cpu, mish_forward_args)
CPU_ENTRY(mish_backward_cpu, mish_backward_args)
CPU_ENTRY(mish_double_backward_cpu, mish_double_backward_args)

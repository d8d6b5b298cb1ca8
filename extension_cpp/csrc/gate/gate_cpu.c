/* swiglu and geglu on the CPU. Elements and not rows are divided among threads, so that threads can
 * share one wide row. A block never crosses rows. The arithmetic is in activation_cpu_math.h. */
#include "gate/gate.h"

#include "activation/activation_cpu.h"
#include "common/cpu/row.h"

#define KERNEL_BODY "gate/gate_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void gate_forward_cpu_range(int64_t begin, int64_t end, const gate_forward_args *args) {
  const int64_t numel = args->rows * args->cols;
  DISPATCH_DTYPE(args->dtype, gate_forward, args, chunk_begin(begin, numel),
                 chunk_begin(end, numel))
}

static void gate_backward_cpu_range(int64_t begin, int64_t end, const gate_backward_args *args) {
  const int64_t numel = args->rows * args->cols;
  DISPATCH_DTYPE(args->dtype, gate_backward, args, chunk_begin(begin, numel),
                 chunk_begin(end, numel))
}

CPU_ENTRY(gate_forward_cpu, gate_forward_args)
CPU_ENTRY(gate_backward_cpu, gate_backward_args)

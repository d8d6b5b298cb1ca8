/* Scans on the CPU.
 * inner = 1: lanes are steps of one row. A block of 32 elements is scanned in registers, in a fixed
 * tree; a state in double carries on from block to block.
 * inner > 1: lanes are inner elements, and the state of each is in an array. Steps are read one
 * after the other, so that memory is read in rows of a tile.
 * Short rows and few columns are scanned element by element, and so are other strides than 1 read.
 * scan.h says how long lines are cut. */
#include "scan/scan.h"

#include "common/cpu_level.h"
#include "common/cpu_row.h"
#include "scan/scan_cpu.h"
#include "scan/scan_cpu_items.h"

#define KERNEL_BODY "scan/scan_cpu_kernel.h"
#include "common/for_each_dtype.h"

static void cumsum_cpu_range(int64_t begin, int64_t end, const cumsum_args *args) {
  DISPATCH_DTYPE(args->shape.dtype, cumsum, args, begin, end, 0)
}

static void cumsum_totals_cpu_range(int64_t begin, int64_t end, const cumsum_args *args) {
  DISPATCH_DTYPE(args->shape.dtype, cumsum, args, begin, end, 1)
}

static void linear_recurrence_cpu_range(int64_t begin, int64_t end,
                                        const linear_recurrence_args *args) {
  DISPATCH_DTYPE(args->shape.dtype, recurrence, args, begin, end, 0)
}

static void linear_recurrence_totals_cpu_range(int64_t begin, int64_t end,
                                               const linear_recurrence_args *args) {
  DISPATCH_DTYPE(args->shape.dtype, recurrence, args, begin, end, 1)
}

static void linear_recurrence_backward_cpu_range(int64_t begin, int64_t end,
                                                 const linear_recurrence_backward_args *args) {
  DISPATCH_DTYPE(args->shape.dtype, recurrence_backward, args, begin, end, 0)
}

static void linear_recurrence_backward_totals_cpu_range(
    int64_t begin, int64_t end, const linear_recurrence_backward_args *args) {
  DISPATCH_DTYPE(args->shape.dtype, recurrence_backward, args, begin, end, 1)
}

static void logcumsumexp_cpu_range(int64_t begin, int64_t end, const logcumsumexp_args *args) {
  DISPATCH_DTYPE(args->shape.dtype, logcumsumexp, args, begin, end, 0)
}

static void logcumsumexp_totals_cpu_range(int64_t begin, int64_t end,
                                          const logcumsumexp_args *args) {
  DISPATCH_DTYPE(args->shape.dtype, logcumsumexp, args, begin, end, 1)
}

static void logcumsumexp_backward_cpu_range(int64_t begin, int64_t end,
                                            const logcumsumexp_backward_args *args) {
  DISPATCH_DTYPE(args->shape.dtype, logcumsumexp_backward, args, begin, end, 0)
}

static void logcumsumexp_backward_totals_cpu_range(int64_t begin, int64_t end,
                                                   const logcumsumexp_backward_args *args){
    DISPATCH_DTYPE(args->shape.dtype, logcumsumexp_backward, args, begin, end, 1)}

CPU_ENTRY(cumsum_cpu, cumsum_args) CPU_ENTRY(cumsum_totals_cpu, cumsum_args)
    CPU_ENTRY(linear_recurrence_cpu, linear_recurrence_args) CPU_ENTRY(linear_recurrence_totals_cpu,
                                                                       linear_recurrence_args)
        CPU_ENTRY(linear_recurrence_backward_cpu, linear_recurrence_backward_args)
            CPU_ENTRY(linear_recurrence_backward_totals_cpu, linear_recurrence_backward_args)
                CPU_ENTRY(logcumsumexp_cpu, logcumsumexp_args)
                    CPU_ENTRY(logcumsumexp_totals_cpu, logcumsumexp_args)
                        CPU_ENTRY(logcumsumexp_backward_cpu, logcumsumexp_backward_args)
                            CPU_ENTRY(logcumsumexp_backward_totals_cpu, logcumsumexp_backward_args)

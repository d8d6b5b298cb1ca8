/* Scans on the CPU. scan.h describes how long lines are cut.
 *
 * If inner = 1, the lanes of a block are steps of one row. A block of 32 elements is scanned in
 * registers, in a fixed binary tree. A running result in double continues from block to block. If
 * inner > 1, the lanes are inner elements, and an array holds the state of each. The steps are read
 * one after the other, so that memory is read in rows of a tile. Short rows and few columns are
 * scanned element by element. If the elements of a block are not neighbours in memory, they are
 * loaded and stored one by one. */
#include "scan/scan.h"

#include "common/cpu/level.h"
#include "common/cpu/row.h"
#include "scan/scan_cpu.h"
#include "scan/scan_cpu_items.h"

#define KERNEL_BODY "scan/scan_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

/* Defines <op>_cpu, which writes the results, and <op>_totals_cpu, which computes totals of
 * parts. */
#define SCAN_RANGE(name, args_type, kernel, only_total)                         \
  static void name##_range(int64_t begin, int64_t end, const args_type *args) { \
    DISPATCH_DTYPE(args->shape.dtype, kernel, args, begin, end, only_total)     \
  }                                                                             \
  CPU_ENTRY_OF(name, args_type, shape.dtype)
#define SCAN_ENTRIES(op, kernel)             \
  SCAN_RANGE(op##_cpu, op##_args, kernel, 0) \
  SCAN_RANGE(op##_totals_cpu, op##_args, kernel, 1)

SCAN_ENTRIES(cumsum, cumsum)
SCAN_ENTRIES(logcumsumexp, logcumsumexp)
SCAN_ENTRIES(logcumsumexp_backward, logcumsumexp_backward)
SCAN_ENTRIES(linear_recurrence, recurrence)
SCAN_ENTRIES(linear_recurrence_backward, recurrence_backward)

/* layer_norm and rms_norm on the CPU. Forward processes one row at a time. It reads the row from
 * memory for the statistics, and then again from the caches for the result. Backward makes two
 * passes over each row. The first pass waits for memory, and the second reads the row from the
 * caches, so the second pass prefetches the next row. Forward is in norm_cpu_kernel.h, backward in
 * norm_cpu_backward_kernel.h. */
#include "norm/norm.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/math.h"
#include "common/cpu/philox.h"
#include "common/cpu/row.h"

_Static_assert(NORM_BLOCK == (int)BLOCK, "the wide arrays are padded for blocks");

enum {
  FLUSH_COLS = 4096,       /* columns (128 per lane) summed in ACC before the sums go to a double */
  FLUSH_ROWS = 64,         /* rows summed in ACC before the sums go to doubles */
  PREFETCHED_ROW = 1 << 17 /* bytes; backward prefetches its output for shorter rows */
};

/* The mean and variance of a row, or of its differences from a number near its mean. */
typedef struct {
  double mean, variance;
} moments_t;

/* The offsets of the two halves of a block in a wide array (norm_cpu_kernel.h). */
typedef struct {
  int64_t lower, upper;
} wide_halves_t;

/* Prefetches an output of backward for writing. Backward calls this in the first pass over a row,
 * because the second pass would otherwise wait for memory. Backward does not call it if stores
 * bypass the caches, or if rows are so long that the caches would lose the output before the second
 * pass. */
ALWAYS_INLINE void prefetch_output(void *p, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch((char *)p + byte, 1, 3);
}

/* Flags of a backward call: CENTERED for layer_norm, and the gradients that are computed. */
enum { GRAD_BIAS = 1, GRAD_WEIGHT = 2, GRAD_X = 4, CENTERED = 8 };

#define KERNEL_BODY "norm/norm_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void norm_widen_cpu_range(int64_t begin, int64_t end, const norm_widen_args *args) {
  DISPATCH_DTYPE(args->dtype, norm_widen, args, begin, end)
}

static void norm_forward_cpu_range(int64_t begin, int64_t end, const norm_forward_args *args) {
  DISPATCH_DTYPE(args->dtype, norm_forward, args, begin, end)
}

static void norm_backward_cpu_range(int64_t begin, int64_t end, const norm_backward_args *args) {
  for (int64_t part = begin; part < end; ++part)
    DISPATCH_DTYPE(args->dtype, norm_backward, args, part)
}

static void norm_grad_weight_cpu_range(int64_t begin, int64_t end, const norm_backward_args *args) {
  for (int64_t tile = begin; tile < end; ++tile)
    DISPATCH_DTYPE(args->dtype, norm_grad_weight, args, tile)
}

CPU_ENTRY(norm_widen_cpu, norm_widen_args)
CPU_ENTRY(norm_forward_cpu, norm_forward_args)
CPU_ENTRY(norm_backward_cpu, norm_backward_args)
CPU_ENTRY(norm_grad_weight_cpu, norm_backward_args)

/* layer_norm and rms_norm on the CPU.
 * Forward takes one row at a time: it reads the row from memory once, for the statistics, and again
 * from the caches, for the result.
 * Backward: the first pass over a row waits for memory and the second leaves memory idle, so the
 * second pass prefetches the next row.
 * norm_cpu_kernel.h has forward, norm_cpu_backward_kernel.h backward. */
#include "norm/norm.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/math.h"
#include "common/cpu/philox.h"
#include "common/cpu/row.h"

_Static_assert(NORM_BLOCK == (int)BLOCK, "the wide arrays are padded for blocks");

enum {
  FLUSH_COLS = 4096, /* columns (128 a lane) that a lane array sums before it goes to double */
  FLUSH_ROWS = 64,   /* rows that sums over rows take before they go to double */
  PREFETCHED_ROW = 1 << 17 /* bytes; backward prefetches its output for rows up to this */
};

/* The moments of a row, or of its differences from a number near its mean. */
typedef struct {
  double mean, variance;
} moments_t;

/* Where the two halves of a block lie in a wide array (norm_cpu_kernel.h). */
typedef struct {
  int64_t lower, upper;
} wide_halves_t;

/* Backward prefetches its output in the first pass over a row, unless stores are streamed: else the
 * second pass would wait for memory. The caches would lose longer rows before the second pass. */
ALWAYS_INLINE void prefetch_output(void *p, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch((char *)p + byte, 1, 3);
}

/* Flags of a call of backward: layer_norm or rms_norm, and the gradients that it computes. */
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

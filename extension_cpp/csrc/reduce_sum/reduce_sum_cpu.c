/* reduce_sum on the CPU. A work item is a tile of columns over the rows of one chunk. The lanes of
 * a block of 32 columns add eight rows at a time. These sums are added to totals in double, which
 * fit into the L1 cache. Several rows that are narrower than a block are treated as one. A sum over
 * the last dimension runs the same loop on rows of 32 terms, and adds up the 32 totals at the end.
 * The source code fixes the order of every sum, for every instruction set and number of threads. */
#include "reduce_sum/reduce_sum.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"

_Static_assert(SUM_BLOCK == (int)BLOCK, "rows as one must fill blocks");

/* Returns the first column of block b in a tile of `width` columns. The last block is not cut but
 * overlaps the block before it. The two blocks compute the same sums for their common columns. */
ALWAYS_INLINE int64_t block_begin(int64_t b, int64_t width) {
  return b * BLOCK < width - BLOCK ? b * BLOCK : width - BLOCK;
}

/* Stores n sums at out[i], rounded to the dtype of out. */
NOINLINE void store_sums(const reduce_sum_args *args, int64_t i, const double *restrict sum,
                         int64_t n) {
  switch (args->out_dtype) {
    case DTYPE_FLOAT64:
      for (int64_t k = 0; k < n; ++k) ((double *)args->out)[i + k] = sum[k];
      break;
    case DTYPE_FLOAT32:
      for (int64_t k = 0; k < n; ++k) ((float *)args->out)[i + k] = (float)sum[k];
      break;
    case DTYPE_BFLOAT16:
      for (int64_t k = 0; k < n; ++k)
        ((uint16_t *)args->out)[i + k] = (uint16_t)(bfloat16_bits((float)sum[k]) >> 16);
      break;
    case DTYPE_FLOAT16:
      for (int64_t k = 0; k < n; ++k)
        ((uint16_t *)args->out)[i + k] = float_to_float16((float)sum[k]);
      break;
  }
}

#define KERNEL_BODY "reduce_sum/reduce_sum_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void reduce_sum_cpu_range(int64_t begin, int64_t end, const reduce_sum_args *args) {
  DISPATCH_DTYPE(args->dtype, reduce_sum, args, begin, end)
}

CPU_ENTRY(reduce_sum_cpu, reduce_sum_args)

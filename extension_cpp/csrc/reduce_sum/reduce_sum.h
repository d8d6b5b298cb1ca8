/* reduce_sum: one pass of a sum over one dimension, in chunks:
 *   out[o,c,i] = sum of x[o,r,i] over r in [c * chunk, min((c + 1) * chunk, reduce))
 *   x    (outer, reduce, inner)  contiguous, of type dtype, at any address valid for that type
 *   out  (outer, chunks, inner)  contiguous, of type out_dtype (dtype or float64), aligned to 16
 *                                bytes, no overlap; chunks = ceil(reduce / chunk), at least 1
 * Any size may exceed 2^31. reduce = 0 needs chunk = chunks = inner = 1 and writes zeros. With
 * outer = 0 or inner = 0 nothing is launched. NaN and infinities propagate. Float lanes add at most
 * a few dozen terms; all further sums are in double. Results are run-to-run deterministic. The
 * order of the additions depends on the shape (on CUDA also on x's address modulo 16), never on
 * threads or the instruction set. The op is a sequence of such passes (reduce_sum.cpp): one for
 * each run of summed dimensions, or two if the run is cut into chunks. */
#ifndef EXTENSION_CPP_REDUCE_SUM_H
#define EXTENSION_CPP_REDUCE_SUM_H

#include <stdint.h>

#include "common/dtype.h"
#include "common/range.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void *x;
  void *out;
  int64_t outer, reduce, inner;
  int64_t chunk, chunks;
  dtype_t dtype, out_dtype;
} reduce_sum_args;

/* How the CPU kernel tiles columns. The kernel sums SUM_BLOCK columns at once, SUM_ROWS rows at a
 * time. A tile has at least SUM_TILE columns (fewer only if inner is less), and less than twice as
 * many. */
enum { SUM_BLOCK = 32, SUM_ROWS = 8, SUM_TILE = 1024 };

static inline int64_t reduce_sum_tiles(int64_t inner) {
  return inner < SUM_TILE ? 1 : inner / SUM_TILE;
}

/* Returns how many narrow rows the CPU kernel treats as one: the smallest power of two for which
 * they fill whole blocks. */
static inline int64_t reduce_sum_rows_as_one(int64_t inner) {
  int64_t rows = 1;
  while (inner < SUM_BLOCK && rows * inner % SUM_BLOCK != 0) rows *= 2;
  return rows;
}

/* CPU kernel. It processes work items [begin, end) of outer * chunks * reduce_sum_tiles(inner)
 * items. `args` points to the argument struct. */
void reduce_sum_cpu(int64_t begin, int64_t end, void *args);

/* CUDA launcher of one kernel. `stream` is a cudaStream_t. The function returns a cudaError_t. */
int reduce_sum_cuda(const reduce_sum_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif

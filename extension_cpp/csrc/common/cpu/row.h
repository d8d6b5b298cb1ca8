/* Functions that kernels over rows share: sums over lanes, prefetches of later rows, and a loop
 * over the blocks of rows. */
#ifndef EXTENSION_CPP_CPU_ROW_H
#define EXTENSION_CPP_CPU_ROW_H

#include "common/cpu/block.h"
#include "common/range.h"

/* Sums 32 lanes in a fixed order, as a binary tree. The pragmas keep gcc from unrolling the loops
 * completely, because it would compile unrolled loops to scalar code. */
#define DEFINE_FOLD(type)                                                     \
  ALWAYS_INLINE double fold_##type(const type *lane) {                        \
    double sum[16];                                                           \
    _Pragma("GCC unroll 1") for (int k = 0; k < 16; ++k) sum[k] =             \
        (double)lane[k] + (double)lane[k + 16];                               \
    _Pragma("GCC unroll 1") for (int k = 0; k < 8; ++k) sum[k] += sum[k + 8]; \
    for (int k = 0; k < 4; ++k) sum[k] += sum[k + 4];                         \
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);                             \
  }
DEFINE_FOLD(float)
DEFINE_FOLD(double)
#define FOLD(lane) _Generic((lane)[0], float : fold_float, double : fold_double)(lane)

/* How far ahead the last pass over a row prefetches. The distance is one row, or at least 4 KiB for
 * narrow rows. Rows of 16 KiB and more (`wide`) are prefetched into the L2 cache, because in the L1
 * cache they would evict each other. */
typedef struct {
  int64_t bytes;
  int wide;
} ahead_t;

ALWAYS_INLINE ahead_t row_ahead(int64_t stride, int64_t cols, int64_t size) {
  const int64_t bytes = stride * size, least = bytes > 0 ? ceil_div(4096, bytes) : 0;
  return (ahead_t){bytes * (least > 1 ? least : 1), cols * size >= 16384};
}

/* Prefetches `bytes` bytes at the distance `ahead` from p. */
ALWAYS_INLINE void prefetch_later(const void *p, int64_t bytes, ahead_t ahead) {
  if (!ahead.wide) {
    prefetch(p, ahead.bytes, bytes);
    return;
  }
  const uintptr_t later = (uintptr_t)p + (uintptr_t)ahead.bytes;
  for (int64_t byte = 0; byte < bytes; byte += 64)
    __builtin_prefetch((const void *)(later + (uintptr_t)byte), 0, 2);
}

/* Returns the number of elements of `size` bytes from p to the next address that is a multiple of
 * 64. p must be aligned to `size` bytes. */
ALWAYS_INLINE int64_t elements_to_line(const void *p, int64_t size) {
  return (64 - (int64_t)((uintptr_t)p % 64)) % 64 / size;
}

/* Calls block(args, i, c, n, stream) for the elements [begin, end) of a matrix with rows of `cols`
 * elements. Each call covers n elements of one row. The first has flat index i and column c. `out`
 * points to element 0 of the output. If `stream` is set, the elements before the next multiple of
 * 64 bytes of `out` get a separate call, so that the rest of the row can use non-temporal
 * stores. */
#define FOR_ROW_BLOCKS(block, args, begin, end, cols, out, stream)                               \
  do {                                                                                           \
    for (int64_t i = (begin), c = (begin) % (cols); i < (end); c = 0) {                          \
      const int64_t row_end = i + ((cols)-c) < (end) ? i + ((cols)-c) : (end);                   \
      for (int64_t n; i < row_end; i += n, c += n) {                                             \
        const int64_t head = (stream) ? elements_to_line((out) + i, sizeof *(out)) : 0;          \
        if (head == 0) {                                                                         \
          for (; i + BLOCK <= row_end; i += BLOCK, c += BLOCK) block(args, i, c, BLOCK, stream); \
        }                                                                                        \
        n = head > 0 && head < row_end - i ? head : row_end - i;                                 \
        n = n < BLOCK ? n : BLOCK;                                                               \
        if (n > 0) block(args, i, c, (int)n, 0);                                                 \
      }                                                                                          \
    }                                                                                            \
    if (stream) stream_fence();                                                                  \
  } while (0)

#endif

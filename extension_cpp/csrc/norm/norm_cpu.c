/* layer_norm and rms_norm on the CPU. Forward: a row at a time, read from memory once and then, for its statistics and its
 * result, from the caches. Backward: a part of the rows, two rows at a time, which share the loads of the weights and of the
 * running sums over the rows; the next rows are asked for early, since a row's first pass else waits for memory and its
 * second leaves memory idle. The arithmetic is in norm_cpu_kernel.h and, for backward, norm_cpu_backward_kernel.h. */
#include "norm/norm.h"

#include "common/cpu_block.h"
#include "common/cpu_level.h"
#include "common/cpu_math.h"
#include "common/cpu_philox.h"

_Static_assert(NORM_BLOCK == (int)BLOCK, "the wide arrays are padded for blocks");

enum {
  FLUSH_COLS =
      4096, /* lanes along a row hold at most this many columns, 128 each, before they go to double */
  FLUSH_ROWS = 64 /* and sums down a column at most this many rows */
};

/* Whether backward has copies that take two rows at a time: the baseline of x86-64 is to be right, not long. */
#if defined(__AVX2__) || !defined(__x86_64__)
#define PAIRS 1
#else
#define PAIRS 0
#endif

/* Wide arrays (norm.h) are in column order, for bfloat16 all even columns and then all odd ones, so that the two halves of a
 * block in its block order are contiguous wherever the block begins. The halves of the block at column c are at
 * wide_index(c) of `lower` and `upper`; these two are the same for all c of the same parity. */
typedef struct {
  int64_t lower, upper;
} wide_place_t;

ALWAYS_INLINE int64_t wide_index_float64(int64_t c) { return c; }
ALWAYS_INLINE int64_t wide_index_float32(int64_t c) { return c; }
ALWAYS_INLINE int64_t wide_index_float16(int64_t c) { return c; }
ALWAYS_INLINE int64_t wide_index_bfloat16(int64_t c) { return c / 2; }

ALWAYS_INLINE wide_place_t wide_place_float64(int64_t c, int64_t cols) {
  (void)c, (void)cols;
  return (wide_place_t){0, BLOCK / 2};
}
ALWAYS_INLINE wide_place_t wide_place_float32(int64_t c, int64_t cols) {
  return wide_place_float64(c, cols);
}
ALWAYS_INLINE wide_place_t wide_place_float16(int64_t c, int64_t cols) {
  return wide_place_float64(c, cols);
}
ALWAYS_INLINE wide_place_t wide_place_bfloat16(int64_t c, int64_t cols) {
  const int64_t odd = norm_wide_cols(cols) / 2;
  return c % 2 ? (wide_place_t){odd, 1} : (wide_place_t){0, odd};
}

/* 32 lanes to one sum, in a fixed tree. A loop that gcc unrolled whole would be scalar. */
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

/* While a row is in its last pass, the columns of a later one are asked for: `bytes` ahead, the next row or rows, and where
 * those are narrow some KiB. Wide rows go to the second-level cache, for in the first they would push out their like. */
typedef struct {
  int64_t bytes;
  int wide;
} ahead_t;

ALWAYS_INLINE ahead_t row_ahead(int64_t stride, int64_t cols, int64_t size, int rows) {
  const int64_t bytes = stride * size, least = bytes > 0 ? ceil_div(4096, bytes) : 0;
  return (ahead_t){bytes * (least > rows ? least : rows), cols * size >= 16384};
}

/* Of `bytes` bytes at p. */
ALWAYS_INLINE void prefetch_later(const void *p, int64_t bytes, ahead_t ahead) {
  if (!ahead.wide) {
    prefetch(p, ahead.bytes, bytes);
    return;
  }
  const uintptr_t later = (uintptr_t)p + (uintptr_t)ahead.bytes;
  for (int64_t byte = 0; byte < bytes; byte += 64)
    __builtin_prefetch((const void *)(later + (uintptr_t)byte), 0, 2);
}

/* Backward's result, where it is not streamed, is asked for in a row's first pass: the second, which writes it, would wait for
 * memory. Of a longer row the caches would have lost it by then. */
enum { ASKED_ROW = 1 << 17 /* bytes */ };

ALWAYS_INLINE void prefetch_output(void *p, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch((char *)p + byte, 1, 3);
}

/* What backward computes: constants in the copies of its loops that take two rows at a time. */
typedef struct {
  int centered, x, weight, bias;
} wanted_t;

/* What the fused forms of backward have beside it. A NULL fused_t is a constant, and leaves the plain norms as they are; which
 * of the forms a call is, is asked block by block, for their copies would be many. */
typedef struct {
  cpu_dropout_t *dropout; /* two, of one dropout; NULL: none */
  int64_t end;            /* the last row's */
  ahead_t grad_sum_ahead;
  int drops_y;
} fused_t;

#define KERNEL_BODY "norm/norm_cpu_kernel.h"
#include "common/for_each_dtype.h"

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

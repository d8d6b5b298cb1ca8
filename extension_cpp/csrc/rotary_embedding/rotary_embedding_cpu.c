/* rotary_embedding on the CPU, row by row, where a row is one head of one token. Rows are processed
 * in the order of memory, so that stores can bypass the caches. If the heads of a token are
 * neighbours in memory, all heads of a token come first, and otherwise all tokens of a head. A
 * token's cos and sin are read from a cache and widened again for each head. (Tiles of tokens, head
 * by head, would keep them in the L1 cache, but took 1.4 times as long.) The arithmetic is in
 * rotary_embedding_cpu_kernel.h. */
#include "rotary_embedding/rotary_embedding.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/math.h"

/* The indices of a row. */
typedef struct {
  int64_t batch, head, token;
} place_t;

ALWAYS_INLINE int heads_inside(const rotary_tensor *tensor) {
  return tensor->y_strides.head < tensor->y_strides.token;
}

ALWAYS_INLINE place_t place_of(const rotary_embedding_args *args, const rotary_tensor *tensor,
                               int64_t row) {
  const int64_t heads = tensor->heads, tokens = args->tokens, rest = row % (heads * tokens);
  const int64_t batch = row / (heads * tokens);
  if (heads_inside(tensor)) return (place_t){batch, rest % heads, rest / heads};
  return (place_t){batch, rest / tokens, rest % tokens};
}

/* Advances `place` to the next row in the order of memory, without a division. */
ALWAYS_INLINE void advance(place_t *place, const rotary_embedding_args *args,
                           const rotary_tensor *tensor) {
  int64_t *inner = &place->token, *outer = &place->head;
  int64_t inner_size = args->tokens, outer_size = tensor->heads;
  if (heads_inside(tensor)) {
    inner = &place->head, outer = &place->token;
    inner_size = tensor->heads, outer_size = args->tokens;
  }
  if (++*inner < inner_size) return;
  *inner = 0;
  if (++*outer < outer_size) return;
  *outer = 0;
  ++place->batch;
}

ALWAYS_INLINE int64_t offset_of(rotary_strides strides, place_t place) {
  return place.batch * strides.batch + place.head * strides.head + place.token * strides.token;
}

#define KERNEL_BODY "rotary_embedding/rotary_embedding_cpu_kernel.h"
#include "common/cpu/for_each_dtype.h"

static void rotary_embedding_cpu_range(int64_t begin, int64_t end,
                                       const rotary_embedding_args *args) {
  int64_t first = 0; /* index of the tensor's first row among the rows of q and k */
  for (int i = 0; i < 2; ++i) {
    const int64_t rows = rotary_rows(args, i);
    const int64_t from = begin > first ? begin - first : 0;
    const int64_t to = end - first < rows ? end - first : rows;
    if (from < to) DISPATCH_DTYPE(args->dtype, rotate_rows, args, &args->tensors[i], from, to)
    first += rows;
  }
}

CPU_ENTRY(rotary_embedding_cpu, rotary_embedding_args)

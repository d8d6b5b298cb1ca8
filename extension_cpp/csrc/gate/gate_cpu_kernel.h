/* CPU kernels of swiglu and geglu. gate_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */
#include "activation/activation_cpu_math.h"

/* Pointers to n neighbouring elements of one row of each input, and to memory for the results. */
typedef struct {
  const T *gate, *up, *grad_out; /* grad_out is NULL in forward */
  T *y, *grad_up;                /* in backward, y is grad_gate */
  int64_t n;
} NAME(part_t);

ALWAYS_INLINE void NAME(forward_block)(activation_t kind, const NAME(part_t) * part, int64_t i,
                                       int n, int stream) {
  ACC gate[BLOCK], up[BLOCK];
  READ(gate, part->gate + i, n);
  READ(up, part->up + i, n);
  for (int k = 0; k < BLOCK; ++k) gate[k] = NAME(activation_value)(kind, gate[k]) * up[k];
  /* store_clean needs every NaN to have 0 in its lower bits. In gelu a NaN passes through exp,
   * which may set these bits. The other activations never pass a NaN to exp. */
  if (kind == GELU) {
    STORE(part->y + i, gate, n, stream);
  } else {
    NAME(store_clean)(part->y + i, gate, n, stream);
  }
}

ALWAYS_INLINE void NAME(backward_block)(activation_t kind, const NAME(part_t) * part, int64_t i,
                                        int n, int stream) {
  ACC grad_out[BLOCK], gate[BLOCK], up[BLOCK];
  READ(grad_out, part->grad_out + i, n);
  READ(gate, part->gate + i, n);
  READ(up, part->up + i, n);
  for (int k = 0; k < BLOCK; ++k) {
    const NAME(jet_t) f = NAME(activation)(kind, gate[k]);
    gate[k] = grad_out[k] * up[k] * f.first;
    up[k] = grad_out[k] * f.value;
  }
  STORE(part->y + i, gate, n, stream);
  STORE(part->grad_up + i, up, n, stream);
}

ALWAYS_INLINE void NAME(block)(activation_t kind, const NAME(part_t) * part, int64_t i, int n,
                               int stream) {
  if (part->grad_out)
    NAME(backward_block)(kind, part, i, n, stream);
  else
    NAME(forward_block)(kind, part, i, n, stream);
}

/* Processes the n elements of `part`. The elements of y before the first address that is a multiple
 * of 64 are a separate block, so that all other blocks can use non-temporal stores. */
ALWAYS_INLINE void NAME(run_part)(activation_t kind, const NAME(part_t) * part, int stream) {
  const int64_t to_line = stream ? elements_to_line(part->y, sizeof(T)) : 0;
  const int64_t head = to_line < part->n ? to_line : part->n;
  for (int64_t i = 0, n; i < part->n; i += n) {
    n = i < head ? head : part->n - i < BLOCK ? part->n - i : BLOCK;
    NAME(block)(kind, part, i, (int)n, stream && i >= head);
  }
}

/* The number of elements from i to the end of i's row, or to `end` if `end` comes first. */
#define PART_LENGTH(args, i, end)                                                      \
  ((args)->cols - (i) % (args)->cols < (end) - (i) ? (args)->cols - (i) % (args)->cols \
                                                   : (end) - (i))

ALWAYS_INLINE void NAME(forward)(activation_t kind, const gate_forward_args *args, int64_t begin,
                                 int64_t end) {
  const int stream = cpu_should_stream(3 * args->rows * args->cols * (int64_t)sizeof(T));
  for (int64_t i = begin, n; i < end; i += n) {
    const int64_t r = i / args->cols, c = i % args->cols;
    n = PART_LENGTH(args, i, end);
    const NAME(part_t) part = {.gate = (const T *)args->gate + r * args->gate_stride + c,
                               .up = (const T *)args->up + r * args->up_stride + c,
                               .y = (T *)args->y + i,
                               .n = n};
    NAME(run_part)(kind, &part, stream);
  }
  if (stream) stream_fence();
}

static void NAME(gate_forward)(const gate_forward_args *args, int64_t begin, int64_t end){
    DISPATCH_ACTIVATION(args->kind, NAME(forward), args, begin, end)}

ALWAYS_INLINE void NAME(backward)(activation_t kind, const gate_backward_args *args, int64_t begin,
                                  int64_t end) {
  /* Non-temporal stores need both outputs at the same distance from a multiple of 64 bytes. New
   * tensors usually meet this condition, because the allocator aligns them alike. */
  const int stream = cpu_should_stream(5 * args->rows * args->cols * (int64_t)sizeof(T)) &&
                     ((uintptr_t)args->grad_gate - (uintptr_t)args->grad_up) % 64 == 0;
  for (int64_t i = begin, n; i < end; i += n) {
    const int64_t r = i / args->cols, c = i % args->cols;
    n = PART_LENGTH(args, i, end);
    const NAME(part_t) part = {.grad_out = (const T *)args->grad_out + r * args->grad_stride + c,
                               .gate = (const T *)args->gate + r * args->gate_stride + c,
                               .up = (const T *)args->up + r * args->up_stride + c,
                               .y = (T *)args->grad_gate + i,
                               .grad_up = (T *)args->grad_up + i,
                               .n = n};
    NAME(run_part)(kind, &part, stream);
  }
  if (stream) stream_fence();
}

static void NAME(gate_backward)(const gate_backward_args *args, int64_t begin, int64_t end) {
  DISPATCH_ACTIVATION(args->kind, NAME(backward), args, begin, end)
}
#undef PART_LENGTH

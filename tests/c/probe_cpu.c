#include "probe.h"

#include "common/cpu_block.h"
#include "common/cpu_level.h"
#include "common/cpu_math.h"
#include "common/cpu_philox.h"

static void exp_cpu_range(int64_t begin, int64_t end, const exp_args *args) {
  for (int64_t i = begin; i < end; i += BLOCK) {
    float x[BLOCK];
    load_float32(x, args->x + i, BLOCK);
    for (int k = 0; k < BLOCK; ++k) x[k] = exp_scaled_float(x[k]);
    store_float32(args->y + i, x, BLOCK, 0);
  }
}

/* As kernels call them: n a constant for whole blocks. */
#define LOAD_BLOCK(type, element, lane)                                     \
  if (n == BLOCK)                                                           \
    load_##type((lane *)args->lanes, (const element *)args->memory, BLOCK); \
  else                                                                      \
    load_##type((lane *)args->lanes, (const element *)args->memory, n)
#define STORE_BLOCK(type, element, lane)                                                   \
  if (n == BLOCK)                                                                          \
    store_##type((element *)args->memory, (const lane *)args->lanes, BLOCK, args->stream); \
  else                                                                                     \
    store_##type((element *)args->memory, (const lane *)args->lanes, n, args->stream)

static void load_block_cpu_range(int64_t begin, int64_t end, const block_args *args) {
  (void)begin, (void)end;
  const int n = args->n;
  switch (args->dtype) {
    case DTYPE_FLOAT64: LOAD_BLOCK(float64, double, double); break;
    case DTYPE_FLOAT32: LOAD_BLOCK(float32, float, float); break;
    case DTYPE_BFLOAT16: LOAD_BLOCK(bfloat16, uint16_t, float); break;
    case DTYPE_FLOAT16: LOAD_BLOCK(float16, uint16_t, float); break;
  }
}

static void store_block_cpu_range(int64_t begin, int64_t end, const block_args *args) {
  (void)begin, (void)end;
  const int n = args->n;
  switch (args->dtype) {
    case DTYPE_FLOAT64: STORE_BLOCK(float64, double, double); break;
    case DTYPE_FLOAT32: STORE_BLOCK(float32, float, float); break;
    case DTYPE_BFLOAT16: STORE_BLOCK(bfloat16, uint16_t, float); break;
    case DTYPE_FLOAT16: STORE_BLOCK(float16, uint16_t, float); break;
  }
  stream_fence();
}

static void store_all_cpu_range(int64_t begin, int64_t end, const store_args *args) {
  for (int64_t i = begin; i < end; i += BLOCK) {
    if (args->dtype == DTYPE_BFLOAT16) store_bfloat16(args->half + i, args->x + i, BLOCK, 0);
    if (args->dtype == DTYPE_FLOAT16) store_float16(args->half + i, args->x + i, BLOCK, 0);
  }
}

static void philox_block_cpu_range(int64_t begin, int64_t end, const philox_args *args) {
  (void)end;
  uint32_t bits[BLOCK];
  if (args->dtype == DTYPE_BFLOAT16) {
    philox_block_bfloat16(bits, begin, args->seed);
  } else {
    philox_block_float32(bits, begin, args->seed);
  }
  memcpy(args->bits, bits, sizeof bits);
}

CPU_ENTRY(exp_cpu, exp_args)
CPU_ENTRY(load_block_cpu, block_args)
CPU_ENTRY(store_block_cpu, block_args)
CPU_ENTRY(store_all_cpu, store_args)
CPU_ENTRY(philox_block_cpu, philox_args)

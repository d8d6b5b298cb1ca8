#include "probe.h"

#include "common/cpu/block.h"
#include "common/cpu/level.h"
#include "common/cpu/math.h"
#include "common/cpu/philox.h"

static void exp_cpu_range(int64_t begin, int64_t end, const exp_args *args) {
  for (int64_t i = begin; i < end; i += BLOCK) {
    float x[BLOCK];
    load_float32(x, args->x + i, BLOCK);
    for (int k = 0; k < BLOCK; ++k) x[k] = exp_scaled_float(x[k]);
    store_float32(args->y + i, x, BLOCK, 0);
  }
}

static float product_of_parts(float x, int degree) {
  float power;
  const float p = exp_parts_float(x, degree, &power);
  return p * power;
}

static float product_of_powers(float x, int degree) {
  float power;
  const float p = exp2_parts_float(x, degree, &power);
  return 2 * (p * power);
}

static float math_function(int function, float x) {
  switch (function) {
    case EXP_DEGREE_5: return product_of_parts(x, 5);
    case EXP_DEGREE_4: return product_of_parts(x, 4);
    case TANH_FLOAT: return tanh_float(x);
    case EXP2_DEGREE_5: return product_of_powers(x, 5);
    case EXP2_DEGREE_4: return product_of_powers(x, 4);
    default: return exp_softmax_float(x);
  }
}

static void math_cpu_range(int64_t begin, int64_t end, const math_args *args) {
  const int function = args->function;
  for (int64_t i = begin; i < end; i += BLOCK) {
    float x[BLOCK];
    load_float32(x, args->x + i, BLOCK);
    for (int k = 0; k < BLOCK; ++k) x[k] = math_function(function, x[k]);
    store_float32(args->y + i, x, BLOCK, 0);
  }
}

/* Calls the load or store as kernels do, with a constant n for whole blocks. */
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

static void kept_cpu_range(int64_t begin, int64_t end, const kept_args *args) {
  cpu_dropout_t state;
  cpu_dropout_init(&state, &args->dropout, end);
  for (int64_t i = begin; i < end; i += BLOCK) {
    const int n = end - i < BLOCK ? (int)(end - i) : BLOCK;
    float behind[BLOCK] = {0}, v[BLOCK];
    if (args->back && i - args->back >= begin)
      dropout_block_float32(behind, &state, i - args->back);
    for (int k = 0; k < BLOCK; ++k) v[k] = 1;
    dropout_block_float32(v, &state, i);
    for (int k = 0; k < n; ++k) args->kept[i - begin + k] = v[k] != 0;
  }
}

/* At the level v4, ops have no float64 functions. These probes have all types at every level. */
#if defined(CPU_LEVEL_V4)
#undef CPU_ENTRY
#define CPU_ENTRY(name, args_type) CPU_ENTRY_LEVEL(name, args_type)
#endif
CPU_ENTRY(exp_cpu, exp_args)
CPU_ENTRY(math_cpu, math_args)
CPU_ENTRY(load_block_cpu, block_args)
CPU_ENTRY(store_block_cpu, block_args)
CPU_ENTRY(store_all_cpu, store_args)
CPU_ENTRY(kept_cpu, kept_args)

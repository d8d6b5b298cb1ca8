/* Test kernels that call inline functions of csrc/common, which have no symbols. They are compiled
 * and dispatched like the kernels of an op, so that each function is tested at each instruction
 * set. */
#ifndef EXTENSION_CPP_TESTS_PROBE_H
#define EXTENSION_CPP_TESTS_PROBE_H

#include <stdint.h>

#include "common/dtype.h"
#include "common/philox.h"

typedef struct {
  const float *x;
  float *y;
} exp_args;

/* Computes y[i] = exp(x[i]) * 2^64 for i in [begin, end). The length is a multiple of BLOCK. */
void exp_cpu(int64_t begin, int64_t end, void *args);

/* The math functions of softmax. */
enum {
  EXP_SOFTMAX_FLOAT,
  EXP_DEGREE_5,
  EXP_DEGREE_4,
  TANH_FLOAT,
  EXP2_DEGREE_5,
  EXP2_DEGREE_4,
  MATH_FUNCTIONS
};

typedef struct {
  const float *x;
  float *y;
  int function;
} math_args;

/* Computes y[i] = function(x[i]) for i in [begin, end). The length is a multiple of BLOCK. */
void math_cpu(int64_t begin, int64_t end, void *args);

/* One block: n elements of dtype in `memory`, and 32 floats (doubles for float64) in `lanes`. */
typedef struct {
  void *memory;
  void *lanes;
  dtype_t dtype;
  int n;
  int stream;
} block_args;

void load_block_cpu(int64_t begin, int64_t end, void *args);
void store_block_cpu(int64_t begin, int64_t end, void *args);

typedef struct {
  const float *x;
  uint16_t *half;
  dtype_t dtype;
} store_args;

/* Sets half[i] to x[i] rounded, for whole blocks in [begin, end). x is in block order. */
void store_all_cpu(int64_t begin, int64_t end, void *args);

typedef struct {
  uint8_t *kept; /* shape (end - begin) */
  dropout_t dropout;
  int64_t back; /* distance to an earlier block, whose mask is made before each mask; 0: none */
} kept_args;

/* Sets kept[i - begin] to whether dropout keeps element i, one block at a time. */
void kept_cpu(int64_t begin, int64_t end, void *args);

#endif

/* Element types of every op: one enum for the C kernels, the CUDA kernels and the C++ shims. */
#ifndef EXTENSION_CPP_DTYPE_H
#define EXTENSION_CPP_DTYPE_H

typedef enum {
  DTYPE_FLOAT64,
  DTYPE_FLOAT32,
  DTYPE_BFLOAT16,
  DTYPE_FLOAT16,
} dtype_t;

#endif

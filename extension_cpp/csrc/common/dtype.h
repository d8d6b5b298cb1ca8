/* The element types of ops. The C kernels, the CUDA kernels and the C++ shims share this enum. */
#ifndef EXTENSION_CPP_DTYPE_H
#define EXTENSION_CPP_DTYPE_H

typedef enum {
  DTYPE_FLOAT64,
  DTYPE_FLOAT32,
  DTYPE_BFLOAT16,
  DTYPE_FLOAT16,
} dtype_t;

#endif

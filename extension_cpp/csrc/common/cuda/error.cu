#include "common/cuda/error.h"

#include <cuda_runtime.h>

extern "C" const char *cuda_error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

// The norms' forward kernels for float32.
#include "norm/norm_forward.cuh"

template cudaError_t norms::forward<float>(const norm_forward_args &, const Plan &, cudaStream_t);

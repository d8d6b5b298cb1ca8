// The norms' forward kernels for float16.
#include "norm/norm_forward.cuh"

template cudaError_t norms::forward<__half>(const norm_forward_args &, const Plan &, cudaStream_t);

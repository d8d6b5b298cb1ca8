// The norms' backward kernels for float32.
#include "norm/norm_backward_split.cuh"

template cudaError_t norms::backward<float>(const norm_backward_args &, const Plan &, cudaStream_t);

// The norms' backward kernels for float16.
#include "norm/norm_backward_split.cuh"

template cudaError_t norms::backward<__half>(const norm_backward_args &, const Plan &,
                                             cudaStream_t);

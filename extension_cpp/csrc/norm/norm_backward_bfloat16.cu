// The norms' backward kernels for bfloat16.
#include "norm/norm_backward_split.cuh"

template cudaError_t norms::backward<__nv_bfloat16>(const norm_backward_args &, const Plan &,
                                                    cudaStream_t);

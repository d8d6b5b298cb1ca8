// The norms' forward kernels for bfloat16.
#include "norm/norm_forward.cuh"

template cudaError_t norms::forward<__nv_bfloat16>(const norm_forward_args &, const Plan &,
                                                   cudaStream_t);

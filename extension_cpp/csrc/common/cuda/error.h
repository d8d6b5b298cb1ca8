/* The library contains its own copy of the CUDA runtime, whose symbols are hidden. The C++ shims
 * therefore call cudaGetErrorString through this function. */
#ifndef EXTENSION_CPP_CUDA_ERROR_H
#define EXTENSION_CPP_CUDA_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

const char *cuda_error_string(int error);

#ifdef __cplusplus
}
#endif

#endif

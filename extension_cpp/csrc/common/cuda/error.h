/* The CUDA runtime is linked into the library with hidden symbols. The C++ shims call it through
 * this function. */
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

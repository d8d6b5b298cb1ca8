/* The CUDA runtime is linked into the library, hidden; shims reach it through here. */
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

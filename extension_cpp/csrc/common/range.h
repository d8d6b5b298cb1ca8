/* How CPU kernels split work. Element-wise ops cut the tensor into chunks of CHUNK elements, and
 * PyTorch's thread pool hands out ranges of chunks. A range therefore begins at a multiple of BLOCK
 * elements and of 64 bytes, whatever the number of threads. */
#ifndef EXTENSION_CPP_RANGE_H
#define EXTENSION_CPP_RANGE_H

#include <stdint.h>

enum { CHUNK = 4096 };

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Returns the index of the first element of a chunk, and numel for the chunk after the last one. */
static inline int64_t chunk_begin(int64_t chunk, int64_t numel) {
  return chunk * CHUNK < numel ? chunk * CHUNK : numel;
}

#endif

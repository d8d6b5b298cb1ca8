/* How CPU kernels split work. Flat ops are cut into chunks of CHUNK elements, and PyTorch's thread
 * pool hands out ranges of chunks. So a range begins at a multiple of 64 bytes and of BLOCK,
 * whatever the number of threads. */
#ifndef EXTENSION_CPP_RANGE_H
#define EXTENSION_CPP_RANGE_H

#include <stdint.h>

enum { CHUNK = 4096 };

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* The first element of chunk number `chunk`; numel for the number after the last chunk. */
static inline int64_t chunk_begin(int64_t chunk, int64_t numel) {
  return chunk * CHUNK < numel ? chunk * CHUNK : numel;
}

#endif

/* An allocator for PyTorch's GPU tensors with guard bytes around each block, for tests/guarded.py.
 * It is compiled without CUDA's headers, because the process that loads it has libcudart
 * already. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { GUARD = 512, PATTERN = 0xA5, DEVICE_TO_HOST = 2 }; /* GUARD keeps blocks aligned */

int cudaMalloc(void **block, size_t size);
int cudaFree(void *block);
int cudaMemset(void *to, int value, size_t size);
int cudaMemcpy(void *to, const void *from, size_t size, int kind);
int cudaDeviceSynchronize(void);

static long damaged;

/* Returns how many blocks had changed guard bytes when they were freed. */
long guarded_damaged(void) { return damaged; }

void *guarded_malloc(ptrdiff_t size, int device, void *stream) {
  (void)device, (void)stream;
  void *block = NULL;
  if (cudaMalloc(&block, (size_t)size + 2 * GUARD) != 0) return NULL;
  cudaMemset(block, PATTERN, (size_t)size + 2 * GUARD);
  return (uint8_t *)block + GUARD;
}

void guarded_free(void *pointer, ptrdiff_t size, int device, void *stream) {
  (void)device, (void)stream;
  uint8_t *const block = (uint8_t *)pointer - GUARD, guards[2 * GUARD], expected[2 * GUARD];
  memset(expected, PATTERN, sizeof expected);
  cudaDeviceSynchronize();
  cudaMemcpy(guards, block, GUARD, DEVICE_TO_HOST);
  cudaMemcpy(guards + GUARD, (uint8_t *)pointer + size, GUARD, DEVICE_TO_HOST);
  damaged += memcmp(guards, expected, sizeof guards) != 0;
  cudaFree(block);
}

// Sums over groups of threads. The N values of a thread are summed together, so that they share
// barriers. The order of the additions is fixed, so that every run gives the same bits. Every
// thread of the group gets the result.
#ifndef EXTENSION_CPP_CUDA_REDUCE_CUH
#define EXTENSION_CPP_CUDA_REDUCE_CUH

#include <cuda_runtime.h>

// Sums over `width` neighbouring lanes, a power of two up to 32. All lanes of a warp must call it.
template <typename A, int N>
__device__ inline void group_sum(A (&v)[N], int width = 32) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset >= width) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) v[n] += __shfl_xor_sync(0xffffffffu, v[n], offset);
  }
}

// Returns the maximum over `width` neighbouring lanes. It ignores NaN, as fmaxf does.
template <typename A>
__device__ inline A group_max(A v, int width = 32) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset < width) v = max(v, __shfl_xor_sync(0xffffffffu, v, offset));
  }
  return v;
}

// Sums over a block of THREADS threads, a power of two from 64 to 1024. All threads must call it.
template <int THREADS, typename A, int N>
__device__ inline void block_sum(A (&v)[N]) {
  constexpr int WARPS = THREADS / 32;
  __shared__ A warps[WARPS][N];
  group_sum(v);
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int n = 0; n < N; ++n) warps[threadIdx.x / 32][n] = v[n];
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) v[n] = warps[threadIdx.x % WARPS][n];
  group_sum(v, WARPS);
  __syncthreads();  // waits for all reads before the next call stores to `warps`
}

#endif

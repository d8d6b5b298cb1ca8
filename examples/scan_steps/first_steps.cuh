// Kernels 0 to 3 of scan_steps.cu. One thread, CTA or warp scans a whole row, a few elements at a
// time.
#ifndef SCAN_STEPS_FIRST_STEPS_CUH
#define SCAN_STEPS_FIRST_STEPS_CUH

#include <cuda_runtime.h>

#include <cstdint>

constexpr int THREADS = 256, WARPS = THREADS / 32;  // threads per CTA
constexpr unsigned ALL = 0xffffffffu;               // mask of all lanes

// ---- 0: one thread scans a row ----

__global__ void __launch_bounds__(THREADS)
    walk_kernel(const float *x, float *y, int64_t rows, int64_t n) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; row < rows;
       row += threads) {
    float sum = 0;
    for (int64_t k = 0; k < n; ++k) {
      sum += x[row * n + k];
      y[row * n + k] = sum;
    }
  }
}

// ---- 1: Hillis and Steele, in shared memory ----

// A CTA scans THREADS elements of its row at a time. After the pass with offset d, an element holds
// the sum of up to 2 d elements that end with it. A pass reads one buffer and writes the other.
__global__ void __launch_bounds__(THREADS)
    hillis_steele_kernel(const float *x, float *y, int64_t rows, int64_t n) {
  __shared__ float sums[2][THREADS];
  const int t = static_cast<int>(threadIdx.x);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float carry = 0;
    for (int64_t start = 0; start < n; start += THREADS) {
      const int64_t k = start + t;
      int from = 0;
      sums[from][t] = k < n ? x[row * n + k] : 0;
      __syncthreads();
      for (int offset = 1; offset < THREADS; offset *= 2) {
        const float before = t < offset ? 0 : sums[from][t - offset];
        sums[1 - from][t] = before + sums[from][t];
        from = 1 - from;
        __syncthreads();
      }
      if (k < n) y[row * n + k] = carry + sums[from][t];
      carry += sums[from][THREADS - 1];
      __syncthreads();  // waits for all reads before the next elements are stored
    }
  }
}

// ---- 2: Blelloch, up and down a tree in shared memory ----

// A CTA scans 2 * THREADS elements at a time. They are the leaves of a tree, and a node is stored
// at the position of its last leaf. On the way up, a node becomes the sum of its leaves. On the way
// down, it becomes the sum of all leaves before its first leaf.
__global__ void __launch_bounds__(THREADS)
    blelloch_kernel(const float *x, float *y, int64_t rows, int64_t n) {
  constexpr int LEAVES = 2 * THREADS;
  __shared__ float tree[LEAVES];
  const int t = static_cast<int>(threadIdx.x);
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float carry = 0;
    for (int64_t start = 0; start < n; start += LEAVES) {
      float own[2];
      for (int i = 0; i < 2; ++i) {
        const int64_t k = start + i * THREADS + t;
        own[i] = k < n ? x[row * n + k] : 0;
        tree[i * THREADS + t] = own[i];
      }
      for (int size = 1; size < LEAVES; size *= 2) {
        __syncthreads();
        const int node = 2 * size * (t + 1) - 1;
        if (node < LEAVES) tree[node] += tree[node - size];
      }
      __syncthreads();
      const float total = tree[LEAVES - 1];
      __syncthreads();
      if (t == 0) tree[LEAVES - 1] = 0;
      for (int size = THREADS; size > 0; size /= 2) {
        __syncthreads();
        const int node = 2 * size * (t + 1) - 1;
        if (node < LEAVES) {
          const float left = tree[node - size];
          tree[node - size] = tree[node];
          tree[node] += left;
        }
      }
      __syncthreads();
      for (int i = 0; i < 2; ++i) {
        const int64_t k = start + i * THREADS + t;
        if (k < n) y[row * n + k] = carry + (tree[i * THREADS + t] + own[i]);
      }
      // No barrier is needed here: up to the next barrier, each thread accesses only its own
      // leaves.
      carry += total;
    }
  }
}

// ---- 3: one warp scans a row, with shuffles ----

// The method of Hillis and Steele on the registers of a warp, without shared memory and barriers.
__device__ inline float warp_scan(float sum) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const float before = __shfl_up_sync(ALL, sum, offset);
    if (lane >= offset) sum += before;
  }
  return sum;
}

__global__ void __launch_bounds__(THREADS)
    warp_shuffles_kernel(const float *x, float *y, int64_t rows, int64_t n) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * WARPS;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + warp; row < rows; row += warps) {
    float carry = 0;
    for (int64_t start = 0; start < n; start += 32) {
      const int64_t k = start + lane;
      const float sum = carry + warp_scan(k < n ? x[row * n + k] : 0);
      if (k < n) y[row * n + k] = sum;
      carry = __shfl_sync(ALL, sum, 31);
    }
  }
}

#endif

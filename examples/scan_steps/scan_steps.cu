// Seven kernels that compute the running sums of each row of a (rows, n) float32 tensor. The first
// uses one thread per row. The last scans the tiles of one long row in parallel. docs/scan.md
// explains each kernel. Each takes any number of rows of any length. All kernels but look_back give
// the same bits in every run.
//
// The exported functions at the end take pointers to memory of the current device, scratch memory
// `state` of scan_state_bytes(rows, n) bytes, and a cudaStream_t. They return a cudaError_t.
// tests/c/cuda_on_cpu compiles this file for the CPU.
#include <cuda_runtime.h>

#include <cstdint>
#include <cuda/atomic>

#include "first_steps.cuh"

namespace scan_steps {

constexpr int VECTORS = 4;                         // 16-byte vectors per thread
constexpr int TILE = THREADS * 4 * VECTORS;        // elements that a CTA scans at once
constexpr int64_t MOST_BLOCKS = INT64_C(1) << 30;  // gridDim.x is at most 2^31 - 1

// ---- 4: a CTA scans a row, tile by tile, with a running carry and vectors ----

// The elements of a tile that one thread holds, as VECTORS vectors. A warp holds 128 * VECTORS
// neighbouring elements. For each j, vectors j of the warp's 32 lanes are neighbours in memory, so
// that loads and stores are coalesced.
using Part = float[VECTORS][4];

__device__ int64_t place(int64_t start, int j) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  return start + ((warp * VECTORS + j) * 32 + lane) * 4;
}

// Loads a thread's elements of a tile, with zeros past the end of the row. `aligned` says that rows
// begin and end at multiples of 16 bytes.
template <bool aligned>
__device__ void load_tile(Part &v, const float *row, int64_t start, int64_t n) {
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const int64_t k = place(start, j);
    if (aligned) {
      const float4 whole = k < n ? *reinterpret_cast<const float4 *>(row + k) : float4{0, 0, 0, 0};
      v[j][0] = whole.x, v[j][1] = whole.y, v[j][2] = whole.z, v[j][3] = whole.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[j][i] = k + i < n ? row[k + i] : 0;
    }
  }
}

// Stores a thread's elements of a tile, plus `before`. nvcc splits some plain float4 stores into
// four scalar stores, but it does not split __stwb.
template <bool aligned>
__device__ void store_tile(float *row, const Part &v, float before, int64_t start, int64_t n) {
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
    const int64_t k = place(start, j);
    if (aligned) {
      const float4 whole{before + v[j][0], before + v[j][1], before + v[j][2], before + v[j][3]};
      if (k < n) __stwb(reinterpret_cast<float4 *>(row + k), whole);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (k + i < n) row[k + i] = before + v[j][i];
      }
    }
  }
}

// Scans the elements of each warp separately. Returns the sum of the tile, and sets *before to the
// sum of all warps before the calling thread's warp. All threads of the CTA must call the function.
__device__ float scan_tile(Part &v, float *before) {
  __shared__ float warp_sums[WARPS];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  float warp_sum = 0;
#pragma unroll
  for (int j = 0; j < VECTORS; ++j) {
#pragma unroll
    for (int i = 1; i < 4; ++i) v[j][i] += v[j][i - 1];
    const float through = warp_scan(v[j][3]);
    const float lanes_before = __shfl_up_sync(ALL, through, 1);
    const float add = lane == 0 ? warp_sum : warp_sum + lanes_before;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[j][i] += add;
    warp_sum += __shfl_sync(ALL, through, 31);
  }
  if (lane == 0) warp_sums[warp] = warp_sum;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w == warp) *before = sum;
    sum += warp_sums[w];
  }
  __syncthreads();  // waits for all reads before the next tile is stored
  return sum;
}

template <bool aligned>
__global__ void __launch_bounds__(THREADS)
    block_carry_kernel(const float *x, float *y, int64_t rows, int64_t n) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    float carry = 0;
    for (int64_t start = 0; start < n; start += TILE) {
      Part v;
      float before;
      load_tile<aligned>(v, x + row * n, start, n);
      const float sum = scan_tile(v, &before);
      store_tile<aligned>(y + row * n, v, carry + before, start, n);
      carry += sum;
    }
  }
}

// ---- 5 and 6: a CTA scans one tile, and other CTAs scan the tiles before it ----

int64_t tiles_of(int64_t n) { return (n + TILE - 1) / TILE; }

// Picks the CTA's tile. CTAs get tiles in the order in which they start to run, so the CTAs of all
// earlier tiles have started, too. If blockIdx.x selected the tile, waiting CTAs could fill the
// GPU, and the CTA that they wait for would never start.
__device__ void take_ticket(unsigned long long *tickets, int64_t tiles, int64_t *row,
                            int64_t *tile) {
  __shared__ int64_t taken[2];
  if (threadIdx.x == 0) {
    const int64_t ticket = static_cast<int64_t>(atomicAdd(tickets, 1ull));
    taken[0] = ticket / tiles;
    taken[1] = ticket % tiles;
  }
  __syncthreads();
  *row = taken[0];
  *tile = taken[1];
}

// Returns the first thread's value to all threads of the CTA.
__device__ float from_first(float value) {
  __shared__ float shared;
  if (threadIdx.x == 0) shared = value;
  __syncthreads();
  return shared;
}

__device__ float warp_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL, value, offset);
  return value;
}

// ---- 5: decoupled look-back ----

// What a tile has published: nothing, its own sum (OWN), or the sum of the row up to and including
// this tile (THROUGH). This state and the sum share a 64-bit word, which is stored at once.
enum Known : unsigned { NOTHING, OWN, THROUGH };

__device__ void say(uint64_t *word, Known known, float sum) {
  cuda::atomic_ref<uint64_t, cuda::thread_scope_device> place(*word);
  const uint64_t bits = __float_as_uint(sum);
  place.store(static_cast<uint64_t>(known) << 32 | bits, cuda::memory_order_relaxed);
}

// Returns the sum of all tiles before `tile`. One warp looks at 32 tiles at a time, the nearest
// first, and stops at the first tile that has published THROUGH. The timing decides at which tile
// the warp stops, and therefore the order of the additions.
__device__ float look_back(uint64_t *words, int64_t tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float sum = 0;
  for (int64_t nearest = tile - 1;; nearest -= 32) {
    uint64_t word = static_cast<uint64_t>(THROUGH) << 32;  // sum 0 for lanes before the first tile
    if (nearest - lane >= 0) {
      cuda::atomic_ref<uint64_t, cuda::thread_scope_device> place(words[nearest - lane]);
      do word = place.load(cuda::memory_order_relaxed);
      while (word >> 32 == NOTHING);
    }
    __syncwarp();
    const unsigned through = __ballot_sync(ALL, word >> 32 == THROUGH);
    const int last = through ? __ffs(static_cast<int>(through)) - 1 : 31;
    sum += warp_sum(lane <= last ? __uint_as_float(static_cast<unsigned>(word)) : 0);
    if (through) return sum;
  }
}

template <bool aligned>
__global__ void __launch_bounds__(THREADS)
    look_back_kernel(const float *x, float *y, int64_t rows, int64_t n, int64_t tiles,
                     unsigned long long *tickets, uint64_t *words) {
  for (int64_t turn = blockIdx.x; turn < rows * tiles; turn += gridDim.x) {
    int64_t row, tile;
    take_ticket(tickets, tiles, &row, &tile);
    Part v;
    float before, earlier = 0;
    load_tile<aligned>(v, x + row * n, tile * TILE, n);
    const float sum = scan_tile(v, &before);
    if (threadIdx.x < 32) {
      uint64_t *of_row = words + row * tiles;
      if (threadIdx.x == 0) say(of_row + tile, OWN, sum);
      earlier = look_back(of_row, tile);
      if (threadIdx.x == 0) say(of_row + tile, THROUGH, earlier + sum);
    }
    store_tile<aligned>(y + row * n, v, from_first(earlier) + before, tile * TILE, n);
  }
}

// ---- 6: look-back along a fixed tree ----

// A sum that other CTAs wait for. The writer stores `sum` and then `there`, with release semantics.
// The reader loads `there` with acquire semantics and then `sum`. A thread that reads `there` = 1
// therefore reads the published sum, whatever the size of its type.
struct Published {
  float sum;
  unsigned there;
};

__device__ void publish(Published *to, float sum) {
  to->sum = sum;
  cuda::atomic_ref<unsigned, cuda::thread_scope_device>(to->there).store(
      1, cuda::memory_order_release);
}

__device__ float wait_for(Published *from) {
  cuda::atomic_ref<unsigned, cuda::thread_scope_device> there(from->there);
  while (there.load(cuda::memory_order_acquire) == 0) continue;
  return from->sum;
}

// The published sums of one row. `tiles` has the sum of each tile, and `groups` that of each whole
// group of 32 tiles. `blocks` has the row's sum up to the end of each whole block of 32 groups.
struct Levels {
  Published *tiles, *groups, *blocks;
};

__host__ __device__ int64_t published_of_row(int64_t tiles) {
  return tiles + tiles / 32 + tiles / 1024;
}

// Publishes the sum of `tile`, and returns the sum of all tiles before it. One warp calls it. The
// order of the additions depends only on `tile`. Each sum is published before the warp waits again.
__device__ float sum_before(const Levels &row, int64_t tile, float own) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int in_group = static_cast<int>(tile % 32), in_block = static_cast<int>(tile / 32 % 32);
  const int64_t group = tile / 32, block = tile / 1024;
  if (lane == 0) publish(row.tiles + tile, own);
  const float tiles = warp_sum(lane < in_group ? wait_for(row.tiles + group * 32 + lane) : 0);
  const float whole_group = tiles + own;
  if (lane == 0 && in_group == 31) publish(row.groups + group, whole_group);
  const float groups = warp_sum(lane < in_block ? wait_for(row.groups + block * 32 + lane) : 0);
  const float blocks = block > 0 ? wait_for(row.blocks + block - 1) : 0;
  if (lane == 0 && in_group == 31 && in_block == 31) {
    publish(row.blocks + block, blocks + (groups + whole_group));
  }
  return blocks + (groups + tiles);
}

template <bool aligned>
__global__ void __launch_bounds__(THREADS)
    fixed_tree_kernel(const float *x, float *y, int64_t rows, int64_t n, int64_t tiles,
                      unsigned long long *tickets, Published *published) {
  for (int64_t turn = blockIdx.x; turn < rows * tiles; turn += gridDim.x) {
    int64_t row, tile;
    take_ticket(tickets, tiles, &row, &tile);
    Part v;
    float before, earlier = 0;
    load_tile<aligned>(v, x + row * n, tile * TILE, n);
    const float sum = scan_tile(v, &before);
    if (threadIdx.x < 32) {
      Published *of_row = published + row * published_of_row(tiles);
      const Levels levels{of_row, of_row + tiles, of_row + tiles + tiles / 32};
      earlier = sum_before(levels, tile, sum);
    }
    store_tile<aligned>(y + row * n, v, from_first(earlier) + before, tile * TILE, n);
  }
}

// ---- launchers ----

template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), int64_t blocks, void *stream, Arguments... arguments) {
  if (blocks == 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS));
  config.blockDim = dim3(THREADS);
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

bool is_aligned(const float *x, const float *y, int64_t n) {
  return (reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y)) % 16 == 0 && n % 4 == 0;
}

// `state` holds the ticket counter, and a Published or a word for each published sum of every row.
static_assert(sizeof(Published) == sizeof(uint64_t), "one size of state for both steps");

int64_t state_bytes(int64_t rows, int64_t n) {
  return static_cast<int64_t>(sizeof(uint64_t)) * (1 + rows * published_of_row(tiles_of(n)));
}

template <typename State>
int launch_tiles(void (*kernel)(const float *, float *, int64_t, int64_t, int64_t,
                                unsigned long long *, State *),
                 const float *x, float *y, int64_t rows, int64_t n, void *state, void *stream) {
  const cudaError_t error =
      cudaMemsetAsync(state, 0, state_bytes(rows, n), static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return error;
  const int64_t tiles = tiles_of(n);
  auto *tickets = static_cast<unsigned long long *>(state);
  auto *rest = reinterpret_cast<State *>(tickets + 1);
  return launch(kernel, rows * tiles, stream, x, y, rows, n, tiles, tickets, rest);
}

}  // namespace scan_steps

using namespace scan_steps;

#define STEP(name)                                                              \
  extern "C" int scan_##name(const float *x, float *y, int64_t rows, int64_t n, \
                             [[maybe_unused]] void *state, void *stream)

extern "C" int64_t scan_state_bytes(int64_t rows, int64_t n) { return state_bytes(rows, n); }

extern "C" const char *scan_error(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

STEP(walk) { return launch(walk_kernel, (rows + THREADS - 1) / THREADS, stream, x, y, rows, n); }

STEP(hillis_steele) { return launch(hillis_steele_kernel, rows, stream, x, y, rows, n); }

STEP(blelloch) { return launch(blelloch_kernel, rows, stream, x, y, rows, n); }

STEP(warp_shuffles) {
  return launch(warp_shuffles_kernel, (rows + WARPS - 1) / WARPS, stream, x, y, rows, n);
}

STEP(block_carry) {
  auto *kernel = is_aligned(x, y, n) ? block_carry_kernel<true> : block_carry_kernel<false>;
  return launch(kernel, rows, stream, x, y, rows, n);
}

STEP(look_back) {
  auto *kernel = is_aligned(x, y, n) ? look_back_kernel<true> : look_back_kernel<false>;
  return launch_tiles(kernel, x, y, rows, n, state, stream);
}

STEP(fixed_tree) {
  auto *kernel = is_aligned(x, y, n) ? fixed_tree_kernel<true> : fixed_tree_kernel<false>;
  return launch_tiles(kernel, x, y, rows, n, state, stream);
}

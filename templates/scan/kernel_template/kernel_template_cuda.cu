// kernel_template on the GPU: one CTA per row. Its threads scan THREADS steps at a time. Each warp
// scans its steps by shuffles, then the warps are joined in order, and a carry goes from one
// iteration to the next. The code loads single elements, because it is written for reading.
// csrc/scan has scans at the speed of memory, and docs/scan.md explains them.
#include "kernel_template/kernel_template.h"

#include "common/cuda/vector.cuh"

namespace kernel_template_kernels {

using scan_args = kernel_template_args;

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int64_t MOST_BLOCKS = INT64_C(1) << 30;  // gridDim.x is at most 2^31 - 1
constexpr unsigned ALL_LANES = 0xffffffffu;

// Joins two neighbouring parts of a row. `weight` is decay to the power of the number of steps in
// the later part. The join must be associative, because the parts are joined along a tree.
template <typename A>
__device__ A join(A earlier, A later, A weight) {
  return weight * earlier + later;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) scan_kernel(scan_args args) {
  using A = acc_t<T>;
  __shared__ A warp_ends[WARPS];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  A weights[5];  // decay to the powers 1, 2, 4, 8 and 16, for the shuffles
  double power = args.decay;
#pragma unroll
  for (int i = 0; i < 5; ++i, power *= power) weights[i] = static_cast<A>(power);
  const A warp_weight = static_cast<A>(power);  // decay^32
  power = args.decay;
  for (int i = 0; i < lane; ++i) power *= args.decay;
  const A lane_weight = static_cast<A>(power);  // decay^(lane + 1)
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T *x = static_cast<const T *>(args.x) + row * args.steps;
    T *y = static_cast<T *>(args.y) + row * args.steps;
    A carry = 0;
    for (int64_t start = 0; start < args.steps; start += THREADS) {
      const int64_t step = start + threadIdx.x;
      const int64_t k = args.reverse ? args.steps - 1 - step : step;
      A state = step < args.steps ? to_acc(x[k]) : A(0);
#pragma unroll
      for (int i = 0; i < 5; ++i) {
        const A earlier = __shfl_up_sync(ALL_LANES, state, 1 << i);
        if (lane >= 1 << i) state = join(earlier, state, weights[i]);
      }
      if (lane == 31) warp_ends[warp] = state;
      __syncthreads();
      A before = carry;  // the state before this warp's first step
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        if (w == warp) before = carry;
        carry = join(carry, warp_ends[w], warp_weight);
      }
      if (step < args.steps) y[k] = from_acc<T>(join(before, state, lane_weight));
      __syncthreads();  // waits for all reads before warp_ends is overwritten
    }
  }
}

static unsigned blocks_for(int64_t rows) {
  return static_cast<unsigned>(rows < MOST_BLOCKS ? rows : MOST_BLOCKS);
}

extern "C" int kernel_template_cuda(const scan_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    scan_kernel<T><<<blocks_for(args->rows), THREADS, 0, on>>>(*args);
    return cudaGetLastError();
  });
}

}  // namespace kernel_template_kernels

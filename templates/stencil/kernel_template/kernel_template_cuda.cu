// kernel_template on the GPU. Filter: `lanes` threads process a tile of a row, and each thread
// computes EACH steps that are `lanes` apart. Neighbouring threads read neighbouring elements, and
// all taps but the first find their elements in the L1 cache. A CTA processes several tiles if rows
// are short. Sums: one CTA per channel. Its threads stride over the rows and their steps, and keep
// the sums of GROUP taps in registers, without atomics. If your op has few channels, split the rows
// as the template `reduction` does.
#include "kernel_template/kernel_template.h"

#include "common/cuda/reduce.cuh"
#include "common/cuda/vector.cuh"

namespace kernel_template_kernels {

using filter_args = kernel_template_filter_args;
using sums_args = kernel_template_sums_args;

constexpr int THREADS = 256;
constexpr int EACH = 4;                            // steps per thread, whose loads are in flight
constexpr int GROUP = 4;                           // number of taps that are summed together
constexpr int64_t MOST_BLOCKS = INT64_C(1) << 30;  // gridDim.x is at most 2^31 - 1

// Computes y. A row has `tiles` tiles of EACH * lanes steps.
template <typename T>
__global__ void __launch_bounds__(THREADS) filter_kernel(filter_args args, int64_t tiles) {
  using A = acc_t<T>;
  const int lanes = blockDim.x;
  const int64_t grid_step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t tile = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; tile < args.rows * tiles; tile += grid_step) {
    const int64_t row = tile / tiles, t = tile % tiles * EACH * lanes + threadIdx.x;
    const int64_t c = row % args.channels;
    const T *x = static_cast<const T *>(args.x) + row * args.steps;
    const T *weight = static_cast<const T *>(args.weight) + c * args.taps;
    T *y = static_cast<T *>(args.y) + row * args.steps;
    A sums[EACH];
    for (int e = 0; e < EACH; ++e)
      sums[e] = args.bias ? to_acc(static_cast<const T *>(args.bias)[c]) : A(0);
    for (int64_t k = 0; k < args.taps; ++k) {
      const A w = to_acc(weight[k]);
      const int64_t s = args.reverse ? t + (args.taps - 1) - k : t - (args.taps - 1) + k;
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int64_t here = s + e * lanes;
        if (here >= 0 && here < args.steps) sums[e] += w * to_acc(x[here]);
      }
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if (t + e * lanes < args.steps) y[t + e * lanes] = from_acc<T>(sums[e]);
    }
  }
}

// Computes grad_weight and grad_bias. `lanes` threads (a power of two) stride over the steps of a
// row. A CTA processes THREADS / lanes rows at a time.
template <typename T>
__global__ void __launch_bounds__(THREADS) sums_kernel(sums_args args, int lanes) {
  using A = acc_t<T>;
  const int lane = threadIdx.x % lanes;
  for (int64_t c = blockIdx.x; c < args.channels; c += gridDim.x) {
    for (int64_t first = 0; first == 0 || first < args.taps; first += GROUP) {
      double sums[GROUP + 1] = {0};  // sums for GROUP taps from `first` on, and for grad_out alone
      for (int64_t b = threadIdx.x / lanes; b < args.batch; b += THREADS / lanes) {
        const int64_t begin = (b * args.channels + c) * args.steps;
        const T *grad_out = static_cast<const T *>(args.grad_out) + begin;
        const T *x = static_cast<const T *>(args.x) + begin;
        A in_row[GROUP + 1] = {0};
        for (int64_t t = lane; t < args.steps; t += lanes) {
          const A g = to_acc(grad_out[t]);
#pragma unroll
          for (int k = 0; k < GROUP; ++k) {
            const int64_t s = t - (args.taps - 1) + first + k;
            if (s >= 0 && first + k < args.taps) in_row[k] += g * to_acc(x[s]);
          }
          in_row[GROUP] += g;
        }
        for (int k = 0; k <= GROUP; ++k) sums[k] += static_cast<double>(in_row[k]);
      }
      block_sum<THREADS>(sums);
      if (threadIdx.x != 0) continue;
      T *grad_weight = static_cast<T *>(args.grad_weight) + c * args.taps + first;
      for (int k = 0; args.grad_weight && k < GROUP && first + k < args.taps; ++k)
        grad_weight[k] = from_acc<T>(static_cast<A>(sums[k]));
      if (args.grad_bias && first == 0)
        static_cast<T *>(args.grad_bias)[c] = from_acc<T>(static_cast<A>(sums[GROUP]));
    }
  }
}

// Returns the smallest power of two of at least `elements` threads, but at most a CTA's threads.
static int lanes_for(int64_t elements) {
  int lanes = 1;
  while (lanes < THREADS && lanes < elements) lanes *= 2;
  return lanes;
}

static unsigned blocks_for(int64_t blocks) {
  return static_cast<unsigned>(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);
}

extern "C" int kernel_template_filter_cuda(const filter_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const int lanes = lanes_for(ceil_div(args->steps, EACH));
    const dim3 threads(lanes, THREADS / lanes);
    const int64_t tiles = ceil_div(args->steps, EACH * lanes);
    const unsigned blocks = blocks_for(ceil_div(args->rows * tiles, threads.y));
    filter_kernel<T><<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*args, tiles);
    return cudaGetLastError();
  });
}

extern "C" int kernel_template_sums_cuda(const sums_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const unsigned blocks = blocks_for(args->channels);
    const int lanes = lanes_for(args->steps);
    sums_kernel<T><<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*args, lanes);
    return cudaGetLastError();
  });
}

}  // namespace kernel_template_kernels

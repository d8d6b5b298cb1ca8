// The norms' kernels for what norm_forward_cuda.cu and norm_backward_cuda.cu do not take otherwise: float64, one column in
// backward, tensors whose rows begin at different distances from multiples of 16 bytes, and rows that are too wide for the chip.
// Element by element; and the sum of the partial rows, which is common to all.
#ifndef EXTENSION_CPP_NORM_PLAIN_CUH
#define EXTENSION_CPP_NORM_PLAIN_CUH

#include "norm/norm_launch.cuh"

namespace norm_cuda {

constexpr int PLAIN_THREADS = 256;

// One weight; `missing` where there are none.
template <typename T>
__device__ inline acc_t<T> weight_at(const void *weights, dtype_t dtype, double missing, int64_t c) {
  if (weights == nullptr) return static_cast<acc_t<T>>(missing);
  if (dtype == DTYPE_FLOAT32) return static_cast<const float *>(weights)[c];
  return to_acc(static_cast<const T *>(weights)[c]);
}

// A block a row, which it reads three times.
template <typename T, bool CENTERED>
__global__ void __launch_bounds__(PLAIN_THREADS) plain_forward_kernel(const norm_forward_args p) {
  using A = acc_t<T>;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const T *x = static_cast<const T *>(p.x) + r * p.x_stride;
    if (p.residual != nullptr) {
      T *const sum = static_cast<T *>(p.sum) + r * p.cols;
      for (int64_t c = threadIdx.x; c < p.cols; c += PLAIN_THREADS) {
        A v[1] = {to_acc(x[c])};
        if (p.dropout_x.seed != nullptr) drop(v, p.dropout_x, keep_one(p.dropout_x, *p.dropout_x.seed, r * p.cols + c));
        sum[c] = from_acc<T>(v[0] + to_acc(static_cast<const T *>(p.residual)[r * p.residual_stride + c]));
      }
      x = sum;  // each thread reads what it wrote
    }
    A mean[1] = {}, v[2] = {};
    if (CENTERED) {
      for (int64_t c = threadIdx.x; c < p.cols; c += PLAIN_THREADS) mean[0] += to_acc(x[c]);
      block_sum<PLAIN_THREADS>(mean);
      mean[0] /= p.cols;
    }
    for (int64_t c = threadIdx.x; c < p.cols; c += PLAIN_THREADS) {
      const A d = to_acc(x[c]) - mean[0];
      v[0] += d;
      v[1] += d * d;
    }
    block_sum<PLAIN_THREADS>(v);
    if (CENTERED) mean[0] += v[0] / p.cols;
    const A squares = CENTERED ? v[1] - v[0] * v[0] / p.cols : v[1];
    const A rstd = 1 / sqrt(squares / p.cols + static_cast<A>(p.eps));
    if (threadIdx.x == 0 && p.rstd != nullptr) {
      if (CENTERED) static_cast<A *>(p.mean)[r] = mean[0];
      static_cast<A *>(p.rstd)[r] = rstd;
    }
    for (int64_t c = threadIdx.x; c < p.cols; c += PLAIN_THREADS) {
      const A xhat = (to_acc(x[c]) - mean[0]) * rstd;
      const A w = weight_at<T>(p.weight, p.weight_dtype, 1, c), b = weight_at<T>(p.bias, p.weight_dtype, 0, c);
      A y[1] = {xhat * w + b};
      if (p.dropout_y.seed != nullptr) drop(y, p.dropout_y, keep_one(p.dropout_y, *p.dropout_y.seed, r * p.cols + c));
      static_cast<T *>(p.y)[r * p.cols + c] = from_acc<T>(y[0]);
    }
  }
}

template <typename T>
cudaError_t plain_forward(const norm_forward_args &args, cudaStream_t stream) {
  const auto kernel = args.centered ? plain_forward_kernel<T, true> : plain_forward_kernel<T, false>;
  kernel<<<static_cast<unsigned>(std::min<int64_t>(args.rows, 1 << 16)), PLAIN_THREADS, 0, stream>>>(args);
  return cudaGetLastError();
}

constexpr int SUM_X = 32, SUM_Y = 16;

// out[c] = the sum of its column of `partial` (parts, cols), in an order that parts alone fixes; the first blocks for the first
// output, the others for the second.
template <typename A, typename W>
__global__ void __launch_bounds__(SUM_X *SUM_Y)
    sum_partial_kernel(const A *partial, W *first, W *second, int64_t parts, int64_t cols) {
  __shared__ double fold[SUM_Y][SUM_X];
#if HAS_CLUSTERS
  asm volatile("griddepcontrol.wait;" ::: "memory");  // the kernel before may still be writing
#endif
  const int64_t blocks = (cols + SUM_X - 1) / SUM_X, c = blockIdx.x % blocks * SUM_X + threadIdx.x;
  if (blockIdx.x >= blocks) partial += parts * cols;
  double sum = 0;
  if (c < cols) {
#pragma unroll 8
    for (int64_t part = threadIdx.y; part < parts; part += SUM_Y) sum += partial[part * cols + c];
  }
  fold[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || c >= cols) return;
  for (int y = 1; y < SUM_Y; ++y) sum += fold[y][threadIdx.x];
  (blockIdx.x < blocks ? first : second)[c] = from_acc<W>(static_cast<acc_t<W>>(sum));
}

template <typename A>
cudaError_t sum_partial(const norm_backward_args &args, int64_t parts, cudaStream_t stream) {
  void *outputs[2] = {args.grad_weight, args.grad_bias};
  if (outputs[0] == nullptr) std::swap(outputs[0], outputs[1]);
  if (outputs[0] == nullptr) return cudaSuccess;
  const int64_t blocks = ceil_div(args.cols, SUM_X) * (outputs[1] == nullptr ? 1 : 2);
  Launch launch(static_cast<unsigned>(blocks), dim3(SUM_X, SUM_Y), 0, stream);
  return with_dtype(args.weight_dtype, [&](auto zero) {
    using W = decltype(zero);
    int device;
    const cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    if (is_for_sm_90<sum_partial_kernel<A, W>>(device)) launch.overlap();
    return cudaLaunchKernelEx(&launch.config, sum_partial_kernel<A, W>, static_cast<const A *>(args.partial),
                              static_cast<W *>(outputs[0]), static_cast<W *>(outputs[1]), parts, args.cols);
  });
}

// A block a row, which it reads twice; its partial row is in memory.
template <typename T, bool CENTERED>
__global__ void __launch_bounds__(PLAIN_THREADS) plain_backward_kernel(const norm_backward_args p) {
  using A = acc_t<T>;
  A *const partial = static_cast<A *>(p.partial);
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const T *x = static_cast<const T *>(p.x) + r * p.x_stride;
    const T *grad_out = static_cast<const T *>(p.grad_out) + r * p.grad_out_stride;
    const A mean = CENTERED ? static_cast<const A *>(p.mean)[r] : A(0), rstd = static_cast<const A *>(p.rstd)[r];
    const auto grad_at = [&](int64_t c) {
      A g[1] = {to_acc(grad_out[c])};
      if (p.dropout_y.seed != nullptr) drop(g, p.dropout_y, keep_one(p.dropout_y, *p.dropout_y.seed, r * p.cols + c));
      return g[0];
    };
    A v[2] = {};
    for (int64_t c = threadIdx.x; c < p.cols; c += PLAIN_THREADS) {
      const A g = grad_at(c) * rstd * weight_at<T>(p.weight, p.weight_dtype, 1, c);
      v[0] += g * (to_acc(x[c]) - mean);
      v[1] += g;
    }
    block_sum<PLAIN_THREADS>(v);
    const A along = v[0] / p.cols * rstd * rstd, shift = CENTERED ? v[1] / p.cols : A(0);
    for (int64_t c = threadIdx.x; c < p.cols; c += PLAIN_THREADS) {
      const A g = grad_at(c), d = to_acc(x[c]) - mean, w = weight_at<T>(p.weight, p.weight_dtype, 1, c);
      if (p.grad_x != nullptr) {
        A grad[1] = {g * rstd * w - shift - along * d};
        if (p.grad_sum != nullptr) grad[0] += to_acc(static_cast<const T *>(p.grad_sum)[r * p.grad_sum_stride + c]);
        static_cast<T *>(p.grad_x)[r * p.cols + c] = from_acc<T>(grad[0]);
        if (p.grad_dropped != nullptr) {
          drop(grad, p.dropout_x, keep_one(p.dropout_x, *p.dropout_x.seed, r * p.cols + c));
          static_cast<T *>(p.grad_dropped)[r * p.cols + c] = from_acc<T>(grad[0]);
        }
      }
      A *sum = partial + blockIdx.x * p.cols + c;
      const bool is_first = r == blockIdx.x;
      if (p.grad_weight != nullptr) {
        *sum = (is_first ? A(0) : *sum) + g * rstd * d;
        sum += gridDim.x * p.cols;
      }
      if (p.grad_bias != nullptr) *sum = (is_first ? A(0) : *sum) + g;
    }
  }
}

template <typename T>
cudaError_t plain_backward(const norm_backward_args &args, cudaStream_t stream) {
  const int64_t blocks = std::min(args.rows, max_parts(args.cols));
  const auto kernel = args.mean ? plain_backward_kernel<T, true> : plain_backward_kernel<T, false>;
  if (blocks > 0) kernel<<<static_cast<unsigned>(blocks), PLAIN_THREADS, 0, stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? error : sum_partial<acc_t<T>>(args, blocks, stream);
}

}  // namespace norm_cuda

#endif

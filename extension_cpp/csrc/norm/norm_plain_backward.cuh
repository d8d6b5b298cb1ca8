// The gradients of layer_norm and rms_norm, as norm_plain.cuh says, and the sum of the partial rows, which is common to all.
//
// grad_x takes a row. grad_weight and grad_bias come from a second reading of x and grad_out, for whose sums the first has neither
// registers nor shared memory: a block takes some columns of some rows and writes one partial row; xhat is made of the saved
// statistics.
#ifndef EXTENSION_CPP_NORM_PLAIN_BACKWARD_CUH
#define EXTENSION_CPP_NORM_PLAIN_BACKWARD_CUH

#include "norm/norm_plain.cuh"

namespace norm_cuda {

// grad_x and grad_dropped.
template <typename T, typename W, int N, bool SHIFTED>
__global__ void __launch_bounds__(MOST_PLAIN_THREADS)
    plain_rows_kernel(const __grid_constant__ norm_backward_args p, const PlainShape shape) {
  using A = acc_t<T>;
  constexpr int U = N == 1 ? SINGLES<T> : 2,
                K = U * sizeof(T) / sizeof(W);  // K for the pass with most in registers
  extern __shared__ uint4 shared[];
  __shared__ typename PlainTeam<A>::Slots slots;
  PlainTeam<A> team(slots, shape.cluster);
  T *const kept_x = reinterpret_cast<T *>(shared) + threadIdx.y * 2 * shape.kept;
  T *const kept_grad = kept_x + shape.kept;
  const int64_t begin = team.rank * shape.slice, size = min(shape.slice, p.cols - begin);
  const A cols = static_cast<A>(p.cols);
  for (int64_t row = team.first_row(); row < p.rows; row = team.next_row(row)) {
    const int64_t first = row * p.cols + begin;
    const T *const x = static_cast<const T *>(p.x) + row * p.x_stride + begin;
    const T *const grad_out = static_cast<const T *>(p.grad_out) + row * p.grad_out_stride + begin;
    const T *const grad_sum = static_cast<const T *>(p.grad_sum) + row * p.grad_sum_stride + begin;
    const A mean = p.mean == nullptr ? A(0) : static_cast<const A *>(p.mean)[row];
    const A rstd = static_cast<const A *>(p.rstd)[row];
    struct Raw {
      Vector<T, N> x, grad_out, grad_sum;
      A weight[N];
    };
    // e = x - mean and g = grad_out * rstd * weight, rounded, so that of one column g - mean(g) is 0.
    const auto widen = [&](int64_t c, const Raw &raw, A(&e)[N], A(&g)[N]) {
      unpack<T, N>(e, raw.x);
      unpack<T, N>(g, raw.grad_out);
      drop_from(g, p.dropout_y, first + c);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        e[j] -= mean;
        g[j] = rounded_product(g[j] * rstd, raw.weight[j]);
      }
    };
    A v[2] = {};
    const auto load_first = [&](int64_t c, int d) {
      Raw raw{load_from<T, N, SHIFTED>(x + c + d), load_from<T, N, SHIFTED>(grad_out + c + d)};
      load_weights<W>(raw.weight, p.weight, A(1), begin + c + d);
      return raw;
    };
    walk_row<N, U, U>(size, load_first, [&](int64_t c, int d, const Raw &raw) {
      if (c < shape.kept) {
        keep_vector<T, N>(kept_x + c + d, raw.x);
        keep_vector<T, N>(kept_grad + c + d, raw.grad_out);
      }
      A e[N], g[N];
      widen(c + d, raw, e, g);
#pragma unroll
      for (int j = 0; j < N; ++j) v[0] += g[j] * e[j], v[1] += g[j];
    });
    team.sum(v);
    const A along = v[0] / cols * rstd * rstd, shift = p.mean == nullptr ? A(0) : v[1] / cols;
    const auto load_again = [&](int64_t c, int d) {
      const bool is_kept = c < shape.kept;
      Raw raw{load_from<T, N, SHIFTED>((is_kept ? kept_x : x) + c + d),
              load_from<T, N, SHIFTED>((is_kept ? kept_grad : grad_out) + c + d)};
      if (p.grad_sum != nullptr) raw.grad_sum = load_from<T, N, SHIFTED>(grad_sum + c + d);
      load_weights<W>(raw.weight, p.weight, A(1), begin + c + d);
      return raw;
    };
    walk_row<N, U, K>(size, load_again, [&](int64_t c, int d, const Raw &raw) {
      const int64_t at = first + c + d;
      A e[N], g[N], more[N];
      widen(c + d, raw, e, g);
      unpack<T, N>(more, raw.grad_sum);
#pragma unroll
      for (int j = 0; j < N; ++j) g[j] = g[j] - shift - along * e[j] + more[j];
      store<T, N>(static_cast<T *>(p.grad_x) + at, g);
      if (p.grad_dropped == nullptr) return;
      drop_from(g, p.dropout_x, at);
      store<T, N>(static_cast<T *>(p.grad_dropped) + at, g);
    });
  }
}

// Partial rows of grad_weight and grad_bias: block (i, j) takes `tile` vectors of columns of `chunk` rows.
template <typename T, int N, bool SHIFTED>
__global__ void __launch_bounds__(PLAIN_THREADS, PLAIN_BLOCKS)
    plain_columns_kernel(const __grid_constant__ norm_backward_args p, int tile, int64_t chunk) {
  using A = acc_t<T>;
  constexpr int U = N == 1   ? SINGLES<T>
                    : N == 8 ? 2
                             : 4,
                M = N * sizeof(A) > 16 ? 16 / sizeof(A) : N;
  __shared__ A fold[2 * N][PLAIN_THREADS / 2];
  const int i = threadIdx.x % tile, y = threadIdx.x / tile, rows_at_once = PLAIN_THREADS / tile;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * tile + i) * N, row = blockIdx.y * chunk;
  A sums[2 * N] = {};  // of grad_out * xhat, and of grad_out
  struct Raw {
    Vector<T, N> x, grad_out;
    A mean, rstd;
  };
  const auto load_row = [&](int64_t chunk_row, int d) {
    const int64_t r = chunk_row + d;
    return Raw{
        load_from<T, N, SHIFTED>(static_cast<const T *>(p.x) + r * p.x_stride + c),
        load_from<T, N, SHIFTED>(static_cast<const T *>(p.grad_out) + r * p.grad_out_stride + c),
        p.mean == nullptr ? A(0) : static_cast<const A *>(p.mean)[r],
        static_cast<const A *>(p.rstd)[r]};
  };
  const int64_t end = c < p.cols ? min(row + chunk, p.rows) : 0;
  walk<U, U>(row + y, end, rows_at_once, U * rows_at_once, load_row,
             [&](int64_t chunk_row, int d, const Raw &raw) {
               A e[N], g[N];
               unpack<T, N>(e, raw.x);
               unpack<T, N>(g, raw.grad_out);
               drop_from(g, p.dropout_y, (chunk_row + d) * p.cols + c);
#pragma unroll
               for (int j = 0; j < N; ++j) {
                 sums[j] += g[j] * raw.rstd * (e[j] - raw.mean);
                 sums[N + j] += g[j];
               }
             });
  for (int half = rows_at_once / 2; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < 2 * N; ++j) {
      if (y >= half && y < 2 * half) fold[j][threadIdx.x - half * tile] = sums[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 2 * N; ++j) {
      if (y < half) sums[j] += fold[j][threadIdx.x];
    }
    __syncthreads();
  }
  if (y > 0 || c >= p.cols) return;
  A *out = static_cast<A *>(p.partial) + blockIdx.y * p.cols + c;
#pragma unroll
  for (int j = 0; j < N; j += M) {
    if (p.grad_weight != nullptr) store<A, M>(out + j, reinterpret_cast<A(&)[M]>(sums[j]));
  }
  if (p.grad_weight != nullptr) out += gridDim.y * p.cols;
#pragma unroll
  for (int j = 0; j < N; j += M) {
    if (p.grad_bias != nullptr) store<A, M>(out + j, reinterpret_cast<A(&)[M]>(sums[N + j]));
  }
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
    return cudaLaunchKernelEx(&launch.config, sum_partial_kernel<A, W>,
                              static_cast<const A *>(args.partial), static_cast<W *>(outputs[0]),
                              static_cast<W *>(outputs[1]), parts, args.cols);
  });
}

// The weights' gradients.
template <typename T, int N, bool SHIFTED>
cudaError_t plain_columns(const norm_backward_args &args, cudaStream_t stream) {
  if (args.rows == 0) return sum_partial<acc_t<T>>(args, 0, stream);
  int device, processors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const int64_t vectors = ceil_div(args.cols, N);
  int tile = 32;
  while (tile < PLAIN_THREADS && tile < vectors) tile *= 2;
  const int64_t tiles = ceil_div(vectors, tile);
  // Three times as many blocks as run at once, as far as there are rows and scratch: more would write more partial rows.
  const int64_t most = std::min(max_parts(args.cols), ceil_div(args.rows, PLAIN_THREADS / tile));
  const int64_t chunk =
      ceil_div(args.rows, std::clamp<int64_t>(3 * PLAIN_BLOCKS * processors / tiles, 1, most));
  const int64_t parts = ceil_div(args.rows, chunk);
  const dim3 blocks(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  plain_columns_kernel<T, N, SHIFTED><<<blocks, PLAIN_THREADS, 0, stream>>>(args, tile, chunk);
  error = cudaGetLastError();
  return error != cudaSuccess ? error : sum_partial<acc_t<T>>(args, parts, stream);
}

template <typename T>
cudaError_t plain_backward(const norm_backward_args &args, cudaStream_t stream) {
  const bool whole = args.cols % VECTOR<T> == 0 && is_aligned(args.grad_x) &&
                     is_aligned(args.grad_dropped) && is_aligned(args.weight);
  const bool aligned = are_aligned<T>(args.x, args.rows, args.x_stride) &&
                       are_aligned<T>(args.grad_out, args.rows, args.grad_out_stride) &&
                       are_aligned<T>(args.grad_sum, args.rows, args.grad_sum_stride);
  return with_vectors<T>(whole, aligned, [&](auto n, auto shifted) {
    constexpr int N = decltype(n)::value;
    constexpr bool SHIFTED = decltype(shifted)::value;
    cudaError_t error = cudaSuccess;
    if (args.rows > 0 && args.grad_x != nullptr) {
      error = with_weight<T>(args.weight_dtype, [&](auto weight) {
        return launch_plain<plain_rows_kernel<T, decltype(weight), N, SHIFTED>, N>(
            args, 2 * sizeof(T), stream);
      });
    }
    const bool wants_columns = args.grad_weight != nullptr || args.grad_bias != nullptr;
    return error == cudaSuccess && wants_columns ? plain_columns<T, N, SHIFTED>(args, stream)
                                                 : error;
  });
}

}  // namespace norm_cuda

#endif

// layer_norm and rms_norm, as norm_plain.cuh says. A row is read once, as far as it is kept, for mean, squared deviations and y.
#ifndef EXTENSION_CPP_NORM_PLAIN_FORWARD_CUH
#define EXTENSION_CPP_NORM_PLAIN_FORWARD_CUH

#include "norm/norm_plain.cuh"

namespace norm_cuda {

// A block's part of a row.
template <typename T, typename W, int N, bool SHIFTED>
struct PlainForwardRow {
  using A = acc_t<T>;
  static constexpr int U = N == 1 ? SINGLES<T> : 4, U_WEIGHTED = N == 1 ? U : 2;

  const norm_forward_args &p;
  T *const kept;  // in shared memory, the first `keeps` columns
  const int64_t keeps;
  const int64_t row;
  const int64_t column;  // the part's first
  const int64_t size;    // columns
  const T *x = static_cast<const T *>(p.x) + row * p.x_stride + column;
  const int64_t first = row * p.cols + column;  // element of contiguous tensors

  // Adds x to v[0] and its square to v[1]. With a residual x becomes the sum, which is written.
  __device__ void read(A (&v)[2]) {
    const T *const residual = static_cast<const T *>(p.residual) + row * p.residual_stride + column;
    T *const sum = static_cast<T *>(p.sum) + first;
    struct Pair {
      Vector<T, N> x, residual;
    };
    const auto load_both = [&](int64_t c, int d) {
      Pair raw{load_from<T, N, SHIFTED>(x + c + d), {}};
      if (p.residual != nullptr) raw.residual = load_from<T, N, SHIFTED>(residual + c + d);
      return raw;
    };
    walk_row<N, U, U>(size, load_both, [&](int64_t c, int d, const Pair &raw) {
      Vector<T, N> bits = raw.x;
      A e[N], r[N];
      unpack<T, N>(e, bits);
      if (p.residual != nullptr) {
        unpack<T, N>(r, raw.residual);
        drop_from(e, p.dropout_x, first + c + d);
#pragma unroll
        for (int j = 0; j < N; ++j) e[j] += r[j];
        store<T, N>(sum + c + d, e);
        bits = pack<T, N>(e);
        unpack<T, N>(e, bits);
      }
      if (c < keeps) keep_vector<T, N>(kept + c + d, bits);
#pragma unroll
      for (int j = 0; j < N; ++j) v[0] += e[j], v[1] += e[j] * e[j];
    });
    if (p.residual != nullptr) x = sum;
  }

  // Each thread reads what it wrote.
  __device__ Vector<T, N> again(int64_t c, int d) const {
    return load_from<T, N, SHIFTED>((c < keeps ? kept : x) + c + d);
  }

  // Adds the distance from the mean to v[0] and its square to v[1].
  __device__ void read_around(A mean, A (&v)[2]) const {
    const auto load = [&](int64_t c, int d) { return again(c, d); };
    walk_row<N, U, U>(size, load, [&](int64_t, int, const Vector<T, N> &bits) {
      A e[N];
      unpack<T, N>(e, bits);
#pragma unroll
      for (int j = 0; j < N; ++j) e[j] -= mean, v[0] += e[j], v[1] += e[j] * e[j];
    });
  }

  // y; shift: how far the mean is off, being rounded.
  __device__ void write(A mean, A shift, A rstd) const {
    struct Weighted {
      Vector<T, N> x;
      A weight[N], bias[N];
    };
    const auto load_weighted = [&](int64_t c, int d) {
      Weighted raw;
      raw.x = again(c, d);
      load_weights<W>(raw.weight, p.weight, A(1), column + c + d);
      load_weights<W>(raw.bias, p.bias, A(0), column + c + d);
      return raw;
    };
    walk_row<N, U, U_WEIGHTED>(size, load_weighted, [&](int64_t c, int d, const Weighted &raw) {
      A y[N];
      unpack<T, N>(y, raw.x);
#pragma unroll
      for (int j = 0; j < N; ++j) y[j] = (y[j] - mean - shift) * rstd * raw.weight[j] + raw.bias[j];
      drop_from(y, p.dropout_y, first + c + d);
      store<T, N>(static_cast<T *>(p.y) + first + c + d, y);
    });
  }
};

template <typename T, typename W, int N, bool SHIFTED>
__global__ void __launch_bounds__(MOST_PLAIN_THREADS)
    plain_forward_kernel(const __grid_constant__ norm_forward_args p, const PlainShape shape) {
  using A = acc_t<T>;
  extern __shared__ uint4 shared[];
  __shared__ typename PlainTeam<A>::Slots slots;
  PlainTeam<A> team(slots, shape.cluster);
  T *const kept = reinterpret_cast<T *>(shared) + threadIdx.y * shape.kept;
  const int64_t begin = team.rank * shape.slice, size = min(shape.slice, p.cols - begin);
  const A cols = static_cast<A>(p.cols);
  for (int64_t row = team.first_row(); row < p.rows; row = team.next_row(row)) {
    PlainForwardRow<T, W, N, SHIFTED> part{p, kept, shape.kept, row, begin, size};
    A v[2] = {};
    part.read(v);
    team.sum(v);
    A mean = 0, shift = 0;
    if (p.centered) {
      mean = v[0] / cols;
      v[0] = v[1] = 0;
      part.read_around(mean, v);
      team.sum(v);
      shift = v[0] / cols;
      // Half types cannot hold a mean so large that its rounding would show; and rows of one value are then exactly their bias.
      if (sizeof(T) == 2) mean += shift, shift = 0;
      if (!isinf(v[1])) v[1] -= v[0] * v[0] / cols;
    }
    const A rstd = 1 / sqrt(v[1] / cols + static_cast<A>(p.eps));
    if (threadIdx.x == 0 && team.rank == 0 && p.rstd != nullptr) {
      if (p.centered) static_cast<A *>(p.mean)[row] = mean + shift;
      static_cast<A *>(p.rstd)[row] = rstd;
    }
    part.write(mean, shift, rstd);
  }
}

template <typename T>
cudaError_t plain_forward(const norm_forward_args &args, cudaStream_t stream) {
  const bool whole = args.cols % VECTOR<T> == 0 && is_aligned(args.y) && is_aligned(args.sum) &&
                     is_aligned(args.weight) && is_aligned(args.bias);
  const bool aligned = are_aligned<T>(args.x, args.rows, args.x_stride) &&
                       are_aligned<T>(args.residual, args.rows, args.residual_stride);
  return with_vectors<T>(whole, aligned, [&](auto n, auto shifted) {
    return with_weight<T>(args.weight_dtype, [&](auto weight) {
      constexpr auto kernel =
          plain_forward_kernel<T, decltype(weight), decltype(n)::value, decltype(shifted)::value>;
      return launch_plain<kernel, decltype(n)::value>(args, sizeof(T), stream);
    });
  });
}

}  // namespace norm_cuda

#endif

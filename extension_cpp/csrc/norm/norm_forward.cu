// Forward of the norms on the GPU. A single kernel serves every fused variant and every width.
// rows/plan.h chooses its shape. Part of a warp, a CTA or a cluster of CTAs holds a row in
// registers, so the row is read once. The statistics are sums over these threads. A CTA processes
// its rows and exits (the kernel is not persistent). An SM runs several CTAs: some load while
// others wait for their sums.
#include "norm/norm_launch.cuh"

namespace norms {

// Replaces x by residual + dropout(x), rounded to T, and writes it to `sum`.
template <typename T, int K, bool ALIGNED>
__device__ inline void add_residual(RowFragment<T, K, ALIGNED> &x,
                                    const RowFragment<T, K, ALIGNED> &residual,
                                    const ForwardParams<T> &p, int64_t row,
                                    const RowWindow<T, K, ALIGNED> &window) {
  T *const sum = static_cast<T *>(p.sum) + row * p.cols;
  window.for_each([&](auto part) {
    if (!window.has(part.k)) return;
    constexpr int M = decltype(part)::SIZE;
    float values[M], added[M];
    x.unpack(values, part.k);
    residual.unpack(added, part.k);
    if (p.drops_x()) drop(values, p.dropout_x, row * p.cols + window.column(part.k));
#pragma unroll
    for (int j = 0; j < M; ++j) values[j] += added[j];
    store<T, M>(sum + window.column(part.k), values);
    x.pack(values, part.k);
  });
}

// Writes y. W is the type of the parameters in memory. The parameters are loaded BATCH vectors at a
// time, as many as fit into the registers. Unaligned vectors need more registers.
template <typename Norm, Form FORM, typename W, typename T, int K, bool ALIGNED>
__device__ inline void write_row(const ForwardParams<T> &p, int64_t row,
                                 const RowWindow<T, K, ALIGNED> &window,
                                 const RowFragment<T, K, ALIGNED> &x,
                                 const Statistics<float> &statistics) {
  constexpr int N = VECTOR<T>, P = Norm::PARAMETERS;
  constexpr int BATCH = P * sizeof(W) * N > 32 || !ALIGNED ? 1 : 2;
  T *const y = static_cast<T *>(p.y) + row * p.cols;
  const int64_t start = row * p.cols, seed = FORM == Form::DROPOUT_OF_Y ? *p.dropout_y.seed : 0;
  // parameters[i][j] is parameter i (weight or bias) for element j
  const auto finish = [&](auto part, const auto &parameters, const auto &bits) {
    constexpr int M = decltype(part)::SIZE;
    float values[M];
    x.unpack(values, part.k);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const float weight = parameters[0][j], bias = parameters[P - 1][j];
      values[j] = Norm::y(Norm::xhat(values[j], statistics), weight, bias);
    }
    if (FORM == Form::DROPOUT_OF_Y) drop(values, p.dropout_y, bits);
    store<T, M>(y + window.column(part.k), values);
  };
#pragma unroll
  for (int begin = 0; begin < K; begin += BATCH) {
    ParameterVector<W, N, ALIGNED> vectors[BATCH][P];
    RandomBits<N> bits[BATCH];
    int64_t first[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH && begin + b < K; ++b) {
      const int k = begin + b;
      first[b] = start + window.column(k);
#pragma unroll
      for (int i = 0; i < P; ++i) {
        const W *const data = static_cast<const W *>(p.parameter(i));
        vectors[b][i].load(data, window.column(k), p.cols, window.has(k), 1 - i);
      }
    }
    if (FORM == Form::DROPOUT_OF_Y) draw(bits, seed, first);
#pragma unroll
    for (int b = 0; b < BATCH && begin + b < K; ++b) {
      if (!window.has(begin + b)) continue;
      float parameters[P][N];
#pragma unroll
      for (int i = 0; i < P; ++i) vectors[b][i].unpack(parameters[i]);
      finish(Part<N>{begin + b}, parameters, bits[b]);
    }
  }
  if constexpr (!ALIGNED) {
    if (!window.has_edge()) return;
    float parameters[P][1];
#pragma unroll
    for (int i = 0; i < P; ++i) {
      parameters[i][0] = load_parameter<W>(p.parameter(i), window.edge, 1 - i);
    }
    finish(Part<1>{K}, parameters, draw_one(seed, start + window.edge));
  }
}

// Returns the number of registers per thread. It limits how many threads run on an SM, and
// therefore how many bytes are in flight.
template <typename Norm, Form FORM, int K, bool ALIGNED>
constexpr int row_registers() {
  if (K > 4 || !ALIGNED) return 80;
  return Norm::PARAMETERS == 1 && FORM != Form::RESIDUAL ? 48 : 64;
}

template <typename T, typename Norm, Form FORM, int K, bool ALIGNED>
__global__ void __maxnreg__((row_registers<Norm, FORM, K, ALIGNED>()))
    row_kernel(const __grid_constant__ ForwardParams<T> p) {
  using Opening = RowOpening<T, K, ALIGNED>;
  __shared__ typename Opening::Shared shared;
  const Opening at(p, shared);
  RowFragment<T, K, ALIGNED> x{}, residual;
  if (at.is_row) {
    x.load(p.x_row(at.row), at.window, p.hint);
    if (FORM == Form::RESIDUAL) residual.load(p.residual_row(at.row), at.window, p.hint);
    if (p.ahead > 0 && at.row + p.ahead < p.rows) {
      prefetch_slice(p.x_row(at.row + p.ahead), at.slice, p.hint);
    }
    if (FORM == Form::RESIDUAL) add_residual(x, residual, p, at.row, at.window);
  }
  at.sum.wait_for_others();
  const auto for_each = [&](auto &&f) {
    x.for_each(at.window, [&](auto &values, int, int) {
#pragma unroll
      for (const float value : values) f(value);
    });
  };
  int turn = 0;
  const auto columns = [&](int cta) {
    return RowSlice<T, ALIGNED>(p.cols, at.row, p.slice, cta).count();
  };
  const float first = x.first(at.window);
  const Statistics<float> statistics =
      Norm::statistics(for_each, sizeof(T) == 2 ? &first : nullptr, at.sum, turn, columns,
                       p.per_col, static_cast<float>(p.eps));
  if (!at.is_row) return;
  if (threadIdx.x == 0 && at.rank == 0 && p.rstd != nullptr) {
    if (p.mean != nullptr) static_cast<float *>(p.mean)[at.row] = statistics.mean;
    static_cast<float *>(p.rstd)[at.row] = statistics.rstd;
  }
  if (sizeof(T) == 2 && p.weight_dtype == DTYPE_FLOAT32) {
    write_row<Norm, FORM, float>(p, at.row, at.window, x, statistics);
  } else {
    write_row<Norm, FORM, T>(p, at.row, at.window, x, statistics);
  }
  if (at.row < p.release_from) return;
  release_row(p.x_row(at.row), at.slice);
  if (FORM == Form::RESIDUAL) release_row(p.residual_row(at.row), at.slice);
}

cudaError_t forward(const norm_forward_args &args, Form form, const Plan &plan,
                    cudaStream_t stream) {
  return with_row_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const ForwardParams<T> p{geometry_of(plan, args.rows, args.cols), args};
    const void *const kernel = kernel_of_norm(args.centered, form, [&](auto norm, auto constant) {
      using Norm = decltype(norm);
      constexpr Form FORM = decltype(constant)::value;
      return kernel_of_shape<FORM>(plan, [](auto vectors, auto aligned) {
        return address(row_kernel<T, Norm, FORM, vectors, aligned>);
      });
    });
    return launch(kernel, &p, plan, stream);
  });
}

}  // namespace norms

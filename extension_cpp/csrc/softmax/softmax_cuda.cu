// softmax and log_softmax on the GPU.
//
// If inner = 1, part of a warp, a CTA or a cluster of CTAs holds a row in registers. The forward
// kernel of the norms does the same, with the same plan (rows/plan.h). Such a row is read once and
// written once. All other cases are processed in strips (rows/strips.cuh), which are read twice.
#include "rows/exp_sum.cuh"
#include "rows/strips.cuh"
#include "softmax/softmax.h"

namespace softmaxes {

using namespace rows;

template <typename T>
struct RowParams : Geometry {
  const T *x;         // x in forward, y in backward
  const T *grad_out;  // only in backward
  T *out;             // y in forward, grad_x in backward
  bool is_log;
};

// ---- the formulas ----

// Returns the term that an element adds to backward's sum over a row.
template <typename A>
__device__ inline A backward_term(A grad_out, A y, bool is_log) {
  return is_log ? grad_out : grad_out * y;
}

template <typename A>
__device__ inline A grad_of(A grad_out, A y, A sum, bool is_log) {
  return is_log ? grad_out - exponential(y) * sum : (grad_out - sum) * y;
}

// ---- rows in registers ----

template <typename T, int K, bool ALIGNED>
__global__ void __maxnreg__((row_registers(K, ALIGNED)))
    softmax_rows(const __grid_constant__ RowParams<T> p) {
  constexpr int N = VECTOR<T>;
  using Opening = RowOpening<T, K, ALIGNED>;
  __shared__ typename Opening::Shared shared;
  const Opening at(p, shared);
  RowFragment<T, K, ALIGNED> x{};
  if (at.is_row) {
    x.load(p.x + at.row * p.cols, at.window, p.hint);
    if (p.ahead > 0 && at.row + p.ahead < p.rows) {
      prefetch_slice(p.x + (at.row + p.ahead) * p.cols, at.slice, p.hint);
    }
  }
  at.sum.wait_for_others();
  float own = -INFINITY, sum[1] = {0};
  x.for_each(at.window, [&](auto &values, int, int) {
    for (const float value : values) own = max(own, value);
  });
  own = at.sum.max_cta(own, 0);
  // The exponentials (in log_softmax, the differences x - from) are kept in registers if there is
  // room. Otherwise they are computed again.
  constexpr bool KEEPS = K <= 4;
  float kept[KEEPS ? K : 1][N], kept_edge = 0;
  const float from = finite_maximum(own);
  x.for_each(at.window, [&](auto &values, int, int k) {
    constexpr int M = sizeof(values) / sizeof(float);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const float distance = values[j] - from, e = exponential(distance);
      sum[0] += e;
      const float keeps = p.is_log ? distance : e;
      if constexpr (M == 1) {
        kept_edge = keeps;
      } else if constexpr (KEEPS) {
        kept[k][j] = keeps;
      }
    }
  });
  at.sum.sum_cta(sum, 1);
  float most = own;
  if (p.cluster > 1) join_cluster(at.sum, most, sum[0], 2);
  if (!at.is_row) return;
  // To convert values relative to the CTA's maximum into results, softmax multiplies them by a
  // factor, and log_softmax adds an offset.
  const float factor = rescale(own, most) / sum[0];
  const float offset = from - finite_maximum(most) - logarithm(sum[0]);
  T *const y = p.out + at.row * p.cols;
  x.for_each(at.window, [&](auto &values, int column, int k) {
    constexpr int M = sizeof(values) / sizeof(float);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      float keeps = kept_edge;
      if constexpr (M > 1 && KEEPS) keeps = kept[k][j];
      if constexpr (M > 1 && !KEEPS)
        keeps = p.is_log ? values[j] - from : exponential(values[j] - from);
      values[j] = p.is_log ? keeps + offset : keeps * factor;
    }
    store_at(y, column, values);
  });
  if (at.row >= p.release_from) release_row(p.x + at.row * p.cols, at.slice);
}

template <typename T, int K, bool ALIGNED>
__global__ void __maxnreg__((row_registers(K, ALIGNED)))
    softmax_backward_rows(const __grid_constant__ RowParams<T> p) {
  using Opening = RowOpening<T, K, ALIGNED>;
  __shared__ typename Opening::Shared shared;
  const Opening at(p, shared);
  RowFragment<T, K, ALIGNED> y{}, grad_out{};
  if (at.is_row) {
    y.load(p.x + at.row * p.cols, at.window, p.hint);
    grad_out.load(p.grad_out + at.row * p.cols, at.window, p.hint);
  }
  at.sum.wait_for_others();
  // Calls f(grads, values, column) with the values of grad_out and of y in the same columns.
  const auto for_each_pair = [&](auto &&f) {
    grad_out.for_each(at.window, [&](auto &grads, int column, int k) {
      float values[sizeof(grads) / sizeof(float)];
      y.unpack(values, k);
      f(grads, values, column);
    });
  };
  float sum[1] = {0};
  for_each_pair([&](auto &grads, auto &values, int) {
#pragma unroll
    for (int j = 0; j < sizeof(grads) / sizeof(float); ++j) {
      sum[0] += backward_term(grads[j], values[j], p.is_log);
    }
  });
  at.sum.sum_cta(sum, 0);
  if (p.cluster > 1) {
    at.sum.send_to_all({sum[0], 0}, 1);
    at.sum.collect(sum, 1);
  }
  if (!at.is_row) return;
  T *const grad_x = p.out + at.row * p.cols;
  for_each_pair([&](auto &grads, auto &values, int column) {
#pragma unroll
    for (int j = 0; j < sizeof(grads) / sizeof(float); ++j) {
      grads[j] = grad_of(grads[j], values[j], sum[0], p.is_log);
    }
    store_at(grad_x, column, grads);
  });
  if (at.row < p.release_from) return;
  release_row(p.x + at.row * p.cols, at.slice);
  release_row(p.grad_out + at.row * p.cols, at.slice);
}

// ---- strips ----

template <typename T, int N>
__global__ void __launch_bounds__(STRIP_THREADS, STRIP_CTAS)
    softmax_strips(const __grid_constant__ StripParams<softmax_forward_args> p) {
  using A = acc_t<T>;
  using Join = StripJoin<ExpSum<A, false>, N>;
  __shared__ typename Join::Shared shared;
  const Join strip_join(shared, p.shape.cluster);
  for (int64_t s = blockIdx.x / p.shape.cluster; s < p.outer * p.shape.strips;
       s += gridDim.x / p.shape.cluster) {
    const Strip strip(s, p.shape, p.cols, p.inner, N);
    const int64_t base = strip.outer * p.cols * p.inner + strip.i;
    const T *const x = static_cast<const T *>(p.x) + base;
    T *const y = static_cast<T *>(p.y) + base;
    ExpSum<A, false> sums[N];
    A z[STRIP_COLUMNS][N];
    strip.for_columns([&](int64_t c) {
      load_columns(z, x, strip, c, p.inner, A(-INFINITY));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        A column[STRIP_COLUMNS];
#pragma unroll
        for (int u = 0; u < STRIP_COLUMNS; ++u) column[u] = z[u][j];
        sums[j].add(column);
      }
    });
    strip_join.join(sums);
    A from[N], per_sum[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      from[j] = finite_maximum(sums[j].max);
      per_sum[j] = p.is_log ? logarithm(sums[j].sum) : 1 / sums[j].sum;
    }
    strip.for_columns_backward([&](int64_t c) {
      load_columns(z, x, strip, c, p.inner, A(0));
#pragma unroll
      for (int u = 0; u < STRIP_COLUMNS; ++u) {
        if (!strip.has(c, u)) break;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const A distance = z[u][j] - from[j];
          z[u][j] = p.is_log ? distance - per_sum[j] : exponential(distance) * per_sum[j];
        }
        store<T, N>(y + (c + u * blockDim.y) * p.inner, z[u]);
      }
    });
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(STRIP_THREADS, STRIP_BACKWARD_CTAS)
    softmax_backward_strips(const __grid_constant__ StripParams<softmax_backward_args> p) {
  using A = acc_t<T>;
  using Join = StripJoin<PlainSum<A>, N>;
  __shared__ typename Join::Shared shared;
  const Join strip_join(shared, p.shape.cluster);
  for (int64_t s = blockIdx.x / p.shape.cluster; s < p.outer * p.shape.strips;
       s += gridDim.x / p.shape.cluster) {
    const Strip strip(s, p.shape, p.cols, p.inner, N);
    const int64_t base = strip.outer * p.cols * p.inner + strip.i;
    const T *const grad_out = static_cast<const T *>(p.grad_out) + base;
    const T *const y = static_cast<const T *>(p.y) + base;
    T *const grad_x = static_cast<T *>(p.grad_x) + base;
    PlainSum<A> sums[N];
    A grads[STRIP_COLUMNS][N], values[STRIP_COLUMNS][N];
    const auto load = [&](int64_t c, bool needs_values) {
      load_columns(grads, grad_out, strip, c, p.inner, A(0));
      if (needs_values) load_columns(values, y, strip, c, p.inner, A(0));
    };
    strip.for_columns([&](int64_t c) {
      load(c, !p.is_log);
#pragma unroll
      for (int u = 0; u < STRIP_COLUMNS; ++u) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          sums[j].sum += backward_term(grads[u][j], values[u][j], p.is_log);
      }
    });
    strip_join.join(sums);
    strip.for_columns_backward([&](int64_t c) {
      load(c, true);
#pragma unroll
      for (int u = 0; u < STRIP_COLUMNS; ++u) {
        if (!strip.has(c, u)) break;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          grads[u][j] = grad_of(grads[u][j], values[u][j], sums[j].sum, p.is_log);
        }
        store<T, N>(grad_x + (c + u * blockDim.y) * p.inner, grads[u]);
      }
    });
  }
}

// ---- launches ----

template <typename T>
cudaError_t launch_rows(const RowParams<T> &p, cudaStream_t stream) {
  const auto forward = [](auto vectors, auto aligned) {
    return address(softmax_rows<T, vectors, aligned>);
  };
  const auto backward = [](auto vectors, auto aligned) {
    return address(softmax_backward_rows<T, vectors, aligned>);
  };
  const void *const kernel = p.grad_out == nullptr ? kernel_of_shape<Form::PLAIN>(p, forward)
                                                   : kernel_of_shape<Form::RESIDUAL>(p, backward);
  return launch(kernel, &p, p, stream);
}

}  // namespace softmaxes

extern "C" int softmax_forward_cuda(const softmax_forward_args *args, void *stream) {
  using namespace softmaxes;
  const auto on = static_cast<cudaStream_t>(stream);
  Plan plan{};
  const bool is_congruent = args->inner == 1 && is_aligned(args->x) && is_aligned(args->y);
  const cudaError_t error =
      plan_rows(plan, args->dtype, args->outer, args->cols, false, is_congruent);
  if (error != cudaSuccess) return error;
  if (plan.kernel == Kernel::ROW) {
    return with_row_type(args->dtype, [&](auto zero) {
      using T = decltype(zero);
      RowParams<T> p{geometry_of(plan, args->outer, args->cols)};
      p.x = static_cast<const T *>(args->x);
      p.out = static_cast<T *>(args->y);
      p.is_log = args->is_log;
      return launch_rows(p, on);
    });
  }
  const bool has_vectors = is_aligned(args->x) && is_aligned(args->y);
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_strip_vector<T>(has_vectors, args->inner, [&](auto n) {
      return launch_strips<T, decltype(n)::value>(softmax_strips<T, n>, *args, args->outer,
                                                  args->cols, args->inner, on);
    });
  });
}

extern "C" int softmax_backward_cuda(const softmax_backward_args *args, void *stream) {
  using namespace softmaxes;
  const auto on = static_cast<cudaStream_t>(stream);
  Plan plan{};
  const bool is_congruent = args->inner == 1 && is_aligned(args->y) && is_aligned(args->grad_out) &&
                            is_aligned(args->grad_x);
  const cudaError_t error =
      plan_rows(plan, args->dtype, args->outer, args->cols, true, is_congruent);
  if (error != cudaSuccess) return error;
  if (plan.kernel == Kernel::ROW) {
    return with_row_type(args->dtype, [&](auto zero) {
      using T = decltype(zero);
      RowParams<T> p{geometry_of(plan, args->outer, args->cols)};
      p.x = static_cast<const T *>(args->y);
      p.grad_out = static_cast<const T *>(args->grad_out);
      p.out = static_cast<T *>(args->grad_x);
      p.is_log = args->is_log;
      return launch_rows(p, on);
    });
  }
  const bool has_vectors =
      is_aligned(args->y) && is_aligned(args->grad_out) && is_aligned(args->grad_x);
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return with_strip_vector<T>(has_vectors, args->inner, [&](auto n) {
      return launch_strips<T, decltype(n)::value>(softmax_backward_strips<T, n>, *args, args->outer,
                                                  args->cols, args->inner, on);
    });
  });
}

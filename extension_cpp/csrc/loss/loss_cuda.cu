// cross_entropy and token_log_probs on the GPU.
//
// loss_forward_rows     inner = 1: a warp or a CTA reads a row once, with a running maximum, and
//                       does not keep it.
// loss_backward_rows    inner = 1: the gradient is computed element by element from the row's lse.
//                       A CTA processes a tile of a wide row, or several narrow rows.
// loss_gradient_rows    forward with the gradient, without softcap and smoothing: the row is in
//                       registers (rows/plan.h), so it is read once and then overwritten.
// loss_*_strips         all other cases: other dimensions and float64.
// loss_partial_sums and loss_total compute the sum over the rows, in two steps.
#include <algorithm>

#include "loss/loss_kernels.cuh"

namespace losses {

// ---- forward with the gradient ----

struct GradientParams : Geometry {
  loss_forward_args args;
};

template <typename T, int K, bool ALIGNED>
__global__ void __maxnreg__((row_registers(K, ALIGNED)))
    loss_gradient_rows(const __grid_constant__ GradientParams p) {
  using Opening = RowOpening<T, K, ALIGNED>;
  __shared__ typename Opening::Shared shared;
  const Opening at(p, shared);
  const loss_rows &rows = p.args.rows;
  RowFragment<T, K, ALIGNED> x{};
  const T *const from_row = static_cast<const T *>(rows.logits) + at.row * p.cols;
  // If the gradient replaces the logits, threads overwrite the row after the first sum over it.
  // Every thread therefore reads the target's logit before, and starts its maximum with it.
  float own = -INFINITY, sum[1] = {0}, z_target = 0;
  if (at.is_row) {
    x.load(from_row, at.window, p.hint);
    if (p.ahead > 0 && at.row + p.ahead < p.rows) {
      prefetch_slice(from_row + static_cast<int64_t>(p.ahead) * p.cols, at.slice, p.hint);
    }
    const Target target(rows, at.row, true);
    if (target.is_class) own = z_target = to_acc(from_row[target.c]);
  }
  at.sum.wait_for_others();
  x.for_each(at.window, [&](auto &values, int, int) {
    for (const float value : values) own = max(own, value);
  });
  own = at.sum.max_cta(own, 0);
  x.for_each(at.window, [&](auto &values, int, int) {
    for (const float value : values) sum[0] += exponential(value - finite_maximum(own));
  });
  at.sum.sum_cta(sum, 1);
  float most = own;
  if (p.cluster > 1) join_cluster(at.sum, most, sum[0], 2);
  if (!at.is_row) return;
  const Target target(rows, at.row, true);
  RowGradient<float> gradient;
  gradient.from = finite_maximum(most);
  gradient.log_sum = logarithm(sum[0]);
  gradient.set(rows, target, *static_cast<const float *>(p.args.grad_scale));
  if (threadIdx.x == 0 && at.rank == 0) {
    write_results<PLAIN, float>(p.args, at.row, target, z_target, gradient.from, gradient.log_sum,
                                0, 0, 0);
  }
  T *const out = static_cast<T *>(p.args.grad_logits) + at.row * p.cols;
  const Logit<PLAIN, float> logit(rows);
  x.for_each(at.window, [&](auto &values, int column, int) {
    gradient.apply(values, rows, logit, column);
    store_at(out, column, values);
  });
  if (at.row >= p.release_from) release_row(out, at.slice);
}

// ---- launches ----

// Calls f(mode) with the mode as a compile-time constant.
template <typename F>
auto with_mode(const loss_rows &rows, bool has_entropy, F &&f) {
  if (has_entropy) return f(std::integral_constant<Mode, ENTROPY>{});
  if (rows.options.label_smoothing > 0 || rows.options.softcap > 0) {
    return f(std::integral_constant<Mode, GENERAL>{});
  }
  return f(std::integral_constant<Mode, PLAIN>{});
}

// Calls f(zero of the rows' type, mode, N). N is the number of elements that a thread loads at
// once. N is greater than 1 only for PLAIN.
template <typename F>
cudaError_t with_strip_kernel(const loss_rows &rows, bool has_entropy, bool are_aligned, F &&f) {
  return with_dtype(rows.dtype, [&](auto zero) {
    return with_mode(rows, has_entropy, [&](auto mode) {
      using T = decltype(zero);
      const auto run = [&](auto n) { return f(zero, mode, n); };
      if constexpr (decltype(mode)::value == PLAIN) {
        const bool has_vectors = are_aligned && rows.outer_stride % VECTOR<T> == 0;
        return with_strip_vector<T>(has_vectors, rows.inner, run);
      }
      return run(std::integral_constant<int, 1>{});
    });
  });
}

int64_t vectors_of(const loss_rows &rows) {
  return ceil_div(rows.cols, rows.dtype == DTYPE_FLOAT32 ? 4 : 8);
}

// Returns the shape of a CTA: x threads per row and y rows. x is the smallest power of two from 4
// to `most` with which a thread has at most `vectors` vectors of its row, or `most` if there is
// none. With fewer than x threads, a row would take longer.
dim3 row_threads(const loss_rows &rows, int vectors, unsigned most) {
  unsigned x = 4;
  while (x < most && static_cast<int64_t>(x) * vectors < vectors_of(rows)) x *= 2;
  return dim3(x, CTA_THREADS / x);
}

unsigned at_most_ctas(int64_t ctas) {
  return static_cast<unsigned>(std::min<int64_t>(ctas, INT32_MAX));
}

cudaError_t forward_rows(const loss_forward_args &args, cudaStream_t stream) {
  // A row of several warps has its own CTA, because a barrier waits for all threads of a CTA.
  const bool is_narrow = vectors_of(args.rows) <= NARROW;
  const dim3 threads =
      is_narrow ? row_threads(args.rows, FORWARD_VECTORS, 32) : dim3(CTA_THREADS, 1);
  const unsigned ctas = at_most_ctas(ceil_div(args.rows.outer, threads.y));
  return with_row_type(args.rows.dtype, [&](auto zero) {
    with_mode(args.rows, args.entropy != nullptr, [&](auto mode) {
      loss_forward_rows<decltype(zero), decltype(mode)::value><<<ctas, threads, 0, stream>>>(args);
    });
    return cudaGetLastError();
  });
}

cudaError_t forward_strips(const loss_forward_args &args, cudaStream_t stream) {
  const loss_rows &rows = args.rows;
  return with_strip_kernel(rows, args.entropy != nullptr, is_aligned(rows.logits),
                           [&](auto zero, auto mode, auto n) {
                             using T = decltype(zero);
                             return launch_strips<T, n>(loss_forward_strips<T, mode, n>, args,
                                                        rows.outer, rows.cols, rows.inner, stream);
                           });
}

cudaError_t backward_rows(const loss_backward_args &args, cudaStream_t stream) {
  const loss_rows &rows = args.rows;
  const dim3 threads = row_threads(rows, TILE_VECTORS, CTA_THREADS);
  return with_row_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t tiles =
        threads.y > 1 ? 1 : ceil_div(vectors_of(rows), TILE_VECTORS * CTA_THREADS);
    const int64_t units = ceil_div(rows.outer, threads.y) * tiles;
    with_mode(rows, args.entropy != nullptr, [&](auto mode) {
      loss_backward_rows<T, decltype(mode)::value>
          <<<at_most_ctas(units), threads, 0, stream>>>(args, tiles, units);
    });
    return cudaGetLastError();
  });
}

cudaError_t backward_strips(const loss_backward_args &args, cudaStream_t stream) {
  const loss_rows &rows = args.rows;
  const bool has_vectors = is_aligned(rows.logits) && is_aligned(args.grad_logits);
  return with_strip_kernel(rows, args.entropy != nullptr, has_vectors,
                           [&](auto zero, auto mode, auto n) {
                             using T = decltype(zero);
                             return launch_strips<T, n>(loss_backward_strips<T, mode, n>, args,
                                                        rows.outer, rows.cols, rows.inner, stream);
                           });
}

cudaError_t gradient_rows(const loss_forward_args &args, const Plan &plan, cudaStream_t stream) {
  return with_row_type(args.rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    const GradientParams p{geometry_of(plan, args.rows.outer, args.rows.cols), args};
    const void *const kernel = kernel_of_shape<Form::PLAIN>(plan, [](auto vectors, auto aligned) {
      return address(loss_gradient_rows<T, vectors, aligned>);
    });
    return launch(kernel, &p, plan, stream);
  });
}

}  // namespace losses

extern "C" int loss_forward_cuda(const loss_forward_args *args, void *stream) {
  using namespace losses;
  const auto on = static_cast<cudaStream_t>(stream);
  const loss_rows &rows = args->rows;
  const bool has_rows = rows.inner == 1 && rows.dtype != DTYPE_FLOAT64;
  Plan plan{};
  if (args->grad_logits != nullptr) {
    const bool is_plain = rows.options.softcap == 0 && rows.options.label_smoothing == 0;
    const bool is_congruent = has_rows && is_plain && rows.outer_stride == rows.cols &&
                              is_aligned(rows.logits) && is_aligned(args->grad_logits);
    const cudaError_t error =
        plan_rows(plan, rows.dtype, rows.outer, rows.cols, false, is_congruent);
    if (error != cudaSuccess) return error;
    if (plan.kernel == Kernel::ROW) return gradient_rows(*args, plan, on);
  }
  const cudaError_t error = has_rows ? forward_rows(*args, on) : forward_strips(*args, on);
  if (error != cudaSuccess || args->grad_logits == nullptr) return error;
  loss_backward_args backward{};
  backward.rows = rows;
  backward.lse = args->lse;
  backward.grad_loss = args->grad_scale;
  backward.grad_dtype = rows.dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
  backward.grad_logits = args->grad_logits;
  return loss_backward_cuda(&backward, stream);
}

extern "C" int loss_backward_cuda(const loss_backward_args *args, void *stream) {
  using namespace losses;
  const auto on = static_cast<cudaStream_t>(stream);
  const bool has_rows = args->rows.inner == 1 && args->rows.dtype != DTYPE_FLOAT64;
  return has_rows ? backward_rows(*args, on) : backward_strips(*args, on);
}

extern "C" int loss_reduce_cuda(const loss_reduce_args *args, void *stream) {
  using namespace losses;
  const auto on = static_cast<cudaStream_t>(stream);
  const auto run = [&](auto zero) {
    using A = decltype(zero);
    const int64_t parts =
        args->rows <= LOSS_REDUCED_ROWS ? 0 : ceil_div(args->rows, LOSS_REDUCED_ROWS);
    if (parts > 0) {
      loss_partial_sums<A><<<static_cast<unsigned>(parts), REDUCE_THREADS, 0, on>>>(*args);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
    loss_total<A><<<1, REDUCE_THREADS, 0, on>>>(*args, parts);
    return cudaGetLastError();
  };
  return args->dtype == DTYPE_FLOAT64 ? run(double{}) : run(float{});
}

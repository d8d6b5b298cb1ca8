// Entry points of the scans on the GPU. The two kernels are in scan_rows.cuh and scan_columns.cuh,
// the arithmetic of each op in scan_math.cuh, the join of tiles in scan_tile.cuh, and the division
// of a scan into tiles in scan_plan.h.
#include "scan/scan.h"
#include "scan/scan_columns.cuh"
#include "scan/scan_rows.cuh"

namespace scans {

// Returns whether every vector of `width` elements that a kernel accesses is aligned.
template <typename T, typename Operand>
static bool has_vectors(const Operand &at, int width, const scan_shape &shape, const Plan &plan) {
  bool has_outer = shape.outer == 1 || at.outer % width == 0;
  for (int64_t j = 0; j < shape.jump_count; ++j)
    has_outer = has_outer && shape.jumps[j].by[at.index] % width == 0;
  const auto address = reinterpret_cast<uintptr_t>(at.data);
  const int64_t size = width * sizeof(T);
  if (!plan.is_rows)
    return at.inner == 1 && has_outer && at.step % width == 0 && address % size == 0;
  const int64_t back = at.step < 0 ? size - sizeof(T) : 0;  // a reversed vector ends at data
  return (at.step == 1 || at.step == -1) && has_outer && (address - back) % size == 0;
}

// Returns the bytes of shared memory that a CTA may have on the current device.
static int shared_memory() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return bytes;
}

// Returns the bytes of dynamic shared memory, including the gaps of row_vector() and ColumnTile.
template <typename Op>
static int dynamic_bytes(int vectors, bool is_rows) {
  const int gaps = is_rows ? THREADS * 16 : ColumnTile<Op>::GAPS;
  return Op::INPUTS * (vectors * THREADS * 16 + gaps);
}

// Returns the largest number of vectors per thread in columns. It is smaller than COLUMN_VECTORS
// only on GPUs of compute capability 7.5, which have 64 KiB of shared memory.
template <typename Op>
static int column_vectors() {
  const int room = shared_memory() - static_cast<int>(sizeof(ColumnTable<Op>));
  int vectors = Op::COLUMN_VECTORS;
  while (vectors > 1 && dynamic_bytes<Op>(vectors, false) > room) vectors /= 2;
  return vectors;
}

// Returns the plan. If a row kernel does not fit into shared memory (compute capability 7.5), rows
// are scanned by the kernel for columns.
template <typename Op>
static Plan plan_of(const scan_shape &shape) {
  const int room = shared_memory() - static_cast<int>(sizeof(RowTable<Op>));
  const bool fits = dynamic_bytes<Op>(Op::ROW_VECTORS, true) <= room;
  return pick(shape, WIDTH<typename Op::T>, fits ? Op::ROW_VECTORS : 0, column_vectors<Op>());
}

template <typename Op>
static StateLayout layout_of(const scan_shape &shape, const Plan &plan) {
  using Algebra = typename Op::Algebra;
  return state_layout(plan, shape.outer, shape.jump_count > 0 ? Params<Op>::OPERANDS : 0,
                      sizeof(typename Algebra::Part) / 4, sizeof(typename Algebra::State) / 4);
}

// Calls f with default-initialised parameters of an op, for the type of its elements in memory.
// bfloat16 and float16 share Half.
template <template <typename> class Op, typename F>
static cudaError_t with_params(const scan_shape &shape, F &&f) {
  if (shape.dtype == DTYPE_FLOAT64) return f(Params<Op<double>>{});
  return shape.dtype == DTYPE_FLOAT32 ? f(Params<Op<float>>{}) : f(Params<Op<Half>>{});
}

// Adds one of the shape's jumps to the table Params::jumps.
static __global__ void add_jump(int64_t *jumps, const __grid_constant__ Plan plan, int operands,
                                const __grid_constant__ scan_jump jump) {
  const int64_t group = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (group >= plan.groups) return;
  for (int i = 0; i < operands; ++i) {
    jumps[i * plan.groups + group] += group * plan.span / jump.span * jump.by[i];
  }
}

// Sets the parameters that all ops share, and launches the kernel.
template <typename Op>
static cudaError_t launch(Params<Op> &p, const scan_shape &shape, const scan_input *in,
                          const scan_output *out, void *stream) {
  using T = typename Op::T;
  p.plan = plan_of<Op>(shape);
  p.layout = layout_of<Op>(shape, p.plan);
  p.state = static_cast<char *>(shape.state);
  const auto jumps = reinterpret_cast<int64_t *>(p.state + p.layout.jumps);
  if (shape.jump_count > 0) p.jumps = jumps;
  p.length = shape.length;
  p.inner = shape.inner;
  p.is_bfloat16 = shape.dtype == DTYPE_BFLOAT16;
  if (p.plan.ctas > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int out_width = p.plan.is_rows ? WIDTH<T> : lines_of(WIDTH<T>);
  for (int i = 0; i < Op::INPUTS; ++i)
    p.in[i] = {in[i], has_vectors<T>(in[i], WIDTH<T>, shape, p.plan)};
  for (int o = 0; o < Op::OUTPUTS; ++o)
    p.out[o] = {out[o], has_vectors<T>(out[o], out_width, shape, p.plan)};
  const auto ctas = static_cast<unsigned>(p.plan.ctas);
  const int bytes = dynamic_bytes<Op>(p.plan.vectors * p.plan.repeats, p.plan.is_rows);
  const auto kernel = p.plan.is_rows ? scan_rows<Op> : scan_columns<Op>;
  // The limit belongs to the kernel and not to a launch, so it is the same for all launches.
  // Otherwise another thread with a smaller tile could lower it between this call and the launch.
  const int most = p.plan.is_rows ? Op::ROW_VECTORS : column_vectors<Op>();
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           dynamic_bytes<Op>(most, p.plan.is_rows));
  const auto on = static_cast<cudaStream_t>(stream);
  if (error == cudaSuccess && p.layout.bytes > 0) {
    error = cudaMemsetAsync(p.state, 0, p.layout.bytes, on);
  }
  if (error != cudaSuccess) return error;
  const auto group_ctas = static_cast<unsigned>(ceil_div(p.plan.groups, THREADS));
  for (int64_t j = 0; j < shape.jump_count; ++j) {
    add_jump<<<group_ctas, THREADS, 0, on>>>(jumps, p.plan, p.OPERANDS, shape.jumps[j]);
  }
  kernel<<<ctas, THREADS, bytes, on>>>(p);
  return cudaGetLastError();
}

template <template <typename> class Op>
static int64_t state_bytes(const scan_shape &shape) {
  int64_t bytes = 0;
  with_params<Op>(shape, [&](auto &&p) {
    using At = decltype(p.op);
    bytes = layout_of<At>(shape, plan_of<At>(shape)).bytes;
    return cudaSuccess;
  });
  return bytes;
}

extern "C" int cumsum_cuda(const cumsum_args *args, void *stream) {
  return with_params<Cumsum>(args->shape, [&](auto &&p) {
    p.op.exclusive = args->exclusive;
    return launch(p, args->shape, &args->x, &args->y, stream);
  });
}

extern "C" int logcumsumexp_cuda(const logcumsumexp_args *args, void *stream) {
  return with_params<Logcumsumexp>(
      args->shape, [&](auto &&p) { return launch(p, args->shape, &args->x, &args->y, stream); });
}

extern "C" int logcumsumexp_backward_cuda(const logcumsumexp_backward_args *args, void *stream) {
  return with_params<LogcumsumexpBackward>(args->shape, [&](auto &&p) {
    const scan_input in[4] = {args->grad_out, args->x, args->y, args->y};
    return launch(p, args->shape, in, &args->grad_x, stream);
  });
}

extern "C" int linear_recurrence_cuda(const linear_recurrence_args *args, void *stream) {
  return with_params<Recurrence>(args->shape, [&](auto &&p) {
    p.start = args->h0;
    const scan_input in[2] = {args->a, args->b};
    return launch(p, args->shape, in, &args->h, stream);
  });
}

extern "C" int linear_recurrence_backward_cuda(const linear_recurrence_backward_args *args,
                                               void *stream) {
  return with_params<RecurrenceBackward>(args->shape, [&](auto &&p) {
    p.after = args->h0;
    p.decay = args->a;
    p.grad_start = args->grad_h0;
    const scan_input in[3] = {args->grad_h, args->a, args->h};
    const scan_output out[2] = {args->grad_a, args->grad_b};
    return launch(p, args->shape, in, out, stream);
  });
}

extern "C" int64_t cumsum_state_bytes_cuda(const cumsum_args *args) {
  return state_bytes<Cumsum>(args->shape);
}

extern "C" int64_t logcumsumexp_state_bytes_cuda(const logcumsumexp_args *args) {
  return state_bytes<Logcumsumexp>(args->shape);
}

extern "C" int64_t logcumsumexp_backward_state_bytes_cuda(const logcumsumexp_backward_args *args) {
  return state_bytes<LogcumsumexpBackward>(args->shape);
}

extern "C" int64_t linear_recurrence_state_bytes_cuda(const linear_recurrence_args *args) {
  return state_bytes<Recurrence>(args->shape);
}

extern "C" int64_t linear_recurrence_backward_state_bytes_cuda(
    const linear_recurrence_backward_args *args) {
  return state_bytes<RecurrenceBackward>(args->shape);
}

}  // namespace scans

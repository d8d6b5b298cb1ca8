// Selects the GPU kernel and its shape for the rows of a norm, a softmax or a loss. The file has a
// table of shapes, and a pure function that picks a row of the table. This is host-only C++: the
// launchers include it, `python -m extension_cpp info --plan` prints a norm's plan, and
// tests/c/plan.cpp checks that every row of the table is reached. benchmarks/norm_plans.py measures
// the shapes and thresholds. The limits on registers are defined beside the kernels. Softmax and
// the losses use only the forward shapes (plan_rows() in rows/launch.cuh).
//
// The kernel and shape of a forward plan depend on the width, the types and the alignment of the
// rows, and never on their number. A row's result therefore has the same bits in every batch.
#ifndef EXTENSION_CPP_ROWS_PLAN_H
#define EXTENSION_CPP_ROWS_PLAN_H

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <tuple>

#include "common/dtype.h"
#include "common/range.h"

namespace rows {

enum class Kernel {
  ROW,         // forward: part of a warp, a CTA or a cluster holds one row in registers
  PERSISTENT,  // backward: each CTA loops over rows and loads them into registers
  PIPELINE,    // backward of wide rows: each cluster loops over rows in stages of shared memory
  SPLIT,       // backward of few rows, by row CTAs and column CTAs; or of grad_x alone
  GENERIC,     // fallback for float64, differently aligned tensors and rows too wide for a cluster
};

inline const char *name_of(Kernel kernel) {
  constexpr const char *NAMES[] = {"row", "persistent", "pipeline", "split", "generic"};
  return NAMES[static_cast<int>(kernel)];
}

// L2 eviction hints (common/cuda/cache.cuh).
enum class Hint { NONE, FIRST, LAST };

// The operation that is fused with the norm.
//   RESIDUAL      forward begins with x = residual + dropout(x)
//                 backward ends with grad_x += grad_sum, grad_dropped = dropout(grad_x)
//   DROPOUT_OF_Y  forward ends with y = dropout(y)
//                 backward begins with grad_out = dropout(grad_out)
enum class Form { PLAIN, RESIDUAL, DROPOUT_OF_Y };

struct Problem {
  bool is_backward;
  Form form;
  dtype_t dtype;
  int64_t rows, cols;
  // True if row r has the same offset from a multiple of 16 bytes in all tensors, and the offset is
  // 0 for row 0 and for the weights. This holds for contiguous tensors from PyTorch's allocator.
  bool is_congruent;
  bool wants_x, wants_parameters;  // backward: which gradients to compute
  bool drops_x = false;            // backward with a residual: also compute grad_dropped
};

struct Device {
  int sms;
  int64_t l2_bytes;  // the L2's size on Hopper; 0 on others, where eviction hints do not help
  int clusters[5];   // [i]: clusters of 2^i CTAs that run at once, one CTA per SM; 0 before sm_90
  uint64_t shapes;   // bit i is set if row i of the table may be picked
  // False if the driver compiled the code from an older architecture's PTX, which has no clusters.
  bool has_sm_90_code;
};

// Bit i is set if row i of the table may be picked. benchmarks/norm_plans.py clears bits to time
// one shape against another (plan.cpp).
extern std::atomic<uint64_t> allowed_shapes;

struct Plan {
  Kernel kernel;
  int shape;        // row of the table, or -1 for the generic kernel
  bool is_aligned;  // whether every row consists of whole 16-byte vectors
  int vectors;      // number of 16-byte vectors per thread
  int threads;      // threads per row in each CTA
  int rows_per_cta;
  int cluster;  // number of CTAs that share a row
  int slice;    // columns of a row per CTA of the cluster
  int64_t ctas;
  int64_t groups;     // PERSISTENT, PIPELINE: number of rows that are processed at once
  int stages;         // PIPELINE: rows that fit into shared memory
  int stage_vectors;  // PIPELINE: vectors of each tensor in a stage
  int shared_bytes;   // dynamic shared memory per CTA, in bytes
  int column_ctas;    // SPLIT: number of CTAs that sum columns
  int ahead;          // forward: the distance of L2 prefetches, in rows; 0 means none
  bool has_prefetch;  // PERSISTENT: whether rows are prefetched into the L2 before their loads
  Hint priority;      // how long the L2 keeps the lines that the kernel reads
  int parts;          // backward: number of partial rows of the parameters' gradients
  // ROW: first row whose L2 lines are marked evict_normal; equal to the number of rows if none
  int64_t release_from;
};

// ---- the table ----

// A shape. A thread holds `vectors` vectors of a half type, or `float_vectors` of float32. Each CTA
// has `least` to `most` threads per row. Their number is a power of two up to 32, and above 32 the
// multiple of 32 that leaves the fewest threads idle. A CTA processes as many rows as fit into
// `cta` threads, at least one. In forward, a row of several warps has its own CTA.
struct Shape {
  Kernel kernel;
  int vectors, float_vectors;
  int least, most;
  int cta;
  int cluster;
};

constexpr Shape SHAPES[] = {
    // Forward. 3 or 4 vectors per thread keep 32 to 64 KB per SM in flight.
    {Kernel::ROW, 3, 3, 4, 512, 128, 1},
    {Kernel::ROW, 4, 4, 4, 512, 128, 1},
    // Forward with dropout of y, which is limited by its instructions. With more vectors, fewer
    // threads execute the instructions that each thread needs once: 3 or 4 vectors are 10 to 15 %
    // slower. Without dropout they are up to 8 % slower, but small tensors are faster.
    {Kernel::ROW, 6, 6, 4, 256, 128, 1},
    {Kernel::ROW, 8, 8, 4, 256, 128, 1},
    // Forward with a cluster per row. 8 vectors per thread take half as many CTAs as 4.
    {Kernel::ROW, 8, 8, 64, 128, 0, 4},
    {Kernel::ROW, 8, 8, 64, 256, 0, 8},
    {Kernel::ROW, 8, 8, 64, 256, 0, 16},
    // Forward with a cluster per row, for rows with a residual and for unaligned rows. These
    // kernels need more registers, so a thread holds only 4 vectors.
    {Kernel::ROW, 4, 4, 64, 256, 0, 4},
    {Kernel::ROW, 4, 4, 64, 256, 0, 8},
    {Kernel::ROW, 4, 4, 64, 512, 0, 16},
    // Backward with 16 elements per thread. Their column sums, their weights and the current row
    // take so many registers that an SM holds only 512 threads.
    {Kernel::PERSISTENT, 2, 4, 4, 512, 512, 1},
    {Kernel::PIPELINE, 2, 4, 64, 512, 0, 2},
    {Kernel::PIPELINE, 2, 4, 64, 512, 0, 4},
    {Kernel::PIPELINE, 2, 4, 64, 512, 0, 8},
    {Kernel::PIPELINE, 2, 4, 64, 512, 0, 16},
    {Kernel::SPLIT, 2, 2, 32, 512, 256, 1},
};
constexpr int SHAPE_COUNT = sizeof SHAPES / sizeof SHAPES[0];

// Returns the largest number of threads of a persistent CTA. float32, a residual, dropout and
// unaligned rows each need more registers. Crowded combinations have registers for only 384
// threads.
constexpr int most_persistent_threads(bool is_float32, Form form, bool is_aligned) {
  const bool is_crowded = is_float32 + (form == Form::RESIDUAL) + !is_aligned > 1 ||
                          (form == Form::DROPOUT_OF_Y && !is_aligned);
  return is_crowded ? 384 : 512;
}

// Returns whether forward has a kernel for aligned rows with this number of vectors per thread.
constexpr bool has_row_kernel(Form form, int vectors, bool is_cluster) {
  if (is_cluster) return vectors == (form == Form::RESIDUAL ? 4 : 8);
  if (vectors == 4) return true;
  return form == Form::DROPOUT_OF_Y ? vectors > 4 : vectors == 3;
}

// The largest number of rows that a thread adds up in float32 (generic_parts(), row_units()).
constexpr int64_t MOST_ROWS = 4096;
// threads in a CTA of generic_columns_kernel, in x and y
constexpr int COLUMNS_X = 32, COLUMNS_Y = 8;
// Forward prefetches rows into the L2 at a distance of 1 / AHEAD_PARTS of the L2's size. At twice
// that distance, lines would be evicted before they are read. Rows of fewer than AHEAD_ROW_BYTES
// bytes gain nothing from the prefetch.
constexpr int64_t AHEAD_PARTS = 12, AHEAD_ROW_BYTES = 20 << 10;
constexpr int64_t FEW_BYTES = 8 << 20;  // for a larger x two kernels are faster than SPLIT
// with longer rows, each column CTA would get too few rows
constexpr int64_t FEW_ROW_BYTES = 16 << 10;
constexpr int64_t FEW_ROWS = 1536;            // with more rows, column CTAs take too long
constexpr int COLUMN_VECTORS = 4;             // vectors per row that a column CTA of SPLIT reads
constexpr int64_t PIPELINE_BYTES = 52 << 10;  // in flight per SM; more would slow down writes
constexpr int64_t SHARED_BYTES = 216 << 10;   // maximum size of all stages of a CTA
constexpr int64_t MAX_STAGES = 8;
constexpr int64_t MEDIUM_BYTES = 32 << 20;     // size of x; see hint_backward()
constexpr int64_t FLIGHT_BYTES = 32 << 10;     // bytes that an SM should keep in flight
constexpr int64_t WIDE_ROW_BYTES = 128 << 10;  // evict_last slows down longer rows

// ---- picking ----

inline int vector_elements(dtype_t dtype) { return dtype == DTYPE_FLOAT32 ? 4 : 8; }
inline int log_of(int cluster) { return cluster == 1 ? 0 : 1 + log_of(cluster / 2); }
inline int64_t row_bytes(const Problem &p) { return p.cols * (16 / vector_elements(p.dtype)); }

// Returns the number of rows after which the offset from a multiple of 16 bytes repeats.
inline int64_t alignment_period(const Problem &p) {
  const int64_t vector = vector_elements(p.dtype);
  int64_t period = vector;
  while (period > 1 && p.cols % (2 * vector / period) == 0) period /= 2;
  return period;
}

// Sets the fields of `plan` that the shape determines. Returns false if the row does not fit the
// shape, or if the device cannot run its clusters.
inline bool fit(Plan &plan, int index, const Problem &p, const Device &device) {
  const Shape &shape = SHAPES[index];
  if (shape.cluster > 1 && device.clusters[log_of(shape.cluster)] == 0) return false;
  const int vector = vector_elements(p.dtype);
  const bool is_aligned = p.cols % vector == 0;
  if (shape.kernel == Kernel::ROW) {
    // For unaligned rows there are only kernels with 4 vectors per thread, so that half as many
    // kernels are compiled for such rows.
    const bool needs_four = !is_aligned || (p.form == Form::RESIDUAL && shape.cluster > 1);
    if (needs_four && shape.vectors != 4) return false;
    if (is_aligned && !has_row_kernel(p.form, shape.vectors, shape.cluster > 1)) return false;
  } else if (shape.kernel != Kernel::PERSISTENT && !is_aligned) {
    // The pipeline and the split kernel have no code for unaligned rows, because models have no
    // norms of such widths.
    return false;
  }
  // Slices begin at multiples of 32 vectors, so that a warp reads whole cache lines.
  const int64_t all = std::max<int64_t>(p.cols / vector, 1);
  const int64_t mine = shape.cluster == 1 ? all : ceil_div(all, 32 * shape.cluster) * 32;
  plan = {};
  plan.kernel = shape.kernel;
  plan.shape = index;
  plan.is_aligned = is_aligned;
  plan.vectors = p.dtype == DTYPE_FLOAT32 ? shape.float_vectors : shape.vectors;
  plan.cluster = shape.cluster;
  const int64_t edges = is_aligned ? 0 : 2 * (vector - 1);  // a thread owns at most one edge
  const int64_t wanted = std::max(ceil_div(mine, plan.vectors), edges);
  int64_t threads = shape.least;
  while (threads < wanted && threads <= shape.most) threads += std::min<int64_t>(threads, 32);
  if (threads > shape.most) return false;
  int most = shape.cta;
  if (shape.kernel == Kernel::ROW && threads > 32) most = 0;
  if (shape.kernel == Kernel::PERSISTENT) {
    most = most_persistent_threads(p.dtype == DTYPE_FLOAT32, p.form, is_aligned);
    if (threads > most) return false;
  }
  plan.threads = static_cast<int>(threads);
  plan.rows_per_cta = std::max(1, most / plan.threads);
  plan.slice = static_cast<int>(mine * vector);
  plan.release_from = p.rows;
  return true;
}

// Picks one of the kernel's shapes that fit. The function prefers the smallest cluster, then the
// smallest product threads * vectors, then the most vectors per thread. Returns false if none fits.
inline bool pick_shape(Plan &plan, Kernel kernel, const Problem &p, const Device &device) {
  const auto cost = [](const Plan &plan) {
    return std::tuple(plan.cluster, plan.threads * plan.vectors, -plan.vectors);
  };
  bool is_found = false;
  for (int index = 0; index < SHAPE_COUNT; ++index) {
    Plan other;
    const bool is_allowed = device.shapes >> index & 1;
    if (SHAPES[index].kernel != kernel || !is_allowed || !fit(other, index, p, device)) continue;
    if (!is_found || cost(other) < cost(plan)) plan = other;
    is_found = true;
  }
  return is_found;
}

// Chooses evict_last for the tensors that the kernel reads; `tensors` is their number. The lines
// read last, half the L2 in total, are marked evict_normal again.
inline void hint_last(Plan &plan, const Problem &p, const Device &device, int tensors) {
  const int64_t rows = ceil_div(device.l2_bytes / 2, tensors * row_bytes(p));
  plan.priority = Hint::LAST;
  plan.release_from = std::max<int64_t>(0, p.rows - rows);
}

// Returns the number of partial rows of the fallback kernel: a few CTAs per SM, if there are enough
// rows. The number is larger if a thread would otherwise add more than MOST_ROWS rows. The limit of
// gridDim.y caps it.
inline int64_t generic_parts(const Problem &p, const Device &device) {
  const int64_t tiles = ceil_div(p.cols, COLUMNS_X);
  const int64_t usual = std::clamp<int64_t>(8 * device.sms / tiles, 1, 160);
  const int64_t wanted = std::max(usual, ceil_div(p.rows, COLUMNS_Y * MOST_ROWS));
  return std::min({ceil_div(p.rows, COLUMNS_Y), wanted, int64_t{65535}});
}

inline Plan generic_plan(const Problem &p, const Device &device) {
  Plan plan{};
  plan.kernel = Kernel::GENERIC;
  plan.shape = -1;
  plan.threads = p.cols <= 512 ? 32 : 256;
  plan.rows_per_cta = 256 / plan.threads;
  plan.ctas = std::min<int64_t>(ceil_div(p.rows, plan.rows_per_cta), INT32_MAX);
  plan.cluster = 1;
  if (p.is_backward && p.cols > 0) plan.parts = static_cast<int>(generic_parts(p, device));
  return plan;
}

inline bool is_generic(const Problem &p) {
  return p.dtype == DTYPE_FLOAT64 || !p.is_congruent || p.rows == 0 || p.cols == 0 ||
         p.cols > 1 << 24 || (p.is_backward && p.cols == 1);
}

inline Plan forward_plan(const Problem &p, const Device &device) {
  Plan plan{};
  if (is_generic(p) || !pick_shape(plan, Kernel::ROW, p, device)) return generic_plan(p, device);
  plan.ctas = ceil_div(p.rows, plan.rows_per_cta) * plan.cluster;
  // While CTAs wait for their sums, too few bytes are in flight if only one tensor is read.
  // Prefetches of later rows add to these bytes.
  if (p.form != Form::RESIDUAL && row_bytes(p) >= AHEAD_ROW_BYTES) {
    plan.ahead = static_cast<int>(device.l2_bytes / AHEAD_PARTS / row_bytes(p));
  }
  const int tensors = p.form == Form::RESIDUAL ? 2 : 1;
  const int64_t read = tensors * p.rows * row_bytes(p);
  if (device.l2_bytes > 0 && 4 * read >= 3 * device.l2_bytes) hint_last(plan, p, device, tensors);
  return plan;
}

// Returns the number of CTAs or clusters of a persistent kernel, each with `unit` rows at once. The
// result is the smallest multiple of `most` for which no thread adds more than MOST_ROWS rows.
// `most` CTAs or clusters run at once.
inline int64_t row_units(const Problem &p, int64_t unit, int64_t most) {
  return most * ceil_div(p.rows, most * unit * MOST_ROWS);
}

// Returns the number of persistent CTAs. Each CTA has `unit` groups of threads, and a group
// processes one row at a time. With CTAs * unit groups in all, group g processes the rows g, g +
// groups, and so on. If a group has several rows, the number of groups is a multiple of the
// alignment period, so that all its rows have the same alignment.
inline int64_t persistent_ctas(const Problem &p, int64_t unit, int64_t most) {
  const int64_t enough = ceil_div(p.rows, unit);
  if (enough <= most) return enough;  // each group has at most one row
  int64_t step = alignment_period(p);
  for (int64_t rest = unit; step > 1 && rest % 2 == 0; rest /= 2) step /= 2;
  return row_units(p, unit, std::max(most / step * step, step));
}

inline bool pick_pipeline(Plan &plan, const Problem &p, const Device &device) {
  if (!pick_shape(plan, Kernel::PIPELINE, p, device)) return false;
  // A stage holds one row of x and one of grad_out. The two rows keep the offset from a multiple of
  // 128 bytes that they have in global memory, because bulk copies are slower otherwise.
  plan.stage_vectors = static_cast<int>(ceil_div(plan.slice / vector_elements(p.dtype) + 9, 8) * 8);
  const int64_t stage = 2 * 16 * static_cast<int64_t>(plan.stage_vectors);
  plan.stages = static_cast<int>(std::min(
      {2 + std::max<int64_t>(PIPELINE_BYTES / stage, 2), SHARED_BYTES / stage, MAX_STAGES}));
  plan.shared_bytes = static_cast<int>(plan.stages * stage);
  plan.groups = std::min(p.rows, row_units(p, 1, device.clusters[log_of(plan.cluster)]));
  plan.ctas = plan.groups * plan.cluster;
  return true;
}

// Picks the split kernel for few rows, or for any number of rows if only grad_x is computed.
inline bool pick_split(Plan &plan, const Problem &p, const Device &device) {
  const bool is_few =
      p.rows <= FEW_ROWS && p.rows * row_bytes(p) <= FEW_BYTES && row_bytes(p) <= FEW_ROW_BYTES;
  if ((p.wants_parameters && !is_few) || !pick_shape(plan, Kernel::SPLIT, p, device)) return false;
  const int64_t vectors = p.cols / vector_elements(p.dtype);
  plan.column_ctas = p.wants_parameters ? static_cast<int>(ceil_div(vectors, COLUMN_VECTORS)) : 0;
  plan.ctas = plan.column_ctas + (p.wants_x ? ceil_div(p.rows, plan.rows_per_cta) : 0);
  return true;
}

// Chooses the eviction hint of backward. Medium tensors are read with evict_first, so that grad_x
// stays in the L2 for the next kernel. Large tensors are read with evict_last, so that they outlast
// the written lines in the L2. For float32, evict_last also helps smaller tensors, because float32
// needs fewer instructions per byte. float32 pipelines that write two tensors use evict_first.
inline void hint_backward(Plan &plan, const Problem &p, const Device &device) {
  const int64_t bytes = p.rows * row_bytes(p);
  const bool is_float = p.dtype == DTYPE_FLOAT32;
  if (device.l2_bytes == 0) return;
  if (bytes <= (is_float ? MEDIUM_BYTES / 2 : MEDIUM_BYTES) ||
      (is_float && p.drops_x && plan.kernel == Kernel::PIPELINE)) {
    plan.priority = Hint::FIRST;
  } else if (row_bytes(p) <= WIDE_ROW_BYTES &&
             (bytes >= 2 * device.l2_bytes || (is_float && plan.kernel == Kernel::PERSISTENT))) {
    hint_last(plan, p, device, p.form == Form::RESIDUAL ? 3 : 2);
  }
}

inline Plan backward_plan(const Problem &p, const Device &device) {
  Plan plan{};
  if (is_generic(p)) return generic_plan(p, device);
  if (pick_split(plan, p, device)) return plan;
  if (pick_shape(plan, Kernel::PERSISTENT, p, device)) {
    plan.ctas = persistent_ctas(p, plan.rows_per_cta, device.sms);
    plan.groups = plan.ctas * plan.rows_per_cta;
    // With a residual, the next row of grad_sum is not loaded ahead into registers, so a prefetch
    // helps. With dropout the computation is long enough to hide the loads.
    plan.has_prefetch = 2 * plan.rows_per_cta * row_bytes(p) < FLIGHT_BYTES ||
                        (p.form == Form::RESIDUAL && !p.drops_x && p.dtype != DTYPE_FLOAT32);
  } else if (!pick_pipeline(plan, p, device)) {
    return generic_plan(p, device);
  }
  plan.parts = static_cast<int>(plan.groups / plan.rows_per_cta);
  hint_backward(plan, p, device);
  return plan;
}

inline Plan pick(const Problem &p, const Device &device) {
  return p.is_backward ? backward_plan(p, device) : forward_plan(p, device);
}

}  // namespace rows

#endif

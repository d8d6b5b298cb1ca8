// Which kernel runs a norm on the GPU, and in which shape: a table of shapes, and a pure function
// that picks a row of it. Host-only C++: the launchers include it, `python -m extension_cpp info
// --plan` prints it, and tests/c/norm_plan.cpp checks that every row is reached. The tuned numbers
// of the family are here and nowhere else; benchmarks/norm_plans.py measures them. Softmax and the
// gradient kernel of the losses use the shapes of forward, too (softmax/softmax_rows.cuh).
//
// A forward plan depends on the width, the types and the alignment of the rows, never on their
// number: a row's result has the same bits in every batch.
#ifndef EXTENSION_CPP_NORM_PLAN_H
#define EXTENSION_CPP_NORM_PLAN_H

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common/dtype.h"
#include "common/range.h"

namespace norms {

enum class Kernel {
  ROW,         // forward, any form: a row in the registers of part of a warp, a CTA or a cluster
  PERSISTENT,  // backward: CTAs loop over rows, which come straight into registers
  PIPELINE,    // backward of wide rows: clusters loop over rows, which come through shared memory
  SPLIT,       // backward of few rows, or of grad_x alone: CTAs for rows beside CTAs for columns
  GENERIC,     // the fallback: float64, tensors of different alignment, rows wider than a cluster
};

inline const char *name_of(Kernel kernel) {
  constexpr const char *NAMES[] = {"row", "persistent", "pipeline", "split", "generic"};
  return NAMES[static_cast<int>(kernel)];
}

// L2 eviction hints (common/cuda_cache.cuh).
enum class Hint { NONE, FIRST, LAST };

enum class Form { PLAIN, RESIDUAL, DROPOUT_OF_Y };

struct Problem {
  bool is_backward;
  bool is_layer_norm;
  Form form;
  dtype_t dtype;
  int64_t rows, cols;
  // Every row begins at the same distance from a multiple of 16 bytes in all tensors, and row 0 and
  // the weights at 0. For contiguous tensors of PyTorch's allocator that holds.
  bool is_congruent;
  bool wants_x, wants_parameters;  // of backward
};

struct Device {
  int sms;
  int64_t l2_bytes;  // where eviction hints are measured to help (Hopper); else 0
  int clusters[5];   // clusters of 2^i CTAs that run at once, one CTA per SM; 0 before sm_90
  uint64_t shapes;   // the rows of the table that may be picked, a bit each
};

// For benchmarks/norm_plans.py, which times one shape beside another (norm_plan.cpp).
extern std::atomic<uint64_t> allowed_shapes;

struct Plan {
  Kernel kernel;
  int shape;        // the row of the table; -1: the generic kernel
  bool is_aligned;  // every row consists of whole vectors of 16 bytes
  int vectors;      // of 16 bytes, per thread
  int threads;      // per row and CTA
  int rows_per_cta;
  int cluster;  // CTAs that share a row
  int slice;    // columns of a row per CTA
  int64_t ctas;
  int64_t groups;        // of a persistent kernel: rows under way at once
  int period;            // of the pipeline: classes of rows that begin alike
  int stages;            // of the pipeline: rows in shared memory
  int stage_vectors;     // of one tensor's row
  int shared_bytes;      // dynamic shared memory per CTA
  int column_ctas;       // of the split kernel
  int ahead;             // of forward: brings the row so far behind its own into the L2
  bool has_prefetch;     // of a persistent kernel: brings a row into the L2 before its loads
  Hint hint;             // of what is read
  int64_t release_from;  // the first row whose lines are released again
};

// ---- the table ----

// A thread has `vectors` vectors, of half types or of float32. The threads per row and CTA are from
// `least` to `most`: a power of two up to 32, else the multiple of 32 that leaves the fewest idle.
// A CTA has as many rows as fit into `cta` threads, at least one.
struct Shape {
  Kernel kernel;
  int vectors, float_vectors;
  int least, most;
  int cta;
  int cluster;
};

constexpr Shape SHAPES[] = {
    // Forward, narrow rows: 2 to 4 vectors per thread keep 32 to 64 KB per SM in flight.
    {Kernel::ROW, 2, 2, 4, 4, 128, 1},
    {Kernel::ROW, 2, 2, 8, 8, 128, 1},
    {Kernel::ROW, 3, 3, 8, 8, 128, 1},
    {Kernel::ROW, 4, 4, 8, 8, 128, 1},
    {Kernel::ROW, 3, 3, 16, 16, 128, 1},
    {Kernel::ROW, 4, 4, 16, 16, 128, 1},
    {Kernel::ROW, 3, 3, 32, 32, 128, 1},
    {Kernel::ROW, 4, 4, 32, 32, 128, 1},
    // One CTA per row.
    {Kernel::ROW, 3, 3, 64, 512, 0, 1},
    {Kernel::ROW, 4, 4, 64, 512, 0, 1},
    // A cluster per row. 8 vectors per thread halve the CTAs that exchange sums.
    {Kernel::ROW, 8, 8, 64, 128, 0, 4},
    {Kernel::ROW, 8, 8, 64, 256, 0, 8},
    {Kernel::ROW, 8, 8, 64, 256, 0, 16},
    // With a residual the registers hold two rows.
    {Kernel::ROW, 4, 4, 64, 256, 0, 4},
    {Kernel::ROW, 4, 4, 64, 256, 0, 8},
    {Kernel::ROW, 4, 4, 64, 512, 0, 16},
    // Backward: 16 elements per thread. Their columns' sums, their weights and the row under way
    // fill the registers of 512 threads, which are all that an SM has.
    {Kernel::PERSISTENT, 2, 4, 4, 4, 512, 1},
    {Kernel::PERSISTENT, 2, 4, 8, 8, 512, 1},
    {Kernel::PERSISTENT, 2, 4, 16, 16, 512, 1},
    {Kernel::PERSISTENT, 2, 4, 32, 32, 512, 1},
    {Kernel::PERSISTENT, 2, 4, 64, 512, 512, 1},
    {Kernel::PIPELINE, 2, 4, 64, 512, 0, 2},
    {Kernel::PIPELINE, 2, 4, 64, 512, 0, 4},
    {Kernel::PIPELINE, 2, 4, 64, 512, 0, 8},
    {Kernel::PIPELINE, 2, 4, 64, 512, 0, 16},
    {Kernel::SPLIT, 2, 2, 32, 32, 256, 1},
    {Kernel::SPLIT, 2, 2, 64, 512, 256, 1},
};
constexpr int SHAPE_COUNT = sizeof SHAPES / sizeof SHAPES[0];

// Threads of a persistent CTA. The registers suffice for fewer if two things need more of them:
// float32, a third tensor or dropout's mask, edges.
constexpr int most_persistent_threads(bool is_float32, bool has_residual, bool drops_y,
                                      bool is_aligned) {
  return is_float32 + has_residual + !is_aligned > 1 || (drops_y && !is_aligned) ? 384 : 512;
}

// A thread adds at most so many rows in float32: see generic_parts() and row_units().
constexpr int64_t MOST_ROWS = 4096;
// Forward brings rows into the L2 that lie so many parts of the L2 ahead; rows shorter than
// AHEAD_ROW_BYTES gain nothing. Twice as far ahead the lines are gone before they are read.
constexpr int64_t AHEAD_PARTS = 12, AHEAD_ROW_BYTES = 20 << 10;
constexpr int64_t FEW_BYTES = 8 << 20;       // of x: up to here one split kernel is faster than two
constexpr int64_t FEW_ROW_BYTES = 16 << 10;  // of a row: longer ones leave column CTAs too few rows
constexpr int64_t FEW_ROWS = 1536;           // more are too many for the column CTAs
constexpr int COLUMN_VECTORS = 4;            // columns of a column CTA of the split kernel
constexpr int64_t PIPELINE_BYTES = 52 << 10;  // of rows in flight per SM: more crowd out the writes
constexpr int64_t SHARED_BYTES = 216 << 10;   // of stages, at most
constexpr int64_t MAX_STAGES = 8;
constexpr int64_t MEDIUM_BYTES = 32 << 20;     // of x
constexpr int64_t FLIGHT_BYTES = 32 << 10;     // that an SM's loads should have in flight
constexpr int64_t WIDE_ROW_BYTES = 128 << 10;  // longer rows: backward is slower with hints

// ---- picking ----

inline int vector_elements(dtype_t dtype) { return dtype == DTYPE_FLOAT32 ? 4 : 8; }
inline int log_of(int cluster) { return cluster == 1 ? 0 : 1 + log_of(cluster / 2); }
inline int64_t row_bytes(const Problem &p) { return p.cols * (16 / vector_elements(p.dtype)); }

// Rows this far apart begin at the same distance from a multiple of 16 bytes.
inline int64_t alignment_period(const Problem &p) {
  const int64_t vector = vector_elements(p.dtype);
  int64_t period = vector;
  while (period > 1 && p.cols % (2 * vector / period) == 0) period /= 2;
  return period;
}

// Fills in what follows from the shape alone; false if the row is too wide for it, or the device
// runs no such clusters.
inline bool fit(Plan &plan, int index, const Problem &p, const Device &device) {
  const Shape &shape = SHAPES[index];
  if (shape.cluster > 1 && device.clusters[log_of(shape.cluster)] == 0) return false;
  const bool holds_two_rows = p.form == Form::RESIDUAL;
  if (shape.kernel == Kernel::ROW && shape.cluster > 1 && holds_two_rows != (shape.vectors == 4)) {
    return false;
  }
  const int vector = vector_elements(p.dtype);
  const bool is_aligned = p.cols % vector == 0;
  // Slices begin at multiples of 32 vectors, so that a warp's vectors fill lines of the cache.
  const int64_t all = std::max<int64_t>(p.cols / vector, 1);
  const int64_t mine = shape.cluster == 1 ? all : ceil_div(all, 32 * shape.cluster) * 32;
  plan = {};
  plan.kernel = shape.kernel;
  plan.shape = index;
  plan.is_aligned = is_aligned;
  plan.vectors = p.dtype == DTYPE_FLOAT32 ? shape.float_vectors : shape.vectors;
  plan.cluster = shape.cluster;
  const int64_t wanted = ceil_div(mine, plan.vectors);
  const int64_t threads =
      shape.least <= 32 ? shape.least : std::max<int64_t>(shape.least, ceil_div(wanted, 32) * 32);
  if (wanted > threads || threads > shape.most) return false;
  if (!is_aligned && threads < 2 * (vector - 1)) return false;  // a thread for each edge
  const int most = shape.kernel == Kernel::PERSISTENT
                       ? most_persistent_threads(p.dtype == DTYPE_FLOAT32, p.form == Form::RESIDUAL,
                                                 p.form == Form::DROPOUT_OF_Y, is_aligned)
                       : shape.cta;
  if (shape.kernel == Kernel::PERSISTENT && threads > most) return false;
  plan.threads = static_cast<int>(threads);
  plan.rows_per_cta = std::max(1, most / plan.threads);
  plan.slice = static_cast<int>(mine * vector);
  plan.release_from = p.rows;
  return true;
}

// Of the kernel's shapes that fit, the one with the smallest cluster, then the fewest threads'
// worth of vectors, then the most vectors per thread. False: none fits.
inline bool pick_shape(Plan &plan, Kernel kernel, const Problem &p, const Device &device) {
  bool is_found = false;
  for (int index = 0; index < SHAPE_COUNT; ++index) {
    Plan other;
    const bool is_allowed = device.shapes >> index & 1;
    if (SHAPES[index].kernel != kernel || !is_allowed || !fit(other, index, p, device)) continue;
    const int room = other.threads * other.vectors, least = plan.threads * plan.vectors;
    const bool is_better = !is_found || other.cluster < plan.cluster ||
                           (other.cluster == plan.cluster &&
                            (room < least || (room == least && other.vectors > plan.vectors)));
    if (is_better) plan = other;
    is_found = true;
  }
  return is_found;
}

// What is read, `tensors` tensors, is marked evict_last. The last lines of it, half an L2, are
// released again.
inline void hint_last(Plan &plan, const Problem &p, const Device &device, int tensors) {
  const int64_t rows = ceil_div(device.l2_bytes / 2, tensors * row_bytes(p));
  plan.hint = Hint::LAST;
  plan.release_from = std::max<int64_t>(0, p.rows - rows);
}

inline Plan generic_plan(const Problem &p) {
  Plan plan{};
  plan.kernel = Kernel::GENERIC;
  plan.shape = -1;
  plan.threads = p.cols <= 512 ? 32 : 256;
  plan.rows_per_cta = 256 / plan.threads;
  plan.cluster = 1;
  plan.release_from = p.rows;
  return plan;
}

inline bool is_generic(const Problem &p) {
  return p.dtype == DTYPE_FLOAT64 || !p.is_congruent || p.rows == 0 || p.cols == 0 ||
         p.cols > 1 << 24 || (p.is_backward && p.cols == 1);
}

inline Plan forward_plan(const Problem &p, const Device &device) {
  Plan plan{};
  if (is_generic(p) || !pick_shape(plan, Kernel::ROW, p, device)) return generic_plan(p);
  plan.ctas = ceil_div(p.rows, plan.rows_per_cta) * plan.cluster;
  // While a row's sums are under way, a single tensor gives its CTA too few bytes in flight.
  if (p.form != Form::RESIDUAL && row_bytes(p) >= AHEAD_ROW_BYTES) {
    plan.ahead = static_cast<int>(device.l2_bytes / AHEAD_PARTS / row_bytes(p));
  }
  const int tensors = p.form == Form::RESIDUAL ? 2 : 1;
  const int64_t read = tensors * p.rows * row_bytes(p);
  if (device.l2_bytes > 0 && 4 * read >= 3 * device.l2_bytes) hint_last(plan, p, device, tensors);
  return plan;
}

// CTAs or clusters of a persistent kernel, `most` of which run at once, with `unit` groups of
// threads each. So many times `most` that no group adds more than MOST_ROWS rows.
inline int64_t row_units(const Problem &p, int64_t unit, int64_t most) {
  return most * ceil_div(p.rows, most * unit * MOST_ROWS);
}

// Group g of a persistent kernel's CTAs takes the rows g, g + groups, ...: in rows that are not
// aligned they must begin alike.
inline int64_t persistent_ctas(const Problem &p, int64_t unit, int64_t most) {
  const int64_t enough = ceil_div(p.rows, unit);
  if (enough <= most) return enough;  // a row for each group
  int64_t step = alignment_period(p);
  for (int64_t rest = unit; step > 1 && rest % 2 == 0; rest /= 2) step /= 2;
  return row_units(p, unit, std::max(most / step * step, step));
}

inline bool pick_pipeline(Plan &plan, const Problem &p, const Device &device) {
  if (!pick_shape(plan, Kernel::PIPELINE, p, device)) return false;
  // A stage holds a row of x and of grad_out, which lie at the same distance from a multiple of 128
  // bytes as in global memory: bulk copies are slower otherwise.
  plan.stage_vectors = static_cast<int>(ceil_div(plan.slice / vector_elements(p.dtype) + 9, 8) * 8);
  const int64_t stage = 2 * 16 * static_cast<int64_t>(plan.stage_vectors);
  plan.stages = static_cast<int>(std::min(
      {2 + std::max<int64_t>(PIPELINE_BYTES / stage, 2), SHARED_BYTES / stage, MAX_STAGES}));
  plan.shared_bytes = static_cast<int>(plan.stages * stage);
  // The rows of a group begin alike: of unaligned ones, those of one class, or of two after
  // another.
  plan.groups = std::min(p.rows, row_units(p, 1, device.clusters[log_of(plan.cluster)]));
  plan.period = p.rows > plan.groups ? static_cast<int>(alignment_period(p)) : 1;
  plan.ctas = plan.groups * plan.cluster;
  return plan.period <= p.rows;
}

// The split kernel takes few rows, or any number if grad_x alone is wanted.
inline bool pick_split(Plan &plan, const Problem &p, const Device &device) {
  const bool is_few =
      p.rows <= FEW_ROWS && p.rows * row_bytes(p) <= FEW_BYTES && row_bytes(p) <= FEW_ROW_BYTES;
  if ((p.wants_parameters && !is_few) || !pick_shape(plan, Kernel::SPLIT, p, device)) return false;
  if (!plan.is_aligned) return false;
  const int64_t vectors = p.cols / vector_elements(p.dtype);
  plan.column_ctas = p.wants_parameters ? static_cast<int>(ceil_div(vectors, COLUMN_VECTORS)) : 0;
  plan.ctas = plan.column_ctas + (p.wants_x ? ceil_div(p.rows, plan.rows_per_cta) : 0);
  return true;
}

// Of medium tensors the lines that are read go first, so that grad_x stays in the L2 for the next
// kernel; of large ones they outlast those that are written. In float32, whose rows need fewer
// instructions per byte, that pays from smaller tensors on.
inline void hint_backward(Plan &plan, const Problem &p, const Device &device) {
  const int64_t bytes = p.rows * row_bytes(p);
  const bool is_float = p.dtype == DTYPE_FLOAT32;
  if (device.l2_bytes == 0) return;
  if (bytes <= (is_float ? MEDIUM_BYTES / 2 : MEDIUM_BYTES)) {
    plan.hint = Hint::FIRST;
  } else if (row_bytes(p) <= WIDE_ROW_BYTES &&
             (bytes >= 2 * device.l2_bytes || (is_float && plan.kernel == Kernel::PERSISTENT))) {
    hint_last(plan, p, device, p.form == Form::RESIDUAL ? 3 : 2);
  }
}

inline Plan backward_plan(const Problem &p, const Device &device) {
  Plan plan{};
  if (is_generic(p)) return generic_plan(p);
  if (pick_split(plan, p, device)) return plan;
  if (pick_shape(plan, Kernel::PERSISTENT, p, device)) {
    plan.ctas = persistent_ctas(p, plan.rows_per_cta, device.sms);
    plan.groups = plan.ctas * plan.rows_per_cta;
    plan.has_prefetch = 2 * plan.rows_per_cta * row_bytes(p) < FLIGHT_BYTES;
  } else if (!pick_pipeline(plan, p, device)) {
    return generic_plan(p);
  }
  hint_backward(plan, p, device);
  return plan;
}

inline Plan pick(const Problem &p, const Device &device) {
  return p.is_backward ? backward_plan(p, device) : forward_plan(p, device);
}

}  // namespace norms

#endif

// How a scan on the GPU is divided into tiles. This is host code; the kernels use its constants,
// too.
//
// A line is one scan. If inner = 1, lines are rows: the steps of a line are neighbours in memory.
// If inner > 1, lines are columns: the neighbours of a step belong to other lines. A tile is the
// work of one CTA, which consists of some steps of some lines. The number of steps in a tile
// depends only on the length of a line. The order of a line's operations is therefore independent
// of the other lines (batch-invariant).
#ifndef EXTENSION_CPP_SCAN_PLAN_H
#define EXTENSION_CPP_SCAN_PLAN_H

#include <algorithm>
#include <cstdint>

#include "common/range.h"
#include "scan/scan.h"

namespace scans {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int FAN = 32;  // number of tiles in a group, and of groups in a block (scan_tile.cuh)

// ---- columns ----

constexpr int MIN_VECTORS = 4;  // vectors along inner in the narrowest tile, which is 64 bytes wide
// Returns how many neighbouring lines a thread scans: as many as fit into a word of 4 bytes (8 for
// float64). `width` is the number of elements in a 16-byte vector.
constexpr int lines_of(int width) { return width == 8 ? 2 : 1; }
// The numbers of segments and lines in the narrowest tile. Long lines are divided into such tiles.
constexpr int max_segments(int width) { return THREADS / (MIN_VECTORS * width / lines_of(width)); }
constexpr int min_columns(int width) { return MIN_VECTORS * width; }
// With fewer CTAs than this, some SMs could be without work.
constexpr int MANY_CTAS = 1024;

struct Plan {
  bool is_rows;
  int vectors;        // vectors per input and thread (columns: per strip)
  int lanes;          // rows: threads of a warp that share a row; columns: threads along inner
  int segments;       // rows: warps per row, or 0 if lanes < 32; columns: THREADS / lanes
  int columns;        // lines of a tile whose segments are joined in shared memory
  int row_vectors;    // rows: vectors of a row in a tile, a power of two
  int row_shift;      // log2(row_vectors)
  int rows;           // rows: number of rows per CTA; columns: 1
  int run;            // columns: number of steps that a thread scans
  int repeats;        // columns: strips of short lines that a CTA scans one after the other
  int64_t steps;      // number of steps per tile
  int64_t tiles;      // number of tiles per line
  int64_t strips;     // columns: number of CTAs along inner; rows: 1
  int64_t span;       // number of outer indices between two jumps (scan.h), which form a group
  int64_t groups;     // number of groups of outer indices
  int64_t per_group;  // number of CTAs that scan the same steps of the lines of a group
  int64_t ctas;
};

// Picks the plan. A vector has `width` elements. In rows, a thread scans neighbouring vectors of a
// row. In columns, a thread scans a range of steps (a run) of lines_of(width) lines. If row_vectors
// is 0, rows are scanned by the kernel for columns.
inline Plan pick(const scan_shape &shape, int width, int row_vectors, int column_vectors) {
  Plan plan{};
  plan.is_rows = shape.inner == 1 && row_vectors > 0;
  const int vectors = plan.is_rows ? row_vectors : column_vectors;
  plan.vectors = vectors;
  plan.strips = plan.tiles = plan.rows = plan.lanes = plan.row_vectors = plan.repeats = 1;
  if (plan.is_rows) {
    const int most = THREADS * vectors;  // vectors per CTA
    while (plan.row_vectors < most && plan.row_vectors * width < shape.length) {
      plan.row_vectors *= 2;
      ++plan.row_shift;
    }
    plan.rows = most / plan.row_vectors;
    plan.steps = plan.row_vectors * width;
    plan.tiles = ceil_div(shape.length, plan.steps);
    while (plan.lanes < 32 && plan.lanes * vectors < plan.row_vectors) plan.lanes *= 2;
    if (plan.lanes == 32) {
      plan.segments = plan.row_vectors / (32 * vectors);
      plan.columns = plan.rows;
    }
  } else {
    // If a line fits into one tile, then the shorter it is, the more threads lie side by side and
    // the fewer segments a tile has. The number of lines must not matter, because segments
    // determine the order of the joins.
    const int steps = width / lines_of(width);  // steps in a thread's vector
    plan.lanes = MIN_VECTORS * steps;
    while (plan.lanes < THREADS && THREADS / (2 * plan.lanes) * vectors * steps >= shape.length) {
      plan.lanes *= 2;
    }
    plan.segments = THREADS / plan.lanes;
    plan.columns = plan.lanes * lines_of(width);
    if (plan.segments == 1) plan.vectors = static_cast<int>(ceil_div(shape.length, steps));
    plan.run = plan.vectors * steps;
    plan.steps = plan.segments * plan.run;
    plan.tiles = ceil_div(shape.length, plan.steps);
    // With one strip of short lines, a CTA would have few bytes in flight. A CTA therefore scans
    // several strips.
    const auto strips = [&](int repeats) { return ceil_div(shape.inner, plan.columns * repeats); };
    while (plan.segments == 1 && 2 * plan.repeats * plan.vectors <= vectors &&
           strips(plan.repeats) > 1 && shape.outer * strips(2 * plan.repeats) >= MANY_CTAS) {
      plan.repeats *= 2;
    }
    plan.strips = strips(plan.repeats);
  }
  plan.span = shape.outer;
  for (int64_t j = 0; j < shape.jump_count; ++j) {
    plan.span = std::min(plan.span, shape.jumps[j].span);
  }
  plan.groups = shape.outer / plan.span;
  plan.per_group = ceil_div(plan.span, plan.rows) * plan.strips;
  plan.ctas = plan.groups * plan.per_group * plan.tiles;
  return plan;
}

// ---- the layout of scan_shape.state: the values that tiles publish, and the table of jumps ----

// The layout of scan_shape.state. If a line is a single tile, nothing is published.
struct StateLayout {
  int64_t group_count, block_count;      // numbers of groups and blocks per line
  int64_t groups, blocks, jumps, bytes;  // offsets in bytes; the array of the tiles is at 0
};

// Computes the layout. `operands` is the number of operands in the table of jumps, or 0 without
// jumps. `words` and `state_words` are the numbers of 32-bit pieces of a Part and of a State. Each
// piece takes a 64-bit word.
inline StateLayout state_layout(const Plan &plan, int64_t outer, int64_t operands, int64_t words,
                                int64_t state_words) {
  StateLayout layout{};
  if (plan.tiles > 1) {
    layout.group_count = ceil_div(plan.tiles, FAN);
    layout.block_count = ceil_div(layout.group_count, FAN);
    const int64_t lines = outer * plan.strips * plan.columns * 8;
    layout.groups = lines * plan.tiles * words;
    layout.blocks = layout.groups + lines * layout.group_count * words;
    layout.jumps = layout.blocks + lines * layout.block_count * state_words;
  }
  layout.bytes = layout.jumps + 8 * operands * plan.groups;
  return layout;
}

}  // namespace scans

#endif

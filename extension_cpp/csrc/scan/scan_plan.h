// How a scan on the GPU is divided into tiles. Host code, whose constants the kernels use, too.
//
// A line is one scan. Lines are rows if inner = 1: the steps of a line are neighbours in memory.
// Else lines are columns: the neighbours of a step belong to other lines. A tile is the work of one
// CTA: some steps of some lines. The number of steps per tile depends on the length of a line
// alone, so the order of a line's operations does not depend on the other lines (batch-invariant).
#ifndef EXTENSION_CPP_SCAN_PLAN_H
#define EXTENSION_CPP_SCAN_PLAN_H

#include <algorithm>
#include <cstdint>

#include "common/range.h"
#include "scan/scan.h"

namespace scans {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int FAN = 32;  // tiles per group, and groups per block, in the tree of scan_tile.cuh

// ---- columns ----

constexpr int MIN_VECTORS = 4;  // a tile is at least 64 bytes wide
// Neighbouring lines of a thread, in one word of 4 bytes (float64: 8). A vector has `width`
// elements.
constexpr int lines_of(int width) { return width == 8 ? 2 : 1; }
// The segments and lines of the narrowest tile. Lines with several tiles use this tile.
constexpr int max_segments(int width) { return THREADS / (MIN_VECTORS * width / lines_of(width)); }
constexpr int min_columns(int width) { return MIN_VECTORS * width; }
// Fewer CTAs than this could leave SMs without work.
constexpr int MANY_CTAS = 1024;

struct Plan {
  bool is_rows;
  int vectors;        // per input and thread; columns: of one strip
  int lanes;          // rows: threads of a warp that share a row; columns: threads along inner
  int segments;       // rows: warps that share a row, 0 if lanes < 32; columns: THREADS / lanes
  int columns;        // lines of a tile whose segments are joined in shared memory
  int row_vectors;    // rows: vectors of a row in a tile, a power of two
  int row_shift;      // its logarithm
  int rows;           // rows per CTA; columns: 1
  int run;            // columns: steps of a thread
  int repeats;        // columns: strips of short lines that a CTA scans, one after the other
  int64_t steps;      // per tile
  int64_t tiles;      // per line
  int64_t strips;     // columns: CTAs along inner; rows: 1
  int64_t span;       // outer indices of a group: between two jumps (scan.h)
  int64_t groups;     // the number of groups of outer indices
  int64_t per_group;  // CTAs that have the same steps of the lines of a group
  int64_t ctas;
};

// A vector has `width` elements. In rows a thread has neighbouring vectors of a row. In columns it
// has a run of steps of lines_of(width) lines. row_vectors 0: rows are taken as columns.
inline Plan pick(const scan_shape &shape, int width, int row_vectors, int column_vectors) {
  Plan plan{};
  plan.is_rows = shape.inner == 1 && row_vectors > 0;
  const int vectors = plan.is_rows ? row_vectors : column_vectors;
  plan.vectors = vectors;
  plan.strips = plan.tiles = plan.rows = plan.lanes = plan.row_vectors = plan.repeats = 1;
  if (plan.is_rows) {
    const int most = THREADS * vectors;  // vectors of a CTA
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
    // Short lines have more threads side by side and fewer segments, as long as a line fits in one
    // tile. The number of lines has no influence, because segments fix the order of the joins.
    const int steps = width / lines_of(width);  // the steps of a thread's vector
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
    // A CTA of one strip of short lines would have few bytes in flight.
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

// ---- what tiles publish, and jumps ----

// The layout of scan_shape.state. Tiles publish nothing if a line is one tile.
struct StateLayout {
  int64_t group_count, block_count;      // per line
  int64_t groups, blocks, jumps, bytes;  // offsets in bytes; the tiles' array is at 0
};

// `operands`: those in the table of jumps, 0 if none jumps. `words` and `state_words`: the 64-bit
// words of a Part and of a State of one line, one for each 32-bit piece.
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

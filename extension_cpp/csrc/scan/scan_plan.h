// How a scan on the GPU is divided into tiles. Host code, whose constants the kernels use, too.
//
// A line is one scan. Lines are rows if inner = 1: the steps of a line are neighbours in memory.
// Else lines are columns: the neighbours of a step belong to other lines. A tile is the work of one
// CTA: some steps of some lines. The number of steps per tile depends on the length of a line
// alone, so the order of a line's operations does not depend on the other lines (batch-invariant).
#ifndef EXTENSION_CPP_SCAN_PLAN_H
#define EXTENSION_CPP_SCAN_PLAN_H

#include <cstdint>

#include "common/range.h"
#include "scan/scan.h"

namespace scans {

constexpr int THREADS = 256, WARPS = THREADS / 32;
// Tiles per group, and groups per block, in the tree that joins tiles (scan_tile.cuh): one for each
// lane of a warp.
constexpr int FAN = 32;
constexpr int MIN_LANES = 4;  // columns: a tile is at least 64 bytes wide

struct Plan {
  bool is_rows;
  int vectors;       // per input and thread; rows: a power of two
  int lanes;         // rows: threads of a warp that share a row; columns: threads along inner
  int segments;      // rows: warps that share a row, 0 if lanes < 32; columns: THREADS / lanes
  int columns;       // lines of a tile whose segments are joined in shared memory
  int row_vectors;   // rows: vectors of a row in a tile, a power of two
  int row_shift;     // its logarithm
  int rows;          // rows per CTA; columns: 1
  int64_t steps;     // per tile
  int64_t tiles;     // per line
  int64_t strips;    // columns: tiles along inner; rows: 1
  int64_t per_tile;  // tiles that have the same steps of different lines
  int64_t ctas;
};

// A vector has `width` elements. In rows a thread has neighbouring vectors of a row. In columns it
// has one vector from each of several neighbouring steps. row_vectors 0: rows are taken as columns.
inline Plan pick(const scan_shape &shape, int width, int row_vectors, int column_vectors) {
  Plan plan{};
  plan.is_rows = shape.inner == 1 && row_vectors > 0;
  const int vectors = plan.is_rows ? row_vectors : column_vectors;
  plan.vectors = vectors;
  plan.strips = plan.tiles = plan.rows = plan.lanes = plan.row_vectors = 1;
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
    plan.lanes = MIN_LANES;
    while (plan.lanes < THREADS && THREADS / (2 * plan.lanes) * vectors >= shape.length) {
      plan.lanes *= 2;
    }
    plan.segments = THREADS / plan.lanes;
    plan.columns = plan.lanes * width;
    if (plan.segments == 1) plan.vectors = static_cast<int>(shape.length);
    plan.steps = plan.segments * plan.vectors;
    plan.tiles = ceil_div(shape.length, plan.steps);
    plan.strips = ceil_div(shape.inner, plan.columns);
  }
  plan.per_tile = ceil_div(shape.outer, plan.rows) * plan.strips;
  plan.ctas = plan.per_tile * plan.tiles;
  return plan;
}

// ---- what tiles publish ----

// The layout of scan_shape.state, which is empty if a line is one tile.
struct StateLayout {
  int64_t group_count, block_count;  // per line
  int64_t groups, blocks, bytes;     // offsets in bytes; the tiles' array is at 0
};

// `words` and `state_words`: the 64-bit words of a Part and of a State of one line, one for each
// 32-bit piece. FAN values of a kind lie side by side.
inline StateLayout state_layout(const Plan &plan, int64_t outer, int64_t words,
                                int64_t state_words) {
  StateLayout layout{};
  if (plan.tiles == 1) return layout;
  const int64_t groups = layout.group_count = ceil_div(plan.tiles, FAN);
  const int64_t blocks = layout.block_count = ceil_div(groups, FAN);
  const int64_t fan = outer * plan.strips * plan.columns * FAN * 8;
  layout.groups = fan * groups * words;
  layout.blocks = layout.groups + fan * blocks * words;
  layout.bytes = layout.blocks + fan * ceil_div(blocks, FAN) * state_words;
  return layout;
}

}  // namespace scans

#endif

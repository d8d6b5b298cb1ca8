// How a scan on the GPU is divided into tiles. Host code; the numbers also are constants of the
// kernels.
//
// A line is one scan. In rows (inner = 1) a line's steps are neighbours in memory, in columns its
// neighbours are other lines. A tile is what a CTA takes at once: some steps of some lines. The
// number of steps in a tile follows from the length of a line alone, so that the order of the
// operations of a line does not depend on the other lines (batch-invariant).
#ifndef EXTENSION_CPP_SCAN_PLAN_H
#define EXTENSION_CPP_SCAN_PLAN_H

#include <cstdint>

#include "common/range.h"
#include "scan/scan.h"

namespace scans {

constexpr int THREADS = 256, WARPS = THREADS / 32;
// Tiles in a group, and groups in a block: what a tile sums up of the tiles before it
// (scan_tile.cuh). One for each lane of a warp.
constexpr int FAN = 32;
constexpr int MIN_LANES = 4;  // columns: 64 bytes side by side

struct Plan {
  bool is_rows;
  int vectors;      // of each input in a thread, a power of two in rows
  int lanes;        // rows: threads of a warp that share a row; columns: threads side by side
  int segments;     // rows: warps that share a row, 0 if lanes < 32; columns: THREADS / lanes
  int columns;      // lines of a tile whose segments are joined in shared memory
  int row_vectors;  // rows: vectors of a row in a tile, a power of two
  int row_shift;    // its logarithm
  int rows;         // rows per CTA; columns: 1
  int64_t steps;    // per tile
  int64_t tiles;    // per line
  int64_t strips;   // columns: tiles side by side; rows: 1
  int64_t ctas;
};

// A vector has `width` elements. In rows a thread has neighbouring vectors of a row, in columns one
// vector of each of some neighbouring steps.
inline Plan pick(const scan_shape &shape, int width, int row_vectors, int column_vectors) {
  Plan plan{};
  plan.is_rows = shape.inner == 1;
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
    // More threads side by side where a line is short, as long as it fits in one tile. The number
    // of lines does not count: it would change the order in which a line's segments are joined.
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
  plan.ctas = ceil_div(shape.outer, plan.rows) * plan.tiles * plan.strips;
  return plan;
}

// ---- what tiles publish ----

// The arrays in scan_shape.state. There is none if a line is one tile.
struct StateLayout {
  int64_t group_count, block_count;  // of a line
  int64_t groups, blocks, bytes;     // offsets in bytes; the tiles' array is at 0
};

// `words`: 64-bit words of a Part of one line, as many as it has 32-bit pieces; state_words: of a
// state. FAN values of each kind lie side by side.
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

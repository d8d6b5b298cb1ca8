// Joins the tiles of a line on the GPU, in an order that does not depend on timing.
//
// FAN tiles form a group, and FAN groups form a block. A tile publishes the Part of its steps as
// soon as it has read them. The last tile of a group publishes the Part of the group instead, and
// the last tile of a block the State at its end. So a tile depends on up to FAN - 1 tiles of its
// group, up to FAN - 1 groups of its block, and the State of the block before. A warp reads these
// values, one per lane, and joins them in a fixed tree. Plain decoupled look-back joins whatever is
// published at that moment, so its rounding differs from run to run.
//
// A tile waits only for CTAs with lower indices. The GPU starts CTAs in the order of their indices
// (CUB's scans assume this, too), so these CTAs are already running.
#ifndef EXTENSION_CPP_SCAN_TILE_CUH
#define EXTENSION_CPP_SCAN_TILE_CUH

#include "scan/scan_math.cuh"
#include "scan/scan_plan.h"

namespace scans {

// One 64-bit store publishes a 32-bit piece of a value in the lower half and 1, as a flag, in the
// upper half. Data and flag arrive together, so no fence is needed.
__device__ inline void publish(uint64_t *word, uint32_t piece) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(uint64_t{1} << 32 | piece)
               : "memory");
}

__device__ inline uint64_t look(const uint64_t *word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Published Parts or States of one line (columns: of a strip of lines), as words of shape (index /
// FAN, piece, columns, index % FAN).
template <typename Value>
struct Published {
  static constexpr int PIECES = sizeof(Value) / 4;
  uint64_t *words;
  int columns;

  __device__ uint64_t *at(int64_t index, int piece, int column) const {
    return words + ((index / FAN * PIECES + piece) * columns + column) * FAN + index % FAN;
  }
  __device__ void put(int64_t index, int column, Value value) const {
    uint32_t pieces[PIECES];
    memcpy(pieces, &value, sizeof value);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) publish(at(index, i, column), pieces[i]);
  }
  // Polls a value once and does not wait, so that several loads are in flight.
  __device__ void look_for(uint64_t (&found)[PIECES], int64_t index, int column,
                           bool is_wanted) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) found[i] = is_wanted ? look(at(index, i, column)) : 0;
  }
  // Waits for the value and returns it; returns `other` if it is not wanted.
  __device__ Value wait(uint64_t (&found)[PIECES], int64_t index, int column, bool is_wanted,
                        Value other) const {
    if (!is_wanted) return other;
    uint32_t pieces[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      while (found[i] >> 32 == 0) found[i] = look(at(index, i, column));
      pieces[i] = static_cast<uint32_t>(found[i]);
    }
    memcpy(&other, pieces, sizeof other);
    return other;
  }
};

// ---- joins over the lanes of a warp ----

template <typename A, int WORDS>
__device__ inline Words<A, WORDS> shuffle_up(Words<A, WORDS> part, int distance) {
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    part.v[w] = __shfl_up_sync(0xffffffffu, part.v[w], distance);
  }
  return part;
}

template <typename A, int WORDS>
__device__ inline Words<A, WORDS> of_lane(Words<A, WORDS> part, int lane) {
#pragma unroll
  for (int w = 0; w < WORDS; ++w) part.v[w] = __shfl_sync(0xffffffffu, part.v[w], lane);
  return part;
}

// The join of the Parts of the lanes before this one, in its group of `lanes`. Replaces `all`, the
// Part of this lane, by the join of all lanes up to this one.
template <typename Algebra>
__device__ inline typename Algebra::Part lanes_before(typename Algebra::Part &all, int lanes) {
  const int lane = threadIdx.x % lanes;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    if (distance >= lanes) break;
    const auto other = shuffle_up(all, distance);
    if (lane >= distance) all = Algebra::join(other, all);
  }
  const auto before = shuffle_up(all, 1);
  return lane == 0 ? Algebra::identity() : before;
}

// ---- look-back ----

// Replaces start[r], the State before the line, by the State before tile `tile`. own[r] is the Part
// of the tile. A warp calls it; r stands for column first + r * WARPS.
template <typename Algebra, int COLUMNS>
__device__ inline void look_back(char *state, const StateLayout &layout, const Plan &plan,
                                 int64_t line, int64_t tile, int first,
                                 const typename Algebra::Part (&own)[COLUMNS],
                                 typename Algebra::State (&start)[COLUMNS]) {
  using Parts = Published<typename Algebra::Part>;
  using States = Published<typename Algebra::State>;
  const int64_t fan = line * plan.columns * FAN;
  const auto words = [&](int64_t offset, int64_t per_column) {
    return reinterpret_cast<uint64_t *>(state + offset) + fan * per_column;
  };
  const int64_t of_blocks = (layout.block_count + FAN - 1) / FAN;
  const Parts tiles{words(0, layout.group_count * Parts::PIECES), plan.columns};
  const Parts groups{words(layout.groups, layout.block_count * Parts::PIECES), plan.columns};
  const States blocks{words(layout.blocks, of_blocks * States::PIECES), plan.columns};
  const int lane = threadIdx.x % 32, in_group = tile % FAN, in_block = tile / FAN % FAN;
  const int64_t group = tile / FAN, block = group / FAN;
  const bool ends_group = in_group == FAN - 1, ends_block = ends_group && in_block == FAN - 1;
  uint64_t in_tiles[COLUMNS][Parts::PIECES], in_groups[COLUMNS][Parts::PIECES],
      in_blocks[COLUMNS][States::PIECES];
#pragma unroll
  for (int r = 0; r < COLUMNS; ++r) {
    const int c = first + r * WARPS;
    if (lane == 0 && !ends_group) tiles.put(tile, c, own[r]);
  }
#pragma unroll
  for (int r = 0; r < COLUMNS; ++r) {
    const int c = first + r * WARPS;
    tiles.look_for(in_tiles[r], group * FAN + lane, c, lane < in_group);
    groups.look_for(in_groups[r], block * FAN + lane, c, lane < in_block);
    blocks.look_for(in_blocks[r], block - 1, c, block > 0);
  }
#pragma unroll
  for (int r = 0; r < COLUMNS; ++r) {
    const int c = first + r * WARPS;
    auto of_tiles =
        tiles.wait(in_tiles[r], group * FAN + lane, c, lane < in_group, Algebra::identity());
    lanes_before<Algebra>(of_tiles, 32);
    of_tiles = of_lane(of_tiles, 31);
    if (lane == 0 && ends_group && !ends_block) {
      groups.put(group, c, Algebra::join(of_tiles, own[r]));
    }
    auto of_groups =
        groups.wait(in_groups[r], block * FAN + lane, c, lane < in_block, Algebra::identity());
    lanes_before<Algebra>(of_groups, 32);
    of_groups = of_lane(of_groups, 31);
    start[r] = blocks.wait(in_blocks[r], block - 1, c, block > 0, start[r]);
    if (in_block > 0) start[r] = Algebra::apply(of_groups, start[r]);
    if (in_group > 0) start[r] = Algebra::apply(of_tiles, start[r]);
    if (lane == 0 && ends_block) blocks.put(block, c, Algebra::apply(own[r], start[r]));
  }
}

// ---- the segments of a tile ----

// A table (segments, columns) of the Parts of a tile's segments. join_segments() replaces each Part
// by the join of the segments before it, and put_states() stores the State before the tile with the
// first segment. A gap after each segment puts the segments of a column into different banks.
template <typename Algebra, typename A, int SIZE>
struct Table {
  using Part = typename Algebra::Part;
  using State = typename Algebra::State;
  A parts[Part::WORDS][SIZE];

  static __device__ int place(int segment, int columns, int c) {
    return segment * (columns + 1) + c;
  }

  template <typename Value>
  __device__ void put(int at, Value value) {
#pragma unroll
    for (int w = 0; w < Value::WORDS; ++w) parts[w][at] = value.v[w];
  }
  template <typename Value = Part>
  __device__ Value get(int at) const {
    Value value;
#pragma unroll
    for (int w = 0; w < Value::WORDS; ++w) value.v[w] = parts[w][at];
    return value;
  }

  // Joins the segments of all columns. All threads call it, after they have put their Parts. The
  // entry of the first segment then holds the Part of the whole tile.
  __device__ void join_segments(const Plan &plan) {
    __syncthreads();
    const int lanes = min(32, plan.segments), share = plan.segments / lanes;
    const int lane = threadIdx.x % lanes, at_once = 32 / lanes, warp = threadIdx.x / 32;
    for (int first = warp * at_once; first < plan.columns; first += WARPS * at_once) {
      const int c = first + threadIdx.x % 32 / lanes;
      const bool is_column = c < plan.columns;
      Part all = Algebra::identity();
      for (int s = 0; s < share && is_column; ++s) {
        const Part part = get(place(lane * share + s, plan.columns, c));
        all = s == 0 ? part : Algebra::join(all, part);
      }
      Part before = lanes_before<Algebra>(all, lanes);
      const Part own = of_lane(all, threadIdx.x % 32 | (lanes - 1));
      for (int s = 0; s < share && is_column; ++s) {
        const int at = place(lane * share + s, plan.columns, c);
        const Part part = get(at);
        put(at, s + lane == 0 ? own : before);
        before = s + lane == 0 ? part : Algebra::join(before, part);
      }
    }
    __syncthreads();
  }

  // Replaces the entry of the first segment by the State before the tile. start(c) is the State
  // before line c. COLUMNS: columns per warp in look_back().
  template <int COLUMNS, typename F>
  __device__ void put_states(char *state, const StateLayout &layout, const Plan &plan, int64_t line,
                             int64_t tile, F &&start) {
    if (plan.tiles == 1) {
      for (int c = threadIdx.x; c < plan.columns; c += THREADS) put(c, start(c));
    } else if (const int warp = threadIdx.x / 32; warp < plan.columns) {
      Part own[COLUMNS];
      State states[COLUMNS];
#pragma unroll
      for (int r = 0; r < COLUMNS; ++r) {
        own[r] = get(warp + r * WARPS);
        states[r] = start(warp + r * WARPS);
      }
      __syncwarp();  // every lane has read before one writes
      look_back<Algebra>(state, layout, plan, line, tile, warp, own, states);
#pragma unroll
      for (int r = 0; r < COLUMNS; ++r) put(warp + r * WARPS, states[r]);
    }
    __syncthreads();
  }

  // The State before a segment.
  __device__ State state(int segment, int columns, int c) const {
    const auto before = get<State>(c);
    return segment == 0 ? before : Algebra::apply(get(place(segment, columns, c)), before);
  }
};

}  // namespace scans

#endif

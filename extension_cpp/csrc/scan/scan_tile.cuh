// Joins the tiles of a line on the GPU, in an order that does not depend on timing.
//
// FAN tiles form a group, and FAN groups form a block. A tile publishes the Part of its steps as
// soon as it has read them. The last tile of a group publishes the Part of the group instead, and
// the last tile of a block the State at its end. A tile thus depends on up to FAN - 1 tiles of its
// group, up to FAN - 1 groups of its block, and the State of the block before. The warps divide
// these values among them and join them in a fixed tree. (Plain decoupled look-back joins whatever
// is published at that moment, so its rounding differs from run to run.)
//
// A tile waits only for CTAs with lower indices. The GPU starts CTAs in the order of their indices
// (CUB's scans assume this, too), so these CTAs are already running.
#ifndef EXTENSION_CPP_SCAN_TILE_CUH
#define EXTENSION_CPP_SCAN_TILE_CUH

#include <algorithm>

#include "scan/scan_math.cuh"
#include "scan/scan_plan.h"

namespace scans {

// Publishes a 32-bit piece of a value. One 64-bit store writes the piece in the lower half and 1,
// as a flag, in the upper half. Data and flag arrive together, so no fence is needed.
__device__ inline void publish(uint64_t *word, uint32_t piece) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(uint64_t{1} << 32 | piece)
               : "memory");
}

__device__ inline uint64_t look(const uint64_t *word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// The published Parts or States of one line, or of a strip of lines in columns. The words have
// shape (index, piece, columns).
template <typename Value>
struct Published {
  static constexpr int PIECES = sizeof(Value) / 4;
  uint64_t *words;
  int columns;

  __device__ uint64_t *at(int64_t index, int piece, int column) const {
    return words + (index * PIECES + piece) * columns + column;
  }
  __device__ void put(int64_t index, int column, Value value) const {
    uint32_t pieces[PIECES];
    memcpy(pieces, &value, sizeof value);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) publish(at(index, i, column), pieces[i]);
  }
  // Reads a value once and does not wait for it, so that several loads are in flight.
  __device__ void look_for(uint64_t (&found)[PIECES], int64_t index, int column) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) found[i] = look(at(index, i, column));
  }
  __device__ Value wait(uint64_t (&found)[PIECES], int64_t index, int column) const {
    uint32_t pieces[PIECES];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      while (found[i] >> 32 == 0) found[i] = look(at(index, i, column));
      pieces[i] = static_cast<uint32_t>(found[i]);
    }
    Value value;
    memcpy(&value, pieces, sizeof value);
    return value;
  }
  __device__ Value wait_for(int64_t index, int column) const {
    uint64_t found[PIECES];
    look_for(found, index, column);
    return wait(found, index, column);
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
__device__ inline Words<A, WORDS> shuffle_down(Words<A, WORDS> part, int distance) {
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    part.v[w] = __shfl_down_sync(0xffffffffu, part.v[w], distance);
  }
  return part;
}

template <typename A, int WORDS>
__device__ inline Words<A, WORDS> of_lane(Words<A, WORDS> part, int lane) {
#pragma unroll
  for (int w = 0; w < WORDS; ++w) part.v[w] = __shfl_sync(0xffffffffu, part.v[w], lane);
  return part;
}

// Returns the join of the Parts of the lanes before this one, in its group of `lanes` lanes.
// Replaces `all`, the Part of this lane, by the join of all lanes up to this one.
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

// The memory in which the tiles of COLUMNS neighbouring lines (1 in rows) publish values, and the
// values that tile `tile` waits for. A warp reads values of AT_ONCE tiles at once, one line per
// lane.
template <typename Algebra, int COLUMNS>
struct LookBack {
  using Part = typename Algebra::Part;
  using State = typename Algebra::State;
  static constexpr int AT_ONCE = 32 / COLUMNS;
  static constexpr int SHARE = std::max(1, FAN / (WARPS * AT_ONCE));  // tiles per lane
  static constexpr int PER_WARP = AT_ONCE * SHARE;
  static constexpr int USED = std::max(1, FAN / PER_WARP);  // number of warps that read tiles
  Published<Part> tiles, groups;
  Published<State> blocks;
  int64_t tile, group, block;
  int in_group, in_block;

  __device__ LookBack(char *state, const StateLayout &layout, const Plan &plan, int64_t line,
                      int64_t tile)
      : tile(tile),
        group(tile / FAN),
        block(group / FAN),
        in_group(tile % FAN),
        in_block(group % FAN) {
    const auto words = [&](int64_t offset, int64_t of_line) {
      return reinterpret_cast<uint64_t *>(state + offset) + line * COLUMNS * of_line;
    };
    tiles = {words(0, plan.tiles * tiles.PIECES), COLUMNS};
    groups = {words(layout.groups, layout.group_count * groups.PIECES), COLUMNS};
    blocks = {words(layout.blocks, layout.block_count * blocks.PIECES), COLUMNS};
  }

  // The values that one warp joins, of the `count` published values from number `first` on. The
  // constructor reads each value once without waiting, so that all loads are in flight.
  struct Share {
    const Published<Part> &from;
    int64_t first;
    int count, column;  // for this lane
    uint64_t found[SHARE][Published<Part>::PIECES];

    __device__ Share(const Published<Part> &from, int64_t first, int count)
        : from(from), column(threadIdx.x % COLUMNS) {
      const int begin = threadIdx.x / 32 * PER_WARP + threadIdx.x % 32 / COLUMNS * SHARE;
      this->first = first + begin;
      this->count = count - begin;
#pragma unroll
      for (int k = 0; k < SHARE; ++k) {
        if (k < this->count) from.look_for(found[k], this->first + k, column);
      }
    }
    // Waits for the values and joins them. The first COLUMNS lanes get the results.
    __device__ Part join() {
      Part all = Algebra::identity();
#pragma unroll
      for (int k = 0; k < SHARE; ++k) {
        if (k >= count) break;
        const Part part = from.wait(found[k], first + k, column);
        all = k == 0 ? part : Algebra::join(all, part);
      }
      __syncwarp();
#pragma unroll
      for (int distance = COLUMNS; distance < 32; distance *= 2) {
        all = Algebra::join(all, shuffle_down(all, distance));
      }
      return all;
    }
  };
};

// ---- the segments of a tile ----

// A table (segments, columns) of the Parts of a tile's segments. join_segments() replaces each Part
// by the join of the segments before it. put_states() stores the State before the tile in the entry
// of the first segment. A gap after each segment puts the segments of a column into different
// banks. COLUMNS is the number of lines in a tile, if a line has several tiles.
template <typename Algebra, typename A, int SIZE, int COLUMNS>
struct Table {
  using Part = typename Algebra::Part;
  using State = typename Algebra::State;
  using Look = LookBack<Algebra, COLUMNS>;
  A parts[Part::WORDS][SIZE];
  Part shares[Look::USED][COLUMNS];  // used by look_back()

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

  // Joins the segments of all columns. All threads must call it, after they have put their Parts.
  // The entry of the first segment then holds the Part of the whole tile.
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

  // Replaces the entry of the first segment by the State before the tile. start(c) returns the
  // State before the first step of line c.
  template <typename F>
  __device__ void put_states(char *state, const StateLayout &layout, const Plan &plan, int64_t line,
                             int64_t tile, F &&start) {
    if (plan.tiles == 1) {
      for (int c = threadIdx.x; c < plan.columns; c += THREADS) put(c, start(c));
    } else {
      look_back({state, layout, plan, line, tile}, start);
    }
    __syncthreads();
  }

  // Does put_states() for a line that has several tiles. Each warp joins its share of the tiles
  // before this one, and the first warp joins the shares. The groups before this one are then
  // joined in the same way. The last tile of a group publishes the group's Part before it waits for
  // other groups, so that this Part depends only on tiles of the group.
  template <typename F>
  __device__ void look_back(const Look &at, F &&start) {
    const int warp = threadIdx.x / 32, c = threadIdx.x % 32;
    const bool is_first = warp == 0 && c < COLUMNS, is_share = warp < Look::USED;
    const bool ends_group = at.in_group == FAN - 1,
               ends_block = ends_group && at.in_block == FAN - 1;
    Part own = Algebra::identity(), tiles = own;
    if (is_first) own = get(c);
    if (is_first && !ends_group) at.tiles.put(at.tile, c, own);
    typename Look::Share of_groups(at.groups, at.block * FAN, is_share ? at.in_block : 0);
    typename Look::Share of_tiles(at.tiles, at.group * FAN, is_share ? at.in_group : 0);
    put_share(of_tiles);
    __syncthreads();
    if (is_first) {
      tiles = join_shares(at.in_group, c);
      if (ends_group && !ends_block) at.groups.put(at.group, c, Algebra::join(tiles, own));
    }
    if (at.in_block > 0) {
      __syncthreads();  // waits until the shares of the tiles have been read
      put_share(of_groups);
      __syncthreads();
    }
    if (!is_first) return;
    State before = at.block > 0 ? at.blocks.wait_for(at.block - 1, c) : start(c);
    if (at.in_block > 0) before = Algebra::apply(join_shares(at.in_block, c), before);
    if (at.in_group > 0) before = Algebra::apply(tiles, before);
    if (ends_block) at.blocks.put(at.block, c, Algebra::apply(own, before));
    put(c, before);
  }
  __device__ void put_share(typename Look::Share &share) {
    const int warp = threadIdx.x / 32, c = threadIdx.x % 32;
    if (warp >= Look::USED) return;
    const Part part = share.join();
    if (c < COLUMNS) shares[warp][c] = part;
  }
  __device__ Part join_shares(int count, int c) const {
    Part all = shares[0][c];
#pragma unroll
    for (int w = 1; w < Look::USED; ++w) {
      if (w * Look::PER_WARP < count) all = Algebra::join(all, shares[w][c]);
    }
    return all;
  }

  // Returns the State before a segment.
  __device__ State state(int segment, int columns, int c) const {
    const auto before = get<State>(c);
    return segment == 0 ? before : Algebra::apply(get(place(segment, columns, c)), before);
  }
};

}  // namespace scans

#endif

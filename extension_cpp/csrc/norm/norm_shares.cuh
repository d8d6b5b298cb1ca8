// Which rows a cluster takes that keeps its columns for many rows.
//
// Of odd rows (norm_rows.cuh) only those that are a multiple of `period` apart begin alike: `period` classes, and a cluster's rows
// have to be of one. If nearly as many clusters as run at once, or some times as many, are a multiple of the period, each takes
// every n-th row: so neighbours are read at about the same time, which is faster.
//
// Else the rows are put in order class by class, and that order is cut into as many shares as clusters run at once, all of one
// size. A share in which a class ends is cut there, and what is left of it becomes a share of its own, behind the others and the
// longest first: it starts when a cluster ends whose share was cut short.
#ifndef EXTENSION_CPP_NORM_SHARES_CUH
#define EXTENSION_CPP_NORM_SHARES_CUH

#include <algorithm>
#include <cstdint>

#include "common/range.h"

namespace norm_cuda {

constexpr int MAX_PERIOD = 8;  // elements of a vector

struct Shares {
  int rows;
  int period;
  int whole;                  // shares at once
  bool alternate;             // each is every n-th row; else:
  int2 rest[MAX_PERIOD - 1];  // places in the order, from .x to .y
};

struct Share {
  int64_t first;  // row
  int64_t step;
  int rows;
};

// The place of a class's first row in the order.
__host__ __device__ inline int class_start(const Shares &shares, int kind) {
  const int more = shares.rows % shares.period;
  return shares.rows / shares.period * kind + (kind < more ? kind : more);
}

// The place where one of the shares at once begins: where a class does, if that is near, for a rest of a few rows would
// cost more than it evens out.
__host__ __device__ inline int share_start(const Shares &shares, int number) {
  const int start = static_cast<int>(static_cast<int64_t>(number) * shares.rows / shares.whole);
  const int near = shares.rows / shares.whole / 32;
  for (int kind = 0; kind < shares.period; ++kind) {
    const int other = class_start(shares, kind);
    if (other - start <= near && start - other <= near) return other;
  }
  return start;
}

__device__ inline Share share_of(const Shares &shares, int number) {
  if (shares.alternate) return {number, shares.whole, (shares.rows - number + shares.whole - 1) / shares.whole};
  int begin, end;
  if (number < shares.whole) {
    begin = share_start(shares, number), end = share_start(shares, number + 1);
  } else {
    begin = shares.rest[number - shares.whole].x, end = shares.rest[number - shares.whole].y;
  }
  int kind = 0;
  while (kind + 1 < shares.period && class_start(shares, kind + 1) <= begin) ++kind;
  end = min(end, class_start(shares, kind + 1));
  return {kind + static_cast<int64_t>(begin - class_start(shares, kind)) * shares.period, shares.period, end - begin};
}

// A multiple of `step`, so that the rows of a thread begin alike, near `at_once` (which run at once) or a multiple of that, so
// that few of them idle in the last round.
inline int64_t alike(int64_t at_once, int64_t step, int64_t most) {
  int64_t best = 0;
  double best_share = 0;
  for (int64_t rounds = 1; rounds <= 8 && rounds * at_once <= most; ++rounds) {
    const int64_t chunks = rounds * at_once / step * step;
    const double share = static_cast<double>(chunks) / static_cast<double>(rounds * at_once) - 0.01 * rounds;
    if (share > best_share) best = chunks, best_share = share;
  }
  return best;
}

// Of rows of `cols` elements in vectors of `vector`; at most `at_once` clusters run at once. Returns how many shares there are:
// at most MAX_PERIOD - 1 more than that or than `most`, and none is empty.
inline int64_t make_shares(Shares &shares, int64_t rows, int64_t cols, int vector, int64_t at_once, int64_t most) {
  shares.rows = static_cast<int>(rows);
  shares.period = vector;
  while (shares.period > 1 && cols % (2 * vector / shares.period) == 0) shares.period /= 2;
  at_once = std::min(rows, at_once);
  const int64_t chunks = at_once == rows ? rows : alike(at_once, shares.period, most),
                rounds = ceil_div(chunks, at_once);
  shares.alternate = chunks >= 0.9 * rounds * at_once && chunks > 0;
  shares.whole = static_cast<int>(shares.alternate ? chunks : at_once);
  if (shares.alternate) return chunks;
  int count = 0;
  for (int kind = 1; kind < shares.period; ++kind) {
    const int start = class_start(shares, kind), next = class_start(shares, kind + 1);
    int number = 0;
    while (share_start(shares, number + 1) <= start && number + 1 < shares.whole) ++number;
    if (start == share_start(shares, number) || start == next) continue;
    shares.rest[count++] = {start, std::min(share_start(shares, number + 1), next)};
  }
  std::sort(shares.rest, shares.rest + count, [](int2 a, int2 b) { return a.y - a.x > b.y - b.x; });
  return shares.whole + count;
}

}  // namespace norm_cuda

#endif

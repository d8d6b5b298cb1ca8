// Which rows a cluster takes that keeps its columns for many rows.
//
// Of odd rows (norm_rows.cuh) only those that are a multiple of `period` apart begin alike: `period` classes, and a cluster's rows
// have to be of one. Cluster number i has class i % period, and the clusters of a class take its rows by turns: so neighbours are
// read at about the same time, which is faster (docs/tuning.md).
//
// If the clusters that run at once are no multiple of the period, some classes have one cluster more than the others. These others
// keep as many rows as their clusters get done in the common time; the last ones become pieces, shares of their own, which start
// where the clusters of the first classes have ended.
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
  int whole;   // clusters at once
  int kept;    // rows that a class with fewer clusters keeps
  int pieces;  // of what is left of it
};

struct Share {
  int64_t first;  // row
  int64_t step;
  int rows;
};

__host__ __device__ inline Share share_of(const Shares &shares, int number) {
  const int more = shares.whole % shares.period;  // classes with one cluster more
  const bool is_piece = number >= shares.whole;
  const int left = number - shares.whole;
  const int kind = is_piece ? more + left % (shares.period - more) : number % shares.period;
  const int place = is_piece ? shares.kept + left / (shares.period - more) : number / shares.period;
  const int step = is_piece ? shares.pieces : shares.whole / shares.period + (kind < more);
  int end =
      shares.rows / shares.period + (kind < shares.rows % shares.period);  // rows of the class
  if (!is_piece && kind >= more && shares.kept < end) end = shares.kept;
  return {kind + static_cast<int64_t>(place) * shares.period,
          static_cast<int64_t>(step) * shares.period, (end - place + step - 1) / step};
}

// Of rows of `cols` elements in vectors of `vector`, where `at_once` clusters run at once. Returns how many shares there are: at
// most `most`, or `at_once` and one for each further class, and none is empty.
inline int64_t make_shares(Shares &shares, int64_t rows, int64_t cols, int vector, int64_t at_once,
                           int64_t most) {
  int64_t period = vector;
  while (period > 1 && cols % (2 * vector / period) == 0) period /= 2;
  at_once = rows < period ? rows : std::min(rows, at_once);
  const int64_t even = at_once / period * period;
  const int64_t whole =
      10 * even >= 9 * at_once ? even : at_once;  // a few idle ones cost less than pieces
  const int64_t more = whole % period, others = period - more, freed = more * (whole / period + 1);
  // To begin anew for a piece takes about two rows' time.
  const int64_t kept = whole / period * (ceil_div(rows, whole) + 2), left = rows / period - kept;
  const bool has_pieces = more > 0 && left > 0;
  const int64_t pieces = std::max<int64_t>(
      1, std::min({(freed + others / 2) / others, left, (most - whole) / others}));
  shares = {static_cast<int>(rows), static_cast<int>(period), static_cast<int>(whole),
            static_cast<int>(has_pieces ? kept : rows), static_cast<int>(has_pieces ? pieces : 0)};
  return has_pieces ? whole + pieces * others : whole;
}

}  // namespace norm_cuda

#endif

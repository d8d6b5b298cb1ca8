// Which rows the forward kernels of layer_norm and rms_norm take, by threads and elements a thread: the numbers of the sweeps
// (docs/tuning.md) for an H200.
#ifndef EXTENSION_CPP_NORM_FORWARD_SHAPES_CUH
#define EXTENSION_CPP_NORM_FORWARD_SHAPES_CUH

#include <climits>

#include "norm/norm_forward_cluster.cuh"
#include "norm/norm_launch.cuh"

namespace norm_cuda {

// A row a block.
template <int TEAM, int ELEMENTS>
using RowShape = Shape<TEAM, ELEMENTS, TEAM * ELEMENTS, TEAM>;

// Shapes of the teams of a block, in turn. Where prefers_block() is false only for chips without clusters, and with a residual or dropout.
template <bool HALF, bool CENTERED, Fused FUSED, bool ODD>
constexpr auto block_shapes() {
  if constexpr (ODD) {  // threads for all edges, and registers for as many rows as odd_rows()
    constexpr int E = HALF && FUSED != ADDED ? 32 : 16;
    return Shapes<Shape<16, 8>, Shape<32, 8>, Shape<32, 16>, Shape<32, E>, Shape<64, E>,
                  Shape<128, E>, Shape<256, E>>{};
  } else if constexpr (FUSED == ALONE && HALF && CENTERED) {
    return Shapes<Shape<8, 8>, Shape<8, 32>, Shape<16, 24>, Shape<16, 32>, Shape<16, 40>,
                  Shape<32, 24, 768, 128>, Shape<32, 32>, Shape<32, 40>, RowShape<64, 24>,
                  RowShape<64, 32>, RowShape<64, 40>, RowShape<96, 32>, RowShape<128, 32>,
                  RowShape<160, 32>, RowShape<192, 32>, RowShape<224, 32>, RowShape<256, 32>,
                  RowShape<256, 40>, RowShape<256, 48>, RowShape<512, 32>>{};
  } else if constexpr (FUSED == ALONE && HALF) {
    return Shapes<Shape<8, 8>, Shape<8, 32>, Shape<16, 24>, Shape<16, 32>, Shape<16, 40>,
                  Shape<32, 24>, Shape<32, 32>, RowShape<64, 24>, RowShape<64, 32>,
                  RowShape<96, 32>, RowShape<128, 32>, RowShape<160, 32>, RowShape<192, 32>,
                  RowShape<224, 32>, RowShape<256, 32>, RowShape<320, 32>, RowShape<384, 32>,
                  RowShape<512, 32>>{};
  } else if constexpr (FUSED == ALONE) {
    return Shapes<Shape<8, 8>, Shape<32, 8, 256, 128>, Shape<32, 16>, Shape<32, 20>,
                  RowShape<64, 12>, Shape<64, 16>, RowShape<96, 16>, Shape<128, 16>,
                  RowShape<160, 16>, RowShape<192, 16>, RowShape<256, 16>, RowShape<320, 16>,
                  RowShape<384, 16>, RowShape<512, 16>>{};
  } else if constexpr (FUSED == ADDED && HALF) {
    return Shapes<Shape<32, 8>, RowShape<32, 16>, Shape<32, 24>, RowShape<64, 16>, RowShape<96, 16>,
                  RowShape<128, 16>, RowShape<128, 24>, RowShape<192, 24>, RowShape<256, 24>,
                  RowShape<384, 24>, RowShape<512, 24>, RowShape<512, 32>>{};
  } else if constexpr (FUSED == ADDED) {
    return Shapes<Shape<32, 8>, RowShape<64, 8>, RowShape<64, 12>, RowShape<128, 8>,
                  RowShape<96, 16>, Shape<128, 16>, RowShape<192, 16>, RowShape<256, 16>,
                  RowShape<320, 16>, RowShape<256, 32>>{};
  } else {
    return Shapes<Shape<32, 8>, Shape<32, 16>, RowShape<32, 24>, RowShape<32, 32>, RowShape<64, 24>,
                  RowShape<64, 32>, RowShape<96, 32>, RowShape<128, 32>, RowShape<160, 32>,
                  RowShape<192, 32>, RowShape<224, 32>, RowShape<256, 32>, RowShape<320, 32>,
                  RowShape<384, 32>, RowShape<512, 32>>{};
  }
}

// Of few rows: more threads for each, so that they are spread over the chip.
template <int N>
using FewShapes = Shapes<Shape<32, 2 * N>, Shape<64, 2 * N>, Shape<128, 2 * N>, Shape<256, 2 * N>,
                         Shape<512, 2 * N>, Shape<1024, 2 * N>>;

// For weights that are not there, or are float beside half types with a residual or dropout.
template <int N>
using OtherShapes =
    Shapes<Shape<8, N>, Shape<32, 3 * N>, Shape<32, 4 * N>, Shape<32, 5 * N>, RowShape<64, 3 * N>,
           RowShape<64, 4 * N>, RowShape<64, 5 * N>, RowShape<96, 4 * N>, RowShape<128, 4 * N>,
           RowShape<160, 4 * N>, RowShape<192, 4 * N>, RowShape<256, 4 * N>, RowShape<320, 4 * N>,
           RowShape<384, 4 * N>, RowShape<512, 4 * N>>;

// Whether one block takes rows of this width sooner than a cluster, where the chip runs those and rows are not few. (Of float weights
// there is a shape of clusters that 4096 columns fill.)
template <bool HALF, bool CENTERED, Fused FUSED>
constexpr bool prefers_block(int cols, bool are_there, bool are_own) {
  if (!HALF || FUSED != ALONE) return true;
  if (are_own) return cols <= (CENTERED ? 8192 : 10240);
  return are_there ? cols <= 5120 && cols != 4096 : cols <= 12288;
}

// Of rows wider than the others take, ROWS a cluster.
template <bool HALF, int ROWS>
using WidestShape =
    std::conditional_t<HALF, ClusterShape<256, 64, ROWS, 2>, ClusterShape<512, 32, ROWS, 1>>;

// For weights that are not there, or in float beside half types.
template <bool HALF, bool CENTERED, Fused FUSED>
using UsualShape = ClusterShape<256, 32, (HALF && CENTERED && FUSED == ALONE ? 4 : 2), 2>;

// For weights in float beside aligned rows of half types, four of which share what is read of them. layer_norm's two are as long as these
// rows, and idle threads and conditions show: hence so many shapes.
template <bool CENTERED>
constexpr auto float_shapes() {
  if constexpr (CENTERED) {
    return Shapes<ExactShape<128, 32, 4, 4, 32768>, ExactShape<128, 24, 4, 5, 24576>,
                  ExactShape<256, 24, 4, 3, 73728>, ExactShape<128, 32, 4, 4>,
                  ExactShape<128, 16, 4, 8, 18432>, ClusterShape<192, 16, 4, 5, 6144>,
                  ClusterShape<224, 16, 4, 4, 7168>, ClusterShape<256, 16, 4, 4, 8192>,
                  ClusterShape<288, 16, 4, 3, 9216>, ClusterShape<256, 24, 4, 3, 12288>,
                  ClusterShape<448, 16, 4, 2, 14336>, ClusterShape<256, 32, 4, 2, 16384>,
                  ClusterShape<384, 24, 4, 2, 18432>>{};
  } else {
    return Shapes<ClusterShape<128, 16, 4, 8>, ClusterShape<256, 16, 4, 4>,
                  ClusterShape<256, 24, 4, 3>>{};
  }
}

// For weights in float beside odd rows of half types, where clusters that stay do not take them.
using OddFloatShape = ClusterShape<128, 40, 4, 5, 10240>;

// Shapes of clusters for wide rows, in turn. DROPS: whether ADDED has dropout.
template <bool HALF, bool CENTERED, Fused FUSED, bool ODD, bool DROPS>
constexpr auto wide_shapes() {
  if constexpr (HALF && FUSED == ADDED && ODD) {
    return Shapes<ClusterShape<128, 24, 2, 6, 12288>, ClusterShape<128, 32, 2, 5>,
                  ClusterShape<256, 24, 2, 3>, ClusterShape<512, 16, 2, 2>>{};
  } else if constexpr (HALF && FUSED == ADDED && DROPS) {
    using Wider =
        std::conditional_t<CENTERED, ClusterShape<128, 64, 1, 5>, ClusterShape<256, 32, 1, 5>>;
    return Shapes<ClusterShape<128, 40, 1, 6, 20480>, Wider>{};
  } else if constexpr (HALF && FUSED == ADDED) {
    return Shapes<ClusterShape<256, 24, 1, 5>, ClusterShape<256, 32, 1, 4>>{};
  } else if constexpr (HALF && FUSED == DROPPED) {
    return Shapes<ClusterShape<128, 40, 2, 6, (ODD ? 10240 : 20480)>,
                  ClusterShape<256, 32, 4, 3>>{};
  } else if constexpr (HALF && CENTERED && ODD) {
    return Shapes<ClusterShape<128, 40, 4, 5, 10240>, ClusterShape<256, 24, 4, 4>>{};
  } else if constexpr (HALF && CENTERED) {
    return Shapes<ExactShape<128, 40, 2, 7>, ExactShape<128, 48, 2, 6>, ExactShape<128, 56, 2, 5>,
                  ExactShape<128, 64, 2, 5>, ClusterShape<128, 40, 2, 7, 10240>,
                  ClusterShape<128, 48, 2, 6, 12288>, ClusterShape<128, 56, 2, 5, 14336>,
                  ClusterShape<128, 40, 2, 7>, ClusterShape<256, 40, 2, 4>>{};
  } else if constexpr (HALF && ODD) {
    return Shapes<ClusterShape<128, 48, 2, 6>>{};
  } else if constexpr (HALF) {
    return Shapes<ClusterShape<256, 32, 1, 7>>{};
  } else if constexpr (FUSED == ADDED && ODD) {
    using Wider =
        std::conditional_t<CENTERED, ClusterShape<256, 24, 2, 2>, ClusterShape<512, 16, 1, 2>>;
    return Shapes<ClusterShape<128, 20, 2, 5, 12288>, ClusterShape<256, 16, 1, 4>, Wider,
                  ClusterShape<512, 16, 1, 2>>{};
  } else if constexpr (FUSED == ADDED) {
    using Wider =
        std::conditional_t<DROPS, ClusterShape<256, 32, 1, 3>, ClusterShape<512, 16, 1, 2>>;
    return Shapes<ClusterShape<256, 20, 1, 4>, ClusterShape<256, 24, 1, 3>, Wider>{};
  } else if constexpr (FUSED == DROPPED) {
    return Shapes<ClusterShape<128, 32, 2, 5>, ClusterShape<256, 24, 2, 3>,
                  ClusterShape<256, 32, 2, 2>>{};
  } else if constexpr (CENTERED && ODD) {
    return Shapes<ClusterShape<128, 16, 4, 4, 32768, false>, ClusterShape<256, 16, 2, 4>,
                  ClusterShape<256, 20, 2, 3>, ClusterShape<512, 16, 2, 2>>{};
  } else if constexpr (CENTERED) {
    return Shapes<ExactShape<256, 20, 2, 4>, ExactShape<256, 24, 2, 3>, ExactShape<256, 16, 2, 4>,
                  ClusterShape<256, 28, 2, 3>, ExactShape<512, 16, 2, 2>,
                  ClusterShape<512, 16, 2, 2>>{};
  } else if constexpr (ODD) {
    return Shapes<ClusterShape<128, 32, 2, 4, 65536, false>,
                  ClusterShape<256, 32, 2, 2, 131072, false>>{};
  } else {
    return Shapes<ClusterShape<256, 32, 1, 4>>{};
  }
}

// A shape of clusters that stay: threads a block, vectors a thread, blocks a multiprocessor, rows in a block's ring, how many places
// its clusters have to take, and the widest row it is for.
template <int TEAM_, int K_, int BLOCKS_, int STAGES_, int TAKEN_ = 0, int WIDEST_ = INT_MAX>
struct RingShape {
  static constexpr int TEAM = TEAM_, K = K_, BLOCKS = BLOCKS_, STAGES = STAGES_, TAKEN = TAKEN_,
                       WIDEST = WIDEST_;
};

// Those, in turn.
template <bool HALF, bool CENTERED>
constexpr auto ring_shapes() {
  if constexpr (HALF && CENTERED) {
    return Shapes<RingShape<192, 3, 4, 3, 0, 9216>, RingShape<224, 3, 3, 3, 0, 10752>,
                  RingShape<192, 4, 2, 3, 0, 12288>, RingShape<192, 6, 2, 3, 28, 73728>,
                  RingShape<256, 5, 1, 4, 0, 20480>, RingShape<256, 6, 1, 4, 0, 24576>,
                  RingShape<256, 7, 1, 3, 0, 28672>, RingShape<256, 8, 1, 3, 32>,
                  RingShape<384, 7, 1, 3, 28, 172032>, RingShape<192, 6, 2, 3, 30>,
                  RingShape<256, 6, 1, 4, 30>, RingShape<256, 7, 1, 3, 28>,
                  RingShape<192, 5, 2, 3, 28>, RingShape<384, 7, 1, 3>>{};
  } else if constexpr (HALF) {
    return Shapes<RingShape<192, 5, 2, 3, 28, 53760>, RingShape<192, 6, 2, 3, 28, 73728>,
                  RingShape<256, 8, 1, 3, 32>, RingShape<256, 6, 1, 4, 30>,
                  RingShape<384, 7, 1, 3, 28, 172032>, RingShape<256, 7, 1, 3, 28>,
                  RingShape<384, 7, 1, 3>>{};
  } else {
    return Shapes<RingShape<320, 8, 1, 3, 32>, RingShape<512, 4, 1, 4, 30>,
                  RingShape<320, 6, 1, 4, 28>>{};
  }
}

// For half types with weights in float, or that are not there: clusters of a power of two fill their places, so there is one for each
// width from 9233 to 131072 columns. The last three are for wider rows, which take nearly all multiprocessors of a group.
using OtherRingShapes =
    Shapes<RingShape<256, 8, 1, 3, 32>, RingShape<256, 6, 1, 4, 32>, RingShape<256, 5, 1, 4, 32>,
           RingShape<320, 5, 1, 4, 32>, RingShape<256, 7, 1, 3, 32>, RingShape<192, 4, 2, 3, 32>,
           RingShape<224, 4, 2, 3, 32>, RingShape<256, 4, 2, 3, 32>, RingShape<256, 5, 1, 4>,
           RingShape<256, 6, 1, 4>, RingShape<256, 7, 1, 3>>;

// Whether such rows, wider than a block, are for those: aligned ones not if they are few, for which the weights' way is too long.
// `are_there`: weight, and of layer_norm bias.
template <bool CENTERED, bool ODD>
constexpr bool others_may_stay(int64_t rows, int cols, bool are_there) {
  if (!are_there && (!CENTERED || cols > 131072)) return false;
  return ODD || (cols > (CENTERED && are_there ? 16384 : 81920) && rows * cols >= 16 << 20);
}

// Whether rows wider than a block are for them: of rms_norm ODD ones in half types alone. layer_norm's rows of whole vectors then go as
// ODD ones: in half types those that begin between two lines of memory, in float the widest that fill their threads.
template <bool HALF, bool CENTERED, bool ODD>
constexpr bool may_stay(int cols) {
  if (!CENTERED) return cols > 49152;
  if (ODD) return HALF || cols > 16640;
  return HALF ? cols > 40960 && cols % 64 > 0 : cols == 131072;
}

}  // namespace norm_cuda

#endif

#include "common/cuda/column_sums.cuh"

// Returns the largest number of partial sums that any vector width and phase (column_sums.cuh)
// needs. The pointers, which determine both, are not known when the memory is allocated.
extern "C" int64_t column_sums_partial_cuda(int64_t rows, int64_t cols) {
  int64_t most = 0;
  for (const int vector : {1, 2, 4, 8}) {
    for (const int any_phase : {0, 1}) {
      const column_sums::Geometry g = column_sums::geometry(rows, cols, vector, any_phase);
      const int64_t sums = g.row_blocks * g.tiles * (g.threads_x * vector + g.halo);
      most = sums > most ? sums : most;
    }
  }
  return most;
}

// norm_shares.cuh on the host: every row is dealt once, a share's rows begin alike, and there are no more shares than promised.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#define __host__
#define __device__

#include "norm/norm_shares.cuh"

int main() {
  for (const int vector : {4, 8}) {
    for (const int64_t cols : {50257, 50258, 50260, 50264}) {
      for (const int64_t rows : {1, 7, 8, 9, 33, 100, 263, 1500, 5342}) {
        for (int64_t at_once = 1; at_once <= 70; ++at_once) {
          for (const int64_t most : {at_once, 2 * at_once + 4, rows}) {
            norm_cuda::Shares shares{};
            const int64_t count = norm_cuda::make_shares(shares, rows, cols, vector, at_once, most);
            std::vector<int> dealt(rows);
            bool right = count <= std::min(rows, std::max(at_once + vector - 1, most));
            for (int number = 0; number < count; ++number) {
              const norm_cuda::Share share = norm_cuda::share_of(shares, number);
              right = right && share.rows > 0;
              for (int i = 0; i < share.rows && right; ++i) {
                const int64_t row = share.first + i * share.step;
                right = row < rows && (row - share.first) * cols % vector == 0;
                if (right) ++dealt[row];
              }
            }
            for (const int times : dealt) right = right && times == 1;
            if (right) continue;
            std::printf("vector %d, cols %lld, rows %lld, at once %lld, most %lld\n", vector,
                        (long long)cols, (long long)rows, (long long)at_once, (long long)most);
            return 1;
          }
        }
      }
    }
  }
}

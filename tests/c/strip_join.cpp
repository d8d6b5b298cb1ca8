// Tests StripJoin of csrc/rows/strips.cuh on the CPU. CPU threads stand in for the threads of a
// cluster's CTAs, and write into each other's shared memory. After each barrier of the cluster one
// CTA stands still for a while, so that a missing barrier shows as a wrong sum.
// tests/test_clusters.py writes the class to strip_join.inc.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#define __device__

constexpr int CLUSTER = 4, STRIP_THREADS = 8, ROUNDS = 100;  // STRIP_THREADS is per CTA
constexpr bool HAS_CLUSTERS = true;

static const struct { int x, y; } blockDim = {2, 4};
static thread_local struct { int x, y; } threadIdx;
static thread_local int rank, turn;
static pthread_barrier_t cta_barriers[CLUSTER], cluster_barrier;

static int cluster_rank() { return rank; }
static void __syncthreads() { pthread_barrier_wait(&cta_barriers[rank]); }
static void sync_cluster() {
  pthread_barrier_wait(&cluster_barrier);
  if (++turn * 7 / 2 % CLUSTER == rank) usleep(300);
}
template <typename T>
static void send_to(int to, void *slot, const T &value);

#include "strip_join.inc"

using Join = StripJoin<PlainSum<double>, 1>;
static Join::Shared shared_memory[CLUSTER];

template <typename T>
static void send_to(int to, void *slot, const T &value) {
  const auto offset = static_cast<char *>(slot) - reinterpret_cast<char *>(&shared_memory[rank]);
  std::memcpy(reinterpret_cast<char *>(&shared_memory[to]) + offset, &value, sizeof value);
}

static double part(int cta, int x, int y, int round) {
  return 1000 * round + 100 * cta + 10 * x + y;
}

static std::atomic<int> wrong{0};

static void run(int cta, int x, int y) {
  rank = cta, threadIdx = {x, y};
  const Join join(shared_memory[rank], CLUSTER);
  for (int round = 0; round < ROUNDS; ++round) {
    PlainSum<double> own[1];
    own[0].sum = part(cta, x, y, round);
    join.join(own);
    double expected = 0;
    for (int i = 0; i < CLUSTER * blockDim.y; ++i)
      expected += part(i / blockDim.y, x, i % blockDim.y, round);
    wrong += own[0].sum != expected;
  }
}

int main() {
  pthread_barrier_init(&cluster_barrier, nullptr, CLUSTER * STRIP_THREADS);
  for (pthread_barrier_t &barrier : cta_barriers)
    pthread_barrier_init(&barrier, nullptr, STRIP_THREADS);
  std::vector<std::thread> threads;
  for (int i = 0; i < CLUSTER * STRIP_THREADS; ++i)
    threads.emplace_back(run, i / STRIP_THREADS, i % blockDim.x, i / blockDim.x % blockDim.y);
  for (std::thread &thread : threads) thread.join();
  if (wrong > 0) std::printf("%d sums are wrong\n", wrong.load());
  return wrong > 0;
}

// Runs CUDA kernels on the CPU, to test what they compute. Compile a .cu file without <<<>>> with
// the C++ compiler and -I of this folder. Its kernels then run here, slowly. CTAs run in parallel
// on a few CPU threads. The threads of a CTA are coroutines, which take turns at barriers in a
// random order. Now and then one warp falls behind as far as it can, so that a missing barrier
// shows. If only some threads reach a barrier, the program prints an error and ends. This header
// has only the functions that the tested kernels call.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct float4 {
  float x, y, z, w;
};

inline thread_local dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace on_cpu {

constexpr size_t STACK = 65536;
constexpr unsigned WARP = 32, WORKERS = 3;
constexpr auto LIMIT = std::chrono::seconds(60);

[[noreturn]] inline void fail(const char *why) {
  std::fprintf(stderr, "cuda_on_cpu: %s\n", why);
  std::abort();
}

struct Barrier {
  unsigned arrived = 0, phase = 0;
};

struct Thread {
  ucontext_t start;
  jmp_buf place;  // where the coroutine yielded
  std::unique_ptr<char[]> stack{new char[STACK]};
  bool started, done;
};

// The CTA that this CPU thread runs.
struct Cta {
  jmp_buf scheduler;
  std::vector<Thread> threads;
  std::function<void()> body;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<uint64_t> slots;  // the values that the lanes exchange
  bool moved;
  std::minstd_rand random;
  std::chrono::steady_clock::time_point deadline;
};

inline thread_local Cta *cta;

// yield() and resume() use _setjmp and _longjmp. swapcontext would do the same, but makes a system
// call for the signal mask each time.
inline void yield() {
  if (_setjmp(cta->threads[threadIdx.x].place) == 0) _longjmp(cta->scheduler, 1);
}

// Runs a coroutine until it yields or ends.
[[gnu::noinline]] inline void resume(Thread &thread) {
  if (_setjmp(cta->scheduler) != 0) return;
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.start);
}

inline void arrive(Barrier &barrier, unsigned expected) {
  const unsigned phase = barrier.phase;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.phase;
    cta->moved = true;
  }
  while (barrier.phase == phase) yield();
}

inline void enter() {
  cta->body();
  cta->threads[threadIdx.x].done = cta->moved = true;
  _longjmp(cta->scheduler, 1);
}

inline void run_cta(Cta &here, unsigned block) {
  const unsigned count = blockDim.x;
  blockIdx = dim3(block);
  here.all = Barrier();
  here.warps.assign(count / WARP, Barrier());
  here.random.seed(block + 1);
  here.deadline = std::chrono::steady_clock::now() + LIMIT;
  for (Thread &thread : here.threads) {
    thread.started = thread.done = false;
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack.get();
    thread.start.uc_stack.ss_size = STACK;
    makecontext(&thread.start, &enter, 0);
  }
  std::vector<unsigned> order(count);
  for (unsigned i = 0; i < count; ++i) order[i] = i;
  constexpr unsigned NONE = ~0u;
  for (unsigned held = NONE;;) {  // one warp stands still until no other can continue
    here.moved = false;
    std::shuffle(order.begin(), order.end(), here.random);
    for (const unsigned i : order) {
      if (here.threads[i].done || i / WARP == held) continue;
      threadIdx = dim3(i);
      resume(here.threads[i]);
    }
    const auto is_done = [](const Thread &thread) { return thread.done; };
    if (std::all_of(here.threads.begin(), here.threads.end(), is_done)) break;
    if (here.moved && held == NONE)
      held = here.random() % (count / WARP);
    else if (!here.moved && held == NONE)
      fail("threads wait at a barrier that others do not reach");
    else if (!here.moved)
      held = NONE;
  }
}

// Returns what `read` computes from the values of all lanes. The whole warp must call this.
template <typename T, typename Read>
auto exchange(T value, Read read) {
  const unsigned warp = threadIdx.x / WARP * WARP;
  std::memcpy(&cta->slots[threadIdx.x], &value, sizeof value);
  arrive(cta->warps[warp / WARP], WARP);
  const auto result = read([warp](unsigned lane) {
    T of;
    std::memcpy(&of, &cta->slots[warp + lane], sizeof of);
    return of;
  });
  arrive(cta->warps[warp / WARP], WARP);
  return result;
}

inline void check(unsigned mask) {
  if (mask != 0xffffffffu) fail("only whole warps exchange values here");
}

// Call this in every iteration of a loop that waits for another CTA. It fails after the deadline.
inline void wait() {
  if (std::chrono::steady_clock::now() > cta->deadline) fail("a CTA waits for another one in vain");
  std::this_thread::yield();
}

}  // namespace on_cpu

inline void __syncthreads() { on_cpu::arrive(on_cpu::cta->all, blockDim.x); }

inline void __syncwarp() {
  on_cpu::exchange(0, [](auto of) { return of(0); });
}

template <typename T>
T __shfl_sync(unsigned mask, T value, unsigned from) {
  on_cpu::check(mask);
  return on_cpu::exchange(value, [from](auto of) { return of(from); });
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  const unsigned lane = threadIdx.x % on_cpu::WARP;
  return __shfl_sync(mask, value, lane >= by ? lane - by : lane);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  const unsigned lane = threadIdx.x % on_cpu::WARP;
  return __shfl_sync(mask, value, lane + by < on_cpu::WARP ? lane + by : lane);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, unsigned by) {
  return __shfl_sync(mask, value, threadIdx.x % on_cpu::WARP ^ by);
}

inline unsigned __ballot_sync(unsigned mask, bool vote) {
  on_cpu::check(mask);
  return on_cpu::exchange(vote, [](auto of) {
    unsigned found = 0;
    for (unsigned lane = 0; lane < on_cpu::WARP; ++lane) {
      found |= static_cast<unsigned>(of(lane)) << lane;
    }
    return found;
  });
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

// Ends the program if the address is not a multiple of the vector's size, which a GPU forbids.
template <typename T>
void __stwb(T *place, T value) {
  if (reinterpret_cast<uintptr_t>(place) % sizeof(T) != 0) on_cpu::fail("a vector is not aligned");
  std::memcpy(place, &value, sizeof value);
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <typename T>
T atomicAdd(T *place, T value) {
  return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}

// ---- host functions ----

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration = 9 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
using cudaStream_t = void *;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream;
};

inline const char *cudaGetErrorString(cudaError_t) { return "none"; }

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}

// Returns the shared memory of a CTA: that of an H100, or the value in the environment variable.
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
  const char *asked = std::getenv("CUDA_ON_CPU_SHARED_MEMORY");
  *value = asked == nullptr ? 232448 : std::atoi(asked);
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  int most;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
  return bytes <= most ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t cudaMemsetAsync(void *data, int byte, size_t size, cudaStream_t) {
  std::memset(data, byte, size);
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments &&...arguments) {
  std::atomic<unsigned> next{0};
  const auto work = [&] {
    on_cpu::Cta here;
    here.threads = std::vector<on_cpu::Thread>(config->blockDim.x);
    here.slots.resize(config->blockDim.x);
    here.body = [&] { kernel(static_cast<Parameters>(arguments)...); };
    on_cpu::cta = &here;
    gridDim = config->gridDim;
    blockDim = config->blockDim;
    for (unsigned block = next++; block < gridDim.x; block = next++) on_cpu::run_cta(here, block);
  };
  std::vector<std::thread> workers;
  const unsigned count = std::min(on_cpu::WORKERS, config->gridDim.x);
  for (unsigned i = 0; i < count; ++i) workers.emplace_back(work);
  for (std::thread &worker : workers) worker.join();
  return cudaSuccess;
}

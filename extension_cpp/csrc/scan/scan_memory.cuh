// Parameters, loads and stores that the two scan kernels on the GPU share.
//
// Both kernels serve every op: scan_rows.cuh if steps are neighbours in memory, scan_columns.cuh if
// lines are. A thread first copies its vectors asynchronously into shared memory, which keeps many
// bytes in flight with few registers. It then computes the Part of its steps. The CTA joins the
// Parts into the State before each thread's steps. The thread passes over its steps again and
// writes the results. Every element is thus read once and written once.
#ifndef EXTENSION_CPP_SCAN_MEMORY_CUH
#define EXTENSION_CPP_SCAN_MEMORY_CUH

#include <algorithm>

#include "common/cuda/async.cuh"
#include "scan/scan_tile.cuh"

namespace scans {

// The number of CTAs that an SM has threads for. ptxas warns if a kernel asks for more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int MAX_CTAS = 1024 / THREADS;
#else
constexpr int MAX_CTAS = 1536 / THREADS;
#endif

template <typename T>
constexpr int WIDTH = 16 / sizeof(T);  // elements in a vector

// An element of bfloat16 or float16; Params::is_bfloat16 says which. The two types share kernels,
// because the conversions are a small part of the work.
struct Half {
  uint16_t bits;
};

struct Operand {
  scan_input at;
  bool is_vector;  // whether each vector of a tile is 16 aligned bytes
};

struct Result {
  scan_output at;
  bool is_vector;  // rows: 16 aligned bytes per vector; columns: one aligned word per thread
};

template <typename A, typename As>
__device__ inline A convert(Half x) {
  As value;
  memcpy(&value, &x, sizeof x);
  return to_acc(value);
}

template <typename As>
__device__ inline Half convert_back(float x) {
  const As value = from_acc<As>(x);
  Half bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <typename Op>
struct Params {
  Op op;
  Operand in[Op::INPUTS];
  Result out[Op::OUTPUTS];
  scan_input start;  // state before the first step (outer, inner); NULL means Algebra::start()
  // value of an input with shift 1 after the last step (outer, inner); NULL means 0
  scan_input after;
  scan_input decay;        // the factor in grad_start = decay * state, after the last step
  scan_output grad_start;  // (outer, inner); NULL if not wanted
  int64_t length, inner;
  bool is_bfloat16;  // true if T = Half means bfloat16, false if it means float16
  Plan plan;
  char *state;
  StateLayout layout;
  const int64_t *jumps;  // offset of each group, in elements: (OPERANDS, plan.groups); may be NULL

  static constexpr int OPERANDS = Op::INPUTS + 2 * Op::OUTPUTS;  // an upper bound

  // Conversions between elements in memory and the accumulation type.
  using T = typename Op::T;
  using A = typename Op::A;
  __device__ void unpack(A (&v)[WIDTH<T>], const uint4 &bits) const {
    if constexpr (!std::is_same_v<T, Half>) {
      ::unpack<T, WIDTH<T>>(v, bits);
    } else if (is_bfloat16) {
      ::unpack<__nv_bfloat16, 8>(v, bits);
    } else {
      ::unpack<__half, 8>(v, bits);
    }
  }
  __device__ uint4 pack(const A (&v)[WIDTH<T>]) const {
    if constexpr (!std::is_same_v<T, Half>) {
      return ::pack<T, WIDTH<T>>(v);
    } else {
      return is_bfloat16 ? ::pack<__nv_bfloat16, 8>(v) : ::pack<__half, 8>(v);
    }
  }
  __device__ A to_acc(T x) const {
    if constexpr (!std::is_same_v<T, Half>) {
      return x;
    } else {
      return is_bfloat16 ? convert<A, __nv_bfloat16>(x) : convert<A, __half>(x);
    }
  }
  __device__ T from_acc(A x) const {
    if constexpr (!std::is_same_v<T, Half>) {
      return x;
    } else {
      return is_bfloat16 ? convert_back<__nv_bfloat16>(x) : convert_back<__half>(x);
    }
  }
};

// An outer index and its group. All outer indices of a CTA are in one group (Plan::span).
struct Outer {
  int64_t index, group;
};

// Returns the offset of an element in an operand.
template <typename Op, typename At>
__device__ inline int64_t offset(const Params<Op> &p, const At &at, const Outer &outer,
                                 int64_t step, int64_t i) {
  int64_t offset = outer.index * at.outer + step * at.step + i * at.inner;
  if (p.jumps != nullptr) offset += p.jumps[at.index * p.plan.groups + outer.group];
  return offset;
}

template <typename Op>
__device__ inline const typename Op::T *element(const Params<Op> &p, const scan_input &in,
                                                const Outer &outer, int64_t step, int64_t i) {
  return static_cast<const typename Op::T *>(in.data) + offset(p, in, outer, step, i);
}

template <typename Op>
__device__ inline typename Op::T *element(const Params<Op> &p, const scan_output &out,
                                          const Outer &outer, int64_t step, int64_t i) {
  return static_cast<typename Op::T *>(out.data) + offset(p, out, outer, step, i);
}

// Returns count * stride. A 32-bit count takes fewer instructions than a 64-bit count.
__device__ inline int64_t strides(int count, int64_t stride) {
  return static_cast<int64_t>(static_cast<unsigned>(count)) * stride;
}

// The vectors that the CTA has copied into dynamic shared memory.
extern __shared__ uint4 held[];

// Copies 16 bytes, or zeros if `is_there` is false. The hint makes the L2 read whole lines of 128
// bytes. Without it, scans of columns, which read 64 bytes at a time, are 4 to 9 % slower.
__device__ inline void copy_vector(uint4 &to, const void *from, bool is_there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(&to)),
               "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
#else
  to = is_there ? *static_cast<const uint4 *>(from) : uint4{0, 0, 0, 0};
#endif
}

__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Returns whether no vector straddles the end of `size` elements, and all can be copied whole.
template <typename Op>
__device__ inline bool has_whole_vectors(const Params<Op> &p, int64_t size) {
  bool all = size % WIDTH<typename Op::T> == 0;
#pragma unroll
  for (int i = 0; i < Op::INPUTS; ++i) all = all && p.in[i].is_vector;
  return all;
}

// Loads `count` elements, `stride` apart, of which the first is at p. The rest of the vector is 0.
template <typename T>
__device__ inline uint4 gather(const T *p, int64_t stride, int64_t count) {
  T v[WIDTH<T>];
#pragma unroll
  for (int j = 0; j < WIDTH<T>; ++j) v[j] = j < count ? p[j * stride] : T{};
  uint4 bits;
  memcpy(&bits, v, sizeof bits);
  return bits;
}

template <typename T>
__device__ inline void scatter(T *p, int64_t stride, int64_t count, const uint4 &bits) {
  T v[WIDTH<T>];
  memcpy(v, &bits, sizeof v);
#pragma unroll
  for (int j = 0; j < WIDTH<T>; ++j) {
    if (j < count) p[j * stride] = v[j];
  }
}

// Writes one step of N neighbouring lines.
template <typename T, int N>
__device__ inline void put_word(const Result &out, T *to, int64_t count, const Vector<T, N> &word) {
  if (N == 1 || (out.is_vector && count >= N)) {
    __stwb(reinterpret_cast<Vector<T, N> *>(to), word);
  } else {
    T v[N];
    memcpy(v, &word, sizeof v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j < count) to[j * out.at.inner] = v[j];
    }
  }
}

template <typename A, int N>
__device__ inline void reverse(A (&v)[N]) {
#pragma unroll
  for (int j = 0; j < N / 2; ++j) {
    const A other = v[j];
    v[j] = v[N - 1 - j];
    v[N - 1 - j] = other;
  }
}

// Returns the state before the first step of a line. is_line says whether the line exists.
template <typename Op>
__device__ inline typename Op::Algebra::State start_state(const Params<Op> &p, bool is_line,
                                                          const Outer &outer, int64_t i) {
  if constexpr (Op::Algebra::State::WORDS == 1) {
    if (p.start.data != nullptr && is_line) return {{p.to_acc(*element(p, p.start, outer, 0, i))}};
  }
  return Op::Algebra::start();
}

template <typename Op>
__device__ inline typename Op::T after_last(const Params<Op> &p, const Outer &outer, int64_t i) {
  using T = typename Op::T;
  return p.after.data == nullptr ? T{} : *element(p, p.after, outer, 0, i);
}

// Writes the gradient of the state before a line. `state` follows the last step.
template <typename Op>
__device__ inline void put_grad_start(const Params<Op> &p, const Outer &outer, int64_t i,
                                      typename Op::Algebra::State state) {
  using T = typename Op::T;
  const auto decay = p.to_acc(*element(p, p.decay, outer, p.length - 1, i));
  *element(p, p.grad_start, outer, 0, i) = p.from_acc(decay * state.v[0]);
}

}  // namespace scans

#endif

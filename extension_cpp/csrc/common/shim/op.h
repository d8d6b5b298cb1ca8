// What the shims of all ops use: checks that raise errors, allocation, layouts, and launch(), which
// runs a kernel on PyTorch's thread pool or on its current CUDA stream. Only PyTorch's stable ABI
// is used.
#ifndef EXTENSION_CPP_OP_H
#define EXTENSION_CPP_OP_H

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/dtype.h"
#include "common/range.h"

namespace extension_cpp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// ---- errors: "extension_cpp::<op>: expected <argument> ..., but got ..." ----

// Throws std::runtime_error, which Python sees as a RuntimeError with exactly this text.
[[noreturn]] void fail(const char *op, const std::string &message);

std::string to_string(Sizes sizes);          // "[2, 3]"
std::string device_string(const Tensor &x);  // "cpu", "cuda:0"
std::string dtype_string(ScalarType dtype);  // "float32", as in Python
inline std::string dtype_string(const Tensor &x) { return dtype_string(x.scalar_type()); }

// Fails unless x is a tensor. Also fails if x has elements but no memory, because its storage may
// have been freed. check_dtype and check_device call this function. All other checks of tensors
// call one of these two, so every tensor argument of an op is covered.
void check_memory(const char *op, const char *name, const Tensor &x);

// Returns x's dtype. Fails if kernels do not support it; `hint` is appended to the message.
dtype_t check_dtype(const char *op, const char *name, const Tensor &x, const char *hint = "");

// Fails unless x is on the same device as `like`.
void check_device(const char *op, const char *name, const Tensor &x, const char *like_name,
                  const Tensor &like);

// Fails unless x has the device and the dtype of `like`.
void check_same(const char *op, const char *name, const Tensor &x, const char *like_name,
                const Tensor &like);

// Returns the dtype in which kernels compute and accumulate.
inline dtype_t acc_dtype(dtype_t dtype) {
  return dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
}

// Returns x's dtype. Fails unless x is on the device of `like` and has its dtype. If `like` has a
// half type, x may also be float32.
dtype_t check_same_or_float32(const char *op, const char *name, const Tensor &x,
                              const char *like_name, const Tensor &like);

// Fails unless x has the shape of `like`.
void check_shape(const char *op, const char *name, const Tensor &x, const char *like_name,
                 const Tensor &like);

// Calls check_same, then check_shape.
void check_like(const char *op, const char *name, const Tensor &x, const char *like_name,
                const Tensor &like);

// Returns x's dtype. Fails unless bias has x's device, x's dtype and the size of x's last
// dimension.
dtype_t check_bias(const char *op, const Tensor &x, const Tensor &bias);

// Returns `dim` as an index that counts from 0. Fails if x has no such dimension. As in PyTorch, a
// 0-d tensor has the dimensions 0 and -1.
int64_t check_dim(const char *op, const Tensor &x, int64_t dim);

// Fails unless 0 <= p <= 1.
void check_probability(const char *op, double p);

// Fails unless seed is an int64 tensor with one element on x's device. Dropout derives its random
// bits from this seed (common/philox.h).
void check_seed(const char *op, const Tensor &seed, const Tensor &x);

// ---- memory ----

ScalarType scalar_type(dtype_t dtype);

// The dtypes that allocate() supports and that a Match can name.
constexpr ScalarType EVERY_DTYPE[] = {
    ScalarType::Double,        ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
    ScalarType::Float8_e4m3fn, ScalarType::Long,  ScalarType::Int,      ScalarType::Short,
    ScalarType::Char,          ScalarType::Byte,  ScalarType::Bool};

// Returns an uninitialised tensor on the device of `like`.
Tensor allocate_strided(Sizes sizes, Sizes strides, ScalarType dtype, const Tensor &like);
inline Tensor allocate_strided(Sizes sizes, Sizes strides, dtype_t dtype, const Tensor &like) {
  return allocate_strided(sizes, strides, scalar_type(dtype), like);
}
Tensor allocate(Sizes sizes, ScalarType dtype, const Tensor &like);
inline Tensor allocate(Sizes sizes, dtype_t dtype, const Tensor &like) {
  return allocate(sizes, scalar_type(dtype), like);
}

// Returns whether x's elements fill one block of memory without gaps or overlap, in any order.
bool is_dense(const Tensor &x);

// Allocates as torch.empty_like does. The result has x's strides if x is dense. Otherwise it has
// dense strides in x's order of dimensions.
Tensor allocate_like(const Tensor &x);

// Returns x itself if it has the strides of `like`, and a copy with these strides otherwise. `like`
// must be dense and have x's shape.
Tensor with_strides_of(const Tensor &x, const Tensor &like);

// Returns x itself if it is contiguous, and a contiguous copy otherwise.
Tensor as_contiguous(const Tensor &x);

// Returns x in a shape to which it broadcasts. That is x itself if it is contiguous and has this
// shape, and a contiguous copy otherwise.
Tensor as_expanded(const Tensor &x, Sizes sizes);

// A tensor viewed as a matrix. The stride within a row is 1, the stride between rows is `stride`,
// and rows do not overlap.
struct Rows {
  Tensor tensor;
  int64_t stride;
};

// Returns x as a matrix whose columns are x's last `row_dims` dimensions. The tensor is x itself if
// its strides allow it, and a contiguous copy otherwise.
Rows as_rows(const Tensor &x, int64_t row_dims);

// Copies `from` into `to`, and returns `to`. Does nothing if they are the same tensor.
Tensor copy_into(const Tensor &to, const Tensor &from);

// Returns the value of an int64 tensor of one element. For a CUDA tensor, the call waits for the
// GPU.
int64_t number_of(const Tensor &x);

// Fails if elements of `x`, which the op writes, share memory, as in an expanded tensor.
void check_writable(const char *op, const char *name, const Tensor &x);

// Fails if the dense tensors `written` and `x` overlap without being the same. Tensors that are not
// dense are not checked: they are copied before or after the kernel, so overlap does no harm.
void check_no_partial_overlap(const char *op, const char *written_name, const Tensor &written,
                              const char *name, const Tensor &x);

// ---- launch ----

template <typename Args>
struct Kernel {
  void (*cpu)(int64_t begin, int64_t end, void *args);
  int (*cuda)(const Args *args, void *stream);
};

// KERNEL(muladd_forward) expands to a Kernel with the functions muladd_forward_cpu and, in a build
// with CUDA, muladd_forward_cuda.
#ifdef WITH_CUDA
#define KERNEL(name) \
  ::extension_cpp::Kernel<name##_args> { name##_cpu, name##_cuda }
// Expands to name_cuda or name_cpu, depending on the device of x.
#define ON_DEVICE_OF(x, name) ((x).is_cuda() ? name##_cuda : name##_cpu)
#else
#define KERNEL(name) \
  ::extension_cpp::Kernel<name##_args> { name##_cpu, nullptr }
#define ON_DEVICE_OF(x, name) name##_cpu
#endif

void parallel_for(int64_t items, int64_t grain, void (*kernel)(int64_t, int64_t, void *),
                  void *args);
void *current_cuda_stream(const Tensor &x);
void check_cuda(const char *op, int error);

// Runs the kernel on x's device. On the CPU it runs over `items` work items, with at least `grain`
// items per thread. An op must return before this call if it has no work, because a CUDA grid of 0
// CTAs is an error. On the CPU, launch() therefore fails for 0 items, so that tests without a GPU
// find a missing return, too.
template <typename Args>
void launch(const char *op, const Kernel<Args> &kernel, Args &args, const Tensor &x, int64_t items,
            int64_t grain) {
  if (!x.is_cuda()) {
    if (items <= 0)
      fail(op, "the kernel was launched for nothing: return early if there is no work");
    return parallel_for(items, grain, kernel.cpu, &args);
  }
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  check_cuda(op, kernel.cuda(&args, current_cuda_stream(x)));
}

// The time of one exp, in units of the time that the memory traffic of one element takes.
constexpr int64_t EXP_COST = 8;

// Returns the smallest number of chunks per CPU thread. So many chunks have about 128 KiB of memory
// traffic if each element takes `bytes` bytes.
inline int64_t flat_grain(int64_t bytes) { return ceil_div(128 << 10, CHUNK * bytes); }

// Calls launch() for an element-wise op over args.numel elements of `bytes` bytes of traffic each.
template <typename Args>
void launch_flat(const char *op, const Kernel<Args> &kernel, Args &args, const Tensor &x,
                 int64_t bytes) {
  launch(op, kernel, args, x, ceil_div(args.numel, CHUNK), flat_grain(bytes));
}

// ---- registration ----

using torch::stable::detail::StableLibrary;
using BoxedKernel = void (*)(StableIValue *, uint64_t, uint64_t);

// A type as a schema spells it, such as "int?", and the C++ type for it.
struct Type {
  std::string schema, cpp;
};
using Types = Type (*const *)();  // an array that ends with nullptr

template <typename T>
struct TypeOf {
  static_assert(
      sizeof(T) == 0,
      "no type of a schema is this C++ type: int is int64_t, float double, a list a vector");
};
#define TYPE_IN_SCHEMA(name, ...)                      \
  template <>                                          \
  struct TypeOf<__VA_ARGS__> {                         \
    static Type get() { return {name, #__VA_ARGS__}; } \
  };
TYPE_IN_SCHEMA("Tensor", Tensor)
TYPE_IN_SCHEMA("int", int64_t)
TYPE_IN_SCHEMA("float", double)
TYPE_IN_SCHEMA("bool", bool)
TYPE_IN_SCHEMA("str", std::string)
TYPE_IN_SCHEMA("ScalarType", ScalarType)
#undef TYPE_IN_SCHEMA
template <typename T>
struct TypeOf<std::optional<T>> {
  static Type get() {
    return {TypeOf<T>::get().schema + "?", "std::optional<" + TypeOf<T>::get().cpp + ">"};
  }
};
template <typename T>
struct TypeOf<std::vector<T>> {
  static Type get() {
    return {TypeOf<T>::get().schema + "[]", "std::vector<" + TypeOf<T>::get().cpp + ">"};
  }
};

template <typename... T>
constexpr Type (*TYPES_OF[])() = {TypeOf<std::remove_cv_t<std::remove_reference_t<T>>>::get...,
                                  nullptr};
template <typename T>
struct ResultsOf {
  static constexpr Types types = TYPES_OF<T>;
};
template <>
struct ResultsOf<void> {
  static constexpr Types types = TYPES_OF<>;
};
template <typename... T>
struct ResultsOf<std::tuple<T...>> {
  static constexpr Types types = TYPES_OF<T...>;
};

// The types of a C++ function, and its boxed form. DEF compares the types with a schema.
struct Function {
  Types arguments, results;
  BoxedKernel kernel;
};
template <auto function>
struct FunctionOf;
template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct FunctionOf<function> {
  static constexpr Function value{TYPES_OF<Arguments...>, ResultsOf<Result>::types,
                                  TORCH_BOX(function)};
};

// DEF(m, "relu(Tensor x) -> Tensor", &relu) defines an operator with the schema "name(arguments) ->
// results". DEF compares the schema with the C++ function: the type of each argument and result,
// and their number. PyTorch does not compare them. If they differ, PyTorch reads the bits of one
// type as those of another at each call. DEF therefore does not define such an operator, and the
// import of the package raises the reason. (DEF must not throw, because no frame between here and
// Python would catch the exception, which would end the process.)
#define DEF(m, schema, ...) \
  ::extension_cpp::def(m, schema, ::extension_cpp::FunctionOf<__VA_ARGS__>::value)

// Does the same as DEF for a differentiable operator, and also defines its no-grad overload. The
// overload is the operator <name>_no_grad, with the same arguments but without an Autograd kernel,
// for calls that record no gradient. By default the overload has the same results and kernel. With
// DEF_WITH_FEWER_RESULTS(m, schema, &function, "Tensor", &no_grad_function) it returns only the
// leading results, because only backward reads the others. A third operator, <name>_all_results,
// then returns all results. This operator has no Autograd kernel either: an autograd.Function calls
// it.
#define DEF_WITH_NO_GRAD(m, schema, ...) \
  ::extension_cpp::def_with_no_grad(m, schema, ::extension_cpp::FunctionOf<__VA_ARGS__>::value)
#define DEF_WITH_FEWER_RESULTS(m, schema, function, no_grad_results, no_grad_function)             \
  ::extension_cpp::def_with_fewer_results(m, schema, ::extension_cpp::FunctionOf<function>::value, \
                                          no_grad_results,                                         \
                                          ::extension_cpp::FunctionOf<no_grad_function>::value)

void def(StableLibrary &m, const std::string &schema, const Function &function);
void def_with_no_grad(StableLibrary &m, const char *schema, const Function &function);
void def_with_fewer_results(StableLibrary &m, const char *schema, const Function &function,
                            const char *no_grad_results, const Function &no_grad_function);
// Defines an operator that Python implements, and its overloads. `no_grad_results` is nullptr if
// the no-grad overload returns all results.
void def_in_python(StableLibrary &m, const char *schema, const char *no_grad_results = nullptr);

// Registers `kernel` for the operator `name`. `kernel` must be made from the function given to DEF.
void impl(StableLibrary &m, const std::string &name, BoxedKernel kernel);
void impl_with_no_grad(StableLibrary &m, const std::string &name, BoxedKernel kernel,
                       BoxedKernel no_grad_kernel = nullptr);

// Registers a list of kernels for the dispatch key CPU and, in a build with CUDA, also for CUDA:
//   REGISTER_KERNELS(m) { impl_with_no_grad(m, "relu", TORCH_BOX(&relu)); }
// The macro's function has a unique name, because several shims may be compiled as one file.
#define REGISTER_KERNELS(m) REGISTER_BY(C10_CONCATENATE(register_kernels_, C10_UID), m)
#define REGISTER_BY(function, m)                                           \
  static void function(::extension_cpp::StableLibrary &);                  \
  REGISTER_CUDA(function)                                                  \
  STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) { function(m); } \
  static void function(::extension_cpp::StableLibrary &m)
#ifdef WITH_CUDA
#define REGISTER_CUDA(function) \
  STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, m) { function(m); }
#else
#define REGISTER_CUDA(function)
#endif

}  // namespace extension_cpp

#endif

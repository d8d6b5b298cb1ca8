#include "common/shim/op.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <sstream>
#include <stdexcept>
#include <vector>

#ifdef WITH_CUDA
#include "common/cuda/error.h"
// The symbol is weak, so that a PyTorch without CUDA, which lacks it, can load the library.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void **stream);
#endif

namespace extension_cpp {

void fail(const char *op, const std::string &message) {
  throw std::runtime_error("extension_cpp::" + std::string(op) + ": " + message);
}

std::string to_string(Sizes sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

std::string device_string(const Tensor &x) {
  if (x.is_cpu()) return "cpu";
  return (x.is_cuda() ? "cuda:" : "device ") + std::to_string(x.get_device_index());
}

std::string dtype_string(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double: return "float64";
    case ScalarType::Float: return "float32";
    case ScalarType::Half: return "float16";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: break;  // for any other dtype, toString gives Python's name in capitals
  }
  std::string name = torch::headeronly::toString(dtype);
  for (char &c : name) c = static_cast<char>(std::tolower(c));
  return name;
}

// Python's None arrives as an undefined tensor. A storage has 0 bytes after
// x.untyped_storage().resize_(0), which FSDP calls to free parameters. The data pointer is then
// null or, in a view, the view's offset, so a kernel must not run.
void check_memory(const char *op, const char *name, const Tensor &x) {
  if (!x.defined()) fail(op, "expected " + std::string(name) + " to be a tensor, but got None");
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &bytes));
  if (bytes == 0 && x.numel() > 0) {
    fail(op, "expected " + std::string(name) + " to have memory for its " +
                 std::to_string(x.numel()) + " elements, but got a storage of 0 bytes");
  }
}

dtype_t check_dtype(const char *op, const char *name, const Tensor &x, const char *hint) {
  check_memory(op, name, x);
  switch (x.scalar_type()) {
    case ScalarType::Double: return DTYPE_FLOAT64;
    case ScalarType::Float: return DTYPE_FLOAT32;
    case ScalarType::BFloat16: return DTYPE_BFLOAT16;
    case ScalarType::Half: return DTYPE_FLOAT16;
    default:
      fail(op, "expected " + std::string(name) +
                   " to be float64, float32, bfloat16 or float16, but got " + dtype_string(x) +
                   hint);
  }
}

// Returns the type and the index of x's device.
static std::array<int32_t, 2> device_of(const Tensor &x) {
  std::array<int32_t, 2> device{};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device[0]));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device[1]));
  return device;
}

void check_device(const char *op, const char *name, const Tensor &x, const char *like_name,
                  const Tensor &like) {
  check_memory(op, name, x);
  if (device_of(x) != device_of(like)) {
    fail(op, "expected " + std::string(name) + " on " + device_string(like) + " like " + like_name +
                 ", but got " + device_string(x));
  }
}

void check_same(const char *op, const char *name, const Tensor &x, const char *like_name,
                const Tensor &like) {
  check_device(op, name, x, like_name, like);
  if (x.scalar_type() != like.scalar_type()) {
    fail(op, "expected " + std::string(name) + " to be " + dtype_string(like) + " like " +
                 like_name + ", but got " + dtype_string(x));
  }
}

dtype_t check_same_or_float32(const char *op, const char *name, const Tensor &x,
                              const char *like_name, const Tensor &like) {
  check_device(op, name, x, like_name, like);
  const bool is_half = like.element_size() < 4;
  if (x.scalar_type() != like.scalar_type() && !(is_half && x.scalar_type() == ScalarType::Float)) {
    fail(op, "expected " + std::string(name) + " to be " + dtype_string(like) + " like " +
                 like_name + (is_half ? " or float32" : "") + ", but got " + dtype_string(x));
  }
  return check_dtype(op, name, x);
}

void check_shape(const char *op, const char *name, const Tensor &x, const char *like_name,
                 const Tensor &like) {
  const Sizes a = x.sizes(), b = like.sizes();
  if (a.size() != b.size() || !std::equal(a.begin(), a.end(), b.begin())) {
    fail(op, "expected " + std::string(name) + " of shape " + to_string(b) + " like " + like_name +
                 ", but got " + to_string(a));
  }
}

void check_like(const char *op, const char *name, const Tensor &x, const char *like_name,
                const Tensor &like) {
  check_same(op, name, x, like_name, like);
  check_shape(op, name, x, like_name, like);
}

int64_t check_dim(const char *op, const Tensor &x, int64_t dim) {
  const int64_t dims = std::max<int64_t>(x.dim(), 1);
  if (dim < -dims || dim >= dims) {
    fail(op, "expected dim in [" + std::to_string(-dims) + ", " + std::to_string(dims - 1) +
                 "], but got " + std::to_string(dim));
  }
  return dim < 0 ? dim + dims : dim;
}

void check_probability(const char *op, double p) {
  if (!(p >= 0 && p <= 1)) {
    std::ostringstream text;
    text << p;
    fail(op, "expected p to be between 0 and 1, but got " + text.str());
  }
}

void check_seed(const char *op, const Tensor &seed, const Tensor &x) {
  check_device(op, "seed", seed, "x", x);
  if (seed.scalar_type() != ScalarType::Long)
    fail(op, "expected seed to be int64, but got " + dtype_string(seed));
  if (seed.numel() != 1)
    fail(op, "expected seed to have one element, but got shape " + to_string(seed.sizes()));
}

dtype_t check_bias(const char *op, const Tensor &x, const Tensor &bias) {
  const dtype_t dtype = check_dtype(op, "x", x);
  check_same(op, "bias", bias, "x", x);
  if (x.dim() == 0) fail(op, "expected x to have at least one dimension, but got shape []");
  if (bias.dim() != 1 || bias.size(0) != x.size(-1)) {
    fail(op, "expected bias of shape [" + std::to_string(x.size(-1)) +
                 "], the last dimension of x, but got " + to_string(bias.sizes()));
  }
  return dtype;
}

ScalarType scalar_type(dtype_t dtype) {
  switch (dtype) {
    case DTYPE_FLOAT64: return ScalarType::Double;
    case DTYPE_FLOAT32: return ScalarType::Float;
    case DTYPE_BFLOAT16: return ScalarType::BFloat16;
    case DTYPE_FLOAT16: return ScalarType::Half;
  }
  return ScalarType::Undefined;
}

static int32_t shim_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double: return aoti_torch_dtype_float64();
    case ScalarType::Float: return aoti_torch_dtype_float32();
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case ScalarType::Half: return aoti_torch_dtype_float16();
    case ScalarType::Float8_e4m3fn: return aoti_torch_dtype_float8_e4m3fn();
    case ScalarType::Long: return aoti_torch_dtype_int64();
    case ScalarType::Int: return aoti_torch_dtype_int32();
    case ScalarType::Short: return aoti_torch_dtype_int16();
    case ScalarType::Char: return aoti_torch_dtype_int8();
    case ScalarType::Byte: return aoti_torch_dtype_uint8();
    case ScalarType::Bool: return aoti_torch_dtype_bool();
    default: fail("allocate", "expected a dtype of EVERY_DTYPE, but got " + dtype_string(dtype));
  }
}

// PyTorch has already printed why the allocation failed. The text begins like PyTorch's own
// out-of-memory error, because programs search for these words.
[[noreturn]] static void fail_to_allocate(Sizes sizes, const Tensor &like) {
  std::string text = like.is_cuda() ? "CUDA out of memory." : "Out of memory.";
  text += " extension_cpp tried to allocate a tensor of shape " + to_string(sizes);
  throw std::runtime_error(text + " on " + device_string(like));
}

Tensor allocate_strided(Sizes sizes, Sizes strides, ScalarType dtype, const Tensor &like) {
  const int32_t device =
      like.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  AtenTensorHandle handle;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               shim_dtype(dtype), device, like.get_device_index(), &handle);
  if (error != AOTI_TORCH_SUCCESS) fail_to_allocate(sizes, like);
  return Tensor(handle);
}

static std::vector<int64_t> contiguous_strides(Sizes sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

Tensor allocate(Sizes sizes, ScalarType dtype, const Tensor &like) {
  return allocate_strided(sizes, contiguous_strides(sizes), dtype, like);
}

// Does the same as PyTorch's is_non_overlapping_and_dense. In order of stride, each stride must be
// the product of the sizes of all dimensions with smaller strides.
bool is_dense(const Tensor &x) {
  if (x.is_contiguous()) return true;
  const Sizes sizes = x.sizes(), strides = x.strides();
  std::vector<size_t> order;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t expected = 1;
  for (const size_t i : order) {
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

// Returns 1 if dimension a of x must be outside of dimension b in memory, -1 if it must be inside,
// and 0 if sizes and strides do not decide.
static int compare_dims(const Tensor &x, size_t a, size_t b) {
  const int64_t stride_a = x.stride(a), stride_b = x.stride(b);
  if (stride_a == 0 || stride_b == 0) return 0;
  if (stride_a != stride_b) return stride_a < stride_b ? -1 : 1;
  return x.size(a) > x.size(b) ? 1 : 0;
}

// Returns the strides that PyTorch's element-wise operators give a result. These are x's own
// strides if x is dense, and dense strides in x's order of dimensions otherwise. The insertion sort
// is copied from PyTorch (infer_dense_strides in ATen/ExpandUtils.cpp), because another algorithm
// may choose a different order where several are possible.
static std::vector<int64_t> preserved_strides(const Tensor &x) {
  if (is_dense(x)) return {x.strides().begin(), x.strides().end()};
  const auto dims = static_cast<size_t>(x.dim());
  std::vector<size_t> order(dims);  // begins with the innermost dimension
  for (size_t i = 0; i < dims; ++i) order[i] = dims - 1 - i;
  for (size_t i = 1; i < dims; ++i) {
    for (size_t place = i, j = i; j-- > 0;) {
      const int comparison = compare_dims(x, order[j], order[place]);
      if (comparison < 0) break;
      if (comparison == 0) continue;
      std::swap(order[j], order[place]);
      place = j;
    }
  }
  std::vector<int64_t> strides(dims);
  int64_t stride = 1;
  for (const size_t d : order) {
    strides[d] = stride;
    stride *= std::max<int64_t>(x.size(d), 1);
  }
  return strides;
}

Tensor allocate_like(const Tensor &x) {
  return allocate_strided(x.sizes(), preserved_strides(x), x.scalar_type(), x);
}

// Returns whether two tensors of the same shape store their elements in the same order. Strides of
// dimensions of size 1 are ignored.
static bool same_strides(const Tensor &x, const Tensor &y) {
  const Sizes sizes = x.sizes(), a = x.strides(), b = y.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] != 1 && a[i] != b[i]) return false;
  }
  return true;
}

Tensor with_strides_of(const Tensor &x, const Tensor &like) {
  if (same_strides(x, like)) return x;
  Tensor copy = allocate_strided(x.sizes(), like.strides(), x.scalar_type(), x);
  torch::stable::copy_(copy, x);
  return copy;
}

Tensor as_contiguous(const Tensor &x) {
  return x.is_contiguous() ? x : torch::stable::contiguous(x);
}

Tensor as_expanded(const Tensor &x, Sizes sizes) {
  const auto has_shape = x.dim() == static_cast<int64_t>(sizes.size()) &&
                         std::equal(sizes.begin(), sizes.end(), x.sizes().begin());
  return has_shape ? as_contiguous(x) : copy_into(allocate(sizes, x.scalar_type(), x), x);
}

// Returns the stride between x's rows, or -1 if the strides do not describe rows without overlap.
static int64_t row_stride(const Tensor &x, int64_t row_dims) {
  int64_t cols = 1, d = x.dim() - 1;
  for (; d >= x.dim() - row_dims; cols *= x.size(d--)) {
    if (x.size(d) != 1 && x.stride(d) != cols) return -1;
  }
  int64_t stride = -1;
  for (int64_t expected = 0; d >= 0; expected *= x.size(d--)) {
    if (x.size(d) == 1) continue;
    if (stride < 0) {
      stride = expected = x.stride(d);
      if (stride < cols) return -1;
    } else if (x.stride(d) != expected) {
      return -1;
    }
  }
  return stride < 0 ? cols : stride;
}

Rows as_rows(const Tensor &x, int64_t row_dims) {
  const int64_t stride = row_stride(x, row_dims);
  if (stride >= 0) return {x, stride};
  const Tensor copy = torch::stable::contiguous(x);
  return {copy, row_stride(copy, row_dims)};
}

int64_t number_of(const Tensor &x) {
  int64_t number;
  TORCH_ERROR_CODE_CHECK(aoti_torch_item_int64(x.get(), &number));
  return number;
}

Tensor copy_into(const Tensor &to, const Tensor &from) {
  Tensor target = to;
  return to.get() == from.get() ? to : torch::stable::copy_(target, from);
}

void check_writable(const char *op, const char *name, const Tensor &x) {
  for (int64_t i = 0; i < x.dim(); ++i) {
    if (x.size(i) > 1 && x.stride(i) == 0) {
      fail(op, "expected " + std::string(name) + " without internal overlap, but got stride 0 in " +
                   "dimension " + std::to_string(i));
    }
  }
}

void check_no_partial_overlap(const char *op, const char *written_name, const Tensor &written,
                              const char *name, const Tensor &x) {
  if (written.numel() == 0 || !is_dense(written) || !is_dense(x)) return;
  const auto a = reinterpret_cast<uintptr_t>(written.const_data_ptr()),
             b = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  if (a == b && same_strides(written, x)) return;
  if (a < b + x.numel() * x.element_size() && b < a + written.numel() * written.element_size()) {
    fail(op, "expected " + std::string(written_name) + " to be " + name +
                 " itself or to share no memory with it, but they overlap in part");
  }
}

void parallel_for(int64_t items, int64_t grain, void (*kernel)(int64_t, int64_t, void *),
                  void *args) {
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, items, grain, kernel, args));
}

#ifdef WITH_CUDA
void *current_cuda_stream(const Tensor &x) {
  void *stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return stream;
}

void check_cuda(const char *op, int error) {
  if (error != 0)
    fail(op, std::string("the CUDA kernel was not launched: ") + cuda_error_string(error));
}
#else
void *current_cuda_stream(const Tensor &) { return nullptr; }
void check_cuda(const char *op, int) { fail(op, "built without CUDA"); }
#endif

}  // namespace extension_cpp

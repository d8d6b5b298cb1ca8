// Fills the argument struct of a kernel that `new --schema` wrote. If an optional argument is None,
// its pointer stays NULL and its count 0.
#ifndef EXTENSION_CPP_FIELDS_H
#define EXTENSION_CPP_FIELDS_H

#include <algorithm>

#include "common/shim/match.h"

namespace extension_cpp {

inline std::optional<Tensor> as_contiguous(const std::optional<Tensor> &x) {
  return x ? std::optional<Tensor>(as_contiguous(*x)) : std::nullopt;
}

inline std::optional<Tensor> as_expanded(const std::optional<Tensor> &x, Sizes sizes) {
  return x ? std::optional<Tensor>(as_expanded(*x, sizes)) : std::nullopt;
}

inline void set_input(const Tensor &x, const void *&data, int64_t &numel) {
  data = x.const_data_ptr();
  numel = x.numel();
}

inline void set_input(const std::optional<Tensor> &x, const void *&data, int64_t &numel) {
  if (x) set_input(*x, data, numel);
}

inline void set_output(const Tensor &x, void *&data, int64_t &numel) {
  data = x.mutable_data_ptr();
  numel = x.numel();
}

// Copies a list of numbers. Match::length has checked that it is no longer than the array.
template <typename T, size_t size, typename... Count>
void set_numbers(const std::vector<T> &values, T (&array)[size], Count &...count) {
  std::copy(values.begin(), values.end(), array);
  ((count = static_cast<int64_t>(values.size())), ...);
}

template <typename T, size_t size, typename... Count>
void set_numbers(const std::optional<std::vector<T>> &values, T (&array)[size], Count &...count) {
  if (values) set_numbers(*values, array, count...);
}

// Returns the sizes of the gradient of an optional tensor x. Without x it has no elements.
inline std::vector<int64_t> gradient_sizes(const std::optional<Tensor> &x) {
  return x ? sizes_of(x->sizes()) : std::vector<int64_t>{0};
}
inline std::vector<int64_t> gradient_sizes(const std::optional<std::vector<int64_t>> &x_sizes) {
  return x_sizes.value_or(std::vector<int64_t>{0});
}

}  // namespace extension_cpp

#endif

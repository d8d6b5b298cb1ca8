// Checks the tensor arguments of an operator against a description of each one, in the order of the
// schema:
//
//   Match match("topk_gate");
//   match("logits", logits, FLOATING, "[*, experts]");
//   match("bias", bias, SAME, "[experts]");
//   match("mask", mask, BOOL, "broadcasts to logits");
//   const int64_t experts = match.size("experts");
//
// registration/match.py does the same for fakes, with the same error messages.
#ifndef EXTENSION_CPP_MATCH_H
#define EXTENSION_CPP_MATCH_H

#include <deque>
#include <string_view>

#include "common/shim/op.h"

namespace extension_cpp {

// The dtypes that an argument may have: a set of dtypes, or SAME, which is the dtype of the first
// tensor. With SAME, the first tensor must be floating point.
struct Dtypes {
  uint64_t any;  // bit i is set if ScalarType i is allowed
  bool same = false, or_float32 = false;
};

template <typename... Types>
constexpr Dtypes any_of(Types... types) {
  return {((uint64_t{1} << static_cast<int>(types)) | ...)};
}

constexpr Dtypes FLOATING =
    any_of(ScalarType::Double, ScalarType::Float, ScalarType::BFloat16, ScalarType::Half);
constexpr Dtypes INT64 = any_of(ScalarType::Long), BOOL = any_of(ScalarType::Bool);
// SAME_OR_FLOAT32 also allows float32 if the first tensor has a half type
constexpr Dtypes SAME{0, true}, SAME_OR_FLOAT32{0, true, true};

class Match {
 public:
  explicit Match(const char *op) : op_(op) {}

  // Fails unless x is on the first tensor's device, has one of these dtypes, and has this shape:
  //   "[rows, 4, *]"          A number is the size itself. A name stands for a size, and * for the
  //                           sizes of any number of dimensions. Where a name or * occurs again, it
  //                           stands for the same sizes.
  //   "like x"                the shape of the tensor that was given as x
  //   "broadcasts to x"       a shape that PyTorch can broadcast to the shape of x
  //   ""                      any shape
  void operator()(const char *name, const Tensor &x, Dtypes dtypes, const char *shape = "");
  void operator()(const char *name, const std::optional<Tensor> &x, Dtypes dtypes,
                  const char *shape = "");  // None is accepted without a check
  void operator()(const char *name, const std::vector<Tensor> &list, Dtypes dtypes,
                  // Checks every tensor of the list. In messages, tensor i is named name[i].
                  const char *shape = "");
  // If a list is the first argument, all its tensors must have the same dtype. "like xs", for
  // another list xs, means that both lists have one length and that tensor i has the shape of
  // xs[i].

  // Fails if a value of the int64 tensor x is negative, or n or more. The message gives the
  // position of the first such value. Only CPU tensors are read, because on a GPU the call would
  // have to wait for the data. A CUDA kernel must skip such values itself.
  void index(const char *name, const Tensor &x, int64_t n) const;

  // Fails unless x has these sizes. The error message calls them the sizes of the result `like`.
  void sizes(const char *name, const Tensor &x, Sizes sizes, const char *like) const;

  // Fails unless a list of numbers, which has `length` values, has from `least` to `most` of them.
  void length(const char *name, size_t length, size_t least, size_t most) const;
  template <typename T>
  void length(const char *name, const std::vector<T> &list, size_t least, size_t most) const {
    length(name, list.size(), least, most);
  }
  template <typename T>  // None is accepted
  void length(const char *name, const std::optional<T> &list, size_t least, size_t most) const {
    if (list) length(name, *list, least, most);
  }

  // Returns the dtype of the first tensor, which must be floating point.
  dtype_t dtype() const { return check_dtype(op_, given_[0].name, *given_[0].tensor); }

  // Returns the size that a name stands for, or the product of the sizes that * stands for.
  int64_t size(std::string_view name) const;

 private:
  struct Given {
    const char *name;
    const Tensor *tensor;
  };
  struct List {
    const char *name;
    size_t length, first;  // place of its first tensor in given_
  };
  // A name in a pattern, or *, and the sizes that it stands for: those of dimensions [begin, end)
  // of the first tensor whose pattern contains it.
  struct Bound {
    std::string_view name;
    Given of;
    int64_t begin, end;
    Sizes sizes() const;
    std::string place() const;  // text for messages, such as "the last dimension of x"; may be ""
  };

  const Bound *find(std::string_view name) const;
  void check_dtypes(const char *name, const Tensor &x, Dtypes dtypes) const;
  void check_pattern(const char *name, const Tensor &x, std::string_view pattern);
  void check_relation(const char *name, const Tensor &x, std::string_view relation) const;
  [[noreturn]] void fail_shape(const char *name, const Tensor &x,
                               const std::vector<std::string_view> &words) const;

  const char *op_;
  std::vector<Given> given_;
  std::vector<Bound> bound_;
  std::vector<List> lists_;
  std::deque<std::string> names_;  // names of the tensors in lists; given_ points to these strings
};

// The functions below make sizes. joined({sizes_of(x.sizes(), 0, -1), {k}}), for example, gives the
// sizes of x with the last one replaced by k.

// Returns the sizes of dimensions [begin, end). Negative indices count from the end.
std::vector<int64_t> sizes_of(Sizes sizes, int64_t begin = 0, int64_t end = INT64_MAX);
int64_t size_of(Sizes sizes, int64_t dim);
std::vector<int64_t> joined(const std::vector<std::vector<int64_t>> &parts);
int64_t product_of(const std::vector<int64_t> &sizes);

}  // namespace extension_cpp

#endif

// Checks the tensors that an operator was given by what each of them is, in the schema's order:
//
//   Match match("topk_gate");
//   match("logits", logits, FLOATING, "[*, experts]");
//   match("bias", bias, SAME, "[experts]");
//   match("mask", mask, BOOL, "broadcasts to logits");
//   const int64_t experts = match.size("experts");
//
// registration/match.py is its twin for fakes, with the same sentences.
#ifndef EXTENSION_CPP_MATCH_H
#define EXTENSION_CPP_MATCH_H

#include <deque>
#include <string_view>

#include "common/shim/op.h"

namespace extension_cpp {

// The dtypes that an argument may have: a set of them, or SAME, that of the first tensor, which is
// then floating.
struct Dtypes {
  uint64_t any;  // bit i: the ScalarType i
  bool same = false, or_float32 = false;
};

template <typename... Types>
constexpr Dtypes any_of(Types... types) {
  return {((uint64_t{1} << static_cast<int>(types)) | ...)};
}

constexpr Dtypes FLOATING =
    any_of(ScalarType::Double, ScalarType::Float, ScalarType::BFloat16, ScalarType::Half);
constexpr Dtypes INT64 = any_of(ScalarType::Long), BOOL = any_of(ScalarType::Bool);
constexpr Dtypes SAME{0, true}, SAME_OR_FLOAT32{0, true, true};  // the latter if that is half

class Match {
 public:
  explicit Match(const char *op) : op_(op) {}

  // Fails unless x is on the first tensor's device and has one of these dtypes and this shape:
  //   "[rows, 4, *]"          an integer is that size. A name, and * for any number of dimensions,
  //                           stands for the sizes that it had where it first occurred.
  //   "like x"                the shape of the tensor that was given as x
  //   "broadcasts to x"       a shape that PyTorch broadcasts to that of x
  //   ""                      any shape
  void operator()(const char *name, const Tensor &x, Dtypes dtypes, const char *shape = "");
  void operator()(const char *name, const std::optional<Tensor> &x, Dtypes dtypes,
                  const char *shape = "");  // None is allowed
  void operator()(const char *name, const std::vector<Tensor> &list, Dtypes dtypes,
                  const char *shape = "");  // each tensor; in messages it is name[i]
  // The tensors of the first list have one dtype. "like xs" of another list xs: as many tensors,
  // and each of the shape of its xs[i].

  // Fails if a number of the int64 tensor x is negative, or n or more; the message says where the
  // first is. Numbers are read on the CPU alone, because on a GPU the call would wait for it: a
  // kernel must leave out what is no index.
  void index(const char *name, const Tensor &x, int64_t n) const;

  // Fails unless x has these sizes, which are those of the result `like`.
  void sizes(const char *name, const Tensor &x, Sizes sizes, const char *like) const;

  // The first tensor's element type, which is floating.
  dtype_t dtype() const { return check_dtype(op_, given_[0].name, *given_[0].tensor); }

  // The size, or the product of the sizes, that a name or * stands for.
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
  // The sizes of dimensions [begin, end) of a tensor.
  struct Bound {
    std::string_view name;
    Given of;
    int64_t begin, end;
    Sizes sizes() const;
    std::string place() const;  // "the last dimension of x"; "" where no words say it
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
  std::deque<std::string> names_;  // names of tensors in lists; given_ points to them
};

// ---- shapes of results ----
// joined({sizes_of(x.sizes(), 0, -1), {k}}): the sizes of x, but k as the last one.

// Sizes [begin, end). Negative numbers count from the end.
std::vector<int64_t> sizes_of(Sizes sizes, int64_t begin = 0, int64_t end = INT64_MAX);
int64_t size_of(Sizes sizes, int64_t dim);
std::vector<int64_t> joined(const std::vector<std::vector<int64_t>> &parts);
int64_t product_of(const std::vector<int64_t> &sizes);

}  // namespace extension_cpp

#endif

#include "common/shim/match.h"

#include <algorithm>

namespace extension_cpp {

static std::string text_of(std::string_view word) { return std::string(word); }

// Returns the names of the dtypes as text, such as "float64, float32, bfloat16 or float16".
static std::string names_of(Dtypes dtypes) {
  std::string text;
  int left = 0;
  for (const ScalarType type : EVERY_DTYPE) left += dtypes.any >> static_cast<int>(type) & 1;
  for (const ScalarType type : EVERY_DTYPE) {
    if (!(dtypes.any >> static_cast<int>(type) & 1)) continue;
    text += (text.empty() ? "" : left == 1 ? " or " : ", ") + dtype_string(type);
    --left;
  }
  return text;
}

static bool is_number(std::string_view word) { return word[0] >= '0' && word[0] <= '9'; }

// Splits a pattern such as "[rows, 4, *]" into its words.
static std::vector<std::string_view> words_of(std::string_view pattern) {
  std::vector<std::string_view> words;
  for (size_t begin = 1; begin < pattern.size() - 1;) {
    const size_t end = std::min(pattern.find(',', begin), pattern.size() - 1);
    words.push_back(pattern.substr(begin, end - begin));
    begin = end + 2;  // skips ", "
  }
  return words;
}

static bool same_sizes(Sizes a, Sizes b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

Sizes Match::Bound::sizes() const {
  return {of.tensor->sizes().data() + begin, static_cast<size_t>(end - begin)};
}

std::string Match::Bound::place() const {
  const int64_t dims = of.tensor->dim(), left = dims - end;
  if (name != "*") {
    return (end == dims ? "the last dimension" : "dimension " + std::to_string(begin)) + " of " +
           of.name;
  }
  if (begin > 0 || left == 0) return "";
  return std::string(of.name) + " without its last " +
         (left == 1 ? "dimension" : std::to_string(left) + " dimensions");
}

const Match::Bound *Match::find(std::string_view name) const {
  for (const Bound &bound : bound_) {
    if (bound.name == name) return &bound;
  }
  return nullptr;
}

int64_t Match::size(std::string_view name) const {
  const Bound *bound = find(name);
  if (bound == nullptr) fail(op_, "no tensor has a dimension " + text_of(name));
  return product_of(sizes_of(bound->sizes()));
}

std::vector<int64_t> sizes_of(Sizes sizes, int64_t begin, int64_t end) {
  const auto dims = static_cast<int64_t>(sizes.size());
  const auto place = [dims](int64_t i) {
    return std::clamp<int64_t>(i < 0 ? i + dims : i, 0, dims);
  };
  const int64_t first = place(begin), last = std::max(first, place(end));
  return {sizes.begin() + first, sizes.begin() + last};
}

int64_t size_of(Sizes sizes, int64_t dim) {
  return sizes.at(dim < 0 ? dim + static_cast<int64_t>(sizes.size()) : dim);
}

std::vector<int64_t> joined(const std::vector<std::vector<int64_t>> &parts) {
  std::vector<int64_t> sizes;
  for (const auto &part : parts) sizes.insert(sizes.end(), part.begin(), part.end());
  return sizes;
}

int64_t product_of(const std::vector<int64_t> &sizes) {
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}

void Match::check_dtypes(const char *name, const Tensor &x, Dtypes dtypes) const {
  if (!given_.empty()) {
    const Given &first = given_.front();
    if (dtypes.or_float32) {
      check_same_or_float32(op_, name, x, first.name, *first.tensor);
      return;
    }
    if (dtypes.same) return check_same(op_, name, x, first.name, *first.tensor);
    check_device(op_, name, x, first.name, *first.tensor);
  }
  check_memory(op_, name, x);
  if (dtypes.same) dtypes = FLOATING;
  if (!(dtypes.any >> static_cast<int>(x.scalar_type()) & 1)) {
    fail(op_, "expected " + std::string(name) + " to be " + names_of(dtypes) + ", but got " +
                  dtype_string(x.scalar_type()));
  }
}

void Match::operator()(const char *name, const Tensor &x, Dtypes dtypes, const char *shape) {
  check_dtypes(name, x, dtypes);
  given_.push_back({name, &x});
  if (*shape == '[')
    check_pattern(name, x, shape);
  else if (*shape != 0)
    check_relation(name, x, shape);
}

void Match::operator()(const char *name, const std::optional<Tensor> &x, Dtypes dtypes,
                       const char *shape) {
  if (x) (*this)(name, *x, dtypes, shape);
}

void Match::operator()(const char *name, const std::vector<Tensor> &list, Dtypes dtypes,
                       const char *shape) {
  const bool is_first = given_.empty();
  const std::string relation = shape;
  std::optional<List> like;
  for (const List &other : lists_) {
    if (relation == std::string("like ") + other.name) like = other;
  }
  if (like && like->length != list.size()) {
    fail(op_, std::string("expected ") + name + " to have as many tensors as " + like->name + ", " +
                  std::to_string(like->length) + ", but got " + std::to_string(list.size()));
  }
  lists_.push_back({name, list.size(), given_.size()});
  for (size_t i = 0; i < list.size(); ++i) {
    names_.push_back(name + ("[" + std::to_string(i) + "]"));
    const char *each = names_.back().c_str();
    (*this)(each, list[i], is_first && i > 0 ? SAME : dtypes, like ? "" : shape);
    if (!like) continue;
    const Given &other = given_[like->first + i];
    check_shape(op_, each, list[i], other.name, *other.tensor);
  }
}

void Match::fail_shape(const char *name, const Tensor &x,
                       const std::vector<std::string_view> &words) const {
  const bool any_dims = std::find(words.begin(), words.end(), "*") != words.end();
  std::string text = "[", place;
  bool is_free = true;
  for (const std::string_view word : words) {
    const Bound *bound = find(word);
    is_free = is_free && bound == nullptr && !is_number(word);
    std::string sizes = text_of(word);
    if (bound != nullptr) {
      sizes = to_string(bound->sizes());
      sizes = sizes.substr(1, sizes.size() - 2);
      if (words.size() == 1) place = bound->place();
    }
    text += (text.size() > 1 && !sizes.empty() ? ", " : "") + sizes;
  }
  const std::string got = to_string(x.sizes());
  if (is_free && any_dims) {
    const size_t least = words.size() - 1;
    fail(op_, "expected " + std::string(name) + " to have at least " +
                  (least == 1 ? "one dimension" : std::to_string(least) + " dimensions") +
                  ", but got shape " + got);
  }
  fail(op_, "expected " + std::string(name) + " of shape " + text + "]" +
                (place.empty() ? "" : ", " + place) + ", but got " + got);
}

void Match::check_pattern(const char *name, const Tensor &x, std::string_view pattern) {
  const std::vector<std::string_view> words = words_of(pattern);
  const Sizes sizes = x.sizes();
  const bool any_dims = std::find(words.begin(), words.end(), "*") != words.end();
  const int64_t named = static_cast<int64_t>(words.size()) - any_dims;
  if (any_dims ? x.dim() < named : x.dim() != named) fail_shape(name, x, words);
  const size_t known = bound_.size();
  int64_t d = 0;
  for (const std::string_view word : words) {
    const Bound here{word, given_.back(), d, d + (word == "*" ? x.dim() - named : 1)};
    d = here.end;
    const Bound *before = find(word);
    const bool fits = is_number(word)     ? std::to_string(sizes[here.begin]) == word
                      : before != nullptr ? same_sizes(here.sizes(), before->sizes())
                                          : true;
    if (!fits) {
      bound_.resize(known, here);  // so that the message names only sizes of earlier tensors
      fail_shape(name, x, words);
    }
    if (before == nullptr && !is_number(word)) bound_.push_back(here);
  }
}

void Match::check_relation(const char *name, const Tensor &x, std::string_view relation) const {
  const std::string_view like = relation.substr(relation.rfind(' ') + 1);
  const auto other = std::find_if(given_.begin(), given_.end(),
                                  [&](const Given &given) { return given.name == like; });
  if (other == given_.end()) return;  // the tensor to compare with is optional and was not given
  if (relation.substr(0, 5) == "like ")
    return check_shape(op_, name, x, other->name, *other->tensor);
  const Sizes from = x.sizes(), to = other->tensor->sizes();
  bool fits = from.size() <= to.size();
  for (size_t i = 1; fits && i <= from.size(); ++i) {
    fits = from[from.size() - i] == 1 || from[from.size() - i] == to[to.size() - i];
  }
  if (!fits) {
    fail(op_, "expected " + std::string(name) + " of a shape that broadcasts to " + to_string(to) +
                  " of " + other->name + ", but got " + to_string(from));
  }
}

void Match::sizes(const char *name, const Tensor &x, Sizes sizes, const char *like) const {
  if (!same_sizes(x.sizes(), sizes)) {
    fail(op_, "expected " + std::string(name) + " of shape " + to_string(sizes) + " like " + like +
                  ", but got " + to_string(x.sizes()));
  }
}

void Match::length(const char *name, size_t length, size_t least, size_t most) const {
  if (length < least || length > most) {
    fail(op_, std::string("expected ") + name + " to have " + (least == most ? "" : "at most ") +
                  std::to_string(most) + (most == 1 ? " value" : " values") + ", but got " +
                  std::to_string(length));
  }
}

void Match::index(const char *name, const Tensor &x, int64_t n) const {
  if (!x.is_cpu() || x.numel() == 0) return;
  const Tensor numbers = as_contiguous(x);
  const auto *data = static_cast<const int64_t *>(numbers.const_data_ptr());
  const auto wrong =
      std::find_if(data, data + numbers.numel(), [n](int64_t i) { return i < 0 || i >= n; });
  if (wrong != data + numbers.numel()) {
    std::vector<int64_t> place = sizes_of(x.sizes());
    int64_t left = wrong - data;
    for (auto size = place.rbegin(); size != place.rend(); ++size) {
      const int64_t here = left % *size;
      left /= *size;
      *size = here;
    }
    fail(op_, "expected " + std::string(name) + " to have numbers from 0 to below " +
                  std::to_string(n) + ", but got " + std::to_string(*wrong) + " at " +
                  to_string({place.data(), place.size()}));
  }
}

}  // namespace extension_cpp

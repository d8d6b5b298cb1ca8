#include "scan/scan_shim.h"

#include <algorithm>

namespace extension_cpp {

ScanView::ScanView(const Tensor &like, int64_t dim, bool reverse, dtype_t dtype)
    : sizes_(like.sizes().begin(), like.sizes().end()),
      strides_(like.strides().begin(), like.strides().end()),
      dim_(dim),
      reverse_(reverse),
      dtype_(dtype) {
  if (sizes_.empty()) sizes_ = strides_ = {1};
  length_ = sizes_[dim];
  std::vector<int64_t> order;
  for (int64_t d = 0; d < static_cast<int64_t>(sizes_.size()); ++d) {
    if (d != dim && sizes_[d] != 1) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return strides_[a] > strides_[b]; });
  for (const int64_t d : order) {
    const bool outside = length_ > 1 && strides_[d] > strides_[dim];
    (outside ? outside_ : inside_).push_back(d);
    (outside ? outer_ : inner_) *= sizes_[d];
  }
}

// Finds the single stride that steps through these dimensions; false if there is none.
bool ScanView::merge(const std::vector<int64_t> &dims, const std::vector<int64_t> &strides,
                     int64_t *stride) const {
  *stride = 0;
  int64_t expected = -1;
  for (size_t i = dims.size(); i-- > 0;) {
    const int64_t d = dims[i];
    if (expected < 0) *stride = expected = strides[d];
    if (strides[d] != expected) return false;
    expected *= sizes_[d];
  }
  return true;
}

bool ScanView::describe(const std::vector<int64_t> &strides, scan_input *view) const {
  view->step = reverse_ ? -strides[dim_] : strides[dim_];
  return merge(outside_, strides, &view->outer) && merge(inside_, strides, &view->inner);
}

// The strides of x, broadcast to the result's shape. !has_dim: the scanned dimension has stride 0.
std::vector<int64_t> ScanView::strides_of(const Tensor &x, bool has_dim) const {
  std::vector<int64_t> strides(sizes_.size(), 0);
  int64_t d = static_cast<int64_t>(sizes_.size()) - 1;
  for (int64_t i = x.dim() - 1; i >= 0 && d >= 0; --i, --d) {
    if (!has_dim && d == dim_) --d;
    if (d >= 0 && x.size(i) != 1) strides[d] = x.stride(i);
  }
  return strides;
}

// The element at which a scan begins: the last step if it runs backward.
static const void *first_step(const Tensor &x, int64_t length, int64_t step) {
  const auto size = static_cast<int64_t>(x.element_size());
  return static_cast<const char *>(x.const_data_ptr()) +
         (step < 0 ? (1 - length) * step * size : 0);
}

scan_input ScanView::input(const Tensor &x) {
  scan_input view{};
  if (describe(strides_of(x, true), &view)) {
    view.data = first_step(x, length_, view.step);
    return view;
  }
  const Tensor copy = allocate_strided(sizes_, strides_, dtype_, x);
  copies_.push_back(copy_into(copy, x));
  describe(strides_, &view);
  view.data = first_step(copy, length_, view.step);
  return view;
}

scan_output ScanView::output(const Tensor &y) const {
  scan_input view{};
  describe(strides_, &view);
  return {const_cast<void *>(first_step(y, length_, view.step)), view.outer, view.step, view.inner};
}

// The result's dimensions without the scanned one, in the order that they have in its memory.
Tensor ScanView::allocate_lines(const Tensor &like) const {
  std::vector<int64_t> sizes = sizes_, strides(sizes_.size(), 1);
  int64_t stride = 1;
  for (const auto *dims : {&inside_, &outside_}) {
    for (size_t i = dims->size(); i-- > 0;) {
      strides[(*dims)[i]] = stride;
      stride *= sizes_[(*dims)[i]];
    }
  }
  sizes.erase(sizes.begin() + dim_);
  strides.erase(strides.begin() + dim_);
  return allocate_strided(sizes, strides, dtype_, like);
}

scan_input ScanView::line_input(const Tensor &x) {
  scan_input view{};
  if (describe(strides_of(x, false), &view)) {
    view.data = x.const_data_ptr();
    return view;
  }
  copies_.push_back(copy_into(allocate_lines(x), x));
  return line_input(copies_.back());
}

Tensor ScanView::line_output(const Tensor &y, scan_output *view) const {
  scan_input strides{};
  if (!describe(strides_of(y, false), &strides)) return line_output(allocate_lines(y), view);
  *view = {y.mutable_data_ptr(), strides.outer, 0, strides.inner};
  return y;
}

scan_cpu_plan plan_cpu(const scan_shape &shape, int64_t steps) {
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  // As many tiles for each thread, a multiple of 64 elements wide, and as wide as they may be: the
  // rows of a wide tile are long runs of memory.
  const int64_t columns = shape.outer * shape.inner;
  const int64_t tiles = ceil_div(ceil_div(columns, int64_t{SCAN_TILE}), threads) * threads;
  const int64_t share = ceil_div(columns, std::max<int64_t>(tiles, 1));
  const int64_t width = std::clamp<int64_t>(ceil_div(share, 64) * 64, 64, SCAN_TILE);
  scan_cpu_plan plan{std::min(width, shape.inner), 1, nullptr};
  if (scan_items(&shape, &plan) < threads)
    plan.parts = std::max<int64_t>(ceil_div(steps, SCAN_PART), 1);
  return plan;
}

int64_t scan_grain(const scan_shape &shape, const scan_cpu_plan &plan, int64_t bytes) {
  const int64_t steps = plan.parts > 1 ? int64_t{SCAN_PART} : shape.length;
  return ceil_div(64 << 10, std::max<int64_t>(steps * plan.width * bytes, 1));
}

}  // namespace extension_cpp

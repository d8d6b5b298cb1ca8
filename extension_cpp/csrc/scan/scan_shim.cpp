#include "scan/scan_shim.h"

#include <algorithm>

namespace extension_cpp::scan {

ScanView::ScanView(const Tensor &like, int64_t dim, bool reverse, dtype_t dtype)
    : sizes_(like.sizes().begin(), like.sizes().end()),
      dim_(dim),
      reverse_(reverse),
      dtype_(dtype) {
  if (sizes_.empty()) sizes_ = {1};
  for (int64_t d = 0; d < like.dim(); ++d) {
    if (d == dim || sizes_[d] == 1) continue;
    order_.push_back(d);
    if (sizes_[dim] > 1 && like.stride(d) > like.stride(dim)) ++outside_;
  }
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int64_t a, int64_t b) { return like.stride(a) > like.stride(b); });
}

// Returns the strides of x, broadcast to the result's shape. Without has_dim, x lacks the scanned
// dimension, whose stride is then 0.
std::vector<int64_t> ScanView::strides_of(const Tensor &x, bool has_dim) const {
  std::vector<int64_t> strides(sizes_.size(), 0);
  int64_t d = static_cast<int64_t>(sizes_.size()) - 1;
  for (int64_t i = x.dim() - 1; i >= 0 && d >= 0; --i, --d) {
    if (!has_dim && d == dim_) --d;
    if (d >= 0 && x.size(i) != 1) strides[d] = x.stride(i);
  }
  return strides;
}

// Returns the address at which a scan begins. In reverse (step < 0) this is the last step.
const void *ScanView::first_step(const Tensor &x, int64_t step) const {
  const auto size = static_cast<int64_t>(x.element_size());
  return static_cast<const char *>(x.const_data_ptr()) +
         (step < 0 ? (1 - sizes_[dim_]) * step * size : 0);
}

// Returns whether one stride steps through both of two neighbouring dimensions, in every operand.
bool ScanView::has_one_stride(int64_t outside, int64_t inside) const {
  return std::all_of(operands_.begin(), operands_.end(), [&](const Operand &operand) {
    return operand.strides[outside] == sizes_[inside] * operand.strides[inside];
  });
}

scan_shape ScanView::divide() {
  scan_shape shape{1, sizes_[dim_], 1, dtype_, nullptr, 0, nullptr};
  size_t outer_dims = order_.size();
  for (; outer_dims > outside_; --outer_dims) {
    const int64_t d = order_[outer_dims - 1];
    if (shape.inner > 1 && !has_one_stride(d, order_[outer_dims])) break;
    shape.inner *= sizes_[d];
  }
  // Neighbouring dimensions that one stride steps through: their total size, and the innermost one.
  struct Run {
    int64_t size, d;
  };
  std::vector<Run> runs;
  for (size_t i = 0; i < outer_dims; ++i) {
    const int64_t d = order_[i];
    if (i > 0 && has_one_stride(order_[i - 1], d)) {
      runs.back() = {runs.back().size * sizes_[d], d};
    } else {
      runs.push_back({sizes_[d], d});
    }
  }
  // The longest run becomes the innermost, so that jumps are rare: all rows of a CTA lie between
  // two jumps.
  auto longest = runs.begin();
  for (auto run = longest; run != runs.end(); ++run) {
    if (run->size >= longest->size) longest = run;
  }
  if (!runs.empty()) std::rotate(longest, longest + 1, runs.end());
  for (const Operand &operand : operands_) {
    *operand.outer = runs.empty() ? 0 : operand.strides[runs.back().d];
    *operand.inner = shape.inner > 1 ? operand.strides[order_.back()] : 0;
  }
  for (size_t i = runs.size(); i-- > 0;) {
    if (i + 1 < runs.size()) {
      scan_jump jump{shape.outer, {}};
      for (size_t o = 0; o < operands_.size(); ++o) {
        const std::vector<int64_t> &strides = operands_[o].strides;
        jump.by[o] = strides[runs[i].d] - runs[i + 1].size * strides[runs[i + 1].d];
      }
      jumps_.push_back(jump);
    }
    shape.outer *= runs[i].size;
  }
  shape.jump_count = static_cast<int64_t>(jumps_.size());
  shape.jumps = jumps_.data();
  return shape;
}

scan_cpu_plan plan_cpu(const scan_shape &shape, int64_t steps) {
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  // Every thread gets the same number of tiles. The width of a tile is a multiple of 64 elements,
  // and as large as SCAN_TILE allows, because then long runs of memory are read.
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

}  // namespace extension_cpp::scan

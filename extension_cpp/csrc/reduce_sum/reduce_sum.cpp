// reduce_sum: schema, checks, the plan of passes, allocation and registration. reduce_sum.h defines
// what the kernels compute.
//
// The plan follows x's layout in memory. Dimensions are sorted by stride, and dimensions of size 1
// are dropped. Neighbours that are both summed or both kept are merged into a group. A pass sums
// over one group. The pass over the largest group comes first, so that the next pass reads little.
// Between passes the sums stay in double. If a pass would keep few threads busy, or add too many
// terms in one chain, its group is cut into chunks, and a second launch adds up the sums of the
// chunks. The plan depends only on shapes and strides, never on the number of threads.
#include "reduce_sum/reduce_sum.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "common/shim/op.h"

namespace extension_cpp::reduce_sum {

struct Group {
  int64_t size;
  bool summed;
};

// Returns which dimensions are summed. None and () mean all. As in PyTorch, a 0-d tensor has the
// dimensions 0 and -1.
static std::vector<bool> summed_dims(const Tensor &x,
                                     const std::optional<std::vector<int64_t>> &dim) {
  if (!dim || dim->empty()) return std::vector<bool>(x.dim(), true);
  const int64_t dims = std::max<int64_t>(x.dim(), 1);
  std::vector<bool> summed(dims, false);
  for (const int64_t d : *dim) {
    if (d < -dims || d >= dims) {
      const std::string range = "[" + std::to_string(-dims) + ", " + std::to_string(dims - 1) + "]";
      fail("reduce_sum", "expected dim in " + range + ", but got " + std::to_string(d));
    }
    const int64_t index = d < 0 ? d + dims : d;
    if (summed[index])
      fail("reduce_sum", "expected each dim once, but got " + std::to_string(index) + " twice");
    summed[index] = true;
  }
  return summed;
}

// Returns the dimensions of x that are larger than 1, the outermost in memory first.
static std::vector<int64_t> memory_order(const Tensor &x) {
  std::vector<int64_t> order;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (x.size(d) != 1) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return x.stride(a) > x.stride(b); });
  return order;
}

static std::vector<Group> merge(const std::vector<Group> &groups) {
  std::vector<Group> merged;
  for (const Group &group : groups) {
    if (!merged.empty() && merged.back().summed == group.summed)
      merged.back().size *= group.size;
    else
      merged.push_back(group);
  }
  return merged;
}

static int64_t round_up(int64_t a, int64_t step) { return ceil_div(a, step) * step; }

// Returns the number of terms per chunk on the CPU. A sum is cut into at most 256 work items of at
// least 128 KiB each, but no chain in double has more than 1024 additions.
static int64_t plan_chunk_cpu(const reduce_sum_args &pass, int64_t element_size) {
  const int64_t tiles = reduce_sum_tiles(pass.inner),
                step = SUM_ROWS * reduce_sum_rows_as_one(pass.inner);
  const int64_t for_items = ceil_div(pass.outer * tiles * pass.reduce, 256);
  const int64_t for_bytes = ceil_div(128 << 10, pass.inner / tiles * element_size);
  return round_up(std::min(std::max(for_items, for_bytes), 1024 * step), step);
}

// Returns the number of terms per chunk on CUDA. No thread adds more than 8192 terms in one chain.
// If fewer than 1024 CTAs would run, a sum is cut into a few waves of CTAs. Each CTA then reads at
// least 32 KiB (64 KiB for columns), because it has 32 KiB in flight.
static int64_t plan_chunk_cuda(const reduce_sum_args &pass, int64_t element_size) {
  const bool rows = pass.inner == 1;
  const int64_t row_bytes = pass.inner * element_size, tiles = ceil_div(row_bytes, 512);
  const int64_t longest = rows ? 1 << 22 : 8192,
                step = ceil_div(32 << 10, std::min<int64_t>(row_bytes, 512));
  if (pass.outer * tiles >= 1024) return longest;
  const int64_t for_blocks = ceil_div(pass.outer * tiles * pass.reduce, rows ? 4096 : 2048);
  return round_up(std::min(std::max(for_blocks, rows ? step : 2 * step), longest), step);
}

static void launch_pass(const Tensor &x, reduce_sum_args &pass, int64_t element_size) {
  const int64_t tiles = reduce_sum_tiles(pass.inner);
  const int64_t item_bytes =
      std::max<int64_t>(pass.inner / tiles * element_size * std::min(pass.chunk, pass.reduce), 16);
  launch("reduce_sum", KERNEL(reduce_sum), pass, x, pass.outer * pass.chunks * tiles,
         ceil_div(128 << 10, item_bytes));
}

// Sums x (outer, reduce, inner) over reduce into out (outer, inner), in one or two launches.
static void run_pass(const Tensor &x, int64_t outer, int64_t reduce, int64_t inner,
                     const Tensor &out) {
  const dtype_t dtype = check_dtype("reduce_sum", "x", x),
                out_dtype = check_dtype("reduce_sum", "out", out);
  const auto element_size = static_cast<int64_t>(x.element_size());
  reduce_sum_args whole{x.const_data_ptr(),
                        out.mutable_data_ptr(),
                        outer,
                        reduce,
                        inner,
                        std::max<int64_t>(reduce, 1),
                        1,
                        dtype,
                        out_dtype};
  const int64_t chunk =
      x.is_cuda() ? plan_chunk_cuda(whole, element_size) : plan_chunk_cpu(whole, element_size);
  if (chunk >= reduce) return launch_pass(x, whole, element_size);
  // A warp reads 512 bytes at once. Shorter rows are joined in pairs while their number is even.
  // The second launch then also adds up the joined rows.
  int64_t as_one = 1;
  if (x.is_cuda() && inner > 1) {
    while (as_one * inner * element_size < 512 && reduce % (2 * as_one) == 0) as_one *= 2;
  }
  reduce_sum_args parts = whole;
  parts.reduce = reduce / as_one;
  parts.inner = inner * as_one;
  parts.chunk = ceil_div(chunk, as_one);
  parts.chunks = ceil_div(parts.reduce, parts.chunk);
  parts.out_dtype = DTYPE_FLOAT64;
  const std::vector<int64_t> sizes{outer, parts.chunks, parts.inner};
  const Tensor sums = allocate(sizes, DTYPE_FLOAT64, x);
  parts.out = sums.mutable_data_ptr();
  launch_pass(x, parts, element_size);
  whole.x = sums.const_data_ptr();
  whole.dtype = DTYPE_FLOAT64;
  whole.chunk = whole.reduce = parts.chunks * as_one;
  launch_pass(x, whole, sizeof(double));
}

// Sums x into out. `groups` is the layout of x, outermost first. out has the kept groups in this
// order.
static void run_passes(const Tensor &x, std::vector<Group> groups, const Tensor &out) {
  const auto is_summed = [](const Group &group) { return group.summed; };
  const auto product = [](int64_t n, const Group &group) { return n * group.size; };
  // If only dimensions of size 1 are summed, a single pass copies x.
  if (std::none_of(groups.begin(), groups.end(), is_summed))
    groups.insert(groups.begin(), {1, true});
  Tensor current = x;
  for (auto left = std::count_if(groups.begin(), groups.end(), is_summed); left > 0; --left) {
    const auto largest =
        std::max_element(groups.begin(), groups.end(), [](const Group &a, const Group &b) {
          return (a.summed ? a.size : 0) < (b.summed ? b.size : 0);
        });
    const int64_t outer = std::accumulate(groups.begin(), largest, int64_t{1}, product);
    const int64_t inner = std::accumulate(largest + 1, groups.end(), int64_t{1}, product);
    const std::vector<int64_t> sizes{outer, inner};
    const Tensor sums = left == 1 ? out : allocate(sizes, DTYPE_FLOAT64, x);
    run_pass(current, outer, largest->size, inner, sums);
    groups.erase(largest);
    current = sums;
  }
}

// Returns strides for a result of these sizes, so that its dimensions have the same order in memory
// as in x. kept[d] is the result's dimension for x's dimension d, or -1.
static std::vector<int64_t> strides_like(const std::vector<int64_t> &sizes,
                                         const std::vector<int64_t> &order,
                                         const std::vector<int64_t> &kept) {
  std::vector<int64_t> strides(sizes.size(), 1);
  int64_t stride = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (kept[*d] < 0) continue;
    strides[kept[*d]] = stride;
    stride *= sizes[kept[*d]];
  }
  return strides;
}

static Tensor reduce_sum(const Tensor &x, const std::optional<std::vector<int64_t>> &dim,
                         bool keepdim) {
  const dtype_t dtype = check_dtype("reduce_sum", "x", x);
  const std::vector<bool> summed = summed_dims(x, dim);
  std::vector<int64_t> sizes, kept(x.dim(), -1);
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (!summed[d]) kept[d] = static_cast<int64_t>(sizes.size());
    if (!summed[d] || keepdim) sizes.push_back(summed[d] ? 1 : x.size(d));
  }
  const Tensor out = allocate(sizes, dtype, x);
  if (out.numel() == 0) return out;
  if (x.numel() == 0) {  // a sum of no terms is 0
    run_pass(x, out.numel(), 0, 1, out);
    return out;
  }
  const Tensor dense = is_dense(x) ? x : torch::stable::contiguous(x);
  const std::vector<int64_t> order = memory_order(dense);
  std::vector<Group> groups;
  std::vector<int64_t> kept_order;
  for (const int64_t d : order) {
    groups.push_back({dense.size(d), summed[d]});
    if (!summed[d]) kept_order.push_back(d);
  }
  if (std::is_sorted(kept_order.begin(), kept_order.end())) {
    run_passes(dense, merge(groups), out);
    return out;
  }
  // The kept dimensions have another order in x's memory than in the result. The sums are permuted
  // and not x, because there are fewer sums than elements of x.
  const Tensor as_x_lies = allocate_strided(sizes, strides_like(sizes, order, kept), dtype, x);
  run_passes(dense, merge(groups), as_x_lies);
  Tensor result = out;
  torch::stable::copy_(result, as_x_lies);
  return result;
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "reduce_sum(Tensor x, int[1]? dim=None, bool keepdim=False) -> Tensor",
                   &reduce_sum);
}

REGISTER_KERNELS(m) { impl_with_no_grad(m, "reduce_sum", TORCH_BOX(&reduce_sum)); }

}  // namespace extension_cpp::reduce_sum

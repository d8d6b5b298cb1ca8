// kernel_template: schema, checks, allocation and registration. kernel_template.h has the kernel's
// contract.
#include "kernel_template/kernel_template.h"

#include "common/shim/match.h"

namespace extension_cpp::kernel_template {

static std::vector<Tensor> multiply(const std::vector<Tensor> &xs, const std::vector<Tensor> &ys) {
  const char *op = "kernel_template";
  Match match(op);
  match("xs", xs, FLOATING);
  match("ys", ys, SAME, "like xs");
  std::vector<Tensor> outs, dense;  // `dense`: copies must live until the launch
  std::vector<kernel_template_tensor> table;
  int64_t chunks = 0;
  for (size_t i = 0; i < xs.size(); ++i) {
    outs.push_back(allocate_like(xs[i]));
    const int64_t numel = xs[i].numel();
    if (numel == 0) continue;
    dense.push_back(with_strides_of(xs[i], outs[i]));
    dense.push_back(with_strides_of(ys[i], outs[i]));
    kernel_template_tensor row{};
    row.x = dense[dense.size() - 2].const_data_ptr();
    row.y = dense[dense.size() - 1].const_data_ptr();
    row.out = outs[i].mutable_data_ptr();
    row.numel = numel;
    row.first_chunk = chunks;
    table.push_back(row);
    chunks += ceil_div(numel, CHUNK);
  }
  if (table.empty()) return outs;
  kernel_template_args args{};
  args.tensors = table.data();
  args.count = static_cast<int64_t>(table.size());
  args.chunks = chunks;
  args.dtype = match.dtype();
  launch(op, KERNEL(kernel_template), args, xs[0], chunks, flat_grain(3 * xs[0].element_size()));
  return outs;
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "kernel_template(Tensor[] xs, Tensor[] ys) -> Tensor[]", &multiply);
}

REGISTER_KERNELS(m) { impl_with_no_grad(m, "kernel_template", TORCH_BOX(&multiply)); }

}  // namespace extension_cpp::kernel_template

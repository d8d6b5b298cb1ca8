// rotary_embedding: schemas, checks, allocation and registration. Formulas: rotary_embedding.h.
#include "rotary_embedding/rotary_embedding.h"

#include <string>
#include <tuple>

#include "common/shim/op.h"

namespace extension_cpp::rotary_embedding {

// ---- checks ----

// The names of the op, q and k in error messages.
struct Names {
  const char *op, *q, *k;
};

static std::string shape_without_heads(const Tensor &q) {
  std::string text = "[";
  for (int64_t d = 0; d < q.dim(); ++d) {
    text += (d ? ", " : "") + (d == q.dim() - 3 ? "*" : std::to_string(q.size(d)));
  }
  return text + "]";
}

static void check_k(const Names &names, const Tensor &k, const Tensor &q) {
  bool fits = k.dim() == q.dim();
  for (int64_t d = 0; fits && d < q.dim(); ++d) {
    fits = d == q.dim() - 3 || k.size(d) == q.size(d);
  }
  if (fits) return;
  fail(names.op, "expected " + std::string(names.k) + " of shape " + shape_without_heads(q) +
                     " like " + names.q + ", with any number of heads, but got " +
                     to_string(k.sizes()));
}

// Returns the size of dimension d, counted from the end (1 is the last), or 1 if there is none.
static int64_t size_from_end(const Tensor &x, int64_t d) {
  return d <= x.dim() ? x.size(x.dim() - d) : 1;
}

static void check_factors(const Names &names, const Tensor &cos, const Tensor &sin,
                          const Tensor &q) {
  const int64_t batch = size_from_end(q, 4), tokens = q.size(-2), cols = q.size(-1);
  const bool shared = cos.dim() == 2;
  const bool fits = (shared || (cos.dim() == 3 && (cos.size(0) == 1 || cos.size(0) == batch))) &&
                    cos.size(-2) == tokens;
  if (!fits) {
    const std::string rows = std::to_string(tokens) + ", rotated]";
    const std::string batches = batch == 1 ? "1" : "1 or " + std::to_string(batch);
    fail(names.op, "expected cos of shape [" + rows + " or [" + batches + ", " + rows +
                       " for the tokens of " + names.q + ", but got " + to_string(cos.sizes()));
  }
  check_shape(names.op, "sin", sin, "cos", cos);
  const int64_t rotated = cos.size(-1);
  if (rotated % 2 != 0 || rotated > cols) {
    fail(names.op, "expected cos to have an even number of columns, at most the " +
                       std::to_string(cols) + " of " + names.q + ", but got " +
                       std::to_string(rotated));
  }
}

static dtype_t check_inputs(const Names &names, const Tensor &q, const Tensor &k, const Tensor &cos,
                            const Tensor &sin) {
  const char *const op = names.op;
  const dtype_t dtype = check_dtype(op, names.q, q);
  check_same(op, names.k, k, names.q, q);
  check_same_or_float32(op, "cos", cos, names.q, q);
  check_same(op, "sin", sin, "cos", cos);
  if (q.dim() < 2 || q.dim() > 4) {
    fail(op, "expected " + std::string(names.q) +
                 " of shape (tokens, width), (heads, tokens, width) or (batch, heads, tokens, "
                 "width), but got " +
                 to_string(q.sizes()));
  }
  check_k(names, k, q);
  check_factors(names, cos, sin, q);
  return dtype;
}

// ---- memory ----

static bool has_unit_rows(const Tensor &x) { return x.size(-1) == 1 || x.stride(-1) == 1; }

// Returns the strides of batch, head and token. The stride of a missing dimension has no effect.
static rotary_strides strides_of(const Tensor &x) {
  const auto from_end = [&](int64_t d) { return d <= x.dim() ? x.stride(x.dim() - d) : 0; };
  return {from_end(4), from_end(3), from_end(2)};
}

// q or k, and its result, as the kernel reads and writes them. If the last dimension does not have
// stride 1, x is a copy of the input, and y is copied to `result` later.
struct Rotated {
  Tensor x, y, result;

  explicit Rotated(const Tensor &input)
      : x(has_unit_rows(input) ? input : torch::stable::contiguous(input)),
        y(allocate_like(input)),
        result(y) {
    if (has_unit_rows(y)) return;
    y = allocate(input.sizes(), check_dtype("rotary_embedding", "q", input), input);
  }

  rotary_tensor args() const {
    return {x.const_data_ptr(), y.mutable_data_ptr(), size_from_end(x, 3), strides_of(x),
            strides_of(y)};
  }
};

static int64_t batch_stride(const Tensor &factors) {
  return factors.dim() == 3 && factors.size(0) > 1 ? factors.stride(0) : 0;
}

static std::tuple<Tensor, Tensor> rotate(const Names &names, const Tensor &q, const Tensor &k,
                                         const Tensor &cos, const Tensor &sin, bool interleaved,
                                         bool transposed) {
  const dtype_t dtype = check_inputs(names, q, k, cos, sin);
  const Rotated of_q(q), of_k(k);
  if (q.numel() + k.numel() == 0) return {of_q.result, of_k.result};
  const Tensor cos_rows = has_unit_rows(cos) ? cos : torch::stable::contiguous(cos),
               sin_rows = has_unit_rows(sin) ? sin : torch::stable::contiguous(sin);
  rotary_embedding_args args{};
  args.tensors[0] = of_q.args();
  args.tensors[1] = of_k.args();
  args.cos = cos_rows.const_data_ptr();
  args.sin = sin_rows.const_data_ptr();
  args.cos_batch_stride = batch_stride(cos_rows);
  args.cos_token_stride = cos_rows.stride(-2);
  args.sin_batch_stride = batch_stride(sin_rows);
  args.sin_token_stride = sin_rows.stride(-2);
  args.batch = size_from_end(q, 4);
  args.tokens = q.size(-2);
  args.cols = q.size(-1);
  args.rotated = cos.size(-1);
  args.dtype = dtype;
  args.wide_factors = cos.scalar_type() != q.scalar_type();
  args.interleaved = interleaved;
  args.transposed = transposed;
  // A CPU thread gets at least 128 KiB of memory traffic.
  const int64_t row_bytes = 2 * args.cols * static_cast<int64_t>(q.element_size());
  launch(names.op, KERNEL(rotary_embedding), args, q, rotary_rows(&args, 0) + rotary_rows(&args, 1),
         ceil_div(128 << 10, row_bytes));
  return {copy_into(of_q.result, of_q.y), copy_into(of_k.result, of_k.y)};
}

static std::tuple<Tensor, Tensor> rotary_embedding(const Tensor &q, const Tensor &k,
                                                   const Tensor &cos, const Tensor &sin,
                                                   bool interleaved) {
  return rotate({"rotary_embedding", "q", "k"}, q, k, cos, sin, interleaved, false);
}

static std::tuple<Tensor, Tensor> rotary_embedding_backward(const Tensor &grad_q,
                                                            const Tensor &grad_k, const Tensor &cos,
                                                            const Tensor &sin, bool interleaved) {
  return rotate({"rotary_embedding_backward", "grad_q", "grad_k"}, grad_q, grad_k, cos, sin,
                interleaved, true);
}

// ---- registration ----

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m,
                   "rotary_embedding(Tensor q, Tensor k, Tensor cos, Tensor sin, "
                   "bool interleaved=False) -> (Tensor, Tensor)",
                   &rotary_embedding);
  DEF_WITH_NO_GRAD(
      m,
      "rotary_embedding_backward(Tensor grad_q, Tensor grad_k, Tensor cos, Tensor sin, "
      "bool interleaved) -> (Tensor, Tensor)",
      &rotary_embedding_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "rotary_embedding", TORCH_BOX(&rotary_embedding));
  impl_with_no_grad(m, "rotary_embedding_backward", TORCH_BOX(&rotary_embedding_backward));
}

}  // namespace extension_cpp::rotary_embedding

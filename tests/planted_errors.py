"""Lists the errors that tests/planted.py plants in the sources. They are errors that a reviewer may overlook.

The author of a new error must not have read the tests. Each error replaces one passage, which must occur exactly once
in its file. An error's number is its position in ERRORS.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Planted:
    file: str
    old: str
    new: str
    why: str  # which input makes the error visible, and what is then wrong
    tests: str  # pytest's arguments: the tests that should detect the error
    gpu: bool = False  # only a GPU shows the error
    survives: str = ""  # why no test has to detect the error


CSRC = "extension_cpp/csrc/"

# ---- C for the CPU ----

CPU = [
    Planted(
        CSRC + "common/cpu/block.h",
        "0xfff + (bits >> 13 & 1)) >> 13",
        "0x1000) >> 13",
        "float16 without F16C, and float16 results of reduce_sum and short scans: ties round up instead of to even.",
        tests="tests/test_c.py tests/test_recorded_bits.py",
    ),
    Planted(
        CSRC + "common/cpu/philox.h",
        "sizeof(acc) == 4 ? (acc)dropout->scale_float : (acc)dropout->scale",
        "(acc)dropout->scale_float",
        "dropout of float64 with p = 0.1 scales by a number of float32, whose error is 4e-8.",
        tests="tests/test_dropout.py",
    ),
    Planted(
        CSRC + "common/cpu/column_sums_kernel.h",
        "memset(tile.sums, 0, sizeof tile.sums);",
        "if (r == first) memset(tile.sums, 0, sizeof tile.sums);",
        "The bias gradient of bias_gelu and scale_bias_relu counts rows twice where a part has more than 64 rows: with "
        "more than 16384 rows of up to 2048 columns.",
        tests="tests/battery/test_sums.py tests/battery/test_values.py tests/test_bias_gelu.py -k bias",
    ),
    Planted(
        CSRC + "common/cpu/level.c",
        "if (*end == 0) {",
        "if (end != bytes) {",
        "EXTENSION_CPP_CPU_CACHE=32M is taken for 32 bytes, without the warning that it is ignored.",
        tests="tests/test_c.py -k 'settings or instruction'",
    ),
    Planted(
        CSRC + "rows/cpu_sum_exp_kernel.h",
        "factor * (row->products + step * row->sum)",
        "factor * row->products",
        "The entropy of token_log_probs is wrong for more than 8192 classes if a later chunk has the largest logit.",
        tests="tests/battery/test_long_rows.py tests/test_loss.py tests/test_loss_sums.py tests/test_large_logits.py",
    ),
    Planted(
        CSRC + "softmax/softmax_cpu_kernel.h",
        "sum[k] += NAME(column)(k) >= skipped ? v[k] : 0;",
        "sum[k] += k >= skipped ? v[k] : 0;",
        "softmax of bfloat16 rows of 33 or more columns, no multiple of 32: the last block's sum has other lanes.",
        tests="tests/battery/test_values.py tests/test_strips.py -k softmax",
    ),
    Planted(
        CSRC + "norm/norm_cpu_kernel.h",
        "m.variance + eps >= 0x1p-100 && m.variance < (double)INFINITY",
        "m.variance + eps >= 0x1p-100",
        "The norms of float32 rows with numbers beyond 2e19, whose squares overflow in float, are 0.",
        tests="tests/test_c.py tests/test_norm.py -k norm",
    ),
    Planted(
        CSRC + "norm/norm_cpu_backward_kernel.h",
        "recent + count - wide",
        "recent + wide",
        "layer_norm whose bias requires grad and whose weight does not: the sums go behind their memory.",
        tests="tests/battery/test_autograd.py tests/test_norm.py tests/test_norm_kernels.py -k layer_norm",
    ),
    Planted(
        CSRC + "scan/scan_cpu_kernel.h",
        "NAME(sum_t) sum[SCAN_NARROW]",
        "ACC sum[SCAN_NARROW]",
        "cumsum of float32 along dim 0 of (16384, 2): one chain of additions in float32 instead of float64.",
        tests="tests/test_scan_kernels.py tests/test_scan.py tests/test_scan_steps.py "
        "tests/battery/test_values.py -k cumsum",
    ),
    Planted(
        CSRC + "scan/scan_cpu_kernel.h",
        "(y.step == -1 && (p + sizeof(T)) % 64 == 0)",
        "(y.step == -1 && p % 64 == 0)",
        "A reversed cumsum of 16 n + 1 float32 with streamed stores, larger than the cache: a misaligned store.",
        tests="tests/battery/test_streaming.py tests/test_scan.py tests/test_c.py -k 'cumsum or scan or streamed'",
    ),
    Planted(
        CSRC + "scan/scan_cpu_items.h",
        "item.is_last = rest <= SCAN_PART;",
        "item.is_last = rest < SCAN_PART;",
        "The gradients of linear_recurrence over exactly 16384 steps: grad_h0 is not written, grad_a's first step is "
        "read from before h.",
        tests="tests/test_scan_steps.py tests/test_scan_kernels.py tests/test_scan.py",
    ),
    Planted(
        CSRC + "scan/scan_cpu_logcumsumexp_kernel.h",
        "EXP_SOFTMAX(y == -(ACC)INFINITY ? y : x == y || d > 0 ? 0 : d)",
        "EXP_SOFTMAX(x == y || d > 0 ? 0 : d)",
        "The gradient of logcumsumexp where a line begins with -inf: these elements get a gradient.",
        tests="tests/test_scan_kernels.py tests/test_scan.py -k 'logcumsumexp or infinity'",
    ),
    Planted(
        CSRC + "rotary_embedding/rotary_embedding_cpu_kernel.h",
        "place.batch * args->sin_batch_stride + place.token * args->sin_token_stride",
        "place.batch * args->cos_batch_stride + place.token * args->cos_token_stride",
        "rotary_embedding whose cos and sin have other strides: cos contiguous, sin expanded over the batch.",
        tests="tests/test_rotary.py tests/test_rotary_rows.py tests/battery/test_values.py -k rotary",
    ),
    Planted(
        CSRC + "mish/mish_cpu_kernel.h",
        "return x > MISH_LINEAR(x) ? 0 : second;",
        "return second;",
        "The second derivative of mish is NaN for float32 x of 30.",
        tests="tests/test_mish.py tests/battery/test_values.py tests/battery/test_autograd.py -k mish",
    ),
    Planted(
        CSRC + "relu/relu_cpu_kernel.h",
        "y[k] <= 0 ? 0 : grad_out[k]",
        "y[k] > 0 ? grad_out[k] : 0",
        "The gradient of relu where x is NaN is 0; PyTorch's is grad_out.",
        tests="tests/battery/test_values.py -k relu",
    ),
]

# ---- CUDA and its plans ----

CUDA = [
    Planted(
        CSRC + "rows/plan.h",
        "std::max(most / step * step, step)",
        "std::max(most, step)",
        "Backward of a norm with many bfloat16 rows of 8193 columns: the rows of a group differ in alignment.",
        gpu=True,
        tests="tests/test_norm_kernels.py -k cuda",
    ),
    Planted(
        CSRC + "rows/plan.h",
        "2 * (vector - 1);  // a thread owns at most one edge",
        "vector - 1;  // a thread owns at most one edge",
        "The norms and softmax of bfloat16 rows of 13 columns: some of a row's 13 edges have no thread.",
        gpu=True,
        tests="tests/battery/test_values.py tests/test_norm_kernels.py -k 'cuda and (norm or softmax)'",
    ),
    Planted(
        CSRC + "scan/scan_plan.h",
        "lines * layout.group_count * words;",
        "lines * layout.group_count * state_words;",
        "linear_recurrence over more than 64 tiles of steps: the groups' words end behind the memory of the state.",
        gpu=True,
        tests="tests/test_scan.py tests/test_scan_steps.py tests/test_scan_kernels.py -k 'cuda or scan'",
    ),
    Planted(
        CSRC + "common/cuda/pointwise.cuh",
        "uint64_t all = cols;",
        "uint64_t all = 0;",
        "swiglu of gate and up as slices of 12 bfloat16 columns with a gap of 8: a vector straddles the end of a row.",
        gpu=True,
        tests="tests/battery/test_values.py -k 'cuda and swiglu'",
    ),
    Planted(
        CSRC + "common/cuda/column_sums.cuh",
        "has_phase_of_x(grad_out) && has_phase_of_x(grad_x) && cols >= widest",
        "has_phase_of_x(grad_out) && cols >= widest",
        "Backward of bias_gelu where x and grad_out begin one element behind an aligned address: misaligned stores.",
        gpu=True,
        tests="tests/battery/test_values.py tests/battery/test_sums.py tests/test_bias_gelu.py -k 'cuda and bias_gelu'",
    ),
    Planted(
        CSRC + "common/cuda/dropout.cuh",
        "bits_of(word[0], first[v] & 1)",
        "bits_of(word[0], 0)",
        "dropout of the tail and of float64 norms: the mask of odd elements is not that of the CPU.",
        gpu=True,
        tests="tests/test_dropout.py tests/test_fused_norm.py",
    ),
    Planted(
        CSRC + "reduce_sum/reduce_sum_cuda.cu",
        "const bool aligned = reinterpret_cast<uintptr_t>(args.x) % 16 == 0 && row_bytes % 16 == 0;",
        "const bool aligned = row_bytes % 16 == 0;",
        "reduce_sum over dim 0 of a view with storage offset 1 and rows of whole vectors: misaligned loads.",
        gpu=True,
        tests="tests/battery/test_values.py tests/test_reduce_sum.py -k cuda",
    ),
    Planted(
        CSRC + "rotary_embedding/rotary_embedding_cuda.cu",
        "q.y_strides.head, k.y_strides.head,",
        "q.y_strides.head, k.x_strides.head,",
        "rotary_embedding where k is a slice of a longer cache, cache[:, :, :T]: its result gets the cache's stride.",
        gpu=True,
        tests="tests/battery/test_values.py tests/test_rotary.py tests/test_rotary_rows.py -k 'cuda and rotary'",
    ),
    Planted(
        CSRC + "softmax/softmax_cuda.cu",
        "from - finite_maximum(most) - logarithm(sum[0])",
        "-logarithm(sum[0])",
        "log_softmax of rows that a cluster shares (65536 columns): each CTA's part is relative to its own maximum.",
        gpu=True,
        tests="tests/battery/test_values.py tests/test_long_rows.py tests/test_clusters.py -k cuda",
    ),
    Planted(
        CSRC + "norm/norm_generic.cuh",
        "drop_element(to_acc(x[c]), p.dropout_x, row * p.cols + c)",
        "drop_element(to_acc(x[c]), p.dropout_x, row * p.x_stride + c)",
        "add_layer_norm with dropout of float64 x whose rows have gaps: not the mask of dropout for the same seed.",
        gpu=True,
        tests="tests/battery/test_values.py tests/test_fused_norm.py -k 'cuda and add_layer_norm and float64'",
    ),
    Planted(
        CSRC + "norm/norm_backward.cuh",
        "drop(grad_x, p.dropout_x, at)",
        "drop(grad_x, p.dropout_x, at + p.cols)",
        "Backward of add_rms_norm with dropout: the gradient of x has the mask of the next row.",
        gpu=True,
        tests="tests/test_fused_norm.py tests/test_norm_kernels.py -k cuda",
    ),
    Planted(
        CSRC + "norm/norm_cuda.cu",
        "is_congruent(p, args.grad_sum, args.grad_sum_stride) &&\n                   is_congruent(p, args.grad_dropped",
        "is_congruent(p, args.grad_dropped",
        "Backward of add_layer_norm where the gradient of the sum is a view with storage offset 1: misaligned loads.",
        gpu=True,
        tests="tests/battery/test_values.py -k 'cuda and add_layer_norm and operand'",
    ),
    Planted(
        CSRC + "norm/norm_forward.cu",
        "static_cast<T *>(p.y) + row * p.cols;",
        "static_cast<T *>(p.y) + static_cast<int>(row) * p.cols;",
        "layer_norm of more than 2^31 elements writes before y.",
        gpu=True,
        tests="--slow tests/battery/test_values.py -k 'cuda and layer_norm and two_to_the_31'",
    ),
    Planted(
        CSRC + "scan/scan_columns.cuh",
        "!has_whole_vectors(p, p.inner) || (p.after.data != nullptr && tile == plan.tiles - 1)",
        "!has_whole_vectors(p, p.inner)",
        "Backward of linear_recurrence with h0 and 64 aligned columns: the first step's grad_a is 0.",
        gpu=True,
        tests="tests/test_scan.py tests/test_scan_steps.py tests/test_scan_kernels.py -k 'cuda or scan'",
    ),
    Planted(
        CSRC + "scan/scan_rows.cuh",
        "tile.first_step == 0 && at.step == 0 && in_row + j == 0",
        "at.step == 0 && in_row + j == 0",
        "Backward of logcumsumexp over rows longer than a tile (2048 float32): each tile begins anew.",
        gpu=True,
        tests="tests/test_scan.py tests/test_scan_steps.py tests/test_scan_kernels.py -k 'cuda or scan'",
    ),
]

# ---- C++ shims ----

SHIMS = [
    Planted(
        CSRC + "common/shim/op.h",
        "guard(x.get_device_index());",
        "guard(0);",
        "Any op on cuda:1 where the current device is another: kernel and stream are of different devices.",
        gpu=True,
        tests="tests/battery/test_runtime.py -k second_gpu",
    ),
    Planted(
        CSRC + "common/shim/op.cpp",
        "if (comparison < 0) break;\n      if (comparison == 0) continue;",
        "if (comparison <= 0) break;",
        "relu of a permuted tensor with an expanded dimension in between: the result's strides are not empty_like's.",
        tests="tests/battery/test_graphs.py tests/battery/test_values.py tests/battery/test_layouts.py -k relu",
    ),
    Planted(
        CSRC + "common/shim/op.cpp",
        "if (a == b && same_strides(written, x)) return;",
        "if (a == b) return;",
        "muladd(a, b, c, out=a.t()) of a square matrix is accepted, and overwrites a before it is read.",
        tests="tests/test_muladd.py",
    ),
    Planted(
        CSRC + "reduce_sum/reduce_sum.cpp",
        "left == 1 ? out : allocate(sizes, DTYPE_FLOAT64, x)",
        'left == 1 ? out : allocate(sizes, check_dtype("reduce_sum", "out", out), x)',
        "reduce_sum of bfloat16 over dims 0 and 2 of three: the sums between two passes are rounded to bfloat16.",
        tests="tests/test_reduce_sum.py tests/battery/test_sums.py tests/battery/test_values.py -k reduce_sum",
    ),
    Planted(
        CSRC + "softmax/softmax.cpp",
        "if (x.dim() == 0 || x.size(dim) == 1) return",
        "if (x.dim() == 0) return",
        "softmax(torch.randn(1, 5)[:, :1], 0): a dimension of size 1 has stride 5, and nothing is computed.",
        tests="tests/battery/test_layouts.py tests/battery/test_values.py -k softmax",
    ),
    Planted(
        CSRC + "norm/norm.cpp",
        "|| (args.rows == 0 && !needs_sums))",
        "|| args.rows == 0)",
        "The gradients of weight and bias for an input of no rows are not written; they should be 0.",
        tests="tests/battery/test_values.py tests/test_norm.py -k norm",
    ),
]

# ---- the package's Python ----

PYTHON = [
    Planted(
        "extension_cpp/functional/norm_formulas.py",
        "along = mean(v * gw) - (mean(v) * mean(gw) if centered else 0) - mean(xhat * v)",
        "along = mean(v * gw) - mean(xhat * v)",
        "The second derivative of layer_norm lacks a term, which is 0 if one of the gradients has mean 0.",
        tests="tests/battery/test_autograd.py -k layer_norm",
    ),
    Planted(
        "extension_cpp/functional/norms.py",
        "ctx.p > 0 and ctx.needs_input_grad[0]:",
        "ctx.p > 0 and ctx.needs_input_grad[1]:",
        "add_rms_norm with dropout, only its sum used, and a residual without grad: the gradient of x is not dropped.",
        tests="tests/battery/test_autograd.py tests/test_fused_norm.py -k add_rms_norm",
    ),
    Planted(
        "extension_cpp/functional/norms.py",
        "return x.new_empty(x.shape), *sums,",
        "return torch.empty_like(x), *sums,",
        "torch.compile and export of layer_norm of a transposed matrix: the fake alone has its strides.",
        tests="tests/battery/test_graphs.py tests/battery/test_layouts.py -k layer_norm",
    ),
    Planted(
        "extension_cpp/functional/scans.py",
        "_first_step(of_earlier_h, ctx.dim, ctx.reverse, h0)",
        "_first_step(of_earlier_h, ctx.dim, False, h0)",
        "The second derivative of linear_recurrence with reverse=True in h0 takes the wrong end of the line.",
        tests="tests/battery/test_autograd.py tests/test_scan.py -k linear_recurrence",
    ),
    Planted(
        "extension_cpp/functional/pointwise.py",
        "output: Tensor) -> None:\n    ctx.save_for_backward(output)",
        "output: Tensor) -> None:\n    ctx.save_for_backward(*inputs)",
        "y = relu(x * 1); changing the input in place before backward raises, and x is kept in memory.",
        tests="tests/battery/test_autograd.py -k relu",
    ),
    Planted(
        "extension_cpp/functional/rotary_embedding.py",
        "dtype = torch.promote_types(q.dtype, torch.float32)",
        "dtype = q.dtype",
        "Under autocast cos and sin in float32 beside bfloat16 q are rounded to bfloat16.",
        tests="tests/test_autocast.py tests/test_rotary.py",
    ),
    Planted(
        "extension_cpp/functional/sharding_rules.py",
        'd if call["needs_grad_x"] or call.get("needs_grad_residual") else None',
        'd if call["needs_grad_x"] else None',
        "Backward of add_layer_norm on DTensors where only the residual requires grad: its part counts as the whole.",
        tests="tests/test_sharding.py",
    ),
    Planted(
        "extension_cpp/registration/autograd.py",
        "return [x] * max(info.batch_size, 1)",
        "return [x] * info.batch_size",
        "torch.vmap over a batch of 0 with an argument that is not batched raises.",
        tests="tests/battery/test_autograd.py -k vmap",
    ),
    Planted(
        "extension_cpp/registration/calls.py",
        "    if forward_ad._current_level >= 0:  # no_grad does not switch forward mode off\n        return True\n",
        "",
        "Forward-mode differentiation under no_grad loses the tangent.",
        tests="tests/battery/test_autograd.py tests/battery/test_direct.py tests/test_autograd.py",
    ),
    Planted(
        "extension_cpp/registration/mutation.py",
        "any(x.requires_grad for x in tensors)",
        "any(x.requires_grad for x in targets(args, keywords))",
        "muladd(a, b, c, out=out) where a requires grad is accepted, and the gradient is lost without a word.",
        tests="tests/test_muladd.py",
    ),
    Planted(
        "extension_cpp/distributed/sharded_loss.py",
        "rest, loss = rest.masked_fill(is_masked, 0.0), loss.masked_fill(is_masked, 0.0)",
        "loss = loss.masked_fill(is_masked, 0.0)",
        "A vocabulary-parallel loss where all logits of one process are -inf in a row is NaN.",
        tests="tests/test_sharding.py",
    ),
    Planted(
        "extension_cpp/modules.py",
        "h.select(-2, 0 if self.reverse else -1)",
        "h.select(-2, -1)",
        "MinGRU(reverse=True) returns the state of the last token as its last state, which is the first one.",
        tests="tests/test_scan.py -k min_gru",
    ),
    Planted(
        "extension_cpp/convert/norms.py",
        "for name in floats:",
        "for name in floats[:1]:",
        "nn.convert changes a norm that multiplies by its attribute scale = 1.0; another scale later has no effect.",
        tests="tests/test_convert.py",
    ),
    Planted(
        "extension_cpp/convert/forwards.py",
        "return context_of(gate) == 0 and can_be_joined(gate, up, results)",
        "return can_be_joined(gate, up, results)",
        "Training a converted gated MLP under autocast raises: backward multiplies a bfloat16 and a float32 matrix.",
        tests="tests/test_convert_parts.py -k made_again",
    ),
]

# ---- tools ----

TOOLS = [
    Planted(
        "extension_cpp/command/tree.py",
        'if text.startswith("#!"):',
        'if path.suffix == ".sh":',
        "new-package: .ci/run of the package cannot be executed.",
        tests="tests/test_scaffold.py",
    ),
    Planted(
        "extension_cpp/command/info.py",
        "return bool(match[4]) and not match[3] and driver_compiles",
        "return bool(match[4]) and driver_compiles",
        "info says that a library for 10.0f+PTX fits a GPU of compute capability 12.0.",
        tests="tests/test_commands.py",
    ),
    Planted(
        "build_library.py",
        "destination.read_bytes() == built.read_bytes()",
        "destination.stat().st_size == built.stat().st_size",
        "A changed constant gives a library of the same size, which is not copied: the package keeps the old one.",
        tests="tests/test_build.py",
    ),
    Planted(
        "setup.py",
        'if "sdist" in sys.argv:',
        'if sys.argv[-1] == "sdist":',
        "A source distribution that a build front end makes, with options behind sdist, has the version 0.2.0+cpu.",
        tests="tests/test_build.py",
    ),
    Planted(
        "Makefile",
        ".venv/ready: requirements.txt $(shell",
        ".venv/ready: $(shell",
        "make build after a change of requirements.txt leaves .venv as it was.",
        tests="tests/test_build.py",
    ),
    Planted(
        "benchmarks/timing.py",
        "if number >= 2:",
        "if number >= 1:",
        "One of the two rounds that do not count is among the times.",
        tests="tests/test_tools.py",
    ),
    Planted(
        "benchmarks/compare.py",
        'after["low"] > before["high"] or',
        'after["median"] > before["high"] or',
        "compare calls a time slower though the ranges of both files overlap.",
        tests="tests/test_tools.py",
    ),
    Planted(
        "benchmarks/run.py",
        "torch.manual_seed(options.seed)",
        "torch.manual_seed(0)",
        "--seed does not change the inputs.",
        tests="tests/test_benchmarks.py",
    ),
    Planted(
        "benchmarks/judging.py",
        "now.data.copy_(0.5 * later.data)",
        "now.data.copy_(later.data)",
        "A contender that keeps the mean loss of its first call is judged right: means are nearly equal.",
        tests="tests/test_benchmark_judges.py",
    ),
    Planted(
        "scripts/matrix.py",
        'failed = count["failures"] + count["errors"]',
        'failed = count["failures"]',
        "A test file that cannot be imported is no failure: the exit status is 0.",
        tests="tests/test_tools.py",
    ),
]

ERRORS = [*CPU, *CUDA, *SHIMS, *PYTHON, *TOOLS]

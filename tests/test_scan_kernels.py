"""Tests the CUDA kernels of csrc/scan, compiled for the CPU (tests/c/cuda_on_cpu), by the checks of the battery.

So the kernels are tested without a GPU, and their threads run in a random order. CTAs have fewer threads, and groups
have fewer tiles, than on a GPU. So a few thousand steps reach all levels of the tree that joins tiles.
"""

import ctypes
import dataclasses
import itertools
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import build_library
from tests.checks import check, leaves, maker
from tests.opspec import OpSpec, all_specs
from tests.test_scan import result_and_gradients, scans_of_slices
from tests.test_scan_masks import along_rows_and_columns, check_gradients, check_sums, masked

ON_CPU = Path(build_library.__file__).parent / "tests" / "c" / "cuda_on_cpu"
# Replacements in the kernels' sources: code that a C++ compiler does not know, and sizes, which become smaller.
CHANGES = {
    "scan_memory.cuh": {
        "extern __shared__ uint4 held[];": "static thread_local uint4 held[8192];",
        # Checks that a gradient of h0, which is NaN before, is written only once: by the line's last tile.
        "*element(p, p.grad_start, outer, 0, i) = p.from_acc(decay * state.v[0]);": (
            "T &grad = *element(p, p.grad_start, outer, 0, i);\n"
            '  if (p.to_acc(grad) == p.to_acc(grad)) on_cpu::fail("a gradient of h0 is written twice");\n'
            "  grad = p.from_acc(decay * state.v[0]);"
        ),
    },
    "scan_tile.cuh": {
        """asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(uint64_t{1} << 32 | piece)
               : "memory");""": "__atomic_store_n(word, uint64_t{1} << 32 | piece, __ATOMIC_RELAXED);",
        """asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");""": (
            "on_cpu::wait();\n  value = __atomic_load_n(word, __ATOMIC_RELAXED);"
        ),
    },
    "scan_cuda.cu": {
        "add_jump<<<group_ctas, THREADS, 0, on>>>(jumps, p.plan, p.OPERANDS, shape.jumps[j]);": (
            "const cudaLaunchConfig_t config{dim3(group_ctas), dim3(THREADS), on};\n    error = "
            "cudaLaunchKernelEx(&config, add_jump, jumps, p.plan, p.OPERANDS, shape.jumps[j]);\n"
            "    if (error != cudaSuccess) return error;"
        ),
        "kernel<<<ctas, THREADS, bytes, on>>>(p);": (
            "const cudaLaunchConfig_t config{dim3(ctas), dim3(THREADS), on};\n"
            "  error = cudaLaunchKernelEx(&config, kernel, p);\n  if (error != cudaSuccess) return error;"
        ),
    },
    "scan_plan.h": {"THREADS = 256": "THREADS = 64", "FAN = 32": "FAN = 4", "MANY_CTAS = 1024": "MANY_CTAS = 2"},
}
DTYPES = {torch.float64: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # the numbers of common/dtype.h


class Operand(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("outer", "step", "inner", "index"))]


class Jump(ctypes.Structure):
    _fields_ = [("span", ctypes.c_int64), ("by", ctypes.c_int64 * 7)]


class Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("outer", "length", "inner")),
        ("dtype", ctypes.c_int),
        ("state", ctypes.c_void_p),
        ("jump_count", ctypes.c_int64),
        ("jumps", ctypes.POINTER(Jump)),
    ]


def arguments(operands: int, exclusive: bool = False) -> type[ctypes.Structure]:
    """Returns an op's argument struct in scan.h: the shape, the inputs, the outputs and, for cumsum, `exclusive`."""
    fields: list[Any] = [("shape", Shape), *((f"operand{i}", Operand) for i in range(operands))]

    class Arguments(ctypes.Structure):
        _fields_ = [*fields, ("exclusive", ctypes.c_int)] if exclusive else fields

    return Arguments


class Kernels:
    """Calls the compiled kernels, which scan tensors along dimension `dim`."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def run(self, op: str, dim: int, reverse: bool, tensors: list[Tensor | None], *exclusive: int) -> None:
        """Launches an op. `tensors` has the order of the op's struct in scan.h. h0 and its gradient have no dimension
        `dim`. The kernel's dimension `inner` is the last one unless this is `dim`, and `outer` joins the others."""
        first = tensors[0]
        assert first is not None
        dim %= first.dim()
        last = first.dim() - 1 if dim < first.dim() - 1 else None
        outer = [d for d in range(first.dim()) if d not in (dim, last)]
        jumps = [Jump(math.prod(first.shape[d] for d in outer[i:])) for i in range(1, len(outer))]
        operands = []
        for index, x in enumerate(tensors):
            if x is None:
                operands.append(Operand(None, 0, 0, 0))
                continue
            stride = (*x.stride()[:dim], *([0] if x.dim() < first.dim() else []), *x.stride()[dim:])
            start, step = x.data_ptr(), stride[dim]
            if reverse:
                start, step = start + step * (first.shape[dim] - 1) * x.element_size(), -step
            for jump, d, inside in zip(jumps, outer, outer[1:], strict=False):
                jump.by[index] = stride[d] - first.shape[inside] * stride[inside]
            operands.append(Operand(start, stride[outer[-1]] if outer else 0, step, stride[last] if last else 0, index))
        jumps = [jump for jump in jumps if any(jump.by)]
        in_memory = (Jump * len(jumps))(*jumps)
        args = arguments(len(operands), bool(exclusive))()
        args.shape = Shape(
            math.prod(first.shape[d] for d in outer),
            first.shape[dim],
            first.shape[last] if last else 1,
            DTYPES[first.dtype],
            None,
            len(jumps),
            in_memory,
        )
        for i, operand in enumerate(operands):
            setattr(args, f"operand{i}", operand)
        if exclusive:
            args.exclusive = exclusive[0]
        bytes_of = getattr(self.library, f"{op}_state_bytes_cuda")
        bytes_of.restype = ctypes.c_int64
        size = bytes_of(ctypes.byref(args))
        state = torch.ones(size + 8, dtype=torch.uint8)  # the launcher clears `size` bytes, and not the 8 after them
        args.shape.state = state.data_ptr()
        assert getattr(self.library, f"{op}_cuda")(ctypes.byref(args), None) == 0
        assert (state[size:] == 1).all(), "written behind the state"


def poisoned(like: Tensor) -> Tensor:
    return torch.full(like.shape, math.nan, dtype=like.dtype)


def functions(kernels: Kernels) -> dict[str, Callable[..., Tensor]]:
    """Returns the ops with autograd, which call `kernels`. Inputs have at least one dimension and one element."""
    # PyTorch's base class declares *args in backward, hence the type: ignore comments below.

    class Cumsum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, exclusive: bool, reverse: bool) -> Tensor:
            ctx.options = dim, exclusive, not reverse
            y = poisoned(x)
            kernels.run("cumsum", dim, reverse, [x, y], exclusive)
            return y

        @staticmethod
        def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
            return Cumsum.apply(grad_y, *ctx.options), None, None, None

    class Logcumsumexp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
            y, ctx.dim = poisoned(x), dim
            kernels.run("logcumsumexp", dim, False, [x, y])
            ctx.save_for_backward(x, y)
            return y

        @staticmethod
        def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            x, y = ctx.saved_tensors
            grad_x = poisoned(x)
            kernels.run("logcumsumexp_backward", ctx.dim, True, [grad_y, x, y, grad_x])
            return grad_x, None

    class Recurrence(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor, h0: Tensor | None, dim: int, reverse: bool) -> Tensor:
            h, ctx.options = poisoned(b), (dim, reverse)
            kernels.run("linear_recurrence", dim, reverse, [a.expand(b.shape), b, h0, h])
            ctx.save_for_backward(a, h, h0)
            return h

        @staticmethod
        def backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            (a, h, h0), (dim, reverse) = ctx.saved_tensors, ctx.options
            grad_a, grad_b = poisoned(h), poisoned(h)
            grad_h0 = None if h0 is None else poisoned(h0)
            tensors = [grad_h, a.expand(h.shape), h, h0, grad_a, grad_b, grad_h0]
            kernels.run("linear_recurrence_backward", dim, not reverse, tensors)
            return grad_a.sum_to_size(a.shape), grad_b, grad_h0, None, None

    return {
        "cumsum": lambda x, dim, *, exclusive=False, reverse=False: Cumsum.apply(x, dim, exclusive, reverse),
        "logcumsumexp": lambda x, dim: Logcumsumexp.apply(x, dim),
        "linear_recurrence": lambda a, b, h0=None, *, dim=-2, reverse=False: Recurrence.apply(a, b, h0, dim, reverse),
    }


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = tmp_path_factory.mktemp("scan")
    (folder / "scan").mkdir()
    for source in (build_library.CSRC / "scan").glob("*"):
        text = source.read_text()
        for old, new in CHANGES.get(source.name, {}).items():
            assert text.count(old) == 1, f"{source.name}: {old}"
            text = text.replace(old, new)
        (folder / "scan" / source.name).write_text(text)
    command = [*build_library.compiler("CXX", "c++", "g++"), "-std=c++17", "-O1", "-Wno-unknown-pragmas", "-shared"]
    command += ["-U_FORTIFY_SOURCE"]  # the fortified longjmp refuses to switch stacks
    command += ["-fPIC", "-pthread", f"-I{folder}", f"-I{ON_CPU}", f"-I{build_library.CSRC}"]
    subprocess.run([*command, "-x", "c++", folder / "scan/scan_cuda.cu", "-o", folder / "libscan.so"], check=True)
    return Kernels(folder / "libscan.so")


@pytest.fixture(scope="module", params=["cumsum", "logcumsumexp", "linear_recurrence"])
def spec(request: pytest.FixtureRequest, kernels: Kernels) -> OpSpec:
    (found,) = (spec for spec in all_specs() if spec.name == request.param)
    return dataclasses.replace(found, function=functions(kernels)[request.param])


def with_dtypes(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("dtype", dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))


every_dtype = with_dtypes(torch.float64, torch.float32, torch.bfloat16)  # float16 has bfloat16's kernels
# Rows for a part of a warp, a warp, and many tiles; columns in one tile and in many, of whole vectors or not.
SHAPES = [(1,), (3, 1), (70, 5), (3, 32), (2, 33), (1, 1000), (5, 3, 7), (2, 40, 8), (1, 900, 3), (1, 300, 8)]
SHAPES += [(600, 33), (2, 1024)]


@with_dtypes(*DTYPES)
def test_right(spec: OpSpec, dtype: torch.dtype) -> None:
    for shape in SHAPES if dtype is not torch.float16 else SHAPES[3::4]:
        for sample in spec.sample_inputs(maker("cpu", dtype, seed=len(shape)), shape):
            check(spec, sample)


@every_dtype
def test_less_shared_memory(spec: OpSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right on GPUs with 64 to 163 KB of shared memory per CTA, where an H100 has 227 KB. CTAs here have a
    quarter of the threads, and only 17 KB, in which row kernels of linear_recurrence do not fit."""
    monkeypatch.setenv("CUDA_ON_CPU_SHARED_MEMORY", "17000")
    for shape in [(3, 100), (2, 40, 8), (1, 300, 8)]:
        for sample in spec.sample_inputs(maker("cpu", dtype), shape):
            check(spec, sample)


@every_dtype
def test_vectors_at_any_address(spec: OpSpec, dtype: torch.dtype) -> None:
    """Results are right for rows with a gap of three elements between them, so that they begin at any alignment."""
    for shape in [(5, 33), (9, 64), (3, 40, 16)]:
        for sample in spec.sample_inputs(maker("cpu", dtype, layout="padded"), shape):
            check(spec, sample, "padded", "padded rows")


@every_dtype
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_and_inf(spec: OpSpec, dtype: torch.dtype, value: float) -> None:
    for sample in spec.sample_inputs(maker("cpu", dtype), (2, 67)):
        for x in leaves(sample):
            for index in range(0, x.numel(), 22):  # includes columns 0 and 66
                keep = x.detach().clone()
                x.detach().view(-1)[index] = value
                check(spec, sample, what=f"{value} at {index}", limits=value == value)
                x.detach().copy_(keep)


@every_dtype
@pytest.mark.parametrize("mean, spread", [(4e4, 1.0), (0.0, 1e30), (0.0, 1e-39), (-90.0, 5.0), (0.0, 30.0)])
def test_hostile_numbers(spec: OpSpec, dtype: torch.dtype, mean: float, spread: float) -> None:
    for sample in spec.sample_inputs(maker("cpu", dtype, mean=mean, spread=spread), (3, 1025)):
        check(spec, sample, what=f"mean {mean}, spread {spread}", limits=True)


ROWS = [((3, 2, 5, 33), 3), ((2, 3, 64), 2), ((2, 2, 1000), 2)]
COLUMNS = [((2, 300, 3, 8), 1), ((2, 40, 3, 5), 1), ((2, 3, 9, 4), 2)]


@with_dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("shape, dim", ROWS + COLUMNS, ids=str)
def test_operands_without_a_common_stride(
    kernels: Kernels, shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    """Operands in which no single stride joins two dimensions give the bits of contiguous operands."""
    for scan, operands in scans_of_slices(functions(kernels), shape, dim, dtype, "cpu"):
        whole = result_and_gradients(scan, [x.contiguous() for x in operands])
        assert all(map(torch.equal, result_and_gradients(scan, operands), whole))


@pytest.mark.parametrize("shape, dim", [((3, 64), 1), ((64, 40), 0)])
def test_logcumsumexp_keeps_small_terms_beside_0(kernels: Kernels, shape: tuple[int, ...], dim: int) -> None:
    """Small terms are not lost beside a term of exp(0), as in the test of this name in test_scan.py."""
    x = torch.full(shape, -17.0)
    x.select(dim, 0).zero_()
    exact = x.narrow(dim, 1, 63).double().exp().cumsum(dim).log1p()
    y = functions(kernels)["logcumsumexp"](x, dim).narrow(dim, 1, 63).double()
    torch.testing.assert_close(y, exact, rtol=128 * torch.finfo(torch.float32).eps, atol=0)


@every_dtype
@along_rows_and_columns
def test_prefixes_of_minus_infinity_get_gradient_0(kernels: Kernels, dim: int, dtype: torch.dtype) -> None:
    scan = functions(kernels)["logcumsumexp"]
    check_sums(scan, dim, *masked(33, dtype, "cpu"))
    for length in (1, 67, 1090):
        check_gradients(scan, dim, *masked(length, dtype, "cpu"))


@pytest.mark.parametrize("shape, dim", [((2, 120_001), 1), ((1, 5_000, 3), 1)])
def test_all_levels_of_the_tree(kernels: Kernels, shape: tuple[int, ...], dim: int) -> None:
    """With more than FAN * FAN tiles, sums of small whole numbers are exact. Other numbers give the same bits in every
    run, and in a call with fewer lines."""
    cumsum, log_sum, recurrence = functions(kernels).values()
    whole = torch.randint(-3, 4, shape).float()
    for exclusive, reverse in itertools.product((False, True), repeat=2):
        x = whole.flip(dim) if reverse else whole
        exact = x.cumsum(dim) - (x if exclusive else 0)
        ours = cumsum(whole, dim, exclusive=exclusive, reverse=reverse)
        assert torch.equal(ours.flip(dim) if reverse else ours, exact)

    def results(a: Tensor, b: Tensor) -> list[Tensor]:
        return [cumsum(b, dim), log_sum(b, dim), recurrence(a, b, dim=dim)]

    a, b = torch.rand(shape), torch.randn(shape)
    first = results(a, b)
    assert all(map(torch.equal, first, results(a, b)))
    # A term passes through at most 64 steps of a thread and 36 joins. Each of these rounds an exp and a sum.
    atol = 100 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(first[1].double(), b.double().logcumsumexp(dim), rtol=0, atol=atol)
    some = (slice(None), slice(None), slice(2)) if len(shape) == 3 else (slice(1),)
    alone = results(a[some].clone(), b[some].clone())
    assert all(torch.equal(ours[some], lines) for ours, lines in zip(first, alone, strict=True))

"""Tests the norms with inputs for all GPU kernels: many widths, few and many rows, all alignments, strided rows."""

import ctypes
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import extension_cpp
from extension_cpp import reference
from extension_cpp.command import info
from tests.checks import NORM_WIDTHS, ODD_WIDTHS, as_tuple, check, maker, norm_arguments, random_grad, run
from tests.opspec import DTYPES, OpSpec, all_specs

every_norm = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
HALF = [torch.bfloat16, torch.float16]


def check_gradients(name: str, rows: int, cols: int, dtype: torch.dtype, weights: torch.dtype, device: str) -> None:
    """Checks that the gradients of a norm are near those that the reference gives in float64."""
    x, grad_out = (torch.randn(rows, cols, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device).to(weights) for _ in range(2))

    def gradients(function, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.requires_grad_() for t in tensors]
        y = function(*norm_arguments(name, *leaves))
        return torch.autograd.grad(y, leaves if name == "layer_norm" else leaves[:2], grad_out.to(y.dtype))

    got = gradients(getattr(extension_cpp, name), x, weight, bias)
    want = gradients(getattr(reference, name), *(t.detach().double() for t in (x, weight, bias)))
    for a, b in zip(got, want, strict=True):
        # Weight gradients are float32 sums of `rows` products, whose errors grow as sqrt(rows). The gradient of x has
        # sums over a row in a tree, with log2(cols) roundings.
        sums = torch.finfo(torch.float32).eps * (4 * rows**0.5 if b.dim() == 1 else 16)
        assert ((a.double() - b).abs() <= torch.finfo(a.dtype).eps * b.abs() + sums * b.abs().max()).all(), cols


def problems_of_every_plan() -> list[tuple[str, str, int, int]]:
    """Returns inputs (op, dtype, rows, columns) that use all rows of the table of kernel plans (csrc/rows/plan.h).

    A row of the table gets one input for each number of threads up to a warp, and one for more threads.
    """
    seen: set[tuple[int, int]] = set()
    found = []
    for op, dtype in itertools.product(info.NORMS, ("bfloat16", "float32")):
        for cols in (
            32,
            100,
            128,
            160,
            256,
            320,
            512,
            640,
            768,
            1024,
            1025,
            2560,
            4096,
            10240,
            20480,
            40000,
            65536,
            131072,
        ):
            for rows, backward in itertools.product((3, (9 << 20) // cols), (False, True)):
                plan = info.norm_plan(op, dtype, rows, cols, backward)
                key = int(plan["shape"]), min(int(plan["threads_per_row"]), 64)
                if key[0] >= 0 and key not in seen:
                    seen.add(key)
                    found.append((op, dtype, rows, cols))
    shapes = ctypes.CDLL(str(extension_cpp.LIBRARY)).extension_cpp_norm_plan_shapes()
    missing = {*range(shapes)} - {shape for shape, _ in seen}
    assert not missing, f"no problem reaches the rows {missing} of the table"
    return found


def test_every_plan(device: str) -> None:
    """Results and gradients are right for inputs that use every kernel plan in the table of csrc/rows/plan.h."""
    problems = problems_of_every_plan()
    if device != "cuda":
        pytest.skip("there is a problem for each row of the table; only a GPU runs it by that row")
    for op, dtype, rows, cols in problems:
        spec = next(spec for spec in all_specs() if spec.name == op)
        check(spec, next(iter(spec.sample_inputs(maker(device, getattr(torch, dtype)), (rows, cols)))))


ROW_COUNTS = (1, 2, 3, 32, 133, 513, 1024, 2048)  # row counts; the CPU, with blocks of 64 rows, gets the first five


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in all_specs() if "norm" in spec.name], ids=str)
def test_batch_invariant(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """A row has the same bits in a call with few rows as in a call with 4096 rows, or with 300 rows on the CPU."""
    all_rows, row_counts = (300, ROW_COUNTS[:5]) if device == "cpu" else (4096, ROW_COUNTS)
    widths = (31, 64, 257, 1024) if device == "cpu" else (31, 64, 257, 768, 1024, 1025, 2560, 4096, 8192, 20480, 40000)
    for cols in widths:
        sample = next(iter(spec.sample_inputs(maker(device, dtype), (all_rows, cols))))
        whole = as_tuple(spec.function(*sample.args, **sample.kwargs))
        for rows in row_counts:
            args = [a[:rows] if isinstance(a, Tensor) and a.dim() == 2 else a for a in sample.args]
            some = as_tuple(spec.function(*args, **sample.kwargs))
            for a, b in zip(some, whole, strict=True):
                assert torch.equal(a, b[:rows]), f"{spec.name} {dtype}: {rows} of {all_rows} rows of {cols} columns"


@every_norm
@pytest.mark.parametrize("cols", [768, 1025, 4096, 16384, 32768, 40000, 50257, 131072])
@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_how_many_there_are(
    dtype: torch.dtype, gap: int, cols: int, name: str, device: str
) -> None:
    """A row has the same bits in a tensor and in a part of it. On a GPU, forward uses L2 hints only for the whole
    tensor."""
    parts, size = (5, 34 << 20) if device == "cuda" else (3, 1 << 20)  # a smaller part has another backward kernel
    step = max(1, size // (cols * dtype.itemsize) // 8) * 8  # parts begin at multiples of 16 bytes
    x, grad_out = (torch.randn(parts * step, cols + gap, device=device).to(dtype)[:, :cols] for _ in range(2))
    weight, bias = (torch.randn(cols, device=device).to(dtype) for _ in range(2))

    def results(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        part = x[begin:end].requires_grad_()
        outputs = getattr(torch.ops.extension_cpp, name)(*norm_arguments(name, part, weight, bias))
        return *outputs, *torch.autograd.grad(outputs[0], part, grad_out[begin:end])

    for _ in range(3 if device == "cuda" else 1):
        whole = results(0, parts * step)
        for i in range(0, parts * step, step):
            for some, of_whole in zip(results(i, i + step), whole, strict=True):
                assert torch.equal(some, of_whole[i : i + step])


@every_norm
@pytest.mark.parametrize(
    "cols, mib",
    [(cols, 34) for cols in (768, 1280, 1536, 2304, 2560, 3072, 4608, 5120, 6144, 9216, 10240)]
    + [(4096, 66), (8192, 66), (9216, 66), (10240, 66), (768, 20)]
    + [(cols, 130) for cols in (1024, 2304, 3072, 4608, 9216, 10240)],
)
@pytest.mark.parametrize("weights", ["float32", "x's"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_of_large_tensors(
    dtype: torch.dtype, weights: str, cols: int, mib: int, name: str, device: str
) -> None:
    """Gradients of large tensors are right. On a GPU, small tensors use other kernels than large ones."""
    if device == "cpu" and mib != 34:
        pytest.skip("the number of rows decides only on the GPU which kernel takes them")
    rows = (mib << 20) // (2 * cols) // (1 if device == "cuda" else 64)
    check_gradients(name, rows, cols, dtype, torch.float32 if weights == "float32" else dtype, device)


@every_norm
@pytest.mark.parametrize(
    "dtype, weights", [(torch.float32, torch.float32), *((x, w) for x in HALF for w in (x, torch.float32))], ids=str
)
def test_gradients_at_many_widths(dtype: torch.dtype, weights: torch.dtype, name: str, device: str) -> None:
    """Gradients of large tensors are right for every width and dtype of weights. These two, and whether a tensor is
    small, select a GPU's kernel."""
    for cols in (*NORM_WIDTHS, *ODD_WIDTHS):
        rows = (17 << 20) // (dtype.itemsize * cols) // (1 if device == "cuda" else 128) + 1
        check_gradients(name, rows, cols, dtype, weights, device)


@every_norm
@pytest.mark.parametrize("bytes_of_x", [1 << 17, 5 << 19])
@pytest.mark.parametrize(
    "dtype, weights",
    [(dtype, kind) for dtype in (torch.float32, *HALF) for kind in ("own", "no bias", "no weight")]
    + [(dtype, "float32") for dtype in HALF],
    ids=str,
)
def test_forward_at_many_widths(dtype: torch.dtype, weights: str, bytes_of_x: int, name: str, device: str) -> None:
    """Forward is right for every width and all kinds of weights, which select a GPU's kernel, and for few and many
    rows."""
    for cols in (*NORM_WIDTHS, *ODD_WIDTHS):
        rows = bytes_of_x // (cols * dtype.itemsize) // (1 if device == "cuda" else 16) + 1
        x = torch.randn(rows, cols, device=device).to(dtype)
        weight, bias = (
            torch.randn(cols, device=device).to(torch.float32 if weights == "float32" else dtype) for _ in "wb"
        )
        given = norm_arguments(
            name, x, None if weights == "no weight" else weight, None if weights == "no bias" else bias
        )
        y = getattr(extension_cpp, name)(*given)
        exact = getattr(reference, name)(*(t.double() if isinstance(t, Tensor) else t for t in given))
        # y is rounded once. Mean and rstd are sums in trees, each with log2(16384) roundings of half an eps, which
        # makes 14 eps for both. Weight and bias contribute 2 eps.
        bound = torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps
        assert (y - exact).abs().max() <= bound * exact.abs().max(), cols


@every_norm
@pytest.mark.parametrize(
    "cols",
    [
        *(6000, 9217, 12289, 14337, 16383, 17408, 18432, 20480, 20483, 24576, 25001, 28001, 32769, 36864, 49160, 65536),
        *(98304, 131081),
    ],
)
@pytest.mark.parametrize(
    "dtype, weights",
    [(torch.float32, "none"), (torch.bfloat16, "none"), *((half, "float32") for half in HALF)],
    ids=str,
)
def test_wide_rows_with_other_weights(dtype: torch.dtype, weights: str, cols: int, name: str, device: str) -> None:
    """Wide rows are right for weights of another dtype than x's, and without weights. Both have separate kernels on a
    GPU, with one or two launch shapes for each width."""
    rows = (130 << 20) // (cols * dtype.itemsize) // (1 if device == "cuda" else 256)
    x = torch.randn(rows, cols, device=device).to(dtype)
    pair = (None, None) if weights == "none" else [torch.randn(cols, device=device) for _ in "wb"]
    given = norm_arguments(name, x, *pair)
    exact = getattr(reference, name)(*(t.double() if isinstance(t, Tensor) else t for t in given))
    y = getattr(extension_cpp, name)(*given)
    # y is rounded once. Mean and rstd are sums in trees, each with log2(131081) roundings of half an eps, which makes
    # log2(131081) eps for both. Weight and bias contribute 2 eps.
    bound = torch.finfo(dtype).eps + 20 * torch.finfo(torch.float32).eps
    assert (y - exact).abs().max() <= bound * exact.abs().max()


@every_norm
@pytest.mark.parametrize("cols", [20480, 20483, 50257, 65544])
@pytest.mark.parametrize(
    "dtype, weights", [(torch.float32, torch.float32), *((x, w) for x in HALF for w in (x, torch.float32))], ids=str
)
def test_wide_rows_do_not_depend_on_those_behind_them(
    dtype: torch.dtype, weights: torch.dtype, cols: int, name: str, device: str
) -> None:
    """A row does not depend on the rows after it. On a GPU a cluster processes several rows, and the last cluster
    perhaps fewer than the others. compute-sanitizer detects a write beyond the last row."""
    x = torch.randn(33, cols, device=device).to(dtype)
    weight, bias = (torch.randn(cols, device=device).to(weights) for _ in "wb")
    whole = getattr(extension_cpp, name)(*norm_arguments(name, x, weight, bias))
    for rows in (1, 2, 3, 5, 9, 17, 31):
        some = getattr(extension_cpp, name)(*norm_arguments(name, x[:rows], weight, bias))
        assert torch.equal(some, whole[:rows]), rows


@every_norm
@pytest.mark.parametrize("rows", [1, 7, 20, 37])
def test_few_wide_odd_rows(name: str, rows: int, device: str) -> None:
    """Gradients of few wide rows are right. The scratch memory for partial weight gradients has no more rows than x,
    and compute-sanitizer detects a write beyond this memory."""
    x, grad_out = (torch.randn(rows, 50257, device=device).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(50257, device=device, requires_grad=True) for _ in range(2))
    inputs = [x, weight, bias] if name == "layer_norm" else [x, weight]
    function = getattr(extension_cpp, name)
    gradients = torch.autograd.grad(function(*norm_arguments(name, x, weight, bias)), inputs, grad_out)
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = getattr(reference, name)(*norm_arguments(name, *doubles))
    want = torch.autograd.grad(exact, doubles[: len(inputs)], grad_out.double())
    for got, right in zip(gradients, want, strict=True):  # each sum over a row is a tree of depth log2(50257)
        assert (got - right).abs().max() <= 16 * torch.finfo(torch.float32).eps * right.abs().max()


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in all_specs() if "norm" in spec.name], ids=str)
def test_rows_wider_than_a_cluster_takes(spec: OpSpec, dtype: torch.dtype, layout: str, device: str) -> None:
    """Rows that are too wide for one cluster's shared memory are right: the widest clusters or the generic kernels
    process them, with a whole row or a part of it in shared memory. Every run gives the same bits."""
    if device != "cuda":
        pytest.skip("the width decides only on the GPU which kernel takes a row")
    for shape in [(40, 131081), (40, 163848), (9, 262144), (9, 270345), (3, 1 << 20)]:
        sample = next(iter(spec.sample_inputs(maker(device, dtype, layout=layout), shape)))
        ours, again = check(spec, sample), run(spec.function, sample, random_grad())
        for (name, a), (_, b) in zip(ours.tensors(), again.tensors(), strict=True):
            assert torch.equal(a, b), f"{spec.name} {shape}: {name}"


@pytest.mark.parametrize("elements", [1, 2, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in all_specs() if "norm" in spec.name], ids=str)
def test_rows_begin_anywhere_in_memory(spec: OpSpec, dtype: torch.dtype, elements: int, device: str) -> None:
    """Rows are right if x begins `elements` after a multiple of 16 bytes, or grad_out one element after it. Weights
    stay aligned. On a GPU some rows are so wide that shared memory holds only a part of a row."""
    make = maker(device, dtype)

    def make_off(shape: Sequence[int]) -> Tensor:
        x = make(shape)
        if x.dim() == 1:
            return x
        return torch.cat([x.new_zeros(elements), x.detach().flatten()])[elements:].view(shape).requires_grad_()

    for shape in [(37, 64), (5, 4096), *([(2, 1 << 20)] if device == "cuda" else [])]:
        check(spec, next(iter(spec.sample_inputs(make_off, shape))))
        check(spec, next(iter(spec.sample_inputs(make, shape))), grad_layout="offset")


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_rows_are_read_where_they_lie(name: str, dtype: torch.dtype, device: str) -> None:
    """Slices of a packed QKV tensor give the bits of their contiguous copies, and no copy is made."""
    packed = torch.randn(5, 7, 3 * 64, device=device).to(dtype)
    function = getattr(extension_cpp, name)
    for part in packed.split(64, dim=-1):
        with torch.profiler.profile() as profiler:
            y = function(part, (64,))
        names = {event.name for event in profiler.events()}
        assert not names & {"aten::contiguous", "aten::clone", "aten::copy_"}
        assert torch.equal(y, function(part.contiguous(), (64,)))
        x = part.detach().requires_grad_()
        twin = part.contiguous().requires_grad_()
        grad_out = torch.randn(5, 7, 64, device=device).to(dtype)
        (a,), (b,) = (torch.autograd.grad(function(t, (64,)), t, grad_out) for t in (x, twin))
        assert torch.equal(a, b)


@every_norm
@pytest.mark.parametrize("rows, cols", [(40, 1024), (2100, 320), (2100, 1024), (2100, 1025), (40, 50257)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_rows_backward(name: str, dtype: torch.dtype, rows: int, cols: int, device: str) -> None:
    """If x, grad_out or both are slices, the gradients are those of contiguous copies, and bitwise so on a GPU."""
    wide_x, wide_grad = (torch.randn(rows, cols + 8, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device).to(dtype).requires_grad_() for _ in range(2))

    def gradients(x: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        inputs = [x, weight, bias] if name == "layer_norm" else [x, weight]
        return torch.autograd.grad(
            getattr(extension_cpp, name)(*norm_arguments(name, x, weight, bias)), inputs, grad_out
        )

    x, grad_out = wide_x[:, :cols], wide_grad[:, :cols]
    compact_x, compact_grad = x.contiguous(), grad_out.contiguous()
    wanted = gradients(compact_x, compact_grad)
    for inputs in [(x, grad_out), (x, compact_grad), (compact_x, grad_out)]:
        for got, want in zip(gradients(*inputs), wanted, strict=True):
            if device == "cuda":
                assert torch.equal(got, want)
            else:  # on the CPU a row's alignment in memory changes the order of its sums
                torch.testing.assert_close(got, want)

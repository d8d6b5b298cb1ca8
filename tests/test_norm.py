"""What only the norms promise: mixed dtypes, strided rows, many rows, frozen weights, the modules, two GPUs."""

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import extension_cpp
from extension_cpp import reference
from extension_cpp.nn import LayerNorm, RMSNorm
from tests.checks import NORM_WIDTHS, ODD_WIDTHS, check, maker, random_grad, run
from tests.opspec import DTYPES, OpSpec, all_specs

NORMS = ["layer_norm", "rms_norm"]
every_norm = pytest.mark.parametrize("name", NORMS)
HALF = [torch.bfloat16, torch.float16]


def arguments(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple:
    shape = (x.shape[-1],)
    return (x, shape, weight, bias, 1e-5) if name == "layer_norm" else (x, shape, weight, 1e-5)


def check_gradients(name: str, rows: int, cols: int, dtype: torch.dtype, weights: torch.dtype, device: str) -> None:
    """Against float64."""
    x, grad_out = (torch.randn(rows, cols, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device).to(weights) for _ in range(2))

    def gradients(function, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.requires_grad_() for t in tensors]
        y = function(*arguments(name, *leaves))
        return torch.autograd.grad(y, leaves if name == "layer_norm" else leaves[:2], grad_out.to(y.dtype))

    got = gradients(getattr(extension_cpp, name), x, weight, bias)
    want = gradients(getattr(reference, name), *(t.detach().double() for t in (x, weight, bias)))
    for a, b in zip(got, want, strict=True):
        # Weights: float32 sums of as many products as rows, of whose roundings sqrt(rows) survive; others: trees of
        # log2(cols) roundings.
        sums = torch.finfo(torch.float32).eps * (4 * rows**0.5 if b.dim() == 1 else 16)
        assert ((a.double() - b).abs() <= torch.finfo(a.dtype).eps * b.abs() + sums * b.abs().max()).all(), cols


@pytest.mark.parametrize(
    "name, given", [("layer_norm", "both"), ("layer_norm", "weight"), ("layer_norm", "bias"), ("rms_norm", "weight")]
)
@pytest.mark.parametrize("rows, cols", [(70, 1024), (70, 1025), (70, 50257), (2100, 1024), (2100, 1025)])
@pytest.mark.parametrize("weights", ["float32", "x's"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_weights_of_half_inputs(
    dtype: torch.dtype, weights: str, rows: int, cols: int, name: str, given: str, device: str
) -> None:
    """Weights of float32 or of x's type, or one of them alone: the result has x's dtype, the weights' gradients
    theirs; against float64."""
    x, grad_out = (torch.randn(rows, cols, device=device).to(dtype) for _ in range(2))
    weight_dtype = torch.float32 if weights == "float32" else dtype
    weight, bias = (
        torch.randn(cols, device=device).to(weight_dtype) if given in ("both", kind) else None
        for kind in ("weight", "bias")
    )
    inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    y = getattr(extension_cpp, name)(*arguments(name, x, weight, bias))
    gradients = torch.autograd.grad(y, inputs, grad_out)
    doubles = [t if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = getattr(reference, name)(*arguments(name, *doubles))
    exact_gradients = torch.autograd.grad(exact, [t for t in doubles if t is not None], grad_out.double())
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (y.double() - exact).abs().max() <= 2 * eps * exact.abs().max()
    for got, want, of in zip(gradients, exact_gradients, inputs, strict=True):
        assert got.dtype == of.dtype
        # grad_x is rounded to half; weight gradients are sums of as many float32 products as rows, then of their type.
        bound = 2 * eps if of is x else rows * torch.finfo(torch.float32).eps + torch.finfo(of.dtype).eps
        assert (got.double() - want).abs().max() <= bound * want.abs().max()


@every_norm
def test_third_order(name: str, device: str) -> None:
    def first_order(*leaves: Tensor) -> tuple[Tensor, ...]:
        y = getattr(extension_cpp, name)(*arguments(name, *leaves, *[None] * (3 - len(leaves))))
        return torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)

    shapes = [(2, 3), (3,), (3,)]
    x, *weights = (torch.randn(*s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes)
    torch.autograd.gradgradcheck(first_order, (x, *(weights if name == "layer_norm" else weights[:1])))


@every_norm
def test_backward_saves_x_itself_and_numbers_a_row(name: str, device: str) -> None:
    x, weight, bias = (torch.randn(*s, device=device, requires_grad=True) for s in [(64, 48), (48,), (48,)])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        getattr(extension_cpp, name)(*arguments(name, x, weight, bias))
    large = [t for t in saved if t.numel() > 64]
    assert [t.data_ptr() for t in large] == [x.data_ptr()]
    assert sum(t.numel() == 64 for t in saved) == (2 if name == "layer_norm" else 1)


def test_rms_norm_default_eps_is_that_of_the_arithmetic(device: str) -> None:
    """float32's for half types: at x of the size of its root, every other eps shows."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((3, 8), 2.0**-13 if dtype is not torch.float64 else 2.0**-27, device=device, dtype=dtype)
        torch.testing.assert_close(extension_cpp.rms_norm(x, (8,)), reference.rms_norm(x, (8,)))


@pytest.mark.parametrize("cols", [8, 33, 1025, 4096, 16384, 20008, 20011, 40960])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rows_of_one_value_are_their_bias(dtype: torch.dtype, cols: int, device: str) -> None:
    """As PyTorch's. A mean that is off by its last bit would show: 1 / sqrt(eps) times 4e4 times 2 ** -24 is near 1."""
    values = torch.tensor([0.0, -3.0, 0.1, 4e4, -4.6e4], device=device).to(dtype)
    x = values[:, None].expand(-1, cols).contiguous()
    weight, bias = (torch.randn(cols, device=device).to(dtype) for _ in range(2))
    assert torch.equal(extension_cpp.layer_norm(x, (cols,), weight, bias), bias.expand_as(x))
    normed, total = extension_cpp.add_layer_norm(x, torch.zeros_like(x), (cols,), weight, bias)
    assert torch.equal(normed, bias.expand_as(x)) and torch.equal(total, x)


@pytest.mark.parametrize("cols", [24, 33, 768, 1025, 1536, 6144, 20484, 20483, 49152])
def test_float32_rows_of_one_value_have_no_negative_variance(cols: int, device: str) -> None:
    """Where deviations are rounding errors, so is what is left of their squares, of either sign: rstd would be NaN."""
    x = (torch.rand(64, 1, device=device) * 10 ** torch.linspace(0, 9, 64, device=device)[:, None]).expand(-1, cols)
    y, mean, rstd = torch.ops.extension_cpp.layer_norm(x.contiguous(), (cols,), None, None, 1e-12)
    assert y.isfinite().all() and rstd.isfinite().all()
    assert ((mean - x[:, :1]).abs() <= 4 * torch.finfo(torch.float32).eps * x[:, :1]).all()


@pytest.mark.parametrize("cols", [8, 33, 1025, 4096, 16384, 20008, 20011, 40960, 50257, 131072])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_whose_squares_are_beyond_float(dtype: torch.dtype, cols: int, device: str) -> None:
    """Of numbers up to 1e16 the squares add up within float, but not the square of half a row's sum."""
    x = (10 ** torch.linspace(0, 16, 33, device=device))[:, None].repeat(1, cols).to(dtype)
    x[:, cols // 2 :].neg_()
    y = extension_cpp.layer_norm(x, (cols,))
    exact = torch.nn.functional.layer_norm(x.double(), (cols,))
    statistics = 4 * torch.finfo(torch.float32).eps * cols**0.5  # which are float's; y is rounded to its own type
    assert (y - exact).abs().max() <= (statistics + torch.finfo(dtype).eps) * exact.abs().max()


@every_norm
@pytest.mark.parametrize("cols", [768, 1025, 4096, 16384, 32768, 40000, 50257, 131072])
@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_how_many_there_are(
    dtype: torch.dtype, gap: int, cols: int, name: str, device: str
) -> None:
    """On a GPU large tensors have a policy for the L2, and other clusters take a row: none differs."""
    parts, size = (5, 34 << 20) if device == "cuda" else (3, 1 << 20)  # fewer bytes would be for other kernels
    step = max(1, size // (cols * dtype.itemsize) // 8) * 8  # parts begin at multiples of 16 bytes
    x, grad_out = (torch.randn(parts * step, cols + gap, device=device).to(dtype)[:, :cols] for _ in range(2))
    weight, bias = (torch.randn(cols, device=device).to(dtype) for _ in range(2))

    def results(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        part = x[begin:end].requires_grad_()
        outputs = getattr(torch.ops.extension_cpp, name)(*arguments(name, part, weight, bias))
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
    """On a GPU smaller ones are for other kernels."""
    rows = (mib << 20) // (2 * cols) // (1 if device == "cuda" else 64)
    check_gradients(name, rows, cols, dtype, torch.float32 if weights == "float32" else dtype, device)


@every_norm
@pytest.mark.parametrize(
    "dtype, weights", [(torch.float32, torch.float32), *((x, w) for x in HALF for w in (x, torch.float32))], ids=str
)
def test_gradients_at_many_widths(dtype: torch.dtype, weights: torch.dtype, name: str, device: str) -> None:
    """On a GPU rows have a kernel a width and kind of weights. Fewer than these bytes would be for another."""
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
    """On a GPU rows have a kernel a width and kind of weights, and another where they are few."""
    for cols in (*NORM_WIDTHS, *ODD_WIDTHS):
        rows = bytes_of_x // (cols * dtype.itemsize) // (1 if device == "cuda" else 16) + 1
        x = torch.randn(rows, cols, device=device).to(dtype)
        weight, bias = (
            torch.randn(cols, device=device).to(torch.float32 if weights == "float32" else dtype) for _ in "wb"
        )
        given = arguments(name, x, None if weights == "no weight" else weight, None if weights == "no bias" else bias)
        y = getattr(extension_cpp, name)(*given)
        exact = getattr(reference, name)(*(t.double() if isinstance(t, Tensor) else t for t in given))
        # As below, with log2(16384) roundings, and two of weight and bias.
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
    """Other kernels on a GPU than with weights of x's type, a shape or two a width."""
    rows = (130 << 20) // (cols * dtype.itemsize) // (1 if device == "cuda" else 64)
    x = torch.randn(rows, cols, device=device).to(dtype)
    pair = (None, None) if weights == "none" else [torch.randn(cols, device=device) for _ in "wb"]
    given = arguments(name, x, *pair)
    exact = getattr(reference, name)(*(t.double() if isinstance(t, Tensor) else t for t in given))
    y = getattr(extension_cpp, name)(*given)
    # y is rounded once; its row's sums are trees of log2(131081) roundings, of which rstd and the mean bring half each;
    # weight and bias bring two.
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
    """On a GPU a cluster has several rows, or the last fewer; a write behind them compute-sanitizer sees."""
    x = torch.randn(33, cols, device=device).to(dtype)
    weight, bias = (torch.randn(cols, device=device).to(weights) for _ in "wb")
    whole = getattr(extension_cpp, name)(*arguments(name, x, weight, bias))
    for rows in (1, 2, 3, 5, 9, 17, 31):
        some = getattr(extension_cpp, name)(*arguments(name, x[:rows], weight, bias))
        assert torch.equal(some, whole[:rows]), rows


@every_norm
@pytest.mark.parametrize("rows", [1, 7, 20, 37])
def test_few_wide_odd_rows(name: str, rows: int, device: str) -> None:
    """Scratch for the partial rows of the weight gradients is no larger than the rows; a write behind it
    compute-sanitizer sees."""
    x, grad_out = (torch.randn(rows, 50257, device=device).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(50257, device=device, requires_grad=True) for _ in range(2))
    inputs = [x, weight, bias] if name == "layer_norm" else [x, weight]
    function = getattr(extension_cpp, name)
    gradients = torch.autograd.grad(function(*arguments(name, x, weight, bias)), inputs, grad_out)
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = getattr(reference, name)(*arguments(name, *doubles))
    want = torch.autograd.grad(exact, doubles[: len(inputs)], grad_out.double())
    for got, right in zip(gradients, want, strict=True):  # a row's sums are trees of log2(50257) roundings
        assert (got - right).abs().max() <= 16 * torch.finfo(torch.float32).eps * right.abs().max()


@pytest.mark.parametrize("layout", ["contiguous", "offset"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", [spec for spec in all_specs() if "norm" in spec.name], ids=str)
def test_rows_wider_than_a_cluster_takes(spec: OpSpec, dtype: torch.dtype, layout: str, device: str) -> None:
    """On a GPU the widest clusters', or the plain kernels': rows that shared memory holds as a whole and in part, of
    whole vectors and odd ones; the same bits in every run."""
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
    """What is read begins so many elements behind a multiple of 16 bytes, or the gradient one, but not the weights; on
    a GPU also rows that shared memory holds in part."""
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
    """A packed QKV: the result of its contiguous copy, bit for bit, and no copy is made."""
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
    """x and grad_out are slices, or one of them: the gradients of their contiguous copies, on a GPU bit for bit."""
    wide_x, wide_grad = (torch.randn(rows, cols + 8, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(cols, device=device).to(dtype).requires_grad_() for _ in range(2))

    def gradients(x: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        inputs = [x, weight, bias] if name == "layer_norm" else [x, weight]
        return torch.autograd.grad(getattr(extension_cpp, name)(*arguments(name, x, weight, bias)), inputs, grad_out)

    x, grad_out = wide_x[:, :cols], wide_grad[:, :cols]
    compact_x, compact_grad = x.contiguous(), grad_out.contiguous()
    wanted = gradients(compact_x, compact_grad)
    for inputs in [(x, grad_out), (x, compact_grad), (compact_x, grad_out)]:
        for got, want in zip(gradients(*inputs), wanted, strict=True):
            if device == "cuda":
                assert torch.equal(got, want)
            else:  # sums begin at another place of the row, where it begins at another place in memory
                torch.testing.assert_close(got, want)


@every_norm
@pytest.mark.parametrize("rows, cols", [(9, 33), (9, 64), (2100, 520), (2100, 1024), (2100, 1032), (500, 8192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_what_needs_a_gradient_gets_one(dtype: torch.dtype, rows: int, cols: int, name: str, device: str) -> None:
    x, weight, bias = (torch.randn(*shape, device=device).to(dtype) for shape in [(rows, cols), (cols,), (cols,)])
    count = 3 if name == "layer_norm" else 2
    function = getattr(extension_cpp, name)

    def gradients(needed: tuple[bool, ...]) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_(n) for t, n in zip((x, weight, bias), (*needed, False), strict=False)]
        leaves += [bias] * (3 - len(leaves))
        function(*arguments(name, *leaves[:3])).square().sum().backward()
        return [leaf.grad for leaf in leaves[:count]]

    everything = gradients((True,) * count)
    for bits in range(1, 2**count):
        needed = tuple(bool(bits >> i & 1) for i in range(count))
        for got, want, n in zip(gradients(needed), everything, needed, strict=True):
            assert (got is not None) == n
            if got is not None:
                torch.testing.assert_close(got, want)


@every_norm
def test_131072_rows_of_bfloat16(name: str, device: str) -> None:
    """Sums over many rows: in bfloat16 they would stop growing at 256."""
    x = torch.randn(131072, 64, device=device).bfloat16()
    weight = torch.ones(64, device=device, requires_grad=True)
    bias = torch.zeros(64, device=device, requires_grad=True)
    grad_out = torch.ones_like(x)
    inputs = [weight, bias] if name == "layer_norm" else [weight]
    got = torch.autograd.grad(getattr(extension_cpp, name)(*arguments(name, x, weight, bias)), inputs, grad_out)
    doubles = [t.detach().double().requires_grad_() for t in (weight, bias)]
    exact = getattr(reference, name)(*arguments(name, x.double(), *doubles))
    want = torch.autograd.grad(exact, doubles[: len(inputs)], grad_out.double())
    for a, b in zip(got, want, strict=True):
        # Partial sums in float32 of terms near 1, of which sqrt(rows) survive, and their magnitudes add up to rows.
        assert (a.double() - b).abs().max() <= 4 * torch.finfo(torch.float32).eps * 131072**0.5 * max(b.abs().max(), 1)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_autocast_gives_pytorchs_dtypes(name: str, dtype: torch.dtype, device: str) -> None:
    """float32 parameters, as a model under autocast has them: the same dtype of result and gradients, the same values
    but for the rounding of each; compiled as well, where the cast is part of the graph."""
    ours = getattr(extension_cpp, name)
    inputs = [
        torch.randn(9, 33, device=device).to(dtype),
        torch.randn(33, device=device),
        torch.randn(33, device=device),
    ]
    results = []
    for function in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True), getattr(reference, name)):
        leaves = [t.clone().requires_grad_() for t in inputs[: 3 if name == "layer_norm" else 2]]
        with torch.autocast(device, torch.bfloat16):
            y = function(*arguments(name, *leaves, *[None] * (3 - len(leaves))))
        y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    for a, compiled, b in zip(*results, strict=True):
        assert compiled.dtype == a.dtype and torch.equal(compiled, a)
        torch.testing.assert_close(a, b, rtol=33 * torch.finfo(dtype).eps, atol=33 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("module", [LayerNorm(48), RMSNorm(48)], ids=lambda module: type(module).__name__)
def test_gradients_accumulate_over_micro_batches(module: torch.nn.Module, device: str) -> None:
    """float32 weights under bfloat16 activations: four backward calls add up to one over the whole batch."""
    module = module.to(device)
    x, grad_out = (torch.randn(64, 48, device=device).bfloat16() for _ in range(2))
    module.zero_grad()
    for part, grad in zip(x.chunk(4), grad_out.chunk(4), strict=True):
        module(part).backward(grad)
    added = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    module(x).backward(grad_out)
    for a, parameter in zip(added, module.parameters(), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, parameter.grad, rtol=1e-5, atol=64 * 2.0**-23)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (LayerNorm((4, 8), eps=1e-3), torch.nn.LayerNorm((4, 8), eps=1e-3)),
        (LayerNorm(8, bias=False), torch.nn.LayerNorm(8, bias=False)),
        (LayerNorm(8, elementwise_affine=False), torch.nn.LayerNorm(8, elementwise_affine=False)),
        (RMSNorm((4, 8), eps=1e-3), torch.nn.RMSNorm((4, 8), eps=1e-3)),
        (RMSNorm(8, elementwise_affine=False), torch.nn.RMSNorm(8, elementwise_affine=False)),
    ],
    ids=lambda module: repr(module),
)
def test_modules_are_torchs(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    assert isinstance(ours, type(theirs)) and repr(ours) == repr(theirs)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 4, 8)
    torch.testing.assert_close(ours(x), theirs(x))


@every_norm
@pytest.mark.parametrize("shape, normalized", [((2, 0, 4), (0, 4)), ((0, 2, 3), (2, 3)), ((3, 0), (0,))])
def test_empty_as_pytorch(name: str, shape: tuple, normalized: tuple, device: str) -> None:
    results = []
    for function in (getattr(extension_cpp, name), getattr(reference, name)):
        x, weight = (torch.ones(s, device=device, requires_grad=True) for s in (shape, normalized))
        y = function(x, normalized, weight)
        y.sum().backward()
        results.append((y, x.grad, weight.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@every_norm
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_and_one_model_a_gpu_in_two_threads(name: str) -> None:
    """Device 1 while device 0 is current; then both at once."""
    cases = {}
    for index in range(2):
        x = torch.randn(300, 16384, generator=torch.Generator().manual_seed(index)).to(f"cuda:{index}").requires_grad_()
        weight, bias = (torch.ones(16384, device=x.device, requires_grad=True) for _ in range(2))
        cases[index] = arguments(name, x, weight, bias)

    def run(index: int) -> list[Tensor]:
        y = getattr(extension_cpp, name)(*cases[index])
        assert y.device.index == index and torch.cuda.current_device() == 0
        leaves = [t for t in cases[index] if isinstance(t, Tensor)]
        leaves = leaves if name == "layer_norm" else leaves[:2]
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    alone = {index: run(index) for index in range(2)}
    exact = getattr(reference, name)(*cases[1])
    torch.testing.assert_close(alone[1][0], exact.detach())
    together: dict[int, list[Tensor]] = {}

    def many(index: int) -> None:
        for _ in range(20):
            together[index] = run(index)

    threads = [threading.Thread(target=many, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        for a, b in zip(together[index], alone[index], strict=True):
            assert torch.equal(a, b)

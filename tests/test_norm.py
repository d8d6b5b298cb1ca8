"""Tests what only the norms have: mixed dtypes, many rows, frozen weights, modules, and the use of two GPUs."""

import itertools
import threading

import pytest
import torch
from torch import Tensor

import extension_cpp
from extension_cpp import reference
from extension_cpp.nn import LayerNorm, RMSNorm
from tests.checks import norm_arguments, rows_for

NORMS = ["layer_norm", "rms_norm"]
every_norm = pytest.mark.parametrize("name", NORMS)
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "name, given", [("layer_norm", "both"), ("layer_norm", "weight"), ("layer_norm", "bias"), ("rms_norm", "weight")]
)
@pytest.mark.parametrize("rows, cols", [(70, 1024), (70, 1025), (70, 50257), (2100, 1024), (2100, 1025)])
@pytest.mark.parametrize("weights", ["float32", "x's"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_weights_of_half_inputs(
    dtype: torch.dtype, weights: str, rows: int, cols: int, name: str, given: str, device: str
) -> None:
    """Results are near float64's if weight, bias or both are in float32 or in x's dtype. The result has x's dtype, and
    each gradient has the dtype of its leaf."""
    rows = rows_for(device, rows, cols)
    x, grad_out = (torch.randn(rows, cols, device=device).to(dtype) for _ in range(2))
    weight_dtype = torch.float32 if weights == "float32" else dtype
    weight, bias = (
        torch.randn(cols, device=device).to(weight_dtype) if given in ("both", kind) else None
        for kind in ("weight", "bias")
    )
    inputs = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    y = getattr(extension_cpp, name)(*norm_arguments(name, x, weight, bias))
    gradients = torch.autograd.grad(y, inputs, grad_out)
    doubles = [t if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = getattr(reference, name)(*norm_arguments(name, *doubles))
    exact_gradients = torch.autograd.grad(exact, [t for t in doubles if t is not None], grad_out.double())
    assert y.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert (y.double() - exact).abs().max() <= 2 * eps * exact.abs().max()
    for got, want, of in zip(gradients, exact_gradients, inputs, strict=True):
        assert got.dtype == of.dtype
        # grad_x is rounded to x's dtype. Weight gradients are rounded float32 sums of `rows` products.
        bound = 2 * eps if of is x else rows * torch.finfo(torch.float32).eps + torch.finfo(of.dtype).eps
        assert (got.double() - want).abs().max() <= bound * want.abs().max()


@every_norm
def test_third_order(name: str, device: str) -> None:
    def first_order(*leaves: Tensor) -> tuple[Tensor, ...]:
        y = getattr(extension_cpp, name)(*norm_arguments(name, *leaves, *[None] * (3 - len(leaves))))
        return torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)

    shapes = [(2, 3), (3,), (3,)]
    x, *weights = (torch.randn(*s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes)
    torch.autograd.gradgradcheck(first_order, (x, *(weights if name == "layer_norm" else weights[:1])))


@every_norm
def test_backward_saves_x_itself_and_numbers_a_row(name: str, device: str) -> None:
    x, weight, bias = (torch.randn(*s, device=device, requires_grad=True) for s in [(64, 48), (48,), (48,)])
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        getattr(extension_cpp, name)(*norm_arguments(name, x, weight, bias))
    large = [t for t in saved if t.numel() > 64]
    assert [t.data_ptr() for t in large] == [x.data_ptr()]
    assert sum(t.numel() == 64 for t in saved) == (2 if name == "layer_norm" else 1)


def test_rms_norm_default_eps_is_that_of_the_arithmetic(device: str) -> None:
    """The default eps for half types is float32's. x is near sqrt(eps), so that eps matters."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.full((3, 8), 2.0**-13 if dtype is not torch.float64 else 2.0**-27, device=device, dtype=dtype)
        torch.testing.assert_close(extension_cpp.rms_norm(x, (8,)), reference.rms_norm(x, (8,)))


@pytest.mark.parametrize("cols", [8, 33, 1025, 4096, 16384, 20008, 20011, 40960])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rows_of_one_value_are_their_bias(dtype: torch.dtype, cols: int, device: str) -> None:
    """If all elements of a row are equal, the result is the bias, as in PyTorch. An error in the mean's last bit would
    be magnified by 1 / sqrt(eps) to a large error of the result: 4e4 * 2**-24 / sqrt(eps) is near 1."""
    values = torch.tensor([0.0, -3.0, 0.1, 4e4, -4.6e4], device=device).to(dtype)
    x = values[:, None].expand(-1, cols).contiguous()
    weight, bias = (torch.randn(cols, device=device).to(dtype) for _ in range(2))
    assert torch.equal(extension_cpp.layer_norm(x, (cols,), weight, bias), bias.expand_as(x))
    normed, total = extension_cpp.add_layer_norm(x, torch.zeros_like(x), (cols,), weight, bias)
    assert torch.equal(normed, bias.expand_as(x)) and torch.equal(total, x)


@pytest.mark.parametrize("cols", [33, 64, 1000, 5120, 20000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_rows_whose_first_elements_are_far_from_the_mean(dtype: torch.dtype, cols: int, device: str) -> None:
    """Results are right if the first elements of a row, by which kernels estimate its mean, are far from the mean."""
    for far, count in itertools.product((1e3, -1e5), (1, 16, 31, 32)):
        x = torch.randn(5, cols, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        x[:, :count] += far
        x = x.to(dtype).to(device).requires_grad_()
        exact = x.detach().double().requires_grad_()
        if dtype is torch.float64:  # two passes in float64, which are more exact than PyTorch's float64 kernel
            centered = exact - exact.mean(-1, keepdim=True)
            want = centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        else:
            want = torch.nn.functional.layer_norm(exact, (cols,))
        got = extension_cpp.layer_norm(x, (cols,))
        grad_out = torch.randn(5, cols, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
        (grad,), (wanted,) = torch.autograd.grad(got, x, grad_out.to(dtype)), torch.autograd.grad(want, exact, grad_out)
        eps = torch.finfo(dtype).eps
        for a, b in ((got, want), (grad, wanted)):  # 32 roundings, relative to the largest element of a row
            assert ((a.double() - b).abs().amax(-1) <= 32 * eps * b.abs().amax(-1)).all(), (far, count)


@pytest.mark.parametrize("cols", [24, 33, 768, 1025, 1536, 6144, 20484, 20483, 49152])
def test_float32_rows_of_one_value_have_no_negative_variance(cols: int, device: str) -> None:
    """rstd is finite for rows of equal elements, where a difference of squares could be negative by rounding."""
    x = (torch.rand(64, 1, device=device) * 10 ** torch.linspace(0, 9, 64, device=device)[:, None]).expand(-1, cols)
    y, mean, rstd = torch.ops.extension_cpp.layer_norm(x.contiguous(), (cols,), None, None, 1e-12)
    assert y.isfinite().all() and rstd.isfinite().all()
    assert ((mean - x[:, :1]).abs() <= 4 * torch.finfo(torch.float32).eps * x[:, :1]).all()


@pytest.mark.parametrize("cols", [8, 33, 1025, 4096, 16384, 20008, 20011, 40960, 50257, 131072])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_whose_squares_are_beyond_float(dtype: torch.dtype, cols: int, device: str) -> None:
    """layer_norm is right if the square of the sum of half a row exceeds float32, but the sum of squares does not."""
    x = (10 ** torch.linspace(0, 16, 33, device=device))[:, None].repeat(1, cols).to(dtype)
    x[:, cols // 2 :].neg_()
    y = extension_cpp.layer_norm(x, (cols,))
    exact = torch.nn.functional.layer_norm(x.double(), (cols,))
    statistics = 4 * torch.finfo(torch.float32).eps * cols**0.5  # statistics are float32, and y is rounded again
    assert (y - exact).abs().max() <= (statistics + torch.finfo(dtype).eps) * exact.abs().max()


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
        function(*norm_arguments(name, *leaves[:3])).square().sum().backward()
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
    """Weight gradients over 131072 rows are right. Sums in bfloat16 would stop growing at 256."""
    x = torch.randn(131072, 64, device=device).bfloat16()
    weight = torch.ones(64, device=device, requires_grad=True)
    bias = torch.zeros(64, device=device, requires_grad=True)
    grad_out = torch.ones_like(x)
    inputs = [weight, bias] if name == "layer_norm" else [weight]
    got = torch.autograd.grad(getattr(extension_cpp, name)(*norm_arguments(name, x, weight, bias)), inputs, grad_out)
    doubles = [t.detach().double().requires_grad_() for t in (weight, bias)]
    exact = getattr(reference, name)(*norm_arguments(name, x.double(), *doubles))
    want = torch.autograd.grad(exact, doubles[: len(inputs)], grad_out.double())
    for a, b in zip(got, want, strict=True):
        # Weight gradients are float32 sums of `rows` terms near 1. Their error grows as sqrt(rows), relative to the
        # largest gradient.
        # sqrt(rows).
        assert (a.double() - b).abs().max() <= 4 * torch.finfo(torch.float32).eps * 131072**0.5 * max(b.abs().max(), 1)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_autocast_gives_pytorchs_dtypes(name: str, dtype: torch.dtype, device: str) -> None:
    """With float32 parameters, as in a model under autocast, results and gradients have PyTorch's dtypes, and its
    values up to 33 eps. Compiled code, whose graph contains the cast, gives the bits of an eager call of our op."""
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
            y = function(*norm_arguments(name, *leaves, *[None] * (3 - len(leaves))))
        y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    for a, compiled, b in zip(*results, strict=True):
        assert compiled.dtype == a.dtype and torch.equal(compiled, a)
        torch.testing.assert_close(a, b, rtol=33 * torch.finfo(dtype).eps, atol=33 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("module", [LayerNorm(48), RMSNorm(48)], ids=lambda module: type(module).__name__)
def test_gradients_accumulate_over_micro_batches(module: torch.nn.Module, device: str) -> None:
    """With float32 weights and bfloat16 activations, gradients of four micro-batches add up to the whole batch's."""
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
    """Calls run on device 1 while device 0 is current, and in two threads on both devices at once."""
    cases = {}
    for index in range(2):
        x = torch.randn(300, 16384, generator=torch.Generator().manual_seed(index)).to(f"cuda:{index}").requires_grad_()
        weight, bias = (torch.ones(16384, device=x.device, requires_grad=True) for _ in range(2))
        cases[index] = norm_arguments(name, x, weight, bias)

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

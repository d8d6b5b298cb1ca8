"""Tests silu, gelu and their derivatives for large |x|, where exp underflows, for infinities, NaN and signed zeros."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import extension_cpp
from extension_cpp.nn import GELU, SiLU

C, D = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715


def _of_logistic(x: Tensor, u: Tensor, u1: Tensor | float, u2: Tensor | float) -> tuple[Tensor, ...]:
    """Returns x * sigmoid(u) and its first two derivatives with respect to x. u1 and u2 are the derivatives of u."""
    s, rest = torch.sigmoid(u), torch.sigmoid(-u)
    slope = s * rest
    return x * s, s + x * slope * u1, slope * (2 * u1 + x * u2 + x * u1 * u1 * (rest - s))


def _silu(x: Tensor) -> tuple[Tensor, ...]:
    return _of_logistic(x, x, 1.0, 0.0)


def _gelu(x: Tensor) -> tuple[Tensor, ...]:
    phi, density = torch.special.erfc(-x / math.sqrt(2)) / 2, torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return x * phi, phi + x * density, density * (2 - x * x)


def _gelu_tanh(x: Tensor) -> tuple[Tensor, ...]:
    return _of_logistic(x, C * x + D * x**3, C + 3 * D * x * x, 6 * D * x)


# For each op: the op, its exact value and derivatives in float64, and a bound of its relative error in eps, from the
# formula's roundings. gelu_tanh also rounds u three times, and exp(u) has |u| <= 103 times u's relative error.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, ...]], float]] = {
    "silu": (extension_cpp.silu, _silu, 8),
    "gelu": (extension_cpp.gelu, _gelu, 12),
    "gelu_tanh": (lambda x: extension_cpp.gelu(x, "tanh"), _gelu_tanh, 320),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def derivatives(f: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    value = f(x)
    (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return [value.detach(), first.detach(), second]


@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_tails(name: str, dtype: torch.dtype, device: str) -> None:
    """Values and derivatives have a small relative error, even where they are tiny. Near a zero of a derivative, the
    error is small relative to the terms of the derivative, which cancel there."""
    function, exact, units = FUNCTIONS[name]
    x = torch.cat([torch.linspace(-20, 20, 400_001), torch.linspace(-120, -20, 10_001)]).to(dtype).to(device)
    eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    # For half types, the float32 arithmetic has a relative error below 2^-15, and its result is then rounded once.
    units = units if dtype is torch.float32 else 0.5 + (2**-15 + units * 2**-23) / eps
    at = x.double()
    # An upper bound of the terms that cancel in a derivative. It is 1 + x^2 times exp(-|x|), which bounds the
    # derivative of silu's sigmoid, or times exp(-x^2 / 2), which bounds gelu's normal density.
    terms = torch.exp(-at.abs() if name == "silu" else -at * at / 2) * (1 + at * at)
    for order, (got, want) in enumerate(zip(derivatives(function, x), exact(at), strict=True)):
        scale = want.abs() + (terms if order and dtype is torch.float32 else 0.25 * terms if order else 0)
        # The error of a subnormal number is absolute, and is multiplied by |x| <= 110. For half types, a GPU's exp2
        # returns 0 instead of a number below 2^-126, also in gelu's density, which is multiplied by |x| <= 13.3.
        flushed = 2.0**-125 if dtype is torch.float32 else 2.0**-123
        bound = units * eps * scale + (eps * smallest if dtype is not torch.float32 else 2.0**-149) * 128 + flushed
        worst = ((got.double() - want).abs() / bound).max().item()
        assert worst <= 1, f"order {order}: {worst:.3g} times the bound"


@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_results_keep_their_digits(name: str, dtype: torch.dtype, device: str) -> None:
    """Near float32's subnormal numbers, the error is at most 1/64 of the result plus the size of a subnormal number."""
    function, exact, _ = FUNCTIONS[name]
    x = torch.linspace(-100, -85, 301) if name == "silu" else torch.linspace(-13, -9, 301)
    x = x.to(dtype).to(device)
    for got, want in zip(derivatives(function, x), exact(x.double()), strict=True):
        tiny = 2.0**-133 if dtype is torch.bfloat16 else 2.0**-142
        # gelu_tanh's second derivative multiplies a subnormal derivative of the sigmoid by x u'^2 <= 2^13.
        tiny = max(tiny, 2.0**-136) if name == "gelu_tanh" else tiny
        # On the GPU, gelu in bfloat16 is 0 where exp(-x^2 / 2) is subnormal in float32.
        tiny = 2.0**-126 if device == "cuda" and dtype is torch.bfloat16 and name == "gelu" else tiny
        assert ((got.double() - want).abs() <= want.abs() / 64 + tiny).all()


@every_function
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_beyond_the_tails(name: str, dtype: torch.dtype, device: str) -> None:
    """For large |x|, the value is its limit x or 0, the first derivative its limit 1 or 0, and the second one 0."""
    function, _, _ = FUNCTIONS[name]
    x = torch.tensor([200.0, 1e4, 1e19, 1e30, 3e38], dtype=dtype, device=device)
    for sign, limits in ((1, (x, 1, 0)), (-1, (0, 0, 0))):
        for got, limit in zip(derivatives(function, sign * x), limits, strict=True):
            # At x = -200 in float64, silu is not 0 yet, but about -1e-85.
            near = 1e-80 if dtype is torch.float64 else 0.0
            torch.testing.assert_close(got, torch.zeros_like(x) + limit, rtol=0, atol=near)
    inf = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=dtype, device=device)
    value = function(inf)
    assert value[0] == torch.inf and value[1:].isnan().all()
    assert all(d[2].isnan() for d in derivatives(function, inf))
    zero = function(torch.tensor([0.0, -0.0], dtype=dtype, device=device))
    assert (zero == 0).all() and zero.signbit().tolist() == [False, True]


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_forward_over_reverse_beyond_the_tails(name: str, device: str) -> None:
    """The plain form of the backward, which forward mode differentiates, has a second derivative of 0 where x^2 is not
    finite in the dtype."""
    for dtype, x in ((torch.float16, [100.0, 300.0, -300.0, 1000.0]), (torch.float32, [1e4, 1e19, -1e19, 3e38])):
        at = torch.tensor(x, dtype=dtype, device=device)
        second = torch.func.jacfwd(torch.func.grad(lambda x: FUNCTIONS[name][0](x).sum()))(at)
        assert torch.equal(second, torch.zeros_like(second))


@every_function
def test_third_derivative_is_refused(name: str, device: str) -> None:
    x = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(FUNCTIONS[name][0](x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    op = name.removesuffix("_tanh")
    with pytest.raises(RuntimeError, match=f"extension_cpp::{op}: the third derivative is not implemented"):
        torch.autograd.grad(second.sum(), x)


def test_modules(device: str) -> None:
    x = torch.randn(4, 33, device=device)
    assert torch.equal(SiLU()(x), extension_cpp.silu(x))
    assert torch.equal(GELU()(x), extension_cpp.gelu(x))
    assert torch.equal(GELU(approximate="tanh")(x), extension_cpp.gelu(x, "tanh"))
    assert repr(GELU("tanh")) == "GELU(approximate='tanh')"
    (expected,) = torch.autograd.grad(extension_cpp.silu(x.requires_grad_()).square().sum(), x)
    leaf = x.detach().clone().requires_grad_()
    overwritten = leaf * 1
    assert SiLU(inplace=True)(overwritten) is overwritten and torch.equal(overwritten, extension_cpp.silu(x))
    assert torch.equal(torch.autograd.grad(overwritten.square().sum(), leaf)[0], expected)

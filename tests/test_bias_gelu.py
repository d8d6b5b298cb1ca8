"""Tests that bias_gelu rounds its result once, and raises an error for third derivatives."""

import pytest
import torch

import extension_cpp

both = pytest.mark.parametrize("approximate", ["none", "tanh"])


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_once(approximate: str, dtype: torch.dtype, device: str) -> None:
    """bias_gelu rounds only its result to the half type. Its error is at most eps / 2 of this type plus the errors of
    float32 arithmetic. PyTorch's error is larger, because it also rounds x + bias before gelu."""
    torch.manual_seed(0)
    x, bias = torch.randn(64, 4096, device=device).to(dtype), torch.randn(4096, device=device).to(dtype)
    s = x.double() + bias.double()
    # The exact result is not from PyTorch's gelu, whose 1 + erf and 1 + tanh cancel for negative x, even in float64.
    phi = torch.special.erfc(s * -(0.5**0.5)) / 2
    if approximate == "tanh":
        phi = torch.sigmoid((8 / torch.pi) ** 0.5 * (s + 0.044715 * s**3))
    exact = s * phi
    ours = extension_cpp.bias_gelu(x, bias, approximate)
    eps, smallest = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    # 2^-15 bounds the relative error of the kernel's float32 arithmetic, which is less exact for half types. It
    # includes the rounding error of x + bias, which gelu magnifies for negative x.
    bound = exact.abs() * (eps / 2 + 2.0**-15) + eps * smallest
    assert ((ours.double() - exact).abs() <= bound).all()
    eager = torch.nn.functional.gelu(x + bias, approximate=approximate)
    assert ((eager.double() - exact).abs() > 2 * bound).any()


@both
def test_gradient_of_the_bias_is_summed_before_it_is_rounded(approximate: str, device: str) -> None:
    """The bias gradient is summed in float32 and rounded once. bfloat16 terms or sums would have larger errors."""
    torch.manual_seed(0)
    x, bias = torch.randn(4096, 65, device=device).bfloat16(), torch.randn(65, device=device).bfloat16()
    leaf = bias.clone().requires_grad_()
    (ours,) = torch.autograd.grad(extension_cpp.bias_gelu(x, leaf, approximate).sum(), leaf)
    exact = bias.double().requires_grad_()
    y = torch.nn.functional.gelu(x.double() + exact, approximate=approximate)
    (expected,) = torch.autograd.grad(y.sum(), exact)
    # The bound is one bfloat16 rounding plus the errors of 4096 terms of at most 1.2, which are 2^-15 of each term.
    assert ((ours.double() - expected).abs() <= expected.abs() * 2.0**-8 + 4096 * 1.2 * 2.0**-15).all()


@both
def test_third_derivative_is_refused(approximate: str, device: str) -> None:
    x, bias = (torch.randn(3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    (first,) = torch.autograd.grad(extension_cpp.bias_gelu(x, bias, approximate).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), bias, create_graph=True)
    with pytest.raises(RuntimeError, match="extension_cpp::gelu: the third derivative is not implemented"):
        torch.autograd.grad(second.sum(), x)

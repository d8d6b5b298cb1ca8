"""Compares accessor_mish with its reference in float64, forward and backward. pytest -s prints the errors."""

import pytest
import torch
from accessor_mish import accessor_mish, reference

SHAPES = [(256, 1024), (3, 0), (0, 5), (20000, 3)]
every_device = pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])


def check(x: torch.Tensor, grad_out: torch.Tensor) -> None:
    x = x.detach().requires_grad_()
    y = accessor_mish(x)
    (grad_x,) = torch.autograd.grad(y, x, grad_out)
    exact_x = x.detach().double().requires_grad_()
    exact = reference(exact_x)
    (exact_grad_x,) = torch.autograd.grad(exact, exact_x, grad_out.double())
    for name, got, want in [("y", y, exact), ("grad_x", grad_x, exact_grad_x)]:
        error = (got.double() - want).abs().max().item() if got.numel() else 0.0
        print(f"{tuple(x.shape)} {name}: largest error {error:.3g}")
        torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-4)


@every_device
def test_right(device: str) -> None:
    """Results and gradients are right in several shapes and strides, and for inputs whose exp overflows or is 0."""
    torch.manual_seed(0)
    for shape in SHAPES:
        check(torch.randn(shape, device=device), torch.randn(shape, device=device))
    ends = torch.tensor([[-1e4, -90.0, -1e-30, 0.0, 19.9, 20.1, 50.0, 1e4]], device=device)
    check(ends, torch.ones((), device=device).expand(1, 8))  # what .sum().backward() gives
    wide = torch.randn(66, 66, device=device)
    for x in (wide[::2, 1::2], wide[:33, :33].t(), wide[:1, :33].expand(33, 33)):
        check(x, torch.randn(33, 33, device=device).t())


@every_device
def test_opcheck_and_sentence(device: str) -> None:
    x = torch.randn(5, 33, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.accessor_mish.forward.default, (x,))
    with pytest.raises(RuntimeError, match=r"expected x of shape \[B, D\], but got \[33\]"):
        accessor_mish(x[0])

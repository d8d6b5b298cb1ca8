"""Tests properties that only kernel_template has. tests/battery tests those that every op must have."""

import pytest
import torch
from torch.nn import functional as F

import extension_cpp


def test_known_values(device: str) -> None:
    x = torch.tensor([[1.0, 2.0, 4.0]], device=device, requires_grad=True)
    weight, bias = torch.tensor([[10.0, 1.0]], device=device), torch.tensor([0.5], device=device)
    weight.requires_grad_(), bias.requires_grad_()
    y = extension_cpp.kernel_template(x, weight, bias)
    grads = torch.autograd.grad(y, (x, weight, bias), torch.tensor([[1.0, 2.0, 3.0]], device=device))
    assert y.tolist() == [[1.5, 12.5, 24.5]]
    assert [grad.tolist() for grad in grads] == [[[21.0, 32.0, 3.0]], [[8.0, 17.0]], [6.0]]


@pytest.mark.parametrize("steps", [1, 2, 3, 35, 36, 4099])
@pytest.mark.parametrize("taps", [0, 1, 3, 4, 5, 33, 40])
def test_convolution_of_pytorch(taps: int, steps: int, device: str) -> None:
    """The op equals PyTorch's convolution, also for more taps than are summed at once or than there are steps."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, steps, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(3, taps, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(3, dtype=torch.float64, device=device, requires_grad=True)
    ours = extension_cpp.kernel_template(x, weight, bias)
    if taps == 0:
        assert torch.equal(ours, bias[:, None].expand(x.shape))
        return
    theirs = F.conv1d(F.pad(x, (taps - 1, 0)), weight[:, None], bias, groups=3)
    torch.testing.assert_close(ours, theirs)
    grad_out, inputs = torch.randn_like(ours), (x, weight, bias)
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad_out) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_only_what_needs_a_gradient_gets_one(device: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device) for shape in ((2, 3, 40), (3, 4), (3,))]
    grad_out = torch.randn(2, 3, 40, device=device)

    def gradients(needed: list[int]) -> dict[int, torch.Tensor]:
        given = [x.clone().requires_grad_(i in needed) for i, x in enumerate(inputs)]
        extension_cpp.kernel_template(*given).backward(grad_out)
        return {i: x.grad for i, x in enumerate(given) if x.grad is not None}

    every = gradients([0, 1, 2])
    for needed in ([0], [1], [2], [0, 2]):
        found = gradients(needed)
        assert [*found] == needed and all(torch.equal(found[i], every[i]) for i in needed)


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 3, 0), (2, 0, 5)], ids=str)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    """Results and gradients of empty tensors are 0."""
    x = torch.ones(shape, device=device, requires_grad=True)
    weight = torch.ones(shape[1], 4, device=device, requires_grad=True)
    bias = torch.ones(shape[1], device=device, requires_grad=True)
    y = extension_cpp.kernel_template(x, weight, bias)
    y.sum().backward()
    assert y.shape == shape and x.grad is not None and weight.grad is not None and bias.grad is not None
    assert x.grad.shape == shape and not weight.grad.any() and not bias.grad.any()


def test_bias_gradient_of_many_rows(device: str) -> None:
    """Gradients over 131072 rows of bfloat16 are exact. Sums in bfloat16 would stop growing at 256."""
    x = torch.ones(131072, 1, 1, device=device, dtype=torch.bfloat16)
    weight, bias = torch.ones(1, 2, device=device).bfloat16(), torch.zeros(1, device=device).bfloat16()
    weight.requires_grad_(), bias.requires_grad_()
    extension_cpp.kernel_template(x, weight, bias).backward(torch.ones_like(x))
    assert weight.grad is not None and weight.grad.tolist() == [[0.0, 131072.0]]
    assert bias.grad is not None and bias.grad.tolist() == [131072.0]


def test_second_order_says_no(device: str) -> None:
    x, weight = torch.ones(1, 3, device=device, requires_grad=True), torch.ones(1, 2, device=device)
    (grad_x,) = torch.autograd.grad(extension_cpp.kernel_template(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="kernel_template: the second derivative is not implemented"):
        torch.autograd.grad(grad_x.sum(), x)

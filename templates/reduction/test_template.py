"""Tests properties that only kernel_template has. tests/battery tests those that every op must have."""

import pytest
import torch

import extension_cpp


def tensors(device: str, rows: int = 9, cols: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(device) for shape in [(rows, cols), (cols,)])
    return x.requires_grad_(), weight.requires_grad_()


def test_rstd_is_the_second_result_by_option(device: str) -> None:
    """With return_rstd the second result is rstd, without a gradient, and the first result stays the same."""
    x, weight = tensors(device)
    y, rstd = extension_cpp.kernel_template(x, weight, return_rstd=True)
    assert torch.equal(y, extension_cpp.kernel_template(x, weight)) and not rstd.requires_grad
    without = extension_cpp.kernel_template(x)
    assert rstd.shape == (9, 1) and torch.equal(without, extension_cpp.kernel_template(x, torch.ones_like(weight)))
    torch.testing.assert_close(x * rstd, without)


def test_only_what_needs_a_gradient_gets_one(device: str) -> None:
    x, weight = tensors(device)
    both = torch.autograd.grad(extension_cpp.kernel_template(x, weight).square().sum(), (x, weight))
    for leaf, other, expected in [(x, weight, both[0]), (weight, x, both[1])]:
        other.requires_grad_(False)
        (got,) = torch.autograd.grad(extension_cpp.kernel_template(x, weight).square().sum(), leaf)
        other.requires_grad_(True)
        assert torch.equal(got, expected)


def test_weight_gradient_of_many_rows(device: str) -> None:
    """The gradient of weight over 131072 rows of bfloat16 is exact. A sum in bfloat16 would stop growing at 256."""
    x = torch.ones(131072, 32, device=device, dtype=torch.bfloat16)
    weight = torch.ones(32, device=device, dtype=torch.bfloat16, requires_grad=True)
    extension_cpp.kernel_template(x, weight, 0.0).backward(torch.ones_like(x))
    assert weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, 131072.0))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (0, 0)], ids=str)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    x = torch.ones(shape, device=device, requires_grad=True)
    weight = torch.ones(shape[-1], device=device, requires_grad=True)
    y = extension_cpp.kernel_template(x, weight)
    y.sum().backward()
    assert y.shape == shape and x.grad is not None and x.grad.shape == shape
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros_like(weight))


def test_second_order_says_no(device: str) -> None:
    x, weight = tensors(device)
    y = extension_cpp.kernel_template(x, weight)
    (grad_x,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="kernel_template: the second derivative is not implemented"):
        torch.autograd.grad(grad_x.sum(), x)


def test_backward_checks_its_own_arguments(device: str) -> None:
    x, weight = (t.detach() for t in tensors(device))
    rstd = torch.ops.extension_cpp.kernel_template(x, weight)[1]
    op = "extension_cpp::kernel_template_backward: expected"
    bad = [
        ((x.double(), x, weight, rstd), f"{op} grad_out to be float32 like x, but got float64"),
        ((x[:1], x, weight, rstd), f"{op} grad_out of shape [9, 33] like x, but got [1, 33]"),
        ((x, x, weight, rstd[:1]), f"{op} rstd as the forward returned it"),
        ((x, x, weight, rstd.double()), f"{op} rstd as the forward returned it"),
    ]
    if device != "cpu":
        bad.append(((x, x, weight, rstd.cpu()), f"{op} rstd on {x.device} like x, but got cpu"))
    for arguments, message in bad:
        with pytest.raises(RuntimeError) as error:
            torch.ops.extension_cpp.kernel_template_backward(*arguments, True, True)
        assert str(error.value) == message

"""Tests properties that only kernel_template has. tests/battery tests those that every op must have."""

import pytest
import torch

import extension_cpp


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_known_values(dtype: torch.dtype, device: str) -> None:
    """The value, the gradient, and the gradient's derivative in grad_out are exact for small binary fractions."""
    x = torch.tensor([[1.0, 2.0, 3.0], [0.0, 4.0, -2.0]], dtype=dtype, device=device, requires_grad=True)
    grad_out = torch.ones_like(x, requires_grad=True)
    y = extension_cpp.kernel_template(x, 0.5)
    (first,) = torch.autograd.grad(y, x, grad_out, create_graph=True)
    (second,) = torch.autograd.grad(first, grad_out, torch.ones_like(x))
    assert y.tolist() == [[1.0, 2.5, 4.25], [0.0, 4.0, 0.0]]
    assert first.tolist() == [[1.75, 1.5, 1.0], [1.75, 1.5, 1.0]]
    assert second.tolist() == [[1.0, 1.5, 1.75], [1.0, 1.5, 1.75]]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_step_counts_once(reverse: bool, device: str) -> None:
    """Sums of ones are exact, across blocks on the CPU and across warps and carries on the GPU."""
    ops = torch.ops.extension_cpp
    op = ops.kernel_template_backward if reverse else ops.kernel_template
    for steps in (1, 31, 32, 33, 255, 256, 257, 1000, 4097):
        expected = torch.arange(1.0, steps + 1, device=device)
        y = op(torch.ones(3, steps, device=device), 1.0)
        assert torch.equal(y, (expected.flip(0) if reverse else expected).expand(3, steps)), steps


def test_without_decay_nothing_is_summed(device: str) -> None:
    x = torch.randn(3, 300, device=device)
    assert torch.equal(extension_cpp.kernel_template(x, 0.0), x)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (0, 0)], ids=str)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    x = torch.ones(shape, device=device, requires_grad=True)
    y = extension_cpp.kernel_template(x, 0.5)
    y.sum().backward()
    assert y.shape == shape and x.grad is not None and x.grad.shape == shape


def test_backward_checks_its_own_arguments(device: str) -> None:
    grad_out = torch.ones(2, 3, device=device)
    backward = torch.ops.extension_cpp.kernel_template_backward
    op = "extension_cpp::kernel_template_backward: expected"
    for wrong, message in (
        ((grad_out.int(), 0.5), "grad_out to be float64, float32, bfloat16 or float16, but got int32"),
        ((grad_out[0, 0], 0.5), "grad_out to have at least one dimension, but got shape []"),
        ((grad_out, 2.0), "decay to be between 0 and 1, but got 2"),
    ):
        with pytest.raises(RuntimeError) as error:
            backward(*wrong)
        assert str(error.value) == f"{op} {message}"

"""Tests properties that only kernel_template has. tests/battery tests those that every op must have."""

import pytest
import torch

import extension_cpp


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_known_values(dtype: torch.dtype, device: str) -> None:
    """The value, the first and the second derivative are exact for small whole numbers, in every dtype."""
    x = torch.tensor([[1.0, -3.0], [0.0, 4.0]], dtype=dtype, device=device, requires_grad=True)
    y = extension_cpp.kernel_template(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert y.tolist() == [5.0, 8.0]
    assert first.tolist() == [[1.0, -3.0], [0.0, 4.0]]
    assert second.tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4), (0, 0)], ids=str)
def test_empty(shape: tuple[int, ...], device: str) -> None:
    """A row without elements gives NaN, as torch.mean does, and an empty gradient."""
    x = torch.ones(shape, device=device, requires_grad=True)
    y = extension_cpp.kernel_template(x)
    y.sum().backward()
    assert y.shape == shape[:-1] and x.grad is not None and x.grad.shape == shape
    assert y.isnan().all() if shape[-1] == 0 else y.numel() == 0


def test_backward_checks_its_own_arguments(device: str) -> None:
    x, grad_out = torch.ones(2, 3, device=device), torch.ones(2, device=device)
    backward = torch.ops.extension_cpp.kernel_template_backward
    op = "extension_cpp::kernel_template_backward: expected grad_out"
    bad = [
        (grad_out.double(), "to be float32 like x, but got float64"),
        (grad_out[:1], "of shape [2], x without its last dimension, but got [1]"),
    ]
    if device != "cpu":
        bad.append((grad_out.cpu(), f"on {x.device} like x, but got cpu"))
    for wrong, message in bad:
        with pytest.raises(RuntimeError) as error:
            backward(wrong, x)
        assert str(error.value) == f"{op} {message}"

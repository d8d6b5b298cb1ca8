"""Tests properties that only kernel_template has. tests/battery tests those that every op must have."""

import pytest
import torch

import extension_cpp


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_known_values(dtype: torch.dtype, device: str) -> None:
    """The value, the first and the second derivative are exact for small whole numbers, in every dtype."""
    x = torch.tensor([-3.0, -1.0, 0.0, 0.5, 4.0], dtype=dtype, device=device, requires_grad=True)
    y = extension_cpp.kernel_template(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert y.tolist() == [9.0, 1.0, 0.0, 0.25, 16.0]
    assert first.tolist() == [-6.0, -2.0, 0.0, 1.0, 8.0]
    assert second.tolist() == [2.0] * 5


def test_backward_checks_its_own_arguments(device: str) -> None:
    x = torch.ones(2, 3, device=device)
    backward = torch.ops.extension_cpp.kernel_template_backward
    op = "extension_cpp::kernel_template_backward: expected grad_out"
    bad = [(x.double(), "to be float32 like x, but got float64"), (x[:1], "of shape [2, 3] like x, but got [1, 3]")]
    if device != "cpu":
        bad.append((x.cpu(), f"on {x.device} like x, but got cpu"))
    for grad_out, message in bad:
        with pytest.raises(RuntimeError) as error:
            backward(grad_out, x)
        assert str(error.value) == f"{op} {message}"

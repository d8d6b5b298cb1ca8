"""Tests properties that only kernel_template has. tests/battery tests those that every op must have."""

import pytest
import torch

import extension_cpp


def test_known_values(device: str) -> None:
    """Values and derivatives are right for a segment without rows, and for a row outside of all segments."""
    x = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0]], device=device, requires_grad=True)
    grad_out = torch.tensor([[1.0], [2.0], [3.0]], device=device, requires_grad=True)
    out = extension_cpp.kernel_template(x, torch.tensor([1, 3, 3, 4], device=device))
    (first,) = torch.autograd.grad(out, x, grad_out, create_graph=True)
    (second,) = torch.autograd.grad(first, grad_out, x.detach())
    assert out.tolist() == second.tolist() == [[6.0], [0.0], [8.0]]
    assert first.tolist() == [[0.0], [1.0], [1.0], [3.0], [0.0]]


@pytest.mark.parametrize("shape, offsets", [((0, 5), [0, 0]), ((3, 0), [0, 2]), ((3, 5), [1]), ((3,), [2, 2])], ids=str)
def test_empty(shape: tuple[int, ...], offsets: list[int], device: str) -> None:
    x = torch.ones(shape, device=device, requires_grad=True)
    out = extension_cpp.kernel_template(x, torch.tensor(offsets, device=device))
    out.sum().backward()
    assert out.shape == (len(offsets) - 1, *shape[1:]) and x.grad is not None
    assert x.grad.sum() == out.sum() == (offsets[-1] - offsets[0]) * x[:1].numel()


@pytest.mark.parametrize("wrong", [-1, 5, 1, 1 << 62, -(1 << 63)])
def test_offsets_that_fall_or_are_out_of_range(wrong: int, device: str) -> None:
    """Wrong offsets raise an error on the CPU. On a GPU only the tensors are read, and valid segments are right."""
    x = torch.ones(4, 3, device=device)
    offsets = torch.tensor([0, 2, wrong, 4], device=device)
    backward, grad_out = torch.ops.extension_cpp.kernel_template_backward, torch.ones(3, 3, device=device)
    if device == "cpu":
        calls = {"kernel_template": lambda: extension_cpp.kernel_template(x, offsets)}
        calls["kernel_template_backward"] = lambda: backward(grad_out, offsets, 4)
        for op, call in calls.items():
            with pytest.raises(RuntimeError) as error:
                call()
            expected = f"expected offsets[2] to be from 2 to 4, but got {wrong}"
            assert str(error.value) == f"extension_cpp::{op}: {expected}"
        return
    out, grad_x = extension_cpp.kernel_template(x, offsets), backward(grad_out, offsets, 4)
    assert out[0].tolist() == [2.0] * 3 and ((out >= 0) & (out <= 4)).all()
    assert grad_x[0].tolist() == [1.0] * 3 and ((grad_x == 0) | (grad_x == 1)).all()


def test_a_sum_of_many_rows(device: str) -> None:
    """A sum over 131072 rows of bfloat16 is exact. A sum in bfloat16 would stop growing at 256."""
    x = torch.ones(131073, 33, device=device, dtype=torch.bfloat16)
    out = extension_cpp.kernel_template(x, torch.tensor([1, 131073], device=device))
    assert torch.equal(out, torch.full_like(out, 131072.0))


def test_backward_checks_its_own_arguments(device: str) -> None:
    grad_out, offsets = torch.ones(2, 3, device=device), torch.tensor([0, 1, 2], device=device)
    op = "extension_cpp::kernel_template_backward: expected"
    for arguments, message in [
        ((grad_out, offsets[:2], 2), f"{op} grad_out of shape [1, 3] like out, but got [2, 3]"),
        ((grad_out, offsets, -1), f"{op} rows to be 0 or more, but got -1"),
    ]:
        with pytest.raises(RuntimeError) as error:
            torch.ops.extension_cpp.kernel_template_backward(*arguments)
        assert str(error.value) == message


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(device: str) -> None:
    """The last rows of x and of the gradient, whose offsets need 64 bits, are right."""
    rows, cols = (1 << 31) // 1024 + 3, 1024
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device=device)
    x[-2:] = torch.tensor([[2.0], [3.0]])
    offsets = torch.tensor([rows - 3, rows - 1, rows], device=device)
    out = extension_cpp.kernel_template(x, offsets)
    assert out.unique(dim=1).tolist() == [[2.0], [3.0]]
    grad_x = torch.ops.extension_cpp.kernel_template_backward(out, offsets, rows)
    assert grad_x[-3:].unique(dim=1).tolist() == [[2.0], [2.0], [3.0]] and not grad_x[:-3].any()

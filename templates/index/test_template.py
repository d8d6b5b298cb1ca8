"""Tests properties that only kernel_template has. tests/battery tests those that every op must have."""

import pytest
import torch

import extension_cpp


def test_known_values(device: str) -> None:
    """Values and derivatives are right for a row that occurs several times and for one that does not occur."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device, requires_grad=True)
    grad_out = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]], device=device, requires_grad=True)
    out = extension_cpp.kernel_template(x, torch.tensor([2, 0, 2], device=device))
    (first,) = torch.autograd.grad(out, x, grad_out, create_graph=True)
    (second,) = torch.autograd.grad(first, grad_out, x.detach())
    assert out.tolist() == second.tolist() == [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]
    assert first.tolist() == [[2.0, 20.0], [0.0, 0.0], [5.0, 50.0]]


@pytest.mark.parametrize("shape, count", [((0, 5), 0), ((3, 0), 4), ((3, 5), 0), ((0,), 0)], ids=str)
def test_empty(shape: tuple[int, ...], count: int, device: str) -> None:
    x = torch.ones(shape, device=device, requires_grad=True)
    out = extension_cpp.kernel_template(x, torch.zeros(count, dtype=torch.int64, device=device))
    out.sum().backward()
    assert out.shape == (count, *shape[1:]) and x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("number", [-1, 3, 1 << 62, -(1 << 63)])
def test_numbers_that_are_no_rows(number: int, device: str) -> None:
    """For a number that is not a row, the CPU raises an error. A GPU gives NaN and no gradient, and reads only x."""
    x = torch.ones(3, 5, device=device, requires_grad=True)
    index = torch.tensor([1, 2, number, 0], device=device)
    backward, grad_out = torch.ops.extension_cpp.kernel_template_backward, torch.ones(4, 5, device=device)
    if device == "cpu":
        calls = {"kernel_template": lambda: extension_cpp.kernel_template(x, index)}
        calls["kernel_template_backward"] = lambda: backward(grad_out, index, 3)
        for op, call in calls.items():
            with pytest.raises(RuntimeError) as error:
                call()
            expected = f"expected index to have numbers from 0 to below 3, but got {number} at [2]"
            assert str(error.value) == f"extension_cpp::{op}: {expected}"
        return
    out = extension_cpp.kernel_template(x, index)
    assert out.isnan().all(1).tolist() == [False, False, True, False] and not out[[0, 1, 3]].isnan().any()
    assert torch.equal(backward(grad_out, index, 3), torch.ones_like(x))


def test_a_row_that_occurs_often(device: str) -> None:
    """The gradient of a row that occurs 131072 times is exact. A sum in bfloat16 would stop growing at 256."""
    x = torch.ones(3, 33, device=device, dtype=torch.bfloat16, requires_grad=True)
    index = torch.ones(131075, dtype=torch.int64, device=device)
    index[[7, 5000, 131074]] = 2
    out = extension_cpp.kernel_template(x, index)
    out.backward(torch.ones_like(out))
    assert x.grad is not None and x.grad[:, 0].tolist() == [0.0, 131072.0, 3.0]


def test_backward_checks_its_own_arguments(device: str) -> None:
    grad_out, index = torch.ones(2, 3, device=device), torch.tensor([0, 1], device=device)
    op = "extension_cpp::kernel_template_backward: expected"
    for arguments, message in [
        ((grad_out, index[:1], 2), f"{op} index of shape [2], dimension 0 of grad_out, but got [1]"),
        ((grad_out, index, -1), f"{op} rows to be 0 or more, but got -1"),
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
    index = torch.tensor([rows - 1, 0, rows - 2, rows - 1], device=device)
    out = extension_cpp.kernel_template(x, index)
    assert [row.unique().tolist() for row in out] == [[3.0], [0.0], [2.0], [3.0]]
    grad_x = torch.ops.extension_cpp.kernel_template_backward(out, index, rows)
    assert grad_x[-2:].unique(dim=1).tolist() == [[2.0], [6.0]] and not grad_x[:-2].any()

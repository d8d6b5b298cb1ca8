"""Tests logcumsumexp of rows and columns that begin with masked elements, which are -inf."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import extension_cpp
from tests.battery import every_dtype
from tests.checks import maker
from tests.loops import PART, result_and_gradients

LOW = -6e4  # finite in every dtype, but its exponential is 0 beside that of a number near 0
BORDERS = {0, 1, 2, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, PART - 1, PART, PART + 1}

along_rows_and_columns = pytest.mark.parametrize("dim", [1, 0], ids=["rows", "columns"])


def masked(length: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Returns rows and a mask of the first elements of each row. The masked prefixes have every length up to 67. In
    longer rows they have the lengths at the ends of a kernel's blocks, tiles and parts."""
    prefixes = [p for p in (range(length + 1) if length <= 67 else {*BORDERS, length - 1, length}) if p <= length]
    x = maker(device, dtype)((len(prefixes), length)).detach()
    return x, torch.arange(length, device=device) < torch.tensor(prefixes, device=device)[:, None]


def check_gradients(scan: Callable[[Tensor, int], Tensor], dim: int, x: Tensor, mask: Tensor) -> None:
    """Checks that masked elements have gradient 0, and others the bits that they have behind elements of LOW."""
    lines = (lambda t: t) if dim == 1 else (lambda t: t.t().contiguous())
    grad_y = maker(x.device.type, x.dtype, seed=1)(x.shape).detach()
    y, grad_x = result_and_gradients(lambda z: scan(z, dim), [lines(x.masked_fill(mask, -math.inf)), lines(grad_y)])
    low_y, low_grad = result_and_gradients(lambda z: scan(z, dim), [lines(x.masked_fill(mask, LOW)), lines(grad_y)])
    mask = lines(mask)
    assert torch.equal(y.isneginf(), mask)
    assert torch.equal(y[~mask], low_y[~mask])
    assert torch.equal(grad_x, low_grad.masked_fill(mask, 0))


def check_sums(scan: Callable[[Tensor, int], Tensor], dim: int, x: Tensor, mask: Tensor) -> None:
    """Checks that the derivatives of each result by its inputs sum to 1, up to rounding, or are 0 if it is -inf."""
    length = x.shape[1]
    x = x.masked_fill(mask, -math.inf)[:, None].expand(-1, length, length)  # one row for each result
    one_hot = torch.eye(length, dtype=x.dtype, device=x.device).expand(x.shape)
    if dim == 0:
        x, one_hot = x.mT.contiguous(), one_hot.mT.contiguous()
    _, weights = result_and_gradients(lambda z: scan(z, 2 if dim == 1 else 1), [x, one_hot])
    sums = weights.double().sum(2 if dim == 1 else 1)
    torch.testing.assert_close(sums, (~mask).double(), rtol=0, atol=32 * torch.finfo(x.dtype).eps)


@every_dtype
@along_rows_and_columns
@pytest.mark.parametrize("length", [1, 67, PART + 65])
def test_prefixes_of_minus_infinity_get_gradient_0(length: int, dim: int, dtype: torch.dtype, device: str) -> None:
    check_gradients(extension_cpp.logcumsumexp, dim, *masked(length, dtype, device))


@every_dtype
@along_rows_and_columns
def test_weights_of_a_result_sum_to_1_at_most(dim: int, dtype: torch.dtype, device: str) -> None:
    check_sums(extension_cpp.logcumsumexp, dim, *masked(67, dtype, device))


def test_a_number_alone(device: str) -> None:
    x = torch.tensor(-math.inf, device=device, requires_grad=True)
    assert torch.equal(torch.autograd.grad(extension_cpp.logcumsumexp(x, 0), x)[0], torch.zeros_like(x))

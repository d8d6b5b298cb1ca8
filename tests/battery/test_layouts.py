"""Tests that the stride of a dimension of size 1 has no effect. NumPy makes it 0, and views can make it large."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.battery import every_op
from tests.checks import as_tuple, maker, random_grad, run
from tests.opspec import Make, OpSpec

SHAPES = [(1,), (5, 1), (1, 33), (1, 1), (3, 1, 33), (1, 4, 1), (2, 1, 1, 7), (1, 3, 1, 33)]


def with_stride(stride: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that sets the stride of each dimension of size 1."""

    def of(x: Tensor) -> Tensor:
        strides = [stride if size == 1 else own for size, own in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, strides)

    return of


def leaves_of(make: Make, change: Callable[[Tensor], Tensor]) -> Make:
    def changed(shape: Sequence[int]) -> Tensor:
        return change(make(shape).detach()).requires_grad_()

    return changed


def same(x: Tensor, y: Tensor, has_products: bool) -> bool:
    """Checks that two tensors have the same bits, where all NaN are equal. With matrix products it allows 16 eps:
    PyTorch picks another product kernel for other strides. Sums of 33 products that round each step differ so much."""
    if x.shape != y.shape or not torch.equal(x.isnan(), y.isnan()):
        return False
    if x.numel() == 0:
        return x.shape == y.shape
    difference, size = (x - y).nan_to_num().abs(), y.nan_to_num().abs().max().item()
    return difference.max().item() <= (16 * torch.finfo(x.dtype).eps * max(size, 1.0) if has_products else 0.0)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # all dtypes read strides the same way
@pytest.mark.parametrize("stride", [0, 7, 1 << 40])
def test_any_stride_of_a_dimension_of_size_1(spec: OpSpec, dtype: torch.dtype, stride: int, device: str) -> None:
    """Results and gradients have the same bits if inputs and grad_out have any stride in dimensions of size 1."""
    change = with_stride(stride)
    for shape in SHAPES:
        usual = spec.sample_inputs(maker(device, dtype), shape)
        given = spec.sample_inputs(leaves_of(maker(device, dtype), change), shape)
        for number, (one, other) in enumerate(zip(usual, given, strict=True)):
            expected = run(spec.function, one, random_grad())
            ours = run(spec.function, other, lambda output: change(random_grad()(output)))
            for (name, x), (_, y) in zip(ours.tensors(), expected.tensors(), strict=True):
                assert same(x, y, spec.has_products), f"{shape}, sample {number}, {name}"
            with torch.no_grad():
                outputs = as_tuple(spec.function(*other.args, **other.kwargs))
            for x, y in zip(outputs, ours.outputs, strict=True):
                assert same(x, y, spec.has_products), f"{shape}, sample {number}: without gradients"

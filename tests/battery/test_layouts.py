"""Tests every number of dimensions, and that the stride of a dimension of size 1 has no effect. Tensors from NumPy may
have 0 as this stride, and views may have a large number."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.battery import every_op, fake_mode
from tests.checks import as_tuple, check, maker, random_grad, run
from tests.opspec import Make, OpSpec

SHAPES = [(1,), (5, 1), (1, 33), (1, 1), (3, 1, 33), (1, 4, 1), (2, 1, 1, 7), (1, 3, 1, 33)]


def with_stride(stride: int) -> Callable[[Tensor], Tensor]:
    """Returns a function that returns a view of a tensor with this stride in each dimension of size 1."""

    def of(x: Tensor) -> Tensor:
        strides = [stride if size == 1 else own for size, own in zip(x.shape, x.stride(), strict=True)]
        return x.as_strided(x.shape, strides)

    return of


def leaves_of(make: Make, change: Callable[[Tensor], Tensor]) -> Make:
    def changed(shape: Sequence[int]) -> Tensor:
        return change(make(shape).detach()).requires_grad_()

    return changed


def same(x: Tensor, y: Tensor, has_products: bool) -> bool:
    """Returns whether two tensors have the same bits, where all NaN are equal. Matrix products may differ by 16 eps,
    because PyTorch may pick another kernel for other strides, which adds 33 products in another order."""
    if x.shape != y.shape or not torch.equal(x.isnan(), y.isnan()):
        return False
    if x.numel() == 0:
        return x.shape == y.shape
    difference, size = (x - y).nan_to_num().abs(), y.nan_to_num().abs().max().item()
    return difference.max().item() <= (16 * torch.finfo(x.dtype).eps * max(size, 1.0) if has_products else 0.0)


@every_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # all dtypes share the code for strides
@pytest.mark.parametrize("stride", [0, 7, 1 << 40])
def test_any_stride_of_a_dimension_of_size_1(spec: OpSpec, dtype: torch.dtype, stride: int, device: str) -> None:
    """Results and gradients do not depend on the strides of inputs and grad_out in dimensions of size 1."""
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


SIZES = (3, 2, 4, 2, 3)  # ops that take any number of dimensions are tested with up to five


@every_op
def test_every_number_of_dimensions(spec: OpSpec, device: str) -> None:
    """Results and gradients are right for every number of dimensions that the op takes. Each number has one layout."""
    greatest = len(SIZES) if spec.greatest_rank is None else spec.greatest_rank
    layouts = itertools.cycle(["transposed", "sliced", "contiguous", "padded"])
    for rank, layout in zip(range(spec.least_rank, greatest + 1), layouts, strict=False):
        shape = tuple(itertools.islice(itertools.cycle(SIZES), rank))
        samples = list(spec.sample_inputs(maker(device, torch.float32, layout=layout if rank else "contiguous"), shape))
        assert samples, f"no sample with {rank} dimensions, though the spec has {spec.least_rank} to {greatest}"
        for sample in samples:
            check(spec, sample, what=f"{layout}, {rank} dimensions")


@every_op
def test_other_numbers_of_dimensions_get_a_sentence(spec: OpSpec, device: str) -> None:
    """With one dimension fewer than the op takes, or one more, the kernel and the fake raise the same error."""
    greatest = spec.greatest_rank
    for rank in ([spec.least_rank - 1] if spec.least_rank > 0 else []) + ([greatest + 1] if greatest else []):
        shape = tuple(itertools.islice(itertools.cycle(SIZES), spec.least_rank))
        sample, messages = next(iter(spec.sample_inputs(maker(device, torch.float32), shape))), []
        args = [torch.ones([2] * rank, device=device), *sample.args[1:]]
        mode = fake_mode(spec)
        for given in (args, tree_map_only(Tensor, mode.from_tensor, args)):
            with mode if given is not args else torch.no_grad(), pytest.raises(RuntimeError) as error:
                (spec.in_place or spec.function)(*given, **sample.kwargs)
            messages.append(str(error.value))
        assert messages[0] == messages[1] and messages[0].startswith(f"extension_cpp::{spec.name}: expected ")

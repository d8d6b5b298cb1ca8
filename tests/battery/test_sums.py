"""Tests that sums over many rows, and over their partial sums, accumulate in float32 or float64. A sum in a half type
would stop growing as soon as its terms are small in comparison with it."""

import math
from collections.abc import Iterator, Sequence

import torch

from tests.battery import every_dtype, every_op
from tests.checks import convert, run
from tests.opspec import Make, OpSpec, Sample

ROWS, COLS = 20_000, 9  # column_sums_part_rows() in csrc/common/column_sums.h makes 157 parts of the rows


def rows_of_one_sign(dtype: torch.dtype, device: str) -> Make:
    """Returns a function make(shape) for tensors whose rows differ only by a positive factor. A norm then gives the
    same result for all rows, and all terms of a sum over rows have the same sign. No element is near its row's mean,
    and sums do not overflow in float16."""

    def make(shape: Sequence[int]) -> torch.Tensor:
        golden = (math.sqrt(5) - 1) / 2
        columns = torch.arange(shape[-1], dtype=torch.float64)
        in_row = (1 + 2 * (columns % 2) + (golden * columns) % 1) / 32
        factors = 1 + (golden * torch.arange(math.prod(shape[:-1]), dtype=torch.float64)) % 1
        return (factors[:, None] * in_row).reshape(shape).to(device, dtype).requires_grad_()

    return make


def samples(spec: OpSpec, dtype: torch.dtype, device: str) -> Iterator[Sample]:
    """Yields the op's samples with ROWS rows of COLS columns. A fused norm gets no dropout, because with a random mask
    the results of the rows would differ. A recurrence runs along the columns, because its reference is a slow loop."""
    make = rows_of_one_sign(dtype, device)
    if spec.name == "linear_recurrence" and spec.options:
        for of_a in spec.options.values["a"]:
            yield spec.options.sample(make, (ROWS, COLS), {"dim": -1, "a": of_a})
    elif spec.positional and spec.options:
        yield spec.options.sample(make, (ROWS, COLS), {"weight": True, "bias": True})
    elif not spec.has_products:  # test_loss_sums.py
        yield from spec.sample_inputs(make, (ROWS, COLS))


@every_op
@every_dtype
def test_sums_over_many_rows(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Results and gradients that are sums over 20,000 rows have at most the error of a float32 tree reduction that is
    then rounded to the dtype. A recurrence may round once more, because the terms of a broadcast factor's gradient are
    stored in the dtype. In float64, the bound is that of adding all rows one by one, as losses and the reference do."""
    stored = 1 if spec.name == "linear_recurrence" else 0.5
    for sample in samples(spec, dtype, device):
        ours, exact = (
            run(function, each, torch.ones_like)
            for function, each in ((spec.function, sample), (spec.reference, convert(sample, torch.float64)))
        )
        in_sums = ROWS * torch.finfo(dtype).eps if dtype is torch.float64 else 16 * torch.finfo(torch.float32).eps
        for (name, x), (_, truth) in zip(ours.tensors(), exact.tensors(), strict=True):
            if x.is_floating_point() and x.numel() < ROWS * COLS:
                error, bound = (x.double() - truth).abs(), stored * torch.finfo(x.dtype).eps + in_sums
                what = f"{spec.name} {name} {tuple(x.shape)}: {(error / truth.abs()).max():.3g} over {bound:.3g}"
                assert (error <= bound * truth.abs()).all(), what

"""Tests rows that a kernel reads in several chunks. A kernel that sums exponentials rescales its running sums whenever
a chunk of 8192 columns has a larger maximum than the chunks before."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.battery import every_dtype, every_op
from tests.checks import check
from tests.opspec import OpSpec

WIDTH = 20_000  # three chunks of 8192 columns, of which the last is incomplete


@every_op
@every_dtype
@pytest.mark.parametrize("falling", [False, True])
def test_maximum_in_a_later_chunk(spec: OpSpec, dtype: torch.dtype, falling: bool, device: str) -> None:
    """Results are right if each chunk of a row has a larger (with `falling`, a smaller) maximum than the one before."""

    def make(shape: Sequence[int]) -> Tensor:
        row = torch.linspace(0, 9, shape[-1] if shape else 1, dtype=torch.float64, device=device)
        return (row.flip(0) if falling else row).to(dtype).expand(shape).clone().requires_grad_()

    for sample in spec.sample_inputs(make, (2, WIDTH)):
        check(spec, sample, what="falling" if falling else "rising")

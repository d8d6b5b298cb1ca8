"""Scans: long lines that several threads share, strides that are read as they are, and what may reach what."""

import itertools

import pytest
import torch
from torch import Tensor

import extension_cpp
from tests.checks import maker
from tests.opspec import DTYPES

PART = 1 << 14  # SCAN_PART of csrc/scan/scan.h
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def randn(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return maker(device, dtype)(shape).detach()


@every_dtype
@pytest.mark.parametrize("shape, dim", [((5 * PART + 7,), 0), ((PART + 1, 2), 0), ((2 * PART, 33), 0), ((1, PART), 1)])
def test_long_lines(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str) -> None:
    """The values, the same bits at any number of threads, and those of a line among others."""
    x = randn(shape, dtype, device)
    before = torch.get_num_threads()
    for exclusive, reverse in itertools.product((False, True), repeat=2):
        options = {"exclusive": exclusive, "reverse": reverse}
        results = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(extension_cpp.cumsum(x, dim, **options))
            results += extension_cpp.cumsum(torch.stack([x] * 3), dim + 1, **options)
        torch.set_num_threads(before)
        for other in results[1:]:
            assert torch.equal(other, results[0])
        exact = extension_cpp.reference.cumsum(x.double(), dim, **options)
        # Half types only round the result; the others round many sums of up to 2^14 numbers, too, as exact does.
        roundings = {torch.float64: x.shape[dim] ** 0.5, torch.float32: 32}.get(dtype, 1)
        bound = roundings * torch.finfo(dtype).eps * exact.abs().max().item()
        assert (results[0].double() - exact).abs().max().item() <= bound

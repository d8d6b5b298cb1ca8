"""Tests what only reduce_sum has. The battery tests the rest through tests/specs/reduce_sum.py."""

import itertools
import os

import numpy as np
import pytest
import torch

from extension_cpp import reduce_sum
from tests.forked import python
from tests.opspec import DTYPES

# Shapes for each case of the kernels: blocks of 32 columns, joined narrow rows, tiles of 1024 columns and of 512 bytes,
# rows for a group of lanes, a warp or a CTA, and sums long enough to be cut into chunks.
SHAPES = [
    (70000,),
    (300, 33),
    (20000, 3),
    (60000, 2),
    (33, 3584),
    (64, 17, 32),
    (2, 3000, 40),
    (3, 9000, 7),
    (2, 900, 1100),
    (5, 2100, 31),
    (2000, 5, 12),
    (40, 5, 1, 3),
    (9, 16, 7, 8),
]


def layouts(shape, dtype, device):
    """Yields tensors of the shape: contiguous, offset by an element, reversed or rotated dimensions, channels_last."""

    def make(*sizes):
        return torch.randn(sizes, dtype=torch.float64, device=device).to(dtype)

    yield "contiguous", make(*shape)
    yield "offset", make(torch.Size(shape).numel() + 1)[1:].view(shape)
    if len(shape) > 1:
        yield "reversed", make(*reversed(shape)).permute(*reversed(range(len(shape))))
        yield "rotated", make(*shape[1:], shape[0]).permute(-1, *range(len(shape) - 1))
    if len(shape) == 4:
        yield "channels_last", make(*shape).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_subset_of_dimensions_and_layout(shape, dtype, device):
    torch.manual_seed(0)
    for layout, x in layouts(shape, dtype, device):
        for count in range(1, len(shape) + 1):
            for dim in itertools.combinations(range(len(shape)), count):
                expected, eager = x.double().sum(dim), x.sum(dim)
                actual = reduce_sum(x, dim)
                terms = x.numel() / expected.numel()
                tolerance = max(
                    2 * (eager - expected).abs().max().item(),
                    4 * torch.finfo(dtype).eps * expected.abs().max().item() * terms**0.5,
                )
                error = (actual - expected).abs().max().item()
                assert actual.shape == eager.shape and actual.is_contiguous(), (layout, dim)
                assert error <= tolerance, (layout, dim)


def test_no_worse_than_eager_on_long_sums(device):
    torch.manual_seed(0)
    n = 1 << 24
    ramp = torch.linspace(0, 1, n, device=device)
    spike = torch.ones(n, device=device)
    spike[0] = 2.0**24  # a float32 sum that begins with 2^24 would lose all ones
    alternating = torch.randn(n, device=device) * 1e4
    alternating[1::2] = -alternating[::2] + 1e-3
    for x in (torch.rand(n, device=device), ramp, spike, alternating):
        for view, dim in ((x, None), (x.view(4, -1), 1), (x.view(-1, 64), 0)):
            exact = view.double().sum(dim)
            bound = torch.maximum((view.sum(dim) - exact).abs().max(), torch.finfo(x.dtype).eps * exact.abs().max())
            assert (reduce_sum(view, dim) - exact).abs().max() <= bound


def test_one_large_term_keeps_the_small_ones():
    x = torch.ones(1 << 20)
    x[5] = 2.0**24
    # A one that is added to 2^24 in float32 is lost. A float lane adds at most a few dozen terms before its sum becomes
    # a double.
    assert abs(reduce_sum(x).item() - (2.0**24 + 2.0**20)) <= 64


DETERMINISM = """
import sys, torch
from extension_cpp import reduce_sum
torch.manual_seed(0)
sums = []
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for shape, dim in (((1 << 21,), None), ((8, 200001), 1), ((5000, 33), 1), ((40000, 48), 0), ((30, 501, 7), 1),
                       ((3000, 1100), 0), ((16, 24, 900), (0, 2))):
        x = torch.randn(shape, dtype=torch.float64).to(dtype)
        results = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(reduce_sum(x, dim))
        assert all(torch.equal(results[0], other) for other in results[1:]), (dtype, shape)
        sums.append(results[0])
torch.save(sums, sys.argv[1])
"""


def test_same_bits_for_any_threads_and_instruction_set(tmp_path):
    saved = []
    for level in ("baseline", "v3", "v4"):  # a CPU without this level runs its highest level instead
        path = tmp_path / f"{level}.pt"
        environment = {**os.environ, "EXTENSION_CPP_CPU_LEVEL": level}
        done = python("-c", DETERMINISM, path, env=environment)
        assert done.returncode == 0, done.stderr
        saved.append(torch.load(path))
    for other in saved[1:]:
        assert all(torch.equal(a, b) for a, b in zip(saved[0], other, strict=True))


def test_sums_over_nothing_are_zero():
    assert torch.equal(reduce_sum(torch.ones(3, 0), 1), torch.zeros(3))
    assert torch.equal(reduce_sum(torch.ones(0, 3)), torch.tensor(0.0))
    assert reduce_sum(torch.ones(0, 3), 1).shape == (0,)
    assert torch.equal(reduce_sum(torch.ones(2, 0, 3), 1, keepdim=True), torch.zeros(2, 1, 3))


def test_dim_arguments_of_torch_sum(device):
    x = torch.randn(3, 4, 5, device=device, dtype=torch.float64)
    for dim in (None, (), 0, -1, [1], (0, 2), (-1, 0), (2, 1, 0)):
        for keepdim in (False, True):
            torch.testing.assert_close(reduce_sum(x, dim, keepdim), torch.sum(x, dim, keepdim))
    scalar = torch.tensor(3.0, device=device)
    assert reduce_sum(scalar).item() == reduce_sum(scalar, 0).item() == reduce_sum(scalar, -1, keepdim=True).item() == 3


def test_infinities_and_nan(device):
    for position in range(0, 200, 7):
        for shape, dim in (((200,), 0), ((200, 40), 0), ((200, 3), 0)):
            x = torch.ones(shape, device=device)
            x[position] = float("inf")
            assert torch.isposinf(reduce_sum(x, dim)).all()
            x[199 - position] = -float("inf")
            assert torch.isnan(reduce_sum(x, dim)).all()
            x = torch.ones(shape, device=device)
            x.view(200, -1)[position, 0] = float("nan")
            result = reduce_sum(x, dim).view(-1)
            assert torch.isnan(result[0]) and not torch.isnan(result[1:]).any()


@pytest.mark.parametrize("dim", [np.int64(1), (np.int32(0), -1), [1], torch.tensor(1), torch.Size([0])], ids=repr)
def test_dims_are_what_torch_takes(dim: object, device: str) -> None:
    x = torch.randn(2, 3, device=device)
    torch.testing.assert_close(reduce_sum(x, dim), torch.sum(x, dim))  # type: ignore[arg-type]  # as torch.sum's stub


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape, dim", [((3, 70001), 1), ((70001, 3), 0), ((300, 40, 301), (0, 2)), ((700, 1100), None)]
)
def test_sums_that_cancel(shape: tuple[int, ...], dim: object, dtype: torch.dtype, device: str) -> None:
    """Sums that cancel are right. They stay in double between passes and chunks, so that the result is the exact sum
    rounded once, apart from float32 lanes of a few dozen terms. Partial sums exceed float16's range and the total."""
    generator = torch.Generator().manual_seed(0)
    size = 500.0 if dtype is torch.float16 else 1e4
    half = torch.randn(shape, generator=generator).mul(size).to(dtype)
    x = torch.stack(
        [half, -half.flip([d for d in range(len(shape)) if dim is None or d in torch.tensor(dim).view(-1)])]
    )
    x += torch.randn(x.shape, generator=generator).to(dtype)
    x = x.flatten(0, 1) if dim is None or 0 in torch.tensor(dim).view(-1) else torch.cat([*x], 1)
    exact = torch.sum(x.double(), dim)  # type: ignore[arg-type]  # as torch.sum's stub
    got = reduce_sum(x.to(device), dim).cpu()  # type: ignore[arg-type]
    lanes = torch.finfo(torch.float32).eps * x.double().abs().max() * 64 * (x.numel() / exact.numel() / 64) ** 0.5
    rounding = torch.finfo(dtype).eps / 2 * exact.abs()
    assert got.dtype == dtype and ((got.double() - exact).abs() <= rounding + lanes).all()


def test_partial_sums_beyond_float16(device: str) -> None:
    """The sum of 200,000 terms of 60000 and 200,000 of -60000 is 0, although partial sums exceed float16's range."""
    for shape, dim in (((2, 400_000), 1), ((400_000, 2), 0)):
        x = torch.full(shape, 60000.0, dtype=torch.float16, device=device)
        x.narrow(dim, 200_000, 200_000).neg_()
        assert reduce_sum(x, dim).tolist() == [0.0, 0.0]

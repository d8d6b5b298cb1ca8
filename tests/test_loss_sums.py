"""Losses of many chunks, and losses whose gradients are streamed past the CPU's cache."""

from collections.abc import Iterator

import pytest
import torch

import extension_cpp
from extension_cpp.functional import linear_loss
from tests.battery import every_dtype
from tests.battery.test_streaming import digest_of, streamed
from tests.checks import maker
from tests.opspec import DTYPES, Sample

CLASSES, BLOCK, LINE = 4097, 32, 64  # common/cpu/block.h has the block of 32 columns; a line has 64 bytes


@pytest.mark.parametrize("reduction", ["sum", "none"])
@every_dtype
def test_bias_gradient_of_many_chunks(
    reduction: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2400 chunks of a row, and 300 of 8, each of which adds 1 or 8 to the sum: bfloat16 has no number between 2048 and
    2064, and float16 none between 2048 and 2050. The other class has the probability 1 in every row."""
    classes, rows = 16, 2400
    for in_chunk in (1, 8):
        monkeypatch.setattr(linear_loss, "CHUNK_BYTES", in_chunk * classes * dtype.itemsize)
        bias = torch.zeros(classes, dtype=dtype, device=device)
        bias[1] = 1000
        leaves = [torch.zeros(rows, 1), torch.zeros(classes, 1), bias]
        x, weight, bias = (leaf.to(device, dtype).requires_grad_() for leaf in leaves)
        target = torch.zeros(rows, dtype=torch.int64, device=device)
        extension_cpp.linear_cross_entropy(x, weight, target, bias, reduction=reduction).sum().backward()
        assert bias.grad is not None
        assert bias.grad.tolist() == [-rows, rows, *[0] * (classes - 2)], f"{in_chunk} rows in a chunk"


def border_targets(dtype: torch.dtype) -> torch.Tensor:
    """For each row a target at a border of what is streamed of it (row_span in rows/cpu_sum_exp.h): of its head up to
    the next line, of the block behind it, of the streamed blocks, and of the last. The first row begins at a line."""
    targets, places = [], LINE // dtype.itemsize
    for row in range(8 * places):  # at each place within a line 8 rows begin
        head = -row * CLASSES % places
        begin = head + BLOCK if head else 0
        end = begin + (CLASSES - begin - BLOCK) // BLOCK * BLOCK
        targets.append((0, head - 1, head, begin - 1, begin, end - 1, end, CLASSES - 1)[row // places])
    return torch.tensor(targets) % CLASSES  # head - 1 is no column where the head is empty


def digests() -> Iterator[str]:
    """For each dtype the hash of the loss and its gradient."""
    for dtype in DTYPES:
        target = border_targets(dtype)
        sample = Sample((maker("cpu", dtype)((len(target), CLASSES)), target), {"reduction": "sum"})
        yield f"{dtype} {digest_of(extension_cpp.cross_entropy, sample)}"


def test_targets_at_the_borders_of_streamed_rows() -> None:
    assert streamed("tests.test_loss_sums.digests") == list(digests())

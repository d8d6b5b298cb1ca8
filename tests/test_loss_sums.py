"""Tests linear_cross_entropy in many chunks, and cross_entropy whose gradients are streamed past the CPU's cache."""

from collections.abc import Iterator

import pytest
import torch

import extension_cpp
from extension_cpp.functional import linear_loss
from tests.battery import every_dtype
from tests.battery.test_streaming import digest_of, streamed
from tests.checks import maker
from tests.opspec import DTYPES, Sample

CLASSES, BLOCK, LINE = 4097, 32, 64  # classes, columns of a block (common/cpu/block.h), bytes of a cache line


@pytest.mark.parametrize("reduction", ["sum", "none"])
@every_dtype
def test_bias_gradient_of_many_chunks(
    reduction: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias gradient is exact for 2400 chunks of one row, and for 300 chunks of 8 rows. Class 1 has probability 1
    and all targets are class 0, so that each row adds -1 and 1 to these gradients. Running sums in half types would be
    wrong: bfloat16 has no number between 2048 and 2064, and float16 none between 2048 and 2050."""
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
    """Returns one target for each row, which is the first or last column of a part of the row. row_span() in
    rows/cpu_sum_exp.h divides a row into the head up to the next cache line, the block after the head, the streamed
    blocks, and the last block. Row 0 begins at a cache line."""
    targets, places = [], LINE // dtype.itemsize
    for row in range(8 * places):  # 8 rows begin at each offset within a cache line
        head = -row * CLASSES % places
        begin = head + BLOCK if head else 0
        end = begin + (CLASSES - begin - BLOCK) // BLOCK * BLOCK
        targets.append((0, head - 1, head, begin - 1, begin, end - 1, end, CLASSES - 1)[row // places])
    return torch.tensor(targets) % CLASSES  # head - 1 is no column where the head is empty


def digests() -> Iterator[str]:
    """Yields, for each dtype, the hash of the loss and its gradient."""
    for dtype in DTYPES:
        target = border_targets(dtype)
        sample = Sample((maker("cpu", dtype)((len(target), CLASSES)), target), {"reduction": "sum"})
        yield f"{dtype} {digest_of(extension_cpp.cross_entropy, sample)}"


def test_targets_at_the_borders_of_streamed_rows() -> None:
    assert streamed("tests.test_loss_sums.digests") == list(digests())

"""Results that do not fit into the CPU's cache are streamed past it, in blocks that begin at a line of the cache. They
have the bits of results that are not. A second process takes a cache of no bytes, so that it streams small tensors."""

import hashlib
import os
from collections.abc import Iterator

import torch

import extension_cpp
from tests.battery import ROOT, SPECS
from tests.checks import maker, random_grad, run
from tests.forked import python
from tests.opspec import DTYPES, Sample

# Rows that begin anywhere between two lines, and rows of whole lines.
SHAPES = [(9, 331), (4, 1024), (2, 3, 5, 67)]
CLASSES, BLOCK, LINE = 4097, 32, 64  # cpu_block.h has the block of 32 columns; a line has 64 bytes


def border_targets(dtype: torch.dtype) -> torch.Tensor:
    """For each row a target at a border of what is streamed of it (row_span in common/cpu_sum_exp.h): of its head up to
    the next line, of the block behind it, of the streamed blocks, and of the last. The first row begins at a line."""
    targets, places = [], LINE // dtype.itemsize
    for row in range(8 * places):  # at each place within a line 8 rows begin
        head = -row * CLASSES % places
        begin = head + BLOCK if head else 0
        end = begin + (CLASSES - begin - BLOCK) // BLOCK * BLOCK
        targets.append((0, head - 1, head, begin - 1, begin, end - 1, end, CLASSES - 1)[row // places])
    return torch.tensor(targets) % CLASSES  # head - 1 is no column where the head is empty


def digests() -> Iterator[str]:
    """A line for each call: its name and the hash of its results and gradients."""
    for dtype in DTYPES:
        target = border_targets(dtype)
        loss = Sample((maker("cpu", dtype)((len(target), CLASSES)), target), {"reduction": "sum"})
        calls = [(extension_cpp.cross_entropy, "cross_entropy at borders", loss)]
        for spec in (spec for spec in SPECS if not spec.has_products):
            samples = (sample for shape in SHAPES for sample in spec.sample_inputs(maker("cpu", dtype), shape))
            calls += [(spec.function, f"{spec.name} {number}", sample) for number, sample in enumerate(samples)]
        for function, name, sample in calls:
            digest = hashlib.sha256()
            for _, x in run(function, sample, random_grad()).tensors():
                digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy())
            yield f"{name} {dtype} {digest.hexdigest()}"


def test_results_that_are_streamed() -> None:
    script = "from tests.battery.test_streaming import digests\nprint(*digests(), sep='\\n')"
    streamed = python("-c", script, cwd=ROOT, env={**os.environ, "EXTENSION_CPP_CPU_CACHE": "0"})
    assert streamed.returncode == 0, streamed.stderr
    assert set(streamed.stdout.splitlines()) ^ set(digests()) == set()

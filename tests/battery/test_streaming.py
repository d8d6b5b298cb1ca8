"""Tests that results written with streaming stores have the same bits as others. CPU kernels use streaming stores, in
blocks of whole cache lines, for results larger than the cache. A second process here assumes a cache of 0 bytes."""

import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from tests.battery import ROOT, SPECS
from tests.checks import maker, random_grad, run
from tests.forked import python
from tests.opspec import OpSpec, Sample

# Shapes whose rows do not begin at multiples of a cache line, and one with rows of whole cache lines.
SHAPES = [(9, 331), (4, 1024), (2, 3, 5, 67)]
DTYPES = (torch.float32, torch.bfloat16)  # float64 and float16 have the same code, with other block sizes
# Ops without matrix products, whose bits may depend on the number of threads, which the second process chooses.
WITHOUT_PRODUCTS = [spec for spec in SPECS if not spec.has_products]


def digest_of(function: Callable[..., Any], sample: Sample) -> str:
    """Runs a sample, and returns a hash of its results and gradients."""
    digest = hashlib.sha256()
    for _, x in run(function, sample, random_grad()).tensors():
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def digests(specs: Iterable[OpSpec] = WITHOUT_PRODUCTS) -> Iterator[str]:
    """Runs all samples of the specs, and yields for each a line with the op's name and a hash of its results."""
    for spec, dtype in itertools.product(specs, DTYPES):
        samples = (sample for shape in SHAPES for sample in spec.sample_inputs(maker("cpu", dtype), shape))
        for number, sample in enumerate(samples):
            yield f"{spec.name} {number} {dtype} {digest_of(spec.function, sample)}"


@functools.cache
def streamed(function: str) -> list[str]:
    """Returns what the named function yields in a process that writes all results with streaming stores."""
    module, _, name = function.rpartition(".")
    script = f"from {module} import {name}\nprint(*{name}(), sep='\\n')"
    done = python("-c", script, cwd=ROOT, env={**os.environ, "EXTENSION_CPP_CPU_CACHE": "0"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("spec", WITHOUT_PRODUCTS, ids=str)
def test_results_that_are_streamed(spec: OpSpec) -> None:
    expected = list(digests([spec]))
    assert (
        expected and [line for line in streamed(f"{__name__}.digests") if line.startswith(f"{spec.name} ")] == expected
    )

"""Results that do not fit into the CPU's cache are streamed past it, in blocks that begin at a line of the cache. They
have the bits of results that are not. A second process takes a cache of no bytes, so that it streams small tensors."""

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

# Rows that begin anywhere between two lines, and rows of whole lines.
SHAPES = [(9, 331), (4, 1024), (2, 3, 5, 67)]
DTYPES = (torch.float32, torch.bfloat16)  # the others have the same code, and blocks of other sizes
# The bits of PyTorch's matrix products may depend on the number of threads, which the second process chooses itself.
WITHOUT_PRODUCTS = [spec for spec in SPECS if not spec.has_products]


def digest_of(function: Callable[..., Any], sample: Sample) -> str:
    """The hash of all results and gradients."""
    digest = hashlib.sha256()
    for _, x in run(function, sample, random_grad()).tensors():
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def digests(specs: Iterable[OpSpec] = WITHOUT_PRODUCTS) -> Iterator[str]:
    """A line for each call: its name and the hash of its results and gradients."""
    for spec, dtype in itertools.product(specs, DTYPES):
        samples = (sample for shape in SHAPES for sample in spec.sample_inputs(maker("cpu", dtype), shape))
        for number, sample in enumerate(samples):
            yield f"{spec.name} {number} {dtype} {digest_of(spec.function, sample)}"


@functools.cache
def streamed(function: str) -> list[str]:
    """The lines that a function of the tests yields where all results are streamed."""
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

"""Results that do not fit into the CPU's cache are streamed past it, in blocks that begin at a line of the cache. They
have the bits of results that are not. A second process takes a cache of no bytes, so that it streams small tensors."""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.battery import ROOT, SPECS
from tests.checks import maker, random_grad, run
from tests.forked import python
from tests.opspec import DTYPES, Sample

# Rows that begin anywhere between two lines, and rows of whole lines.
SHAPES = [(9, 331), (4, 1024), (2, 3, 5, 67)]


def digest_of(function: Callable[..., Any], sample: Sample) -> str:
    """The hash of all results and gradients."""
    digest = hashlib.sha256()
    for _, x in run(function, sample, random_grad()).tensors():
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def digests() -> Iterator[str]:
    """A line for each call: its name and the hash of its results and gradients."""
    for spec, dtype in itertools.product(SPECS, DTYPES):
        if spec.has_products:  # PyTorch's products, and cross_entropy
            continue
        samples = (sample for shape in SHAPES for sample in spec.sample_inputs(maker("cpu", dtype), shape))
        for number, sample in enumerate(samples):
            yield f"{spec.name} {number} {dtype} {digest_of(spec.function, sample)}"


def streamed(function: str) -> list[str]:
    """The lines that a function of this package's tests yields, without arguments, where all results are streamed."""
    module, _, name = function.rpartition(".")
    script = f"from {module} import {name}\nprint(*{name}(), sep='\\n')"
    done = python("-c", script, cwd=ROOT, env={**os.environ, "EXTENSION_CPP_CPU_CACHE": "0"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_results_that_are_streamed() -> None:
    assert set(streamed("tests.battery.test_streaming.digests")) ^ set(digests()) == set()

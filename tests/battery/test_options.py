"""Tests every pair of options of every op, with shapes that end in an incomplete block of columns or tile of rows."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.battery import SPECS, every_dtype
from tests.checks import as_tuple, check, maker
from tests.opspec import OpSpec

# With 128 rows or more, linear_cross_entropy pads 11 classes to a multiple of 8, unless an option forbids it.
SHAPES = [(130, 33), (3, 7, 33), (2, 3, 5, 34)]
FOR_GRADIENTS = ("float_loss", "needs_grad_x", "needs_grad_weight", "needs_grad_bias")  # set by autograd alone


def pairs(spec: OpSpec) -> Iterator[dict[str, Any]]:
    """Yields every combination of values of any two options, as keyword arguments."""
    assert spec.options is not None
    for names in itertools.combinations(spec.options.values, 2):
        for values in itertools.product(*(spec.options.values[name] for name in names)):
            yield dict(zip(names, values, strict=True))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.options], ids=str)
@every_dtype
def test_every_pair_of_options(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Results and gradients are right for every pair of option values. A call under no_grad gives the same bits or,
    with matrix products, nearly the same results."""
    assert spec.options is not None
    for shape, chosen in itertools.product(SHAPES, pairs(spec)):
        sample = spec.options.sample(maker(device, dtype), shape, chosen)
        ours = check(spec, sample, what=f"{chosen}")
        with torch.no_grad():
            outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
        for output, with_gradients in zip(outputs, ours.outputs, strict=True):
            # Under no_grad, PyTorch may pick another kernel for a matrix product. A sum of 33 products then differs by
            # up to 16 eps.
            tolerance = 16 * torch.finfo(output.dtype).eps if spec.has_products else 0.0
            assert torch.allclose(output, with_gradients, tolerance, tolerance), (
                f"{spec.name} {shape} {chosen}: without gradients"
            )


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_no_option_is_forgotten(spec: OpSpec) -> None:
    """The spec's options include every argument of the schema that is not a required tensor, if there are two or more.
    The seed, which p requires, and the arguments that only autograd sets do not count."""
    schema = getattr(torch.ops.extension_cpp, spec.name).default._schema
    arguments = [each.name for each in schema.arguments if str(each.type) != "Tensor"]
    expected = {name for name in arguments if name not in ("seed", *FOR_GRADIENTS, *spec.lists)}
    listed = set(spec.options.values) if spec.options else set()
    assert len(expected) < 2 or listed >= expected

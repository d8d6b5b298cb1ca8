"""Tests jagged nested tensors with lengths, whose values may contain rows that belong to no component."""

from typing import Any

import pytest
import torch
from torch import Tensor

from extension_cpp.registration.entries import BY_ROWS, NESTED
from tests.checks import as_tuple, maker, random_grad
from tests.opspec import OpSpec, all_specs

OFFSETS, LENGTHS = (0, 3, 3, 7, 9), (2, 0, 4, 1)


@pytest.mark.parametrize("shape", [(9, 6), (9, 4, 6)], ids=str)
@pytest.mark.parametrize("spec", [x for x in all_specs() if NESTED.get(x.name) is BY_ROWS], ids=str)
def test_lengths_stay(spec: OpSpec, shape: tuple[int, ...], device: str) -> None:
    """Results and gradients have the nested input's offsets and lengths, and the bits of a call on its values()."""
    offsets, lengths = (torch.tensor(each, device=device) for each in (OFFSETS, LENGTHS))

    def jagged(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(x, offsets, lengths)

    def is_like(x: Tensor) -> bool:
        return x.is_nested and torch.equal(x.offsets(), offsets) and torch.equal(x.lengths(), lengths)

    for sample in spec.sample_inputs(maker(device, torch.float32), shape):
        if any(isinstance(arg, tuple) and len(arg) == len(shape) for arg in sample.args):
            continue  # normalizes over the jagged dimension, which raises an error

        def call(is_nested: bool, sample: Any = sample) -> list[Tensor]:
            given, leaves = [], []
            for x in sample.args:
                if isinstance(x, Tensor) and x.is_floating_point():
                    x = jagged(x.detach()) if is_nested and x.shape == shape else x.detach()
                    leaves.append(x.requires_grad_())
                given.append(x)
            outputs = as_tuple(spec.function(*given, **sample.kwargs))
            grads = [random_grad()(y.values()) if is_nested else random_grad()(y) for y in outputs]
            gradients = torch.autograd.grad(outputs, leaves, [jagged(g) for g in grads] if is_nested else grads)
            with torch.no_grad():
                again = as_tuple(spec.function(*given, **sample.kwargs))
            found = [*outputs, *gradients, *again]
            if is_nested:
                assert all(is_like(y) for y in (*outputs, *again))
                assert all(is_like(g) for g, x in zip(gradients, leaves, strict=True) if x.is_nested)
                assert [len(part) for part in outputs[0].unbind()] == list(LENGTHS)
            return [x.values() if x.is_nested else x for x in found]

        for ours, expected in zip(call(True), call(False), strict=True):
            assert torch.equal(ours, expected)

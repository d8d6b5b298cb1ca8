"""Tests each op with an autocast rule in ops.py under autocast, with one tensor in another dtype than the others."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from extension_cpp.registration.calls import without_suffix
from tests.battery import SPECS
from tests.checks import as_tuple, maker, random_grad, run
from tests.opspec import DTYPES, OpSpec, Sample

AUTOCAST = torch.bfloat16
NAMES = ("linear_recurrence", "cross_entropy", "linear_cross_entropy", "rotary_embedding")


def cast(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the floating-point arguments in the dtypes to which autocast should cast them, by the op's docstring."""
    if name == "linear_recurrence":
        widest = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
        return [x.to(widest) for x in tensors]
    if name == "rotary_embedding":
        q, k, cos, sin = tensors
        of_q = torch.promote_types(q.dtype, k.dtype)
        of_cos = of_q if cos.dtype == sin.dtype == of_q else torch.promote_types(of_q, torch.float32)
        return [q.to(of_q), k.to(of_q), cos.to(of_cos), sin.to(of_cos)]
    if name == "linear_cross_entropy":  # the class weights do not require grad and keep their dtype
        return [x.to(AUTOCAST) if x.requires_grad and x.dtype is not torch.float64 else x for x in tensors]
    return list(tensors)


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def called(function: Any, sample: Sample) -> list[Tensor] | str:
    """Runs the function forward and backward. Returns its outputs and gradients, or the message of a RuntimeError."""
    try:
        return [x for _, x in run(function, sample, random_grad()).tensors()]
    except RuntimeError as error:
        return str(error)


def same(ours: list[Tensor] | str, by_hand: list[Tensor] | str, float_loss: bool) -> bool:
    """Returns whether the calls with autocast and with casts by hand gave the same bits or the same error. `float_loss`
    allows that only the first call has a float32 loss, which is then rounded before the comparison."""
    if isinstance(ours, str) or isinstance(by_hand, str):
        return ours == by_hand
    if float_loss and ours[0].dtype is torch.promote_types(by_hand[0].dtype, torch.float32):
        ours = [ours[0].to(by_hand[0].dtype), *ours[1:]]
    elif float_loss:
        return False
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(ours, by_hand, strict=True))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.name in NAMES], ids=str)
def test_one_tensor_in_another_dtype(spec: OpSpec, device: str) -> None:
    """Under autocast, an op gives the same outputs and gradients as for tensors cast by hand. If it raises an error for
    the cast tensors, it raises the same error under autocast."""
    accepted = set()
    for dtype, other in itertools.permutations(DTYPES, 2):
        for number, sample in enumerate(spec.sample_inputs(maker(device, dtype), (4, 6))):
            given = [*sample.args, *sample.kwargs.values()]
            places = [i for i, x in enumerate(given) if is_float(x)]
            for place in places:
                mixed = [
                    x.detach().to(other).requires_grad_(x.requires_grad) if i == place else x
                    for i, x in enumerate(given)
                ]
                float_loss = "cross_entropy" in spec.name

                def call(values: Sequence[Any], sample: Sample = sample) -> Any:
                    args, kwargs = values[: len(sample.args)], values[len(sample.args) :]
                    return spec.function(*args, **dict(zip(sample.kwargs, kwargs, strict=True)))

                def under_autocast(*values: Any) -> Any:
                    with torch.autocast(device, AUTOCAST):
                        return call(values)

                def by_hand(*values: Any) -> Any:
                    tensors = iter(cast(spec.name, [x for x in values if is_float(x)]))
                    return call([next(tensors) if is_float(x) else x for x in values])

                ours, expected = (called(function, Sample(tuple(mixed))) for function in (under_autocast, by_hand))
                what = f"{spec.name}, sample {number}: {dtype}, tensor {places.index(place)} {other}"
                assert same(ours, expected, float_loss), f"{what}: {ours}, by hand {expected}"
                if isinstance(ours, str):
                    continue
                accepted.add(place)
                with torch.no_grad():
                    outputs = as_tuple(under_autocast(*mixed))
                assert all(map(torch.equal, outputs, ours)), f"{what}: without gradients"
    assert accepted >= set(places)


def test_every_rule_is_tested() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    every = torch._C._dispatch_get_all_op_names()
    # A cast to float32 is registered for CUDA alone, and a rule for both device types.
    with_rule = [name for name in every if name.startswith("extension_cpp::") and has_kernel(name, "AutocastCPU")]
    assert {without_suffix(name) for name in with_rule} == {f"extension_cpp::{name}" for name in NAMES}

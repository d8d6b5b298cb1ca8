"""Tests that wrong input raises RuntimeError with the same message in the kernel and in the fake."""

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from tests.battery import calls_of_every_order, every_differentiable_op, every_op, fake_mode, with_overloads
from tests.checks import (
    maker,
)
from tests.opspec import ErrorSample, OpSpec


@every_op
def test_bad_input_gets_its_sentence(spec: OpSpec, device: str) -> None:
    samples = list(spec.error_inputs(device))
    assert samples
    for sample in samples:
        tensors = [x.detach() for x in (*sample.args, *sample.kwargs.values()) if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in tensors]
        with pytest.raises(RuntimeError) as error:
            (spec.in_place or spec.function)(*sample.args, **sample.kwargs)
        assert str(error.value) == sample.message
        for x, old in zip(tensors, before, strict=True):
            torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True, msg=f"{sample.message}: it was written")


def _on_meta(sample: ErrorSample) -> ErrorSample:
    """Returns a copy of the sample with meta tensors. Tensors that share a storage also do so in the copy."""
    storages: dict[int, torch.Tensor] = {}

    def one(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        flat = torch.empty(storage.nbytes() // x.itemsize, dtype=x.dtype, device="meta")
        flat = storages.setdefault(storage.data_ptr(), flat)
        return flat.as_strided(x.shape, x.stride(), x.storage_offset()).requires_grad_(x.requires_grad)

    args, kwargs = tree_map_only(torch.Tensor, one, (sample.args, sample.kwargs))
    return ErrorSample(args, sample.message, kwargs)


@every_op
@pytest.mark.parametrize("fake_device", ["cpu", "cuda", "meta"])
def test_fakes_refuse_what_kernels_refuse(spec: OpSpec, fake_device: str) -> None:
    """For meta tensors and FakeTensors, a wrong call raises the kernel's message. If a fake accepted the call,
    torch.export would succeed, and the exported program would fail at run time. FakeTensors on "cuda" need no GPU."""
    with FakeTensorMode() if fake_device != "meta" else contextlib.nullcontext():
        samples = list(spec.error_inputs("cpu" if fake_device == "meta" else fake_device))
        for sample in map(_on_meta, samples) if fake_device == "meta" else samples:
            for gradients in (True, *(() if re.search("requires? grad", sample.message) else (False,))):
                with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError) as error:
                    (spec.in_place or spec.function)(*sample.args, **sample.kwargs)
                assert str(error.value) == sample.message


def _wrong(name: str, x: Any, others: dict[str, Any]) -> Iterator[Any]:
    """Yields wrong values of the argument `name`, whose right value is x, given the right values of the others."""
    if isinstance(x, list) and x and isinstance(x[0], torch.Tensor):
        yield from ([wrong, *x[1:]] for wrong in (x[0].cfloat(), x[0].int()) if x[0].is_floating_point())
    if isinstance(x, torch.Tensor):
        yield x.cfloat() if x.is_floating_point() else x.float()
        yield x.int()
        tensors = [other for other in others.values() if isinstance(other, torch.Tensor)]
        if x.is_floating_point() and any(other.is_floating_point() for other in tensors):
            yield x.float() if x.dtype is torch.float64 else x.double()
        has_like = any(other.shape == x.shape and x.numel() > 0 for other in tensors)
        if name == "seed" or "normalized_shape" in others or has_like:
            yield torch.cat([x.reshape(-1), x.reshape(-1)[:1]])
        if tensors:
            yield x.to("meta")
    elif name == "p":
        yield from (-0.5, 1.5, float("nan"))
    elif name == "normalized_shape":
        yield from ((), (*x, 2), (2, *x[1:]), (1, 1, 1, 1, *x))
    elif name == "dim" and isinstance(x, int):
        yield from (7, -7)
    elif name == "dim":
        yield from ((7,), (-7,), (0, 0))


@every_op
def test_every_argument_is_checked(spec: OpSpec, device: str) -> None:
    """For a wrong argument of any operator of the op, the kernel and the fake raise the same message, which names the
    argument. The operators include those of backward and the no-grad overloads."""
    refused = 0
    for sample in spec.sample_inputs(maker(device, torch.float32), (3, 5)):
        for called, args, kwargs in calls_of_every_order(spec, sample, "contiguous").made:
            args = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            given = {argument.name: x for argument, x in zip(called._schema.arguments, args, strict=False)}
            mode = fake_mode(spec)
            fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
            for op, (i, name) in itertools.product(with_overloads(called), enumerate(given)):
                for wrong in _wrong(name, args[i], {other: x for other, x in given.items() if other != name}):
                    with pytest.raises(RuntimeError) as error:
                        op(*args[:i], wrong, *args[i + 1 :], **kwargs)
                    message = str(error.value)
                    assert message.startswith(f"{called._schema.name}: expected "), message
                    assert re.search(rf"\b({name}|dim|seed)\b", message), message
                    fake = tree_map_only(torch.Tensor, mode.from_tensor, wrong)
                    with mode, pytest.raises(RuntimeError) as fake_error:
                        op(*fakes[:i], fake, *fakes[i + 1 :], **kwargs)
                    assert str(fake_error.value) == message
                    refused += 1
    assert refused > 0


@every_differentiable_op
def test_forward_mode_refuses_what_kernels_refuse(spec: OpSpec, device: str) -> None:
    """For dual tensors, a wrong call raises the kernel's message. Forward mode computes by plain PyTorch operations,
    which by themselves would accept other arguments than the kernel."""
    for sample in spec.error_inputs(device):
        args = list(sample.args)
        places = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if "out" in sample.kwargs or "grad" in sample.message or not places:
            continue
        with forward_ad.dual_level(), pytest.raises(RuntimeError) as error:
            x = args[places[0]].detach()
            args[places[0]] = forward_ad.make_dual(x, torch.ones_like(x))
            spec.function(*args, **sample.kwargs)
        assert str(error.value) == sample.message


@every_op
def test_autocast_lets_no_integers_through(spec: OpSpec, device: str) -> None:
    for sample in spec.sample_inputs(maker(device, torch.float32), (3, 5)):
        for i, x in enumerate(sample.args):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                args = [*sample.args[:i], x.detach().int(), *sample.args[i + 1 :]]
                with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(RuntimeError) as error:
                    spec.function(*args, **sample.kwargs)
                assert str(error.value).startswith(f"extension_cpp::{spec.name}: expected "), error.value

"""Tests that run for every op, over all dtypes and devices, from its OpSpec. Each file has one subject."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import ProfilerActivity, profile

from extension_cpp.registration.calls import overload_of, overloads_of, without_suffix
from tests.checks import Calls, Strides, as_tuple, leaves, random_grad
from tests.opspec import DTYPES, OpSpec, Sample, all_specs

SPECS = all_specs()
OPCHECKS = inspect.signature(torch.library.opcheck).parameters["test_utils"].default
ROOT = Path(__file__).resolve().parent.parent.parent

every_differentiable_op = pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.differentiable], ids=str)
every_op = pytest.mark.parametrize("spec", SPECS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def profiled(call: Callable[[], object], device: str) -> tuple[set[str], list[str]]:
    """Returns the names of the operators and of the GPU kernels that a call runs, without memcpy and memset."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    for _ in range(2):  # the first run of a profiler may miss kernels
        with profile(activities=activities) as profiler:
            call()
            if device == "cuda":
                torch.cuda.synchronize()
    on_gpu = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {event.name for event in profiler.events()}, [name for name in on_gpu if not name.startswith("Mem")]


def fake_mode(spec: OpSpec) -> FakeTensorMode:
    """Returns a FakeTensorMode that lets an op return a tensor whose size depends on the values of its inputs."""
    return FakeTensorMode(shape_env=ShapeEnv() if spec.unknown_sizes else None, static_shapes=True)


def calls_of_every_order(spec: OpSpec, sample: Sample, layout: str | Strides) -> Calls:
    """Runs a sample's forward, backward and, if any, double backward, and returns the recorded operator calls."""
    grad_out = random_grad(layout)
    with Calls() as calls:
        outputs = [y for y in as_tuple(spec.function(*sample.args, **sample.kwargs)) if y.requires_grad]
        if not spec.differentiable:
            return calls
        first = torch.autograd.grad(
            outputs, leaves(sample), [grad_out(output) for output in outputs], create_graph=spec.second_order
        )
        again = [gradient for gradient in first if gradient.requires_grad]
        if again:
            torch.autograd.grad(again, leaves(sample), [grad_out(g) for g in again], allow_unused=True)
    return calls


def can_be_traced(spec: OpSpec) -> bool:
    """Returns whether torch.jit.trace can record the op. It raises an error for an argument bool[]."""
    schema = overload_of(f"extension_cpp::{spec.name}")._schema
    return not any("List[bool]" in str(argument.type) for argument in schema.arguments)


def with_overloads(op: torch._ops.OpOverload) -> list[torch._ops.OpOverload]:
    """Returns an operator and its no-grad overloads, which have no Autograd kernel, if the operator has them."""
    name = without_suffix(op._schema.name)
    return [overload_of(name), *overloads_of(name)]

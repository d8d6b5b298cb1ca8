"""Tests fakes, torch.compile, torch.export and AOTInductor."""

import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.battery import (
    OPCHECKS,
    SPECS,
    calls_of_every_order,
    can_be_traced,
    every_differentiable_op,
    every_op,
    fake_mode,
    with_overloads,
)
from tests.checks import (
    LAYOUTS,
    Calls,
    Strides,
    as_tuple,
    leaves,
    maker,
    random_grad,
    run,
    with_float_weights,
)
from tests.opspec import OpSpec, Sample


@every_op
def test_opcheck(spec: OpSpec, device: str, request: pytest.FixtureRequest) -> None:
    """Every op passes torch.library.opcheck. With --slow, all of opcheck's tests run for each pair of a dtype and a
    layout. Without it, each dtype has one layout. test_aot_dispatch_dynamic, the slowest test, then runs for one
    sample, because test_compile_fullgraph_with_dynamic_shapes makes the same comparison for all samples."""
    cases = [(torch.float32, (5, 33)), (torch.bfloat16, (2, 3, 4, 5)), (torch.float64, (0, 3))]
    for i, (dtype, shape) in enumerate(cases):
        for j, layout in enumerate(("sliced", "transposed", "contiguous")):
            slow = request.config.getoption("--slow")
            if i != j and not slow:
                continue
            for number, sample in enumerate(spec.sample_inputs(maker(device, dtype, layout=layout), shape)):
                aot = slow or i == number == 0
                tests = [test for test in OPCHECKS if aot or test != "test_aot_dispatch_dynamic"]
                with Calls() as calls:
                    outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
                # Samples whose results contain NaN are left out, because opcheck treats NaN as different from NaN.
                if calls.made and not any(output.isnan().any() for output in outputs):
                    torch.library.opcheck(*calls.made[0], test_utils=tests)


@every_op
def test_compile_fullgraph_with_dynamic_shapes(spec: OpSpec, device: str) -> None:
    """The op compiles to one graph for all sizes, which gives the results and gradients of eager mode. A second
    compilation raises RecompileError and fails the test. A fake that converts a SymInt to an int would cause one."""
    samples = [list(spec.sample_inputs(maker(device, torch.float32), shape)) for shape in [(6, 40), (9, 64), (5, 33)]]
    for same_call in zip(*samples, strict=True):
        torch._dynamo.reset()
        compiled = torch.compile(spec.function, backend="aot_eager", fullgraph=True, dynamic=True)
        for sample in same_call:
            with torch._dynamo.config.patch(error_on_recompile=True):
                ours = run(compiled, sample, random_grad())
            eager = run(spec.function, sample, random_grad())
            for (name, a), (_, b) in zip(ours.tensors(), eager.tensors(), strict=True):
                assert torch.equal(a, b), f"{spec.name} {sample.args[0].shape}: {name} differs under torch.compile"
                assert a.stride() == b.stride(), f"{spec.name} {sample.args[0].shape}: {name} has other strides"


# The strides of q in a packed QKV tensor of shape (batch, rows, heads, width), after transpose(1, 2).
PERMUTED = Strides(order=(0, 2, 1, 3), steps=(1, 3, 1, 1), expanded=frozenset(), offset=8)


@every_op
@pytest.mark.slow
def test_compile_with_inductor_alone(spec: OpSpec, device: str) -> None:
    """Inductor compiles a graph of each op with some of PyTorch's ops, for permuted inputs with gaps. Without --slow,
    only test_compile_with_inductor runs. test_compile_with_inductor compiles all ops in one graph, which takes little
    longer than one op."""
    torch._dynamo.reset()
    for sample in spec.sample_inputs(maker(device, torch.float32, layout=PERMUTED), (2, 4, 7, 8)):

        def model(*args: object, sample: Sample = sample) -> tuple[torch.Tensor, ...]:
            outputs = as_tuple(spec.function(*args, **sample.kwargs))
            return tuple((output * 2.0).sin() for output in outputs)

        ours = run(torch.compile(model, fullgraph=True), Sample(sample.args), random_grad())
        eager = run(model, Sample(sample.args), random_grad())
        for (name, a), (_, b) in zip(ours.tensors(), eager.tensors(), strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
        break


class EveryOp(torch.nn.Module):
    """A module whose forward calls each op with its sample, and sums each output over dimension 1."""

    def __init__(self, samples: list[tuple[OpSpec, Sample]]) -> None:
        super().__init__()
        self.samples = samples

    def forward(self, tensors: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for (spec, sample), inputs in zip(self.samples, tensors, strict=True):
            left = iter(inputs)
            args = [next(left) if isinstance(x, torch.Tensor) else x for x in sample.args]
            outputs = as_tuple(spec.function(*args, **sample.kwargs))
            results += [output.sum(1) if output.dim() > 1 else output for output in outputs]
        return results


def test_compile_with_inductor(device: str) -> None:
    """Inductor compiles forward and backward of all ops, mixed with PyTorch's, in one graph, with the right results."""
    torch._dynamo.reset()
    make = maker(device, torch.float32, layout=PERMUTED)
    samples = [(spec, next(iter(spec.sample_inputs(make, (2, 4, 7, 8))))) for spec in SPECS]
    tensors = [[x for x in sample.args if isinstance(x, torch.Tensor)] for _, sample in samples]
    inputs = [x for each in tensors for x in each if x.requires_grad]
    model = EveryOp(samples)
    results = []
    for each in (torch.compile(model, fullgraph=True), model):
        outputs = each(tensors)
        trained = [output for output in outputs if output.requires_grad]
        grads = [random_grad()(output) for output in trained]
        results.append([*outputs, *(torch.autograd.grad(trained, inputs, grads) if inputs else ())])
    names = [f"result {i}" for i in range(len(outputs))]
    names += [
        f"{spec}: gradient" for (spec, _), each in zip(samples, tensors, strict=True) for x in each if x.requires_grad
    ]
    for name, ours, eager in zip(names, *results, strict=True):
        torch.testing.assert_close(ours, eager, msg=lambda text, name=name: f"{name}: {text}")


def test_ahead_of_time_inductor(device: str, tmp_path: Path) -> None:
    """A graph of all ops compiled by AOTInductor gives the values of eager mode. AOTInductor's code does not check an
    op's strides and reads its outputs with those of the fake, so that wrong strides of a fake give wrong values."""
    make = maker(device, torch.bfloat16, layout=PERMUTED)
    samples = [(spec, next(iter(spec.sample_inputs(make, (2, 4, 7, 8))))) for spec in SPECS]
    tensors = [[x.detach() for x in sample.args if isinstance(x, torch.Tensor)] for _, sample in samples]
    model = EveryOp(samples)
    program = torch.export.export(model, (tensors,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    for ours, eager in zip(torch._inductor.aoti_load_package(path)(tensors), model(tensors), strict=True):
        torch.testing.assert_close(ours, eager)


def _check_fakes(spec: OpSpec, sample: Sample, layout: str | Strides, what: str) -> None:
    """Checks that the fakes of all operators that a sample calls have the real results' shapes, dtypes and strides."""
    mode = fake_mode(spec)
    for called, args, kwargs in calls_of_every_order(spec, sample, layout).made:
        args = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, args)
        for op in with_overloads(called):
            reals = tree_leaves(as_tuple(op(*args, **kwargs)))  # a result may be a list
            with mode:
                promises = tree_leaves(as_tuple(op(*fakes, **kwargs)))
            for real, fake in zip(reals, promises, strict=True):
                for part in ("shape", "dtype", "device"):
                    promised, given = getattr(fake, part), getattr(real, part)
                    if part == "shape" and spec.unknown_sizes:
                        given = [b for a, b in zip(promised, given, strict=True) if type(a) is int]
                        promised = [a for a in promised if type(a) is int]
                    assert promised == given, f"{op} {what}: the fake's {part} is {promised}, the kernel's {given}"
                for size, promised, stride in zip(real.shape, fake.stride(), real.stride(), strict=True):
                    assert size == 1 or promised == stride or real.numel() == 0, (
                        f"{op} {what}: the fake promises strides {fake.stride()} for {real.stride()}"
                    )


@every_op
def test_fake_has_the_real_strides(spec: OpSpec, device: str) -> None:
    """Fakes return the real results' strides for many layouts in bfloat16, float32 weights and empty tensors."""
    some = [((6, 33), "contiguous"), ((1, 3, 1, 5), "transposed"), ((3, 0), "transposed")]
    for shape, layout in [*some, *(((2, 3, 4, 37), layout) for layout in LAYOUTS)]:
        for sample in spec.sample_inputs(maker(device, torch.bfloat16, layout=layout), shape):
            for each in (sample, *([with_float_weights(sample)] if spec.float_weights else [])):
                _check_fakes(spec, each, layout, f"{shape} {layout}")


@every_differentiable_op
def test_fakes_of_backward_with_frozen_inputs(spec: OpSpec, device: str) -> None:
    """If only one input requires grad, the fake of backward returns the shapes and strides of the real results."""
    for sample in spec.sample_inputs(maker(device, torch.float32), (5, 33)):
        for trained in leaves(sample):
            args = [x.detach() if isinstance(x, torch.Tensor) and x is not trained else x for x in sample.args]
            _check_fakes(spec, Sample(tuple(args), sample.kwargs), "contiguous", "frozen")


ANY_STRIDES = st.builds(
    Strides,
    order=st.permutations(range(4)).map(tuple),
    steps=st.tuples(*[st.integers(1, 3)] * 4),
    expanded=st.frozensets(st.integers(0, 3), max_size=2),
    offset=st.integers(0, 3),
)


@every_op
@settings(deadline=None, derandomize=True, max_examples=10, suppress_health_check=list(HealthCheck))
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), first=ANY_STRIDES, second=ANY_STRIDES)
def test_fake_has_the_real_strides_of_any_layout(
    spec: OpSpec, device: str, shape: tuple[int, ...], first: Strides, second: Strides
) -> None:
    """Fakes return the real results' strides for random dimension orders, gaps, offsets, expansions and sizes."""
    turns = itertools.cycle([maker(device, torch.float32, layout=layout) for layout in (first, second)])
    for sample in spec.sample_inputs(lambda shape: next(turns)(shape), shape):
        _check_fakes(spec, sample, second, f"{shape} {first}, others {second}")


class OneCall(torch.nn.Module):
    """A module that calls the op. forward takes the sample's first tensor; the others are parameters and buffers."""

    def __init__(self, spec: OpSpec, sample: Sample) -> None:
        super().__init__()
        self.function = functools.partial(spec.function, **sample.kwargs)
        self.others = list(sample.args[1:])
        for i, x in enumerate(self.others):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                self.register_parameter(f"tensor_{i}", torch.nn.Parameter(x.detach()))
            elif isinstance(x, torch.Tensor):
                self.register_buffer(f"tensor_{i}", x)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        others = [getattr(self, f"tensor_{i}", other) for i, other in enumerate(self.others)]
        outputs = self.function(x, *others)
        return outputs if isinstance(outputs, tuple) else (outputs,)


CAPTURES: dict[str, Callable[[OneCall, torch.Tensor], torch.nn.Module]] = {
    "torch.export": lambda module, x: torch.export.export(module, (x,)).module(),
    "strict torch.export": lambda module, x: torch.export.export(module, (x,), strict=True).module(),
    "make_fx": lambda module, x: make_fx(module)(x),
    "symbolic_trace": lambda module, x: torch.fx.symbolic_trace(module),
    "jit.trace": lambda module, x: torch.jit.trace(module, (x,)),
}


# Without --slow, strict torch.export, the slowest of CAPTURES, runs only under no_grad, under which a captured graph
# might lose gradients. test_compile_fullgraph_with_dynamic_shapes runs Dynamo, on which strict torch.export is based,
# with gradients.
WAYS = [
    pytest.param(
        *(capture, gradients),
        id=f"{capture}-{'grad' if gradients else 'no_grad'}",
        marks=[pytest.mark.slow] if gradients and capture == "strict torch.export" else [],
    )
    for capture, gradients in itertools.product(CAPTURES, (True, False))
]


@every_op
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("capture, gradients", WAYS)
def test_captured_graphs_train(
    spec: OpSpec, capture: str, gradients: bool, device: str, request: pytest.FixtureRequest
) -> None:
    """A graph gives the results and all gradients of eager mode, even if it was captured under no_grad. Without --slow,
    one sample per op is captured under no_grad, because all samples then run the same code."""
    if capture == "jit.trace" and sys.version_info >= (3, 14):
        pytest.skip("torch.jit does not support Python 3.14")
    if capture == "jit.trace" and not can_be_traced(spec):
        pytest.skip("torch.jit.trace takes no lists of bool")
    if capture == "jit.trace" and spec.lists and spec.mutates:
        pytest.skip("torch.jit.trace loses calls of custom operators that write into lists")
    every = gradients or request.config.getoption("--slow")
    for sample in itertools.islice(spec.sample_inputs(maker(device, torch.float32), (5, 33)), None if every else 1):
        module, x = OneCall(spec, sample), sample.args[0].detach()
        with torch.set_grad_enabled(gradients):
            captured = CAPTURES[capture](module, x)
        results = []
        for each in (captured, module):
            each.zero_grad()
            leaf = x.clone().requires_grad_(spec.differentiable)
            outputs = tree_leaves(each(leaf))  # a graph of torch.fx returns an op's list as a single output
            if not spec.differentiable:
                results.append(outputs)
                continue
            trained = [output for output in outputs if output.requires_grad]
            torch.autograd.backward(trained, [random_grad()(output) for output in trained])
            parameters = [*module.parameters()] if capture in ("make_fx", "symbolic_trace") else [*each.parameters()]
            results.append([*outputs, leaf.grad, *(parameter.grad for parameter in parameters)])
        for ours, eager in zip(*results, strict=True):
            assert ours is not None and torch.equal(ours, eager)

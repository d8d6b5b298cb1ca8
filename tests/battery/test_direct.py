"""Tests that direct calls and dispatcher calls of an op give the same results, gradients and autograd graphs.

A direct call applies the operator's autograd.Function without PyTorch's dispatcher (registration/calls.py). Calls in
plain eager mode are direct. If a mode, a hook or a tensor subclass must see the operator, the call goes through the
dispatcher."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from extension_cpp.registration import calls
from extension_cpp.registration.autograd import qualified
from tests.battery import can_be_traced, every_differentiable_op, profiled
from tests.checks import as_tuple, leaves, maker, random_grad
from tests.opspec import OpSpec, Sample

SHAPE = (6, 40)


def sample_of(spec: OpSpec, device: str, dtype: torch.dtype = torch.float32) -> Sample:
    """Returns the op's sample that has the largest number of tensors, and thus its optional tensors."""
    samples = spec.sample_inputs(maker(device, dtype), SHAPE)
    return max(samples, key=lambda sample: sum(isinstance(x, Tensor) for x in sample.args))


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Yields a list to which each direct call adds the name of its operator."""
    before, seen = dict(calls.DIRECT), list[str]()

    def spy(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [seen.append(name), apply(*args)][1]

    calls.DIRECT.update({name: spy(name, apply) for name, apply in before.items()})
    try:
        yield seen
    finally:
        calls.DIRECT.update(before)


@contextlib.contextmanager
def by_the_dispatcher() -> Iterator[None]:
    before = dict(calls.DIRECT)
    calls.DIRECT.clear()
    try:
        yield
    finally:
        calls.DIRECT.update(before)


def graph(y: Tensor) -> list[Any]:
    """Returns the name of y's autograd node, and the names of the nodes to which this node passes gradients."""
    node = y.grad_fn
    return [] if node is None else [node.name(), *(after and after.name() for after, _ in node.next_functions)]


def outcome(spec: OpSpec, sample: Sample) -> list[Any]:
    """Calls the op. Returns its outputs, their autograd nodes, and the gradients of first and, if any, second order."""
    outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
    different = [y for y in outputs if y.requires_grad]
    found: list[Any] = [[y.detach().clone(), y.requires_grad, graph(y)] for y in outputs]
    if different:
        grads = [random_grad()(y) for y in different]
        first = torch.autograd.grad(different, leaves(sample), grads, create_graph=spec.second_order, allow_unused=True)
        found.append([None if g is None else g.detach() for g in first])
        again = [g for g in first if g is not None and g.requires_grad]
        if again:
            found.append(
                torch.autograd.grad(again, leaves(sample), [random_grad()(g) for g in again], allow_unused=True)
            )
    return found


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert torch.equal(one.nan_to_num(3.0), other.nan_to_num(3.0))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


@every_differentiable_op
def test_results_that_only_backward_reads_do_not_require_grad(spec: OpSpec, device: str, monkeypatch) -> None:
    """The operators' results that the functions never return, such as a norm's statistics, have no gradient."""
    found = list[Tensor]()

    def returned(name: str) -> int:
        return len(calls.overload_of(name + calls.NO_GRAD)._schema.returns)

    def spy(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
        count, operator = returned(name), calls.by_position(calls.overload_of(name))
        return lambda *args: [found.extend(as_tuple(operator(*args))[count:]), apply(*args)][1]

    for name, apply in calls.DIRECT.items():
        monkeypatch.setitem(calls.DIRECT, name, spy(name, apply))
    sample = sample_of(spec, device)
    spec.function(*sample.args, **sample.kwargs)
    assert not any(x.requires_grad for x in found)
    own = qualified(spec.name)
    assert found or own not in calls.DIRECT or returned(own) == len(calls.overload_of(own)._schema.returns)


@every_differentiable_op
def test_plain_calls_are_direct(spec: OpSpec, device: str) -> None:
    """Calls in plain eager mode are direct, and give the same as dispatcher calls, even if one input alone requires
    grad."""
    for dtype in (torch.float32, torch.bfloat16):
        sample = sample_of(spec, device, dtype)
        parameters = [torch.nn.Parameter(x.detach()) if x is not sample.args[0] else x for x in leaves(sample)]
        swap = {id(x): y for x, y in zip(leaves(sample), parameters, strict=True)}
        given = replace(sample, args=tuple(swap.get(id(x), x) for x in sample.args))
        for alone in range(len(parameters)):
            for i, x in enumerate(leaves(given) if alone == 0 else parameters):
                x.requires_grad_(i == alone)
            with counted() as seen:
                direct = outcome(spec, given)
            assert seen[:1] == [f"{calls.NAMESPACE}::{spec.name}"]
            with by_the_dispatcher():
                assert_equal(direct, outcome(spec, given))


@every_differentiable_op
def test_calls_without_gradients_run_the_no_grad_overload(spec: OpSpec, device: str) -> None:
    """If no input requires grad, a call runs the no-grad overload, even if gradients are enabled."""
    sample = sample_of(spec, device)
    given = [x.detach() if isinstance(x, Tensor) else x for x in sample.args]
    names, _ = profiled(lambda: spec.function(*given, **sample.kwargs), device)
    name = f"{calls.NAMESPACE}::{spec.name}"
    assert f"{name}{calls.NO_GRAD}" in names and name not in names


class Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


class DispatchRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def inference_with_gradients() -> Iterator[None]:
    with torch.inference_mode(), torch.enable_grad():
        yield


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "torch_function mode": Recorder,
    "dispatch mode": DispatchRecorder,
    "forward mode": forward_ad.dual_level,
    "default device": lambda: torch.device("cpu"),
    "inference mode": inference_with_gradients,
}


@every_differentiable_op
@pytest.mark.parametrize("mode", MODES)
def test_modes_see_the_operator(spec: OpSpec, device: str, mode: str) -> None:
    sample = sample_of(spec, device)
    with counted() as seen, MODES[mode]() as direct_mode:
        direct = as_tuple(spec.function(*sample.args, **sample.kwargs))
    assert not seen
    with by_the_dispatcher(), MODES[mode]() as other_mode:
        other = as_tuple(spec.function(*sample.args, **sample.kwargs))
    assert_equal([y.detach() for y in direct], [y.detach() for y in other])
    assert [graph(y) for y in direct] == [graph(y) for y in other]
    if isinstance(direct_mode, Recorder | DispatchRecorder):
        assert any(spec.name in name for name in direct_mode.seen) and direct_mode.seen == other_mode.seen


@every_differentiable_op
def test_autocast_sees_the_operators_that_have_a_rule(spec: OpSpec, device: str) -> None:
    sample = sample_of(spec, device)
    with torch.autocast(device, torch.bfloat16):
        with counted() as seen:
            direct = outcome(spec, sample)
        with by_the_dispatcher():
            assert_equal(direct, outcome(spec, sample))
    name = f"{calls.NAMESPACE}::{spec.name}"
    assert (name in calls.CASTING) == (name not in seen)


class Seen(Tensor):
    """A tensor subclass that records the name of every function called with it."""

    names: list[str] = []  # noqa: RUF012  # shared by all tensors of the class

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.names.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@every_differentiable_op
@pytest.mark.parametrize("as_parameter", [False, True])
def test_subclasses_see_the_operator(spec: OpSpec, device: str, as_parameter: bool) -> None:
    """If any argument, also an optional one, is a tensor subclass, the call goes through the dispatcher."""
    sample = sample_of(spec, device)
    for i, x in enumerate(sample.args):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        one = x.detach().as_subclass(Seen).requires_grad_(x.requires_grad)
        one = torch.nn.Parameter(one) if as_parameter and x.requires_grad else one
        args = (*sample.args[:i], one, *sample.args[i + 1 :])
        Seen.names.clear()
        with counted() as seen:
            spec.function(*args, **sample.kwargs)
        assert not seen and any(spec.name in name for name in Seen.names), f"argument {i}"


@every_differentiable_op
def test_transforms_and_graphs_see_the_operator(spec: OpSpec, device: str) -> None:
    sample = sample_of(spec, device)
    places = [i for i, x in enumerate(sample.args) if isinstance(x, Tensor) and x.requires_grad]
    tensors = [sample.args[i] for i in places]

    def function(*given: Tensor) -> Tensor:
        args = list(sample.args)
        for i, x in zip(places, given, strict=True):
            args[i] = x
        return as_tuple(spec.function(*args, **sample.kwargs))[0]

    with counted() as seen:
        torch.func.vjp(function, *(x.detach() for x in tensors))
        if not spec.positional:
            torch.vmap(function)(*(torch.stack([x.detach()] * 2).requires_grad_() for x in tensors))
        graph_of = make_fx(function)(*tensors)
        if not spec.positional and can_be_traced(spec):
            torch.jit.trace(function, tuple(tensors), check_trace=False)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            function(*(mode.from_tensor(x.detach()).requires_grad_() for x in tensors))
    assert not seen
    assert any(spec.name in str(node.target) for node in graph_of.graph.nodes)


@every_differentiable_op
def test_saved_tensors_hooks(spec: OpSpec, device: str) -> None:
    """saved_tensors_hooks around forward see the same tensors in a direct call as in a dispatcher call. Hooks that are
    set between forward and backward see only what backward saves for a second backward."""
    sample, packed = sample_of(spec, device), list[int]()

    def pack(x: Tensor) -> Tensor:
        packed.append(x.numel())
        return x.clone()

    def once() -> list[int]:
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = next(y for y in as_tuple(spec.function(*sample.args, **sample.kwargs)) if y.requires_grad)
        found = sorted(packed)
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            torch.autograd.grad(y, leaves(sample), random_grad()(y), allow_unused=True)
        return [*found, -1, *packed]

    with counted() as seen:
        direct = once()
    assert seen
    with by_the_dispatcher():
        assert direct == once()


def _in_a_thread(call: Callable[[], Any]) -> Any:
    """Runs a call in a thread, while another thread is in a dispatch mode, which must not affect the call."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    with DispatchRecorder():
        thread.start()
        thread.join()
    return found[0]


class Inner(torch.autograd.Function):
    """An autograd.Function whose forward calls the op with gradients enabled. autograd.Function disables them first."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], Any], x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.found = call()
        return x.clone()


def _in_a_function(call: Callable[[], Any]) -> Any:
    found = []
    Inner.apply(lambda: found.append(call()), torch.ones(1, requires_grad=True))
    return found[0]


def _deterministic(call: Callable[[], Any]) -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return call()
    finally:
        torch.use_deterministic_algorithms(before)


def _checkpointed(call: Callable[[], Any]) -> Any:
    return checkpoint(call, use_reentrant=False)


@every_differentiable_op
@pytest.mark.parametrize("around", [_in_a_thread, _in_a_function, _deterministic, _checkpointed])
def test_what_does_not_see_the_operator(spec: OpSpec, device: str, around: Callable[..., Any]) -> None:
    sample = sample_of(spec, device)
    with counted() as seen:
        direct = around(lambda: outcome(spec, sample))
    assert seen
    with by_the_dispatcher():
        assert_equal(direct, around(lambda: outcome(spec, sample)))


@every_differentiable_op
def test_profilers_name_the_operator_or_an_overload(spec: OpSpec, device: str) -> None:
    sample = sample_of(spec, device)
    name = f"{calls.NAMESPACE}::{spec.name}"
    shapes = []
    for way, seen in ((contextlib.nullcontext, calls.overloads_of(name)[0]._schema.name), (by_the_dispatcher, name)):
        with way(), profile(record_shapes=True) as profiler:
            spec.function(*sample.args, **sample.kwargs)
        shapes += [[event.input_shapes for event in profiler.events() if event.name == seen]]
    assert shapes[0] == shapes[1] and len(shapes[0]) == 1


@every_differentiable_op
def test_errors_are_those_of_the_operator(spec: OpSpec, device: str) -> None:
    """Direct calls raise the same errors as dispatcher calls: for wrong arguments that require grad, in a second
    backward, and in a backward after inputs and a result were changed in place."""

    def message(call: Callable[[], Any]) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def messages() -> list[str]:
        found = []
        for error in spec.error_inputs(device):
            for x in error.args:
                if isinstance(x, Tensor) and x.is_floating_point() and x.is_leaf:
                    x.requires_grad_()
            found.append(message(lambda error=error: spec.function(*error.args, **error.kwargs)))
        assert all(found)
        for write in (False, True):
            sample = sample_of(spec, device)
            y = next(y for y in as_tuple(spec.function(*sample.args, **sample.kwargs)) if y.requires_grad)
            if write:
                for x in (*sample.args, y):
                    if isinstance(x, Tensor):
                        x.detach().zero_()
            grad = functools.partial(torch.autograd.grad, y, leaves(sample), random_grad()(y), allow_unused=True)
            found += [message(grad), message(grad)]
        return found

    direct = messages()
    with by_the_dispatcher():
        assert direct == messages()


@every_differentiable_op
def test_compiled_autograd(spec: OpSpec, device: str) -> None:
    """Compiled autograd, which traces the backward of an uncompiled call, gives the outputs and gradients of eager
    mode, for direct calls and for dispatcher calls."""
    sample, once = sample_of(spec, device), replace(spec, second_order=False)
    eager = outcome(once, sample)
    for way in (contextlib.nullcontext, by_the_dispatcher):
        torch._dynamo.reset()
        with way(), compiled_autograd._enable(torch.compile(backend="eager")):
            assert_equal(outcome(once, sample), eager)

"""Times what a call of layer_norm costs the host in each software layer. For the small tensor the kernel hardly counts.

With --op, the functions of other ops are called in two ways: with the package's own registration of the operator, and
with torch.library.register_autograd. Each figure is the time of a batch of calls divided by their number. The host
waits for a GPU only between batches. The ways take turns.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import DispatchKey, DispatchKeySet, Tensor

import extension_cpp
from benchmarks import results, table
from benchmarks.timing import BenchmarkParser, Call, take_turns
from extension_cpp import _ops
from extension_cpp.registration import autograd, calls
from extension_cpp.registration.entries import DERIVATIVES
from tests.opspec import OpSpec, Sample, all_specs, as_tuple, leaves

ROWS, COLS, EPS = 8, 512, 1e-5
PLAIN = "register_autograd"  # the way whose operator has torch.library's registration
WARM_UP = 100  # calls before a batch
CALLS = 50  # calls per batch: few enough to end before the system interrupts, and to fit into a GPU's queue

# For each pass its grad mode, and the ways to call layer_norm that are left out, because they do what another way does.
PASSES: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "forward, inference_mode": (torch.inference_mode, {PLAIN, "by hand"}),
    "forward, no_grad": (torch.no_grad, {"by hand", "kernel", "shim"}),
    "forward, grad": (contextlib.nullcontext, {"kernel", "shim"}),
    "forward and backward": (contextlib.nullcontext, {"shim"}),
}


def in_order(operator: Any, backward: Callable[..., autograd.Gradients]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Converts a backward of this package, which returns a dictionary, to one for torch.library.register_autograd,
    which returns the gradients in the order of the arguments."""
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    return lambda ctx, *grads: tuple(map(backward(ctx, *grads).get, names))


@contextlib.contextmanager
def registered_plainly(op: str) -> Iterator[None]:
    """Registers an operator and its backward operator by torch.library.register_autograd in place of this package's.

    `_ops` then has a function that only calls the operator. A backward pass that is not differentiated itself still
    runs the no-grad overload of the backward operator, as if that operator had no derivative.
    """
    names = [name for name in (op, f"{op}_backward") if name in DERIVATIVES]
    operator, no_grad = (calls.overload_of(autograd.qualified(op + end)) for end in ("", calls.NO_GRAD))
    call, count = calls.by_position(operator), len(no_grad._schema.returns)
    if count < len(operator._schema.returns):
        call = autograd.leading(call, count)
    library = torch.library.Library(calls.NAMESPACE, "FRAGMENT")
    try:
        for name in names:
            full = autograd.qualified(name)
            del autograd.registrations[full]  # PyTorch allows only one registration at a time
            del calls.DIRECT[full]
            backward = in_order(calls.overload_of(full), DERIVATIVES[name]["backward"])
            setup_context = DERIVATIVES[name]["setup_context"]
            torch.library.register_autograd(full, backward, setup_context=setup_context, lib=library)
        with mock.patch.object(_ops, op, call):
            yield
    finally:
        del library
        for name in names:
            autograd.register_autograd(name, **DERIVATIVES[name])


def layer_norms(device: str) -> tuple[dict[str, Call], dict[str, Call]]:
    """Returns the calls of layer_norm by their WAYS: forward alone, and forward with backward."""
    x, grad_out = (torch.randn(ROWS, COLS, device=device) for _ in range(2))
    weight, bias = torch.ones(COLS, device=device), torch.zeros(COLS, device=device)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    shape, no_rows, native = (COLS,), x[:0], torch.ops.aten.native_layer_norm.default
    operator = torch.ops.extension_cpp.layer_norm.default
    backward = torch.ops.extension_cpp.layer_norm_backward.default
    keys = DispatchKeySet(getattr(DispatchKey, device.upper()))

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y, mean, rstd = operator.redispatch(keys, x, (COLS,), weight, bias, EPS)
            ctx.save_for_backward(x, weight, bias, mean, rstd)
            return y

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> Any:
            x, weight, bias, mean, rstd = ctx.saved_tensors
            return backward.redispatch(keys, grad_out, x, (COLS,), mean, rstd, weight, bias, True, True, True)

    by_hand = ByHand.apply
    forward: dict[str, Call] = {
        "native": lambda: torch.nn.functional.layer_norm(x, shape, weight, bias, EPS),
        "native operator": lambda: native(x, shape, weight, bias, EPS)[0],
        "function": lambda: extension_cpp.layer_norm(x, shape, weight, bias, EPS),
        "operator": lambda: operator(x, shape, weight, bias, EPS)[0],
        PLAIN: lambda: operator(x, shape, weight, bias, EPS)[0],
        "by hand": lambda: by_hand(x, weight, bias),
        "kernel": lambda: operator.redispatch(keys, x, shape, weight, bias, EPS),
        "shim": lambda: operator.redispatch(keys, no_rows, shape, weight, bias, EPS),
    }

    def with_backward(call: Call) -> Call:
        return lambda: torch.autograd.grad(call(), inputs, grad_out)

    kernel = forward["kernel"]

    def kernels() -> Any:
        _, mean, rstd = kernel()
        return backward.redispatch(keys, grad_out, x, (COLS,), mean, rstd, weight, bias, True, True, True)

    return forward, {way: with_backward(call) for way, call in forward.items()} | {"kernel": kernels}


def take_batches(
    op: str, head: results.Row, calls: dict[str, Call], device: str, rounds: int, mode: Any
) -> list[results.Row]:
    """Returns a row for each call, timed in batches that take turns. PLAIN has the plain registration of the op."""
    plain = contextlib.ExitStack()

    def batch(call: Call, count: int) -> None:
        with mode():
            for _ in range(count):
                call()

    def ready(way: str) -> None:
        plain.close()
        if way == PLAIN:
            plain.enter_context(registered_plainly(op))
        # Untimed, because the other ways' calls have changed the caches. Where a registration has changed a module, the
        # interpreter specializes the code that reads the module again only after some 50 calls.
        batch(calls[way], WARM_UP)
        if device == "cuda":
            torch.cuda.synchronize()

    batches: dict[str, Call] = {way: functools.partial(batch, call, CALLS) for way, call in calls.items()}
    with plain:
        times = take_turns(batches, "cpu", rounds, ready)  # the host is timed, even if the tensors are on a GPU
    seconds = {way: {figure: spent / CALLS for figure, spent in time.items()} for way, time in times.items()}
    return [head | {"way": way, "seconds": seconds[way]} for way in calls]


def measure(device: str, rounds: int) -> Iterator[results.Row]:
    forward, both = layer_norms(device)
    for name, (mode, left_out) in PASSES.items():
        calls = both if name == "forward and backward" else forward
        calls = {way: call for way, call in calls.items() if way not in left_out}
        yield from take_batches("layer_norm", {"pass": name}, calls, device, rounds, mode)


def timed_specs() -> dict[str, OpSpec]:
    """Returns the specs of the differentiable ops, except ops of lists: torch.library gives their setup_context a
    needs_input_grad of another form."""
    return {spec.name: spec for spec in all_specs() if spec.differentiable and not spec.lists}


def sample_of(spec: OpSpec, device: str) -> Sample:
    return spec.bench.sample(functools.partial(torch.randn, device=device, requires_grad=True), (ROWS, COLS))


def passes(spec: OpSpec, sample: Sample) -> dict[str, Call]:
    inputs, is_operator = leaves(sample), spec.function is getattr(_ops, spec.name)

    def function() -> Any:
        called = getattr(_ops, spec.name) if is_operator else spec.function  # registered_plainly() changes _ops
        return called(*sample.args, **sample.kwargs)

    grads = [torch.ones_like(y) for y in as_tuple(function()) if y.requires_grad]

    def both() -> Any:
        outputs = [y for y in as_tuple(function()) if y.requires_grad]
        return torch.autograd.grad(outputs, inputs, grads)

    return {"forward, grad": function, "forward and backward": both}


def measure_op(spec: OpSpec, device: str, rounds: int) -> Iterator[results.Row]:
    for name, call in passes(spec, sample_of(spec, device)).items():
        head, calls = {"op": spec.name, "pass": name}, dict.fromkeys(("function", PLAIN), call)
        yield from take_batches(spec.name, head, calls, device, rounds, contextlib.nullcontext)


def main(arguments: Sequence[str] | None = None) -> int:
    parser, specs = BenchmarkParser("benchmarks host", __doc__, "out/host-DEVICE.json", 101, "batches"), timed_specs()
    parser.add_argument("--op", nargs="+", choices=specs, default=[], metavar="OP", help=f"of {', '.join(specs)}")
    options = parser.parse(arguments)
    torch.set_num_threads(1)  # the tensor is too small for several threads, and waiting for them would be timed
    about = results.about(options.device, shape=f"{ROWS} x {COLS}", calls=CALLS, rounds=options.rounds)
    origin = results.run(options.device)
    rows = [row | origin(op) for op in options.op for row in measure_op(specs[op], options.device, options.rounds)]
    rows = rows or [row | origin("layer_norm") for row in measure(options.device, options.rounds)]
    table.finish(options.path, {"machine": about, "rows": rows}, table.host)
    return 0

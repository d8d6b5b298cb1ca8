"""Times what a call of every op costs the host, beside the same operator under torch.library.register_autograd.

Kernels, formulas and the Python code before the operator are the same for both registrations. With torch.library's, a
backward runs an operator without a derivative, as in a user's own package. Tensors are so small that the kernels hardly
count. The two registrations take turns. Each figure is the time of a batch of calls divided by their number.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import results, table
from benchmarks.host import CALLS, PLAIN, take_batches
from benchmarks.table import finish
from benchmarks.timing import BenchmarkParser
from extension_cpp import _ops
from tests.opspec import OpSpec, Sample, all_specs, as_tuple, leaves

ROWS, COLS = 4, 64
OURS = "ours"
PASSES = ("forward, grad", "forward and backward")


def timed_specs() -> list[OpSpec]:
    """Returns the specs of the differentiable ops, except ops of lists: torch.library gives their setup_context a
    needs_input_grad of another form."""
    return [spec for spec in all_specs() if spec.differentiable and not spec.lists]


def sample_of(spec: OpSpec, device: str) -> Sample:
    def make(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    return spec.bench.sample(make, (ROWS, COLS))


def passes(spec: OpSpec, sample: Sample) -> dict[str, Callable[[], Any]]:
    inputs, is_operator = leaves(sample), spec.function is getattr(_ops, spec.name)

    def function() -> Any:
        called = getattr(_ops, spec.name) if is_operator else spec.function  # registered_plainly() changes _ops
        return called(*sample.args, **sample.kwargs)

    grads = [torch.ones_like(y) for y in as_tuple(function()) if y.requires_grad]

    def both() -> Any:
        outputs = [y for y in as_tuple(function()) if y.requires_grad]
        return torch.autograd.grad(outputs, inputs, grads)

    return dict(zip(PASSES, (function, both), strict=True))


def measure(spec: OpSpec, device: str, rounds: int) -> Iterator[dict[str, Any]]:
    for name, call in passes(spec, sample_of(spec, device)).items():
        both = dict.fromkeys((OURS, PLAIN), call)
        for row in take_batches(spec.name, both, device, rounds, contextlib.nullcontext):
            yield {"op": spec.name, "pass": name} | row


def main(arguments: Sequence[str] | None = None) -> int:
    specs = {spec.name: spec for spec in timed_specs()}
    parser = BenchmarkParser("benchmarks host_ops", __doc__, "out/host-ops-DEVICE.json", 51, "batches")
    parser.add_argument("--op", nargs="+", choices=specs, default=list(specs), metavar="OP", help="(default: all)")
    options = parser.parse(arguments)
    torch.set_num_threads(1)  # the tensors are too small for several threads, and waiting for them would be timed
    about = results.about(options.device, shape=f"{ROWS} x {COLS}", calls=CALLS, rounds=options.rounds)
    origin = results.run(options.device)
    rows = [row | origin(op) for op in options.op for row in measure(specs[op], options.device, options.rounds)]
    finish(options.path, {"machine": about, "rows": rows}, table.host_ops)
    return 0

"""Prints the table with which the demo begins: error and time of every operator, beside those of eager PyTorch."""

import contextlib
import ctypes
import inspect
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import extension_cpp

from .. import reference
from .once import once_cpu, once_cuda

COLUMNS = 1024
ROWS_TIMED = {"cpu": 2**13, "cuda": 2**16}
ROWS_CHECKED = 2**8
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
SECONDS_A_ROW = 0.4  # seconds of timing per row, after two rounds of warm-up

# For each op the fastest function of eager PyTorch: PyTorch's own function if there is one, else that in reference.py.
EAGER = SimpleNamespace(
    **vars(reference)
    | {name: getattr(F, name) for name in ("mish", "silu", "gelu", "cross_entropy", "dropout")}
    | {
        "bias_gelu": lambda x, bias: F.gelu(x + bias),
        "geglu": lambda gate, up: F.gelu(gate) * up,
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "linear_cross_entropy": lambda x, linear_weight, target: F.cross_entropy(F.linear(x, linear_weight), target),
        "layer_norm_dropout": lambda x, normalized_shape, weight, bias, p: F.dropout(
            F.layer_norm(x, normalized_shape, weight, bias), p
        ),
    }
)

# The shape of a tensor argument, as a function of the number of rows. Equal names have equal shapes in all operators.
SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    **dict.fromkeys(("a", "b", "gate", "input", "logits", "residual", "up", "x"), lambda rows: (rows, COLUMNS)),
    **dict.fromkeys(("bias", "weight"), lambda rows: (COLUMNS,)),
    **dict.fromkeys(("q", "k"), lambda rows: (1, 16, rows, COLUMNS // 16)),  # the elements of x as 16 heads
    **dict.fromkeys(("cos", "sin"), lambda rows: (1, rows, COLUMNS // 16)),
    "linear_weight": lambda rows: (COLUMNS, COLUMNS),
    "target": lambda rows: (rows,),
}
VALUES = {"c": 0.5, "decay": 0.5, "dim": -1, "normalized_shape": (COLUMNS,), "p": 0.1, "scale": 0.5}


class Case:
    """One operator, with the arguments of its call by parameter name."""

    def __init__(self, name: str) -> None:
        self.name = name
        parameters = inspect.signature(getattr(extension_cpp, name)).parameters
        left = {"weight"} if "target" in parameters else set()  # leaves out the weights of the classes
        left |= {each for each in parameters if each == "p" and parameters[each].default == 0}
        self.names = [each for each in parameters if each in {*SHAPES, *VALUES} - left]
        needed = {each for each, parameter in parameters.items() if parameter.default is parameter.empty}
        self.is_known = needed <= {*self.names}

    def call(self, namespace: Any, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Calls the namespace's function with the name of this operator, and returns its outputs as a tuple."""
        values = {name: VALUES[name] for name in self.names if name in VALUES}
        result = getattr(namespace, self.name)(**tensors, **values)
        return result if isinstance(result, tuple) else (result,)

    def make(self, rows: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Makes the tensors of a call. All except the target, cos and sin require grad."""
        generator = torch.Generator(device).manual_seed(0)
        made = {}
        if "linear_weight" in self.names:  # fewer rows, because a matrix product takes long
            rows = max(rows // 16, 1)
        for name in (name for name in self.names if name in SHAPES):
            shape = SHAPES[name](rows)
            if name == "target":
                made[name] = torch.randint(COLUMNS, shape, generator=generator, device=device)
                continue
            x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
            x = x / COLUMNS**0.5 if name == "linear_weight" else x
            made[name] = x.requires_grad_(name not in ("cos", "sin"))
        return made


def cases() -> list[Case]:
    """Returns the operators whose argument names are known here, in the order of reference.py."""
    found = (Case(name) for name in vars(reference) if name in extension_cpp.__all__)
    return [case for case in found if case.is_known]


def keep_memory() -> None:
    """Makes the C library keep freed memory for the rest of the process. By default it returns large blocks to the
    operating system, and the next call of an operator then spends more time on page faults than on arithmetic."""
    with contextlib.suppress(OSError, AttributeError):  # not every C library has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, -1)  # M_TRIM_THRESHOLD
        mallopt(-4, 0)  # M_MMAP_MAX


# ---- errors ----


def results(case: Case, namespace: Any, tensors: dict[str, Tensor], grads_out: tuple[Tensor, ...]) -> list[Tensor]:
    """Calls a function, and returns its outputs and the gradients of all tensors that require grad."""
    outputs = case.call(namespace, tensors)
    leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads_out)]


def largest_error(found: list[Tensor], truth: list[Tensor]) -> float:
    """Returns the largest error, relative to the largest exact value."""
    pairs = zip(found, truth, strict=True)
    return float(torch.stack([(got.double() - want).abs().max() / want.abs().max() for got, want in pairs]).max())


def largest_errors(case: Case, device: str, dtype: torch.dtype) -> list[float]:
    """Returns the largest error of this package's results and gradients, and then that of eager PyTorch's. With dropout
    there is no second number, because eager PyTorch draws another mask than the exact results have."""
    tensors = case.make(ROWS_CHECKED, device, dtype)
    exact = {
        name: each.detach().double().requires_grad_(each.requires_grad) if each.is_floating_point() else each
        for name, each in tensors.items()
    }
    generator = torch.Generator(device).manual_seed(1)
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = case.call(reference, exact)
    grads_out = tuple(torch.randn(y.shape, generator=generator, device=device).to(dtype) for y in outputs)
    torch.manual_seed(0)
    truth = results(case, reference, exact, tuple(grad.double() for grad in grads_out))
    errors = []
    for namespace in (extension_cpp, *([] if "p" in case.names else [EAGER])):
        # Memory is filled with NaN and freed, so that a result has NaN where the kernel does not write an element.
        poison = [torch.full_like(x, torch.nan) for x in 3 * [*tensors.values()] if x.is_floating_point()]
        del poison
        torch.manual_seed(0)  # the reference draws its dropout mask from the same seed
        errors.append(largest_error(results(case, namespace, tensors, grads_out), truth))
    return errors


# ---- times ----


def medians(functions: dict[str, Callable[[], Any]], device: str, budget: float) -> dict[str, float]:
    """Returns the median seconds of a call of each function. In each round every function is called once, so that a
    change of the machine's state affects all. The first two rounds, in which memory is first used, do not count."""
    once = partial(once_cuda, ahead=True) if device == "cuda" else once_cpu
    times: dict[str, list[float]] = {name: [] for name in functions}
    rounds, started = 0, time.perf_counter()
    while rounds < 5 or time.perf_counter() - started < budget:
        for name, function in functions.items():
            times[name].append(once(function))
        rounds += 1
    return {name: statistics.median(each[2:]) for name, each in times.items()}


def to_time(case: Case, tensors: dict[str, Tensor]) -> dict[str, Callable[[], Any]]:
    """Returns four functions to time: of this package's op and of eager PyTorch's function, the forward without
    gradients, and forward and backward together."""
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    grads_out = tuple(torch.ones_like(y) for y in case.call(EAGER, detached))
    functions: dict[str, Callable[[], Any]] = {}
    for name, namespace in (("ours", extension_cpp), ("eager", EAGER)):
        functions[name] = partial(case.call, namespace, detached)
        functions[name + " both"] = partial(results, case, namespace, tensors, grads_out)
    return functions


def short(number: float) -> str:
    """Returns a number as at most five characters, so that the table fits into 80 columns."""
    decimals = 4 if number < 0.1 else 3 if number < 1 else 2 if number < 10 else 1 if number < 100 else 0
    text = f"{number:.{decimals}f}"
    return text.removeprefix("0") if number < 0.1 else text


def milliseconds(ours: float, eager: float) -> list[str]:
    """Returns two cells of the table: our time and eager PyTorch's, and eager's time divided by ours."""
    ratio = f"{eager / ours:.1f}" if eager < 9.9 * ours else f"{eager / ours:.0f}"
    return [f"{short(1000 * ours)} / {short(1000 * eager)}", f"[{'green' if ours <= eager else 'yellow'}]{ratio}x[/]"]


def show(device: str, console: Console) -> None:
    """Prints the table, in about 30 seconds."""
    dtype, rows = DTYPE[device], ROWS_TIMED[device]
    table = Table(title=f"Every operator beside eager PyTorch, {str(dtype)[6:]}", box=None, padding=(0, 1, 0, 0))
    table.add_column("\noperator", no_wrap=True)
    for heading in ("error\nours / eager", "forward, ms\nours / eager", "\n", "both, ms\nours / eager", "\n"):
        table.add_column(heading, justify="right", no_wrap=True)
    keep_memory()
    ratios: dict[str, float] = {}
    with console.status("measuring") as status:
        for case in cases():
            status.update(f"measuring {case.name}")
            errors = largest_errors(case, device, dtype)
            took = medians(to_time(case, case.make(rows, device, dtype)), device, SECONDS_A_ROW)
            cells = [case.name, " / ".join([*(f"{error:.1e}" for error in errors), "-"][:2])]
            table.add_row(
                *cells, *milliseconds(took["ours"], took["eager"]), *milliseconds(took["ours both"], took["eager both"])
            )
            ratios[case.name] = took["eager both"] / took["ours both"]
    console.print(table)
    console.print(
        "error: the largest of results and gradients against float64, relative to the largest true value, on memory "
        f"filled with NaN beforehand. Times: medians over {rows} x {COLUMNS} elements. both: forward and backward. "
        "2.0x: ours takes half of eager's time.",
    )
    best = max(ratios, key=lambda name: ratios[name])
    console.print(
        f"Forward and backward of {best} run {ratios[best]:.1f} times as fast here as in eager PyTorch; "
        f"{sum(ratio > 1 for ratio in ratios.values())} of {len(ratios)} operators are faster than there.",
    )

"""The demo's first part: error and time of every operator, beside eager PyTorch's."""

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from resource import RUSAGE_SELF, getrusage
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import extension_cpp

from . import reference

COLUMNS = 1024
ROWS_TIMED = {"cpu": 2**13, "cuda": 2**16}
ROWS_CHECKED = 2**8
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
SECONDS_A_ROW = 0.4  # of timing, after the warm-up
# Warm-up goes on while calls still get memory that was never used: its page faults cost more than the work.
WARM_UPS, NEW_PAGES = 6, 1000

# The fastest form in eager PyTorch: a function of PyTorch if there is one, else the formula in reference.py.
EAGER = SimpleNamespace(
    **{
        **vars(reference),
        "mish": functional.mish,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "bias_gelu": lambda x, bias, *approximate: functional.gelu(x + bias, *approximate),
        "geglu": lambda gate, up, *approximate: functional.gelu(gate, *approximate) * up,
        "cross_entropy": functional.cross_entropy,
        "linear_cross_entropy": lambda x, weight, target: functional.cross_entropy(
            functional.linear(x, weight), target
        ),
        "swiglu": lambda gate, up: functional.silu(gate) * up,
        "dropout": functional.dropout,
        "layer_norm_dropout": lambda x, shape, weight, bias, p: functional.dropout(
            functional.layer_norm(x, shape, weight, bias), p
        ),
    }
)


class Case(NamedTuple):
    """One operator, and a call of it in a namespace of functions."""

    name: str
    call: Callable[..., Any]  # (namespace, *tensors)
    tensors: tuple[str, ...]  # by the names of SHAPES
    is_random: bool = False
    row_divisor: int = 1  # fewer rows, where a matrix product takes most of the time


# x and its like are rows x COLUMNS; q is the same number of elements as 16 heads.
SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "x": lambda rows: (rows, COLUMNS),
    "row": lambda rows: (COLUMNS,),
    "square": lambda rows: (COLUMNS, COLUMNS),
    "q": lambda rows: (1, 16, rows, COLUMNS // 16),
    "cos": lambda rows: (1, rows, COLUMNS // 16),
    "target": lambda rows: (rows,),
}
ROW = (COLUMNS,)
CASES = (
    Case("muladd", lambda f, a, b: f.muladd(a, b, 0.5), ("x", "x")),
    Case("scale_bias_relu", lambda f, x, bias: f.scale_bias_relu(x, bias, 0.5), ("x", "row")),
    Case("relu", lambda f, x: f.relu(x), ("x",)),
    Case("mish", lambda f, x: f.mish(x), ("x",)),
    Case("silu", lambda f, x: f.silu(x), ("x",)),
    Case("gelu", lambda f, x: f.gelu(x), ("x",)),
    Case("bias_gelu", lambda f, x, bias: f.bias_gelu(x, bias), ("x", "row")),
    Case("swiglu", lambda f, gate, up: f.swiglu(gate, up), ("x", "x")),
    Case("geglu", lambda f, gate, up: f.geglu(gate, up), ("x", "x")),
    Case("reduce_sum", lambda f, x: f.reduce_sum(x, -1), ("x",)),
    Case("dropout", lambda f, x: f.dropout(x, 0.1), ("x",), is_random=True),
    Case("layer_norm", lambda f, x, w, b: f.layer_norm(x, ROW, w, b), ("x", "row", "row")),
    Case("rms_norm", lambda f, x, w: f.rms_norm(x, ROW, w), ("x", "row")),
    Case("add_layer_norm", lambda f, x, r, w, b: f.add_layer_norm(x, r, ROW, w, b), ("x", "x", "row", "row")),
    Case("add_rms_norm", lambda f, x, r, w: f.add_rms_norm(x, r, ROW, w), ("x", "x", "row")),
    Case(
        "layer_norm_dropout",
        lambda f, x, w, b: f.layer_norm_dropout(x, ROW, w, b, p=0.1),
        ("x", "row", "row"),
        is_random=True,
    ),
    Case("softmax", lambda f, x: f.softmax(x, -1), ("x",)),
    Case("log_softmax", lambda f, x: f.log_softmax(x, -1), ("x",)),
    Case("cumsum", lambda f, x: f.cumsum(x, -1), ("x",)),
    Case("logcumsumexp", lambda f, x: f.logcumsumexp(x, -1), ("x",)),
    Case("linear_recurrence", lambda f, a, b: f.linear_recurrence(a, b, dim=-1), ("x", "x")),
    Case("cross_entropy", lambda f, x, target: f.cross_entropy(x, target), ("x", "target")),
    Case("token_log_probs", lambda f, x, target: f.token_log_probs(x, target), ("x", "target")),
    Case(
        "linear_cross_entropy",
        lambda f, x, weight, target: f.linear_cross_entropy(x, weight, target),
        ("x", "square", "target"),
        row_divisor=16,
    ),
    Case("rotary_embedding", lambda f, q, k, cos, sin: f.rotary_embedding(q, k, cos, sin), ("q", "q", "cos", "cos")),
)


def make(case: Case, rows: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    """The tensors of a call. Those that can have a gradient require it."""
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for name in case.tensors:
        shape = SHAPES[name](max(rows // case.row_divisor, 1))
        if name == "target":
            made.append(torch.randint(COLUMNS, shape, generator=generator, device=device))
            continue
        x = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        x = x / COLUMNS**0.5 if name == "square" else x
        made.append(x.requires_grad_(name != "cos"))
    return made


def keep_memory() -> bool:
    """Makes the C library keep freed blocks instead of giving them back to the system, for the rest of the process.

    It returns large blocks by habit, and the next call then pays for page faults more than for its work.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD, M_MMAP_MAX
    return bool(mallopt(trim_threshold, -1) and mallopt(mmap_max, 0))


# ---- errors ----


def outputs_of(case: Case, namespace: Any, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    result = case.call(namespace, *tensors)
    return result if isinstance(result, tuple) else (result,)


def results(case: Case, namespace: Any, tensors: list[Tensor], grads_out: tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs and the gradients of all tensors that have one."""
    outputs = outputs_of(case, namespace, tensors)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, grads_out)]


def largest_error(found: list[Tensor], truth: list[Tensor]) -> float:
    """The largest error, relative to the largest exact value."""
    pairs = zip(found, truth, strict=True)
    return float(torch.stack([(got.double() - want).abs().max() / want.abs().max() for got, want in pairs]).max())


def largest_errors(case: Case, device: str, dtype: torch.dtype) -> list[float]:
    """Of our results and gradients and of eager's; eager's dropout draws another mask, and is not compared."""
    tensors = make(case, ROWS_CHECKED, device, dtype)
    exact = [
        each.detach().double().requires_grad_(each.requires_grad) if each.is_floating_point() else each
        for each in tensors
    ]
    generator = torch.Generator(device).manual_seed(1)
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = outputs_of(case, reference, exact)
    grads_out = tuple(torch.randn(y.shape, generator=generator, device=device).to(dtype) for y in outputs)
    torch.manual_seed(0)
    truth = results(case, reference, exact, tuple(grad.double() for grad in grads_out))
    errors = []
    for namespace in (extension_cpp, *([] if case.is_random else [EAGER])):
        # Freed blocks are filled with NaN, so that an element that a kernel does not write shows.
        poison = [torch.full_like(x, torch.nan) for x in (*tensors, *tensors, *tensors) if x.is_floating_point()]
        del poison
        torch.manual_seed(0)  # the reference draws its dropout mask from the same seed
        errors.append(largest_error(results(case, namespace, tensors, grads_out), truth))
    return errors


# ---- times ----


def seconds(function: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # For a millisecond the device waits and the host runs ahead, so that only the device's work is timed.
    torch.cuda._sleep(2_000_000)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def medians(functions: dict[str, Callable[[], Any]], device: str, budget: float) -> dict[str, float]:
    """The seconds of a call of each function. They take turns, so that a change of the machine's state affects all."""
    for _ in range(WARM_UPS):
        touched = getrusage(RUSAGE_SELF).ru_minflt
        for function in functions.values():
            function()
        if getrusage(RUSAGE_SELF).ru_minflt - touched < NEW_PAGES:
            break
    times: dict[str, list[float]] = {name: [] for name in functions}
    started = time.perf_counter()
    while len(next(iter(times.values()))) < 3 or time.perf_counter() - started < budget:
        for name, function in functions.items():
            times[name].append(seconds(function, device))
    return {name: statistics.median(each) for name, each in times.items()}


def to_time(case: Case, tensors: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """Forward without gradients, and forward with backward, of ours and of eager's."""
    detached = [tensor.detach() for tensor in tensors]
    grads_out = tuple(torch.ones_like(y) for y in outputs_of(case, EAGER, detached))
    functions: dict[str, Callable[[], Any]] = {}
    for name, namespace in (("ours", extension_cpp), ("eager", EAGER)):
        functions[name] = partial(case.call, namespace, *detached)
        functions[name + " both"] = partial(results, case, namespace, tensors, grads_out)
    return functions


def short(number: float) -> str:
    """At most five characters, lest the table be wider than 80 columns."""
    decimals = 4 if number < 0.1 else 3 if number < 1 else 2 if number < 10 else 1 if number < 100 else 0
    text = f"{number:.{decimals}f}"
    return text.removeprefix("0") if number < 0.1 else text


def milliseconds(ours: float, eager: float) -> list[str]:
    """Two cells: the times, and eager's time divided by ours."""
    ratio = f"{eager / ours:.1f}" if eager < 9.9 * ours else f"{eager / ours:.0f}"
    return [f"{short(1000 * ours)} / {short(1000 * eager)}", f"[{'green' if ours <= eager else 'yellow'}]{ratio}x[/]"]


def show(device: str, console: Console) -> None:
    """Prints the table; takes about 30 seconds."""
    dtype, rows = DTYPE[device], ROWS_TIMED[device]
    table = Table(title=f"Every operator beside eager PyTorch, {str(dtype)[6:]}", box=None, padding=(0, 1, 0, 0))
    table.add_column("\noperator", no_wrap=True)
    for heading in ("error\nours / eager", "forward, ms\nours / eager", "\n", "both, ms\nours / eager", "\n"):
        table.add_column(heading, justify="right", no_wrap=True)
    keep_memory()
    ratios: dict[str, float] = {}
    with console.status("measuring") as status:
        for case in CASES:
            status.update(f"measuring {case.name}")
            errors = largest_errors(case, device, dtype)
            took = medians(to_time(case, make(case, rows, device, dtype)), device, SECONDS_A_ROW)
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
        highlight=False,
    )
    best = max(ratios, key=lambda name: ratios[name])
    console.print(
        f"Forward and backward of {best} run {ratios[best]:.1f} times as fast here as in eager PyTorch; "
        f"{sum(ratio > 1 for ratio in ratios.values())} of {len(ratios)} operators are faster than there.",
        highlight=False,
    )

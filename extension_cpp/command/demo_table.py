"""Prints the table with which the demo begins: error and time of every operator, beside those of eager PyTorch.

The calls are those that the benchmarks time, from the specs in tests/.
"""

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from .check_case import checks, judge, of_tests, opspec
from .once import once_cpu, once_cuda
from .tree import TREE

COLUMNS = 1024
ROWS_TIMED = {"cpu": 2**13, "cuda": 2**16}
ROWS_CHECKED = 2**8
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
SECONDS_A_ROW = 0.4  # seconds of timing per row, after two rounds of warm-up

# PyTorch's own functions, where the benchmarks compare with the formula of reference.py.
EAGER: dict[str, Callable[..., Any]] = {
    "mish": F.mish,
    "linear_cross_entropy": lambda x, linear_weight, target: F.cross_entropy(F.linear(x, linear_weight), target),
}


def specs() -> list[Any]:
    """Returns the OpSpec of every operator, with a call without dropout where there is one."""
    names = sorted(path.stem for path in (TREE / "tests" / "specs").glob("*.py") if path.stem != "__init__")
    found = [module.SPEC for module in of_tests(*(f"specs.{name}" for name in names))]
    return [
        replace(spec, bench=spec.variants["p0"], positional=False) if "p0" in spec.variants else spec for spec in found
    ]


def eager(spec: Any) -> Callable[..., Any]:
    """Returns the fastest function of eager PyTorch for the operator."""
    return EAGER.get(spec.name) or spec.bench.stock or spec.reference


def make_sample(spec: Any, rows: int, device: str, dtype: torch.dtype) -> Any:
    rows = max(rows // 16, 1) if spec.has_products else rows  # because a matrix product takes long
    return spec.bench.sample(checks.maker(device, dtype), (rows, COLUMNS))


def keep_memory() -> None:
    """Makes the C library keep freed memory for the rest of the process. By default it returns large blocks to the
    operating system, and the next call of an operator then spends more time on page faults than on arithmetic."""
    with contextlib.suppress(OSError, AttributeError):  # not every C library has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, -1)  # M_TRIM_THRESHOLD
        mallopt(-4, 0)  # M_MMAP_MAX


# ---- errors ----


def largest_errors(spec: Any, device: str, dtype: torch.dtype) -> list[float]:
    """Returns the largest error of this package's results and gradients, and then that of eager PyTorch's, relative to
    the largest exact value. With dropout there is no second number, because eager PyTorch draws another mask than the
    exact results have."""
    sample = make_sample(spec, ROWS_CHECKED, device, dtype)
    truth = judge.run(spec.reference, judge.convert(sample, torch.float64), checks.random_grad())
    errors = []
    for function in (spec.function, *([] if spec.positional else [eager(spec)])):
        # Memory is filled with NaN and freed, so that a result has NaN where the kernel does not write an element.
        poison = [torch.full_like(x, torch.nan) for x in 3 * opspec.leaves(sample)]
        del poison
        found = judge.run(function, sample, checks.random_grad())
        pairs = zip(found.tensors(), truth.tensors(), strict=True)
        errors.append(max(float((got.double() - want).abs().max() / want.abs().max()) for (_, got), (_, want) in pairs))
    return errors


# ---- times ----


def medians(functions: list[Callable[[], Any]], device: str, budget: float) -> list[float]:
    """Returns the median seconds of a call of each function. In each round every function is called once, so that a
    change of the machine's state affects all. The first two rounds, in which memory is first used, do not count."""
    once = once_cuda if device == "cuda" else once_cpu
    started, rounds = time.perf_counter(), list[list[float]]()
    while len(rounds) < 5 or time.perf_counter() - started < budget:
        rounds.append([once(function) for function in functions])
    return [statistics.median(each) for each in zip(*rounds[2:], strict=True)]


def to_time(spec: Any, rows: int, device: str, dtype: torch.dtype) -> list[Callable[[], Any]]:
    """Returns functions to time, each of this package's op and then of eager PyTorch: the forward without gradients,
    and forward and backward together."""
    sample = make_sample(spec, rows, device, dtype)
    results = opspec.as_tuple(spec.function(*sample.args, **sample.kwargs))
    grads = [torch.ones_like(y) for y in results if y.requires_grad]
    both = (spec.function, eager(spec))
    forward = [partial(torch.no_grad()(function), *sample.args, **sample.kwargs) for function in both]
    return [*forward, *(partial(judge.run_with, function, sample, grads) for function in both)]


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
        for spec in specs():
            status.update(f"measuring {spec.name}")
            try:
                errors = largest_errors(spec, device, dtype)
            except NotImplementedError:  # of an operator that `new --schema` wrote, whose formula is not written yet
                continue
            *forward, ours, stock = medians(to_time(spec, rows, device, dtype), device, SECONDS_A_ROW)
            cells = [spec.name, " / ".join([*(f"{error:.1e}" for error in errors), "-"][:2])]
            table.add_row(*cells, *milliseconds(*forward), *milliseconds(ours, stock))
            ratios[spec.name] = stock / ours
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

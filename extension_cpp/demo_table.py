"""The demo's first part: error, time and share of the copy bandwidth of every operator, beside eager PyTorch's."""

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import partial
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import extension_cpp
from extension_cpp import reference

COLUMNS = 1024
ROWS_TIMED = {"cpu": 2**15, "cuda": 2**16}
ROWS_CHECKED = 2**10
SECONDS_A_ROW = 0.7  # of timing, after the warm-up
# Warm-up goes on while the calls still meet memory that was never touched: its page faults cost more than the work.
WARM_UPS, NEW_PAGES = 6, 1000
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

Function = Callable[..., Tensor]


class Case(NamedTuple):
    """One operator; its tensors are rows x COLUMNS or one row."""

    name: str
    ours: Function
    eager: Function
    reference: Function
    tensors: tuple[tuple[int, ...], ...]  # shapes without COLUMNS; -1 stands for the rows
    numbers: tuple[Any, ...]
    # Elements that must be moved for one element of x: every input read once, every output written once.
    forward: int
    backward: int


CASES = (
    Case("muladd", extension_cpp.muladd, reference.muladd, reference.muladd, ((-1,), (-1,)), (0.5,), 3, 5),
    Case(
        "scale_bias_relu",
        extension_cpp.scale_bias_relu,
        reference.scale_bias_relu,
        reference.scale_bias_relu,
        ((-1,), ()),
        (0.5,),
        2,
        3,
    ),
    Case("relu", extension_cpp.relu, torch.relu, reference.relu, ((-1,),), (), 2, 3),
    Case("mish", extension_cpp.mish, functional.mish, reference.mish, ((-1,),), (), 2, 3),
    # The gradient of a sum is a view: its backward moves nothing.
    Case("reduce_sum", extension_cpp.reduce_sum, torch.sum, reference.reduce_sum, ((-1,),), (-1,), 1, 0),
)


def make(case: Case, rows: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [[rows if size == -1 else size for size in shape] + [COLUMNS] for shape in case.tensors]
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_() for shape in shapes]


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


def results(function: Function, case: Case, tensors: list[Tensor], grad_out: Tensor) -> list[Tensor]:
    y = function(*tensors, *case.numbers)
    return [y.detach(), *torch.autograd.grad(y, tensors, grad_out)]


def largest_errors(case: Case, device: str, dtype: torch.dtype) -> list[float]:
    """Of our result and gradients and of eager's: the largest error, relative to the largest true value."""
    tensors = make(case, ROWS_CHECKED, device, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    with torch.no_grad():
        like = case.reference(*exact, *case.numbers)
    grad_out = torch.randn(like.shape, generator=torch.Generator(device).manual_seed(1), device=device).to(dtype)
    truth = results(case.reference, case, exact, grad_out.double())
    errors = []
    for function in (case.ours, case.eager):
        # Freed blocks full of NaN: what a kernel forgets to write shows, where an earlier call's answer would hide it.
        poison = [torch.full_like(tensor, torch.nan) for tensor in (*tensors, *tensors, *tensors)]
        del poison
        pairs = zip(results(function, case, tensors, grad_out), truth, strict=True)
        errors.append(
            float(torch.stack([(got.double() - want).abs().max() / want.abs().max() for got, want in pairs]).max())
        )
    return errors


# ---- times ----


def seconds(function: Callable[[], Any], device: str) -> float:
    if device == "cpu":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(
        2_000_000
    )  # a millisecond, in which the host runs ahead: what is timed is the device's work alone
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000


def medians(functions: dict[str, Callable[[], Any]], device: str, budget: float) -> dict[str, float]:
    """Seconds a call, the functions taking turns, so that a change of the machine's state meets all of them."""
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
    detached = [tensor.detach() for tensor in tensors]
    grad_out = torch.ones_like(case.eager(*detached, *case.numbers))
    target = torch.empty_like(detached[0])
    functions: dict[str, Callable[[], Any]] = {"copy": partial(target.copy_, detached[0])}
    for name, function in (("ours", case.ours), ("eager", case.eager)):
        functions[name] = partial(function, *detached, *case.numbers)
        functions[name + " both"] = partial(results, function, case, tensors, grad_out)
    return functions


def milliseconds(ours: float, eager: float) -> str:
    shown = [f"{1000 * each:.3g}" if each < 0.9995 else f"{1000 * each:.0f}" for each in (ours, eager)]
    return f"[{'green' if ours <= eager else 'yellow'}]{shown[0]}[/] / {shown[1]}"


def add_row(table: Table, case: Case, device: str, dtype: torch.dtype) -> None:
    ours_error, eager_error = largest_errors(case, device, dtype)
    functions = to_time(case, make(case, ROWS_TIMED[device], device, dtype))
    took = medians(functions, device, SECONDS_A_ROW)
    cells = [case.name, DTYPES[dtype], f"{ours_error:.1e} / {eager_error:.1e}"]
    for suffix, moved in (("", case.forward), (" both", case.forward + case.backward)):
        ours = took["ours" + suffix]
        # A copy moves two elements for one element of x.
        percent = 100 * moved / 2 * took["copy"] / ours
        cells += [milliseconds(ours, took["eager" + suffix]), f"{percent:.0f}"]
    table.add_row(*cells)


def copy_bandwidth(device: str) -> float:
    """Bytes a second."""
    source = torch.ones(ROWS_TIMED[device], COLUMNS, device=device)
    target = torch.empty_like(source)
    took = medians({"copy": partial(target.copy_, source)}, device, 0.2)
    return 2 * source.nbytes / took["copy"]


def show(device: str, console: Console) -> None:
    """Prints the table; takes about 15 seconds."""
    table = Table(title="Every operator beside eager PyTorch", box=None, padding=(0, 1, 0, 0))
    table.add_column("\noperator", no_wrap=True)
    table.add_column("\ntype", no_wrap=True)
    for heading in (
        "error\nours / eager",
        "forward, ms\nours / eager",
        "% of\ncopy",
        "both, ms\nours / eager",
        "% of\ncopy",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    remark = ""
    if device == "cpu":
        fresh = to_time(CASES[0], make(CASES[0], ROWS_TIMED[device], device, torch.float32))
        cold = medians({name: fresh[name] for name in ("ours", "eager")}, device, 0)
        if keep_memory():
            remark = (
                " Freed memory is kept for the next call; with the C library's habit of handing it back, muladd in "
                f"float32 takes {1000 * cold['ours']:.3g} ms, eager {1000 * cold['eager']:.3g} ms."
            )
    with console.status("measuring"):
        for case in CASES:
            for dtype in DTYPES:
                add_row(table, case, device, dtype)
        bandwidth = copy_bandwidth(device)
    console.print(table)
    console.print(
        "error: the largest of result and gradients against float64, relative to the largest true value, on memory "
        f"filled with NaN beforehand. Times: medians over {ROWS_TIMED[device]} x {COLUMNS} elements; both: forward and "
        "backward. % of copy: the bytes that must be moved, over the bandwidth of a copy in turns with it "
        f"({bandwidth / 1e9:.0f} GB/s in float32).{remark}",
        highlight=False,
    )

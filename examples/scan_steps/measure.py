"""Checks and times the kernels of docs/scan.md: python -m examples.scan_steps.measure, in a checkout's root, on a GPU.

docs/scan.md develops a scan in steps, with one kernel for each. Each kernel is compared with torch.cumsum in float64:
exactly for small whole numbers, whose sums float32 can hold, and within a bound for normally distributed numbers. The
kernels then take turns with a copy, torch.cumsum and this package's cumsum. A kernel whose first call takes longer than
a quarter of a second is not timed again, and the time of this call is its figure.
"""

import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import extension_cpp
from benchmarks import results
from benchmarks.table import finish, scan_steps
from benchmarks.timing import BenchmarkParser, seconds_of, take_turns
from examples.scan_steps.steps import STEPS, Scans, build

SHAPES = ((2**20, 32), (2**16, 2**12), (1, 2**28))
SLOW = 0.25  # seconds
EPS = torch.finfo(torch.float32).eps
Call = Callable[[Tensor], Tensor]


def poisoned(call: Call, x: Tensor) -> Tensor:
    """Returns the result of a call, which gets memory that was full of NaN before."""
    torch.full_like(x, math.nan)
    return call(x)


def first_call(name: str, call: Call, x: Tensor) -> tuple[float, float]:
    """Returns the seconds of the first call, and the largest error of its result relative to the largest sum, in eps.
    Ends the program if the result is wrong."""
    results: list[Tensor] = []
    seconds = seconds_of(lambda: results.append(poisoned(call, x)), x.device.type)
    exact = x.cumsum(1, dtype=torch.float64)
    error = ((results[0] - exact).abs().max() / exact.abs().max()).item() / EPS
    if not error <= 4 * math.sqrt(x.shape[1]):
        sys.exit(f"error: {name} of {tuple(x.shape)} is wrong: the largest error is {error:.3g} eps")
    return seconds, error


def check_whole_numbers(name: str, call: Call, x: Tensor) -> None:
    whole = torch.randint_like(x, -3, 4)
    if not torch.equal(poisoned(call, whole).double(), whole.cumsum(1, dtype=torch.float64)):
        sys.exit(f"error: {name} of {tuple(x.shape)} is wrong for whole numbers")


def results_of_five(call: Call, x: Tensor) -> int:
    """Returns the number of different results in five calls."""
    found: list[Tensor] = []
    for _ in range(5):
        y = call(x)
        if not any(torch.equal(y, other) for other in found):
            found.append(y)
    return len(found)


def measure(calls: dict[str, Call], x: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Returns one row for each call, in order, with the copy first."""
    copied = torch.empty_like(x)
    quick: dict[str, Callable[[], object]] = {"copy": functools.partial(copied.copy_, x)}
    rows: dict[str, dict[str, Any]] = {"copy": {}}
    for name, call in calls.items():
        seconds, error = first_call(name, call, x)
        rows[name] = {"error_eps": error}
        if seconds > SLOW:
            check_whole_numbers(name, call, x[:, : x.shape[1] // 64].contiguous())
            rows[name]["seconds"] = dict.fromkeys(("median", "low", "high"), seconds)
        else:
            check_whole_numbers(name, call, x)
            rows[name]["results_of_5"] = results_of_five(call, x)
            quick[name] = functools.partial(call, x)
    for name, spent in take_turns(quick, x.device.type, rounds).items():
        rows[name]["seconds"] = spent
    shape = {"rows": x.shape[0], "n": x.shape[1]}
    return [shape | {"step": name} | row for name, row in rows.items()]


def contenders(scans: Scans) -> dict[str, Call]:
    found: dict[str, Call] = {step: functools.partial(scans, step) for step in STEPS}
    found["torch.cumsum"] = functools.partial(torch.cumsum, dim=1)
    return found | {"extension_cpp.cumsum": functools.partial(extension_cpp.cumsum, dim=1)}


def main(arguments: Sequence[str] | None = None) -> int:
    command, file = "examples.scan_steps.measure", "out/scan-steps-cuda.json"
    options = BenchmarkParser(command, __doc__, file, 21, device="cuda").parse(arguments)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "native")
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        if library is None:
            sys.exit("error: there is no nvcc, which compiles the steps")
        scans = Scans(library)
    found: dict[str, Any] = {"machine": results.about("cuda", rounds=options.rounds), "rows": []}
    origin = results.run("cuda")("cumsum")
    torch.manual_seed(0)
    for shape in SHAPES:
        rows = measure(contenders(scans), torch.randn(shape, device="cuda"), options.rounds)
        found["rows"] += [row | origin for row in rows]
        results.write(options.path, found)  # keeps these figures if the next shape fails
    finish(options.path, found, scan_steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times the norms' GPU kernels in each shape that they can have: each row of the table in csrc/rows/plan.h.

At each width all shapes that allow this width take turns with each other and with a copy of memory. The figures go into
a CSV file with one line per shape. A shape is useful if some width is 5 % slower without it.
"""

import argparse
import csv
import ctypes
from collections.abc import Callable, Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import results, run
from benchmarks.judging import Judge
from benchmarks.timing import BenchmarkParser, take_turns
from extension_cpp import LIBRARY
from extension_cpp.command import info

ALL = 2**64 - 1
PLAN = ("kernel", "vectors_per_thread", "threads_per_row", "rows_per_cta", "cluster", "stages")
COLUMNS = ("op", "pass", "dtype", "rows", "cols", "shape", *PLAN, "is_picked", "percent_of_copy", "microseconds")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = (__doc__ or "").split("\n\n")[0]
    parser = BenchmarkParser("benchmarks norm_plans", about, "out/norm-plans.csv", 15, device="cuda")
    run.add_case_options(parser, list(info.NORMS), list(run.DTYPES))
    return parser.parse(arguments)


def allow(shapes: int) -> None:
    """Sets which rows of the table in plan.h the library may pick, with one bit of `shapes` for each row."""
    ctypes.CDLL(str(LIBRARY)).extension_cpp_norm_allow(ctypes.c_uint64(shapes))


def plan_of(case: run.Case) -> dict[str, str]:
    return info.norm_plan(case.spec.name, case.dtype, case.rows, case.cols, case.backward)


def plans(case: run.Case) -> dict[int, dict[str, str]]:
    """Returns the plan of each shape that can run the case, by the shape's row in the table of plan.h."""
    found = {}
    try:
        for shape in range(info.ask_library_number("norm_plan_shapes")):
            allow(1 << shape)
            plan = plan_of(case)
            if int(plan["shape"]) == shape:
                found[shape] = plan
    finally:
        allow(ALL)
    return found


def measure(case: run.Case, device: str, rounds: int) -> Iterator[dict[str, object]]:
    """Times a case, and yields a line of the CSV file for each shape."""
    sample = run.make_sample(case, device, case.rows)
    source = torch.empty(int(case.floor_bytes() / 2), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    call = run.call_of(case, Judge(case.spec, sample, sample), "ours", case.spec.function)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    found, picked = plans(case), int(plan_of(case)["shape"])
    calls |= {str(shape): call for shape in found}
    try:
        times = take_turns(calls, device, rounds, lambda name: allow(ALL if name == "copy" else 1 << int(name)))
    finally:
        allow(ALL)
    head = {name: value for name, value in case.head().items() if name in COLUMNS}
    for shape, plan in found.items():
        seconds = times[str(shape)]["median"]
        line = head | {"shape": shape, "is_picked": shape == picked} | {name: plan[name] for name in PLAN}
        percent = 100 * times["copy"]["median"] / seconds
        yield line | {"percent_of_copy": f"{percent:.1f}", "microseconds": f"{1e6 * seconds:.1f}"}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch._functorch.config.donated_buffer = False  # allows many backward calls after one forward
    about = f"{results.machine(options.device)}, commit {results.commit()}"
    table = Table(*COLUMNS, title=about)
    options.path.parent.mkdir(parents=True, exist_ok=True)
    with options.path.open("w", newline="") as file:
        file.write(f"# {about}\n")
        lines = csv.DictWriter(file, COLUMNS)
        lines.writeheader()
        for case in run.cases(options):
            for line in measure(case, options.device, options.rounds):
                lines.writerow(line)
                table.add_row(*(str(line[name]) for name in COLUMNS))
            file.flush()
    Console(width=160).print(table)
    print(f"The figures are in {options.path}.")
    return 0

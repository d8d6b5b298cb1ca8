"""Times every op's forward and backward beside eager PyTorch, torch.compile and a copy of memory, in one run.

The rows come from the tests' specs: a new op is measured with nothing to add. A figure is the percent of the copy's
bandwidth that the op's floor (every input read once, every output written once) over its time comes to; streaming
stores and ops that write less than they read can pass 100.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.timing import Time, take_turns
from tests.checks import as_tuple, leaves
from tests.opspec import OpSpec, Sample, all_specs

WIDTHS = (768, 1024, 4096, 8192, 16384, 65536, 1025)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# glibc hands large blocks back to the kernel, and then every call pays for page faults; PyTorch's users meet that, too.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@dataclass(frozen=True)
class Case:
    spec: OpSpec
    dtype: str
    rows: int
    cols: int
    backward: bool

    def floor_bytes(self) -> float:
        elements = self.spec.bench.backward if self.backward else self.spec.bench.forward
        return elements * self.rows * self.cols * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.spec.name} {'backward' if self.backward else 'forward'} {self.dtype} {self.rows} x {self.cols}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    names = [spec.name for spec in all_specs()]
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--op", nargs="+", choices=names, default=names, metavar="OP", help=f"of {', '.join(names)}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--width", nargs="+", type=int, default=list(WIDTHS), help="columns (default: %(default)s)")
    parser.add_argument(
        "--pass", dest="passes", nargs="+", choices=["forward", "backward"], default=["forward", "backward"]
    )
    parser.add_argument("--mib", type=int, help="size of one tensor in MiB (default: 512)", default=512)
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each contender (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes most of the time)")
    parser.add_argument("--plain-malloc", action="store_true", help="CPU: with the page faults of glibc's defaults")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: out/bench-DEVICE.json)")
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    for spec in all_specs():
        if spec.name not in options.op:
            continue
        for dtype in options.dtype:
            elements = options.mib * 2**20 // DTYPES[dtype].itemsize
            for cols in [1024] if spec.bench.flat else options.width:
                for step in options.passes:
                    if step == "forward" or spec.bench.backward:
                        yield Case(spec, dtype, max(elements // cols, 1), cols, step == "backward")


def forward_call(function: Callable[..., Any], sample: Sample) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return function(*sample.args, **sample.kwargs)

    return call


def backward_call(function: Callable[..., Any], sample: Sample) -> Callable[[], object]:
    """Differentiates one kept forward."""
    outputs = as_tuple(function(*sample.args, **sample.kwargs))
    inputs, grads_out = leaves(sample), [torch.randn_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, grads_out, retain_graph=True)


def contenders(case: Case, options: argparse.Namespace) -> dict[str, Callable[[], object]]:
    dtype, device = DTYPES[case.dtype], options.device
    sample = case.spec.bench.sample(
        lambda shape: torch.randn(shape, dtype=dtype, device=device, requires_grad=True), (case.rows, case.cols)
    )
    stock = case.spec.bench.stock or case.spec.reference
    functions = {"ours": case.spec.function, "eager": stock}
    if not options.no_compile:
        torch._dynamo.reset()
        functions["compile"] = torch.compile(stock)
    x = sample.args[0].detach()
    target = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(x)}
    for name, function in functions.items():
        calls[name] = (backward_call if case.backward else forward_call)(function, sample)
    return calls


def percents(case: Case, times: dict[str, Time]) -> dict[str, float]:
    """The floor's bytes over each time, as percent of the copy's bandwidth."""
    copied = 2 * case.rows * case.cols * DTYPES[case.dtype].itemsize
    bandwidth = copied / times["copy"].median
    return {name: 100 * case.floor_bytes() / time.median / bandwidth for name, time in times.items() if name != "copy"}


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def main() -> None:
    options = parse()
    if options.device == "cpu" and not options.plain_malloc and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], {**os.environ, **KEEP_MEMORY})
    if options.threads:
        torch.set_num_threads(options.threads)
    torch._functorch.config.donated_buffer = False  # backward is called many times over one forward
    console = Console(width=None if sys.stdout.isatty() else 130)
    rows: list[dict[str, Any]] = []
    todo = list(cases(options))
    about = machine(options.device) | {"mib": options.mib, "plain_malloc": options.plain_malloc}
    table = Table(
        "op", "pass", "dtype", "shape", "copy GB/s", "ours us", "ours %", "eager %", "compile %", title=str(about)
    )
    with Progress(console=console) as progress:
        task = progress.add_task("benchmarks", total=len(todo))
        for case in todo:
            progress.update(task, description=str(case))
            times = take_turns(contenders(case, options), options.device, options.rounds)
            share = percents(case, times)
            bandwidth = 2e-9 * case.rows * case.cols * DTYPES[case.dtype].itemsize / times["copy"].median
            step = "backward" if case.backward else "forward"
            row: dict[str, Any] = {"op": case.spec.name, "pass": step, "dtype": case.dtype}
            row |= {"rows": case.rows, "cols": case.cols, "copy_gb_s": bandwidth, "percent_of_copy": share}
            row["seconds"] = {name: asdict(time) for name, time in times.items()}
            rows.append(row)
            figures = [f"{bandwidth:.0f}", f"{times['ours'].median * 1e6:.0f}", *(f"{p:.0f}" for p in share.values())]
            table.add_row(case.spec.name, step, case.dtype, f"{case.rows} x {case.cols}", *figures)
            progress.advance(task)
            path = options.json or Path("out") / f"bench-{options.device}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"machine": about, "rows": rows}, indent=1))
    console.print(table)
    console.print(f"The figures are in {path}.")


if __name__ == "__main__":
    main()

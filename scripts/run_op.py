"""Runs one op forward and backward, for a profiler to watch: scripts/profile.sh, nsys, perf, valgrind.

    python -m scripts.run_op layer_norm --width 8192

On a GPU it calls each pass once between cudaProfilerStart and cudaProfilerStop, which Nsight Compute
(--profile-from-start off) and Nsight Systems (--capture-range cudaProfilerApi) wait for; on the CPU as often as
--seconds allows.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.results import machine
from benchmarks.run import DTYPES, Case, backward_call, forward_call, make_sample
from extension_cpp.__main__ import Parser, positive
from tests.opspec import timed_specs


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    specs = {spec.name: spec for spec in timed_specs()}
    parser = Parser(prog="python -m scripts.run_op", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("op", choices=specs, metavar="OP", help=f"of {', '.join(specs)}")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--width", type=positive, default=4096, help="columns (default: 4096)")
    parser.add_argument("--mib", type=positive, default=128, help="size of one tensor in MiB (default: 128)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=4, help="CPU: how long (default: 4); 0: once, untimed")
    parser.add_argument(
        "--control", type=Path, nargs="+", default=[], metavar="FIFO", help="perf's, told when to begin and to end"
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: torch sees no GPU here")
    options.spec = specs[options.op]
    return options


def passes(options: argparse.Namespace) -> dict[Case, Callable[[], object]]:
    """The calls of forward and, if the op has one that moves data, backward. They have run before."""
    rows = max(options.mib * 2**20 // (options.width * DTYPES[options.dtype].itemsize), 1)
    sizes = (options.spec, options.dtype, rows, options.width)
    forward, backward = (Case(*sizes, step, torch.get_num_threads(), "large") for step in (False, True))
    torch.manual_seed(0)
    sample = make_sample(forward, options.device, rows)
    calls = {forward: forward_call(options.spec.function, sample)}
    if options.spec.bench.backward:
        calls[backward] = backward_call(options.spec.function, sample)
    for call in [*calls.values()] * 3:
        call()
    return calls


def run_cuda(calls: dict[Case, Callable[[], object]]) -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def tell(control: Sequence[Path], word: str) -> None:
    for fifo in control:
        fifo.write_text(f"{word}\n")


def run_cpu(calls: dict[Case, Callable[[], object]], seconds: float, control: Sequence[Path]) -> None:
    tell(control, "enable")
    spent: dict[Case, list[float]] = {case: [] for case in calls}
    end = time.perf_counter() + seconds
    while not spent[next(iter(calls))] or time.perf_counter() < end:
        for case, call in calls.items():
            start = time.perf_counter()
            call()
            spent[case].append(time.perf_counter() - start)
    tell(control, "disable")
    for case, times in spent.items() if seconds > 0 else ():
        median = statistics.median(times)
        rate = 1e-9 * case.floor_bytes() / median
        print(f"  {case.step:8}  {1e3 * median:.2f} ms, {rate:.1f} GB/s of those bytes, median of {len(times)} calls")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    calls = passes(options)
    about = machine(options.device)
    threads = f", {about['threads']} threads" if options.device == "cpu" else ""
    for case in calls:
        print(f"{case}: {1e-6 * case.floor_bytes():.1f} MB, each input read once, each output written once")
    print(f"  {about['device']}{threads}, torch {about['torch']}", flush=True)
    if options.device == "cuda":
        run_cuda(calls)
    else:
        run_cpu(calls, options.seconds, options.control)


if __name__ == "__main__":
    main()

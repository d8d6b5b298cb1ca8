"""Times the training step of examples/train_text.py on one process and on several, with the same batch in all.

On GPUs each process has one, and the model has 870 million parameters, enough to keep a GPU busy. A step is the
example's: compiled, under bfloat16 autocast, some forwards and backwards, one exchange of gradients, AdamW.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from torch import distributed

from benchmarks.results import commit, machine, versions
from benchmarks.timing import check_options
from examples import train_text
from extension_cpp.__main__ import Parser, positive

LARGE = {"width": 2048, "layers": 16, "heads": 16, "context": 1024, "batch": 32, "accumulate": 8, "learning_rate": 1e-4}
SIZES: dict[str, dict[str, Any]] = {"cuda": LARGE, "cpu": train_text.SMALL}
WARM_UP = 3
OPS = ("ours", "torch")


def times(device: str, parallel: str | None, rounds: int, which: Sequence[str]) -> dict[str, Any]:
    """The seconds of each step and the last loss, for each of --ops."""
    text = train_text.Text.of(train_text.read_text(None), SIZES[device]["context"])
    settings = train_text.Settings(device, WARM_UP + rounds, text.digest, **SIZES[device])
    found = {}
    for ops in which:  # one after the other: two models of this size do not fit on a GPU
        training = train_text.Training(ops, text, settings, compiled=True, parallel=parallel)
        for _ in range(WARM_UP + rounds):
            training.step()
        found[ops] = {"seconds": training.seconds[WARM_UP:], "losses": training.losses}
        del training
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def process(
    rank: int, processes: int, device: str, parallel: str | None, rounds: int, which: Sequence[str], folder: str
) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    if parallel:
        store = f"file://{folder}/rendezvous"
        distributed.init_process_group("nccl" if device == "cuda" else "gloo", store, rank=rank, world_size=processes)
    found = times(device, parallel, rounds, which)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    if parallel:
        distributed.destroy_process_group()


def run(processes: int, device: str, parallel: str | None, rounds: int, which: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, device, parallel, rounds, which, folder)
        torch.multiprocessing.start_processes(process, arguments, processes, start_method="spawn")
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text())
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks processes", description=__doc__.replace("\n", " "))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=positive, default=2, help="beside one (default: %(default)s)")
    parser.add_argument("--ops", choices=OPS, nargs="+", default=OPS, help="whose functions (default: both)")
    kinds = ["ddp", "fsdp"]
    parser.add_argument("--parallel", choices=kinds, nargs="+", default=kinds, help="(default: both)")
    parser.add_argument("--rounds", type=positive, default=9, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: out/processes-DEVICE.json)")
    options = parser.parse_args(arguments)
    check_options(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    path = options.json or Path("out") / f"processes-{options.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = machine(options.device) | {"rounds": options.rounds, "commit": commit(), "versions": versions()}
    found: dict[str, Any] = {"machine": about, "sizes": SIZES[options.device], "figures": {}}
    table = Table("", "processes", "ops", "ms a step", "least, most", "x one process", title="train_text, compiled")
    alone: dict[str, float] = {}
    for parallel, processes in ((None, 1), *((kind, options.processes) for kind in options.parallel)):
        figures = run(processes, options.device, parallel, options.rounds, options.ops)
        found["figures"][f"{parallel or 'alone'} {processes}"] = figures
        path.write_text(json.dumps(found, indent=1))  # so that these figures remain if the next one fails
        for ops, figure in figures.items():
            seconds = figure["seconds"]
            median = statistics.median(seconds)
            ratio = alone.setdefault(ops, median) / median
            spread = f"{1e3 * min(seconds):.0f}, {1e3 * max(seconds):.0f}"
            table.add_row(parallel or "alone", str(processes), ops, f"{1e3 * median:.0f}", spread, f"{ratio:.2f}")
    Console(width=None if sys.stdout.isatty() else 130).print(table, f"The figures are in {path}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

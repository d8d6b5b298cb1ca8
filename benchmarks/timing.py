"""Times calls fairly: contenders take turns, each figure is a median, and a copy is measured in the same turns."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import results
from extension_cpp.__main__ import Parser, positive
from extension_cpp.command.once import once_cpu, once_cuda

Call = Callable[[], Any]
Time = dict[str, float]  # seconds of one call: the median, and low and high, the 10th and the 90th percentile


def seconds_of(call: Call, device: str, ahead: bool = True) -> float:
    return once_cuda(call, ahead) if device == "cuda" else once_cpu(call)


def judged_seconds(name: str, call: Call, device: str, judge: Any, ahead: bool = True) -> float:
    """Returns the seconds of a call. judge.renew writes other numbers into the inputs, so that a result kept from an
    earlier call is wrong. judge.judge records what is wrong with the result."""
    judge.renew()
    results: list[object] = []
    spent = seconds_of(lambda: results.append(call()), device, ahead)
    judge.judge(name, results.pop())
    return spent


def summary(seconds: list[float]) -> Time:
    deciles = statistics.quantiles(seconds, n=10)
    return {"median": statistics.median(seconds), "low": deciles[0], "high": deciles[-1]}


def take_turns(
    calls: dict[str, Call],
    device: str,
    rounds: int,
    ready: Callable[[str], object] = lambda name: None,
    ahead: bool = True,
    judge: Any = None,
) -> dict[str, Time]:
    """Times every call once per round, after two rounds that do not count. `ready` gets the call's name before each
    call and is not timed. The last timed call of each contender is judged.

    On a GPU the time begins with the call's first kernel. Without `ahead` it begins with the call, and includes the
    device's wait for the host.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            ready(name)
            is_judged = judge is not None and number == rounds + 1
            spent = judged_seconds(name, call, device, judge, ahead) if is_judged else seconds_of(call, device, ahead)
            if number >= 2:
                seconds[name].append(spent)
    return {name: summary(values) for name, values in seconds.items()}


class BenchmarkParser(Parser):
    """Parses the options that all benchmarks have: the device, the rounds and the file for the figures."""

    def __init__(self, command: str, about: str | None, file: str, rounds: int, what: str = "calls", device: str = ""):
        """`file` is the default of --json, with DEVICE for the device. `what` is timed --rounds times."""
        super().__init__(prog=f"python -m {command}", description=(about or "").replace("\n", " "))
        self.file = file
        default = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.add_argument("--device", choices=[device] if device else ["cpu", "cuda"], default=default)
        self.add_argument("--rounds", type=positive, default=rounds, help=f"timed {what} of each (default: {rounds})")
        self.add_argument("--json", dest="path", type=Path, help=f"where to write the figures (default: {file})")

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """Parses the options. Ends the program if --rounds or --device is impossible, or if figures of uncommitted
        changes would be published."""
        options = self.parse_args(arguments)
        if options.rounds < 9:
            self.error("argument --rounds: the spread from 10 to 90 % takes at least 9")
        if options.device == "cuda" and not torch.cuda.is_available():
            self.error("argument --device: torch sees no GPU here")
        is_published = options.path and options.path.resolve().parent == results.PUBLISHED
        if is_published and not results.is_clean(results.commit()):
            self.error("argument --json: published figures have a commit, and this tree has changes: commit them first")
        options.is_new = options.path is None
        options.path = options.path or Path(self.file.replace("DEVICE", options.device))
        return options

"""Measures accessor_mish beside extension_cpp.mish: python -m examples.accessor.compare, in the root of a checkout.

What is measured: microseconds a call on a small tensor; and for a large tensor, contiguous and strided, the bandwidth
in percent of that of a copy of a contiguous tensor of this size. Each result is compared with float64 before the call
is timed. The figures are written to examples/accessor/results/.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.benchmark import Timer

import extension_cpp
from extension_cpp.__main__ import Parser, positive

FOLDER = Path(__file__).resolve().parent
COLS = 1024
NAMES = ("ours", "accessor", "eager", "copy")


def measure(x: Tensor, seconds: float) -> dict[str, float]:
    """Returns the median microseconds of a call of each contender, and of a copy of the tensor, made contiguous. On a
    GPU the timer waits for the end of the calls."""
    calls: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: extension_cpp.mish(x),
        "accessor": lambda: torch.ops.accessor_mish.forward(x),
        "eager": lambda: torch.nn.functional.mish(x),
    }
    exact = extension_cpp.reference.mish(x[:1000].double())
    for call in calls.values():
        torch.testing.assert_close(call()[:1000].double(), exact, atol=1e-5, rtol=1e-4)
    source, target, threads = x.contiguous(), torch.empty(x.shape, device=x.device), torch.get_num_threads()
    calls["copy"] = lambda: target.copy_(source)
    timers = {name: Timer("call()", globals={"call": call}, num_threads=threads) for name, call in calls.items()}
    return {name: 1e6 * timer.blocked_autorange(min_run_time=seconds).median for name, timer in timers.items()}


def main() -> None:
    parser = Parser(prog="python -m examples.accessor.compare", description=__doc__.split("\n\n")[0])
    there = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    parser.add_argument("--device", choices=there, default=there[-1])
    parser.add_argument("--mib", type=positive, default=256, help="size of the large tensor (default: 256)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each figure (default: 2)")
    parser.add_argument("--json", type=Path, help="where to write (default: examples/accessor/results/DEVICE.json)")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    about = {"device": name, "torch": torch.__version__, "mib": options.mib, "seconds": options.seconds}
    sys.path.insert(0, str(FOLDER))
    __import__("accessor_mish")  # compiles it, if it is not in the cache of extensions
    rows: dict[str, dict[str, float]] = {}
    table = Table("", *NAMES, title=str(about))
    size = options.mib * 2**20 // 4 // COLS
    wide = torch.randn(size, 2 * COLS, device=options.device)
    with torch.no_grad():
        for label, x in [
            ("4 x 4, us", wide[:4, :4].contiguous()),
            (f"{size} x {COLS}, us", wide[:, :COLS].contiguous()),
            (f"{size} x {COLS} every other column, us", wide[:, ::2]),
            (f"{COLS} x {size} transposed, us", wide[:, :COLS].contiguous().t()),
        ]:
            rows[label] = row = measure(x, options.seconds)
            table.add_row(label, *(f"{row[name]:.1f}" for name in NAMES))
            if x.numel() > 16:
                table.add_row("  percent of copy", *(f"{100 * row['copy'] / row[name]:.0f}" for name in NAMES))
    path = options.json or FOLDER / "results" / f"{options.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    Console(width=120, highlight=False).print(table, f"The figures are in {path}.")


if __name__ == "__main__":
    main()

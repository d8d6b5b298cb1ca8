"""The markdown table of a results file: python -m benchmarks.table benchmarks/results/h100.json"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import host, results

# The ops of the published runs that the README shows.
OVERVIEW = ("layer_norm", "rms_norm", "add_layer_norm", "bias_gelu", "cross_entropy")
WIDTH = 4096
Cells = Callable[[results.Row, list[str]], list[str]]


def table(path: Path) -> str:
    if path.stem.startswith("host-"):
        return host.markdown(path)
    if path.stem.startswith("models-"):
        return _models(json.loads(path.read_text()))
    if path.stem.startswith("linear-loss-"):
        return _linear_loss(json.loads(path.read_text()))
    if path.stem.startswith("processes-"):
        return _processes(json.loads(path.read_text()))
    if path.stem.startswith("scan-steps-"):
        return scan_steps(json.loads(path.read_text()))
    found = results.read(path)
    about = found["machine"]
    lines = [
        f"{about['device']}, {about['threads']} CPU threads, torch {about['torch']}, tensors of {about['mib']} MiB:"
    ]
    large = _in_order([row for row in found["rows"] if results.sizes(row) == "large"])
    if large:
        lines += _table(large, ["op", "pass", "dtype", "width", "copy GB/s"], _percents)
    small = [row for row in found["rows"] if results.sizes(row) == "small"]  # sweeps are for pictures
    others = [(f", {title}", results.other(small, key)) for key, title in results.OTHERS]
    for title, rows in others if any(rows for _, rows in others) else [("", small)]:
        if rows:
            lines += ["", f"Small tensors, microseconds{title}:"]
            lines += _table(rows, ["op", "pass", "dtype", "shape", "copy"], _microseconds)
    return "\n".join(lines) + "\n"


def overview(*machines: Sequence[Path]) -> str:
    """Percent of copy at one width in bfloat16: one row per op; ours and the best other of each machine's files."""
    runs = [[results.read(path) for path in paths] for paths in machines]
    devices = [found[0]["machine"]["device"] for found in runs]
    columns = [f"{device}, {step}" for device in devices for step in ("forward", "backward")]
    lines = [f"| | {' | '.join(columns)} |", "|" + "---|" * (1 + len(columns))]
    for op in OVERVIEW:
        cells = [_ours_and_best(found, op, step) for found in runs for step in ("forward", "backward")]
        lines.append(f"| `{op}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _ours_and_best(found: list[dict[str, Any]], op: str, step: str) -> str:
    what = {"op": op, "pass": step, "dtype": "bfloat16", "cols": WIDTH}
    rows = [row for run in found for row in run["rows"] if what.items() <= row.items()]
    rows = [row for row in rows if results.sizes(row) == "large"]
    percents = dict(max(rows, key=lambda row: row.get("threads", 0))["percent_of_copy"])
    ours = percents.pop("ours")
    best = max(percents, key=lambda name: percents[name])
    return f"**{ours:.0f}**, {best} {percents[best]:.0f}"


def _models(found: dict[str, Any]) -> str:
    """The table of whole models, with ratios to the stock model under torch.compile if it was measured."""
    compared = all("stock compiled" in row["figures"] for row in found["rows"])
    heads = ["model", "", "ms a step", "GB at the peak", *(["time", "memory"] if compared else [])]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in found["rows"]:
        name, figures = f"{row['model']}, {row['batch']} x {row['tokens']}", row["figures"]
        for way, figure in figures.items():
            time, peak = figure["seconds"]["median"], figure["peak_bytes"]
            cells = [name, way, f"{1e3 * time:.1f}", f"{peak / 1e9:.1f}"]
            if compared:
                stock = figures["stock compiled"]
                cells += [f"{time / stock['seconds']['median']:.2f}", f"{peak / stock['peak_bytes']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _linear_loss(found: dict[str, Any]) -> str:
    figures = found["figures"]
    products = figures["products"]["seconds"]["median"]
    lines = ["| | ms | beside the products | GB beyond inputs and gradients |", "|---|---|---|---|"]
    for name, figure in figures.items():
        time = figure["seconds"]["median"]
        cells = [name, f"{1e3 * time:.1f}", f"{time / products:.2f}", f"{figure['extra_bytes'] / 1e9:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _processes(found: dict[str, Any]) -> str:
    """Milliseconds, and the speed-up over one process."""
    medians = {
        place: {ops: statistics.median(figure["seconds"]) for ops, figure in figures.items()}
        for place, figures in found["figures"].items()
    }
    alone = next(iter(medians.values()))
    lines = [f"| | {' | '.join(f'{ops}, ms | speed-up' for ops in alone)} |", "|" + "---|" * (1 + 2 * len(alone))]
    for place, times in medians.items():
        cells = [f"{1e3 * time:.0f} | {alone[ops] / time:.2f}" for ops, time in times.items()]
        lines.append(f"| {place} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def scan_steps(found: dict[str, Any]) -> str:
    """Milliseconds and percent of copy, with one column per shape; errors and repeatability of the widest rows."""
    shapes = list(dict.fromkeys((row["rows"], row["n"]) for row in found["rows"]))
    heads = [f"{rows} x {n}" for rows, n in shapes]
    lines = [f"| | {' | '.join(heads)} | largest error | results of 5 calls |", "|" + "---|" * (len(heads) + 3)]
    for step in dict.fromkeys(row["step"] for row in found["rows"]):
        cells = []
        for rows, n in shapes:
            same = [row for row in found["rows"] if (row["rows"], row["n"]) == (rows, n)]
            copy, row = same[0], next(row for row in same if row["step"] == step)
            spent, share = row["seconds"]["median"], copy["seconds"]["median"] / row["seconds"]["median"]
            percent = f"{100 * share:.0f}" if share > 0.095 else f"{100 * share:.2g}"
            cells.append(f"{1e3 * spent:.2f}, {percent} %")
        error = f"{row['error_eps']:.2g} eps" if "error_eps" in row else ""
        lines.append(f"| {step} | {' | '.join(cells)} | {error} | {row.get('results_of_5', '')} |")
    return "\n".join(lines) + "\n"


def _in_order(rows: list[results.Row]) -> list[results.Row]:
    """Sorts by op and dtype in the file's order, then by threads (most first), width, and forward before backward."""
    ops, dtypes = [list(dict.fromkeys(row[key] for row in rows)) for key in ("op", "dtype")]

    def place(row: results.Row) -> tuple[int, ...]:
        is_backward = row["pass"] != "forward"
        return ops.index(row["op"]), dtypes.index(row["dtype"]), -row.get("threads", 0), row["cols"], is_backward

    return sorted(rows, key=place)


def _table(rows: list[results.Row], head: list[str], cells_of: Cells) -> list[str]:
    """Threads have a column if they differ."""
    names = results.names(rows)
    body = [cells_of(row, names) for row in rows]
    if len({row["threads"] for row in rows if "threads" in row}) > 1:
        at = len(head) - 1
        head = [*head[:at], "threads", *head[at:]]
        body = [[*cells[:at], str(row.get("threads", "")), *cells[at:]] for row, cells in zip(rows, body, strict=True)]
    lines = ["", f"| {' | '.join([*head, *names])} |", "|" + "---|" * (len(head) + len(names))]
    return lines + [f"| {' | '.join(cells)} |" for cells in body]


def _percents(row: results.Row, names: list[str]) -> list[str]:
    cells = [row["op"], row["pass"], row["dtype"], str(row["cols"]), f"{row['copy_gb_s']:.0f}"]
    return cells + [_cell(row, name, row["percent_of_copy"].get(name, 0.0), 0) for name in names]


def _microseconds(row: results.Row, names: list[str]) -> list[str]:
    times = {name: 1e6 * seconds["median"] for name, seconds in row["seconds"].items()}
    cells = [row["op"], row["pass"], row["dtype"], f"{row['rows']} x {row['cols']}", f"{times['copy']:.1f}"]
    return cells + [_cell(row, name, times.get(name, 0.0), 1) for name in names]


def _cell(row: results.Row, name: str, value: float, digits: int) -> str:
    """The cell of a contender. It is empty if the contender was not measured."""
    if name in row.get("failed", {}):
        return "wrong" if row["failed"][name].startswith("wrong") else "raised"
    return f"{value:.{digits}f}" if name in row["seconds"] else ""


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")

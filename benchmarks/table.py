"""Prints the markdown table of a results file: python -m benchmarks.table benchmarks/results/h200.json"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console

from benchmarks import results
from benchmarks.timing import Time, summary

Figure = Callable[..., str]  # the function median or spread
Table = tuple[list[str], list[list[str]]]  # the head and the lines
OLDER = "older kernels"  # kernels that have changed since they were timed, or had uncommitted changes then
MARK = " \u2020"
# The ways to call layer_norm that host.py times, from the outermost software layer to the innermost. "by hand" does the
# least work that is possible with an autograd.Function in Python.
WAYS = {
    "native": "torch.nn.functional.layer_norm",
    "native operator": "torch.ops.aten.native_layer_norm.default",
    "function": "extension_cpp.layer_norm",
    "operator": "torch.ops.extension_cpp.layer_norm.default",
    "register_autograd": "the operator with torch.library.register_autograd",
    "by hand": "an autograd.Function around the kernel, without the dispatcher",
    "kernel": "the kernel below autograd: checks, allocation, launch",
    "shim": "the kernel on no rows: without launch",
}


def table(path: Path) -> str:
    """Returns the rows of a file as text, after a line with the machine and the runs."""
    for kind, (columns, make) in KINDS.items():
        if path.stem.startswith(kind):
            found = results.read(path, columns)
            return f"{heading(found)}\n\n" + "\n".join(markdown(*make(found["rows"]))) + "\n"
    found = results.read(path)
    lines, large = [heading(found)], [row for row in found["rows"] if row["sizes"] == "large"]
    if large:
        lines += _table(_in_order(large), percents=True)
    small = [row for row in found["rows"] if row["sizes"] == "small"]
    others = [(f", {title}", results.other(small, key)) for key, title in results.OTHERS]
    for title, timed in others if any(timed for _, timed in others) else [("", small)]:
        if timed:
            lines += ["", f"Small tensors, microseconds{title}:", *_table(timed, percents=False)]
    return "\n".join(lines) + "\n"


def heading(found: dict[str, Any]) -> str:
    about = found["machine"]
    facts = [about["device"], f"{about['threads']} CPU threads", f"torch {about['torch']}"]
    facts += [f"tensors of {about['mib']} MiB"] if "mib" in about else []
    facts += [f"float32 {about['shape']}, microseconds a call"] if "calls" in about else []
    return f"{', '.join(facts)}; {runs(found['rows'], about['device'])}:"


def runs(rows: Sequence[results.Row], device: str) -> str:
    """Names the runs of these rows and their commits, and says whether all or the marked rows have older kernels."""
    commits = {row["run"]: row["commit"] for row in rows}
    said = f"run{'s' * (len(commits) > 1)} " + ", ".join(f"{number} ({commits[number]})" for number in sorted(commits))
    older = are_older(rows, device)
    return said + (f"; {OLDER}" if all(older) else f"; {MARK.strip()} {OLDER}" if any(older) else "")


def are_older(rows: Sequence[results.Row], device: str) -> list[bool]:
    return [results.is_older(row, "cuda" if "NVIDIA" in device else "cpu") for row in rows]


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in body)
    return lines + [f"| {' | '.join(cells)} |" for cells in escaped]


def median(time: Time, scale: float = 1e3, digits: int = 1) -> str:
    """Returns the median in milliseconds."""
    return f"{scale * time['median']:.{digits}f}"


def spread(time: Time, scale: float = 1e3, digits: int = 1) -> str:
    """Returns the median with the range from 10 to 90 %."""
    middle, low, high = (f"{scale * time[figure]:.{digits}f}" for figure in ("median", "low", "high"))
    return f"{middle} ({low} to {high})"


def models(rows: list[results.Row], time: Figure = median) -> Table:
    """Makes the table of whole models, with ratios to the stock model under torch.compile of the same run. A figure
    that no row has gets no column."""
    stock = {(row["model"], row["run"]): row for row in rows if row["way"] == "stock compiled"}
    pairs = [(row, stock.get((row["model"], row["run"]), {})) for row in rows]
    columns = {
        "model": [f"{row['model']}, {row['batch']} x {row['tokens']}" for row in rows],
        "": [row["way"] for row in rows],
        "ms a step": [time(row["seconds"]) for row in rows],
        "ms of kernels": [f"{1e3 * row['kernel_seconds']:.1f}" if "kernel_seconds" in row else "" for row in rows],
        "ms of the host": [time(row["host_seconds"]) if "host_seconds" in row else "" for row in rows],
        "GB at the peak": [f"{row['peak_bytes'] / 1e9:.1f}" if "peak_bytes" in row else "" for row in rows],
        "time": [f"{row['seconds']['median'] / one['seconds']['median']:.2f}" if one else "" for row, one in pairs],
        "memory": [f"{row['peak_bytes'] / one['peak_bytes']:.2f}" if "peak_bytes" in one else "" for row, one in pairs],
    }
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    return list(columns), list(map(list, zip(*columns.values(), strict=True)))


def linear_loss(rows: list[results.Row], time: Figure = median) -> Table:
    (products,) = (row["seconds"]["median"] for row in rows if row["way"] == "products")
    body = []
    for row in rows:
        extra = f"{row['extra_bytes'] / 1e9:.2f}" if "extra_bytes" in row else ""  # only measured on a GPU
        body.append([row["way"], time(row["seconds"]), f"{row['seconds']['median'] / products:.2f}", extra])
    return ["", "ms", "beside the products", "GB beyond inputs and gradients"], body


def processes(rows: list[results.Row], time: Figure = median) -> Table:
    """Makes a table of the milliseconds of a training step on one process and on several, with the speed-up."""
    found = {(row["place"], row["ops"]): summary(row["seconds"]) for row in rows}
    places, which = (list(dict.fromkeys(row[name] for row in rows)) for name in ("place", "ops"))
    body = []
    for place in places:
        cells = [place]
        for ops in which:
            speed_up = found[places[0], ops]["median"] / found[place, ops]["median"]
            cells += [time(found[place, ops], digits=0), f"{speed_up:.2f}"]
        body.append(cells)
    return ["", *(head for ops in which for head in (f"{ops}, ms", "speed-up"))], body


def scan_steps(rows: list[results.Row], time: Figure = median) -> Table:
    """Makes a table of the scan steps of examples/scan_steps: milliseconds and percent of copy for each shape, and the
    errors and repeatability for the widest rows."""
    found = {(row["step"], (row["rows"], row["n"])): row for row in rows}
    steps, shapes = (list(dict.fromkeys(names)) for names in zip(*found, strict=True))
    body = []
    for step in steps:
        cells = []
        for shape in shapes:
            row = found[step, shape]
            share = found["copy", shape]["seconds"]["median"] / row["seconds"]["median"]
            percent = f"{100 * share:.0f}" if share > 0.095 else f"{100 * share:.2g}"
            cells.append(f"{time(row['seconds'], digits=2)}, {percent} %")
        error = f"{row['error_eps']:.2g} eps" if "error_eps" in row else ""
        body.append([step, *cells, error, str(row.get("results_of_5", ""))])
    heads = [f"{height} x {n}" for height, n in shapes]
    return ["", *heads, "largest error", "results of 5 calls"], body


def host(rows: list[results.Row], time: Figure = median) -> Table:
    """Makes a table of host microseconds per call: a row for each op and way to call it, a column per pass."""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    # The rows of layer_norm name no op. They come in the order of WAYS, of which some are not in all passes.
    lines: dict[tuple[str, str], dict[str, str]] = {(way, words): {} for way, words in WAYS.items()}
    for row in rows:
        line = (row["op"], row["way"]) if "op" in row else (row["way"], WAYS[row["way"]])
        lines.setdefault(line, {})[row["pass"]] = time(row["seconds"], scale=1e6)
    body = [[*line, *(cells.get(name, "") for name in passes)] for line, cells in lines.items() if cells]
    return ["", "", *passes], body


def finish(path: Path, found: dict[str, Any], make: Callable[..., Table]) -> None:
    """Writes the results to the file, and prints their table with the spread of each time."""
    results.write(path, found)
    head, body = make(found["rows"], spread)
    settings = [str(value) for name, value in found.items() if name not in ("machine", "rows")]
    printed = rich.table.Table(*head, title="\n".join([heading(found), *settings]))
    for cells in body:
        printed.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(printed, f"The figures are in {path}.")


# How to print files of other commands than `python -m benchmarks`, by the beginning of the file's name: the columns of
# a row, and the function that makes the table.
KINDS: dict[str, tuple[Sequence[str], Callable[..., Table]]] = {
    "host-": (("way", "pass", "seconds"), host),
    "models-": (("model", "way", "seconds"), models),
    "linear-loss-": (("way", "seconds"), linear_loss),
    "processes-": (("place", "ops", "seconds"), processes),
    "scan-steps-": (("step", "n", "seconds"), scan_steps),
}


def _in_order(rows: list[results.Row]) -> list[results.Row]:
    """Sorts by op and dtype in the file's order, then by width, and forward before backward."""
    ops, dtypes = [list(dict.fromkeys(row[key] for row in rows)) for key in ("op", "dtype")]
    return sorted(rows, key=lambda x: (ops.index(x["op"]), dtypes.index(x["dtype"]), x["cols"], x["pass"] != "forward"))


def _table(rows: list[results.Row], percents: bool) -> list[str]:
    """Makes a table. Runs have a column if they differ between rows."""
    names, has_runs = results.names(rows), len({row["run"] for row in rows}) > 1
    head = ["op", "pass", "dtype", "width" if percents else "shape", *["run"] * has_runs]
    older, body = are_older(rows, "NVIDIA" if "threads" not in rows[0] else ""), []
    for row, is_older in zip(rows, older, strict=True):
        mark = MARK if is_older and not all(older) else ""
        size = str(row["cols"]) if percents else f"{row['rows']} x {row['cols']}"
        cells = [row["op"] + mark, row["pass"], row["dtype"], size, *[str(row["run"])] * has_runs]
        body.append(cells + figures(row, ["copy", *names], percents))
    return ["", *markdown([*head, "copy GB/s" if percents else "copy", *names], body)]


def figures(row: results.Row, names: list[str], percents: bool) -> list[str]:
    """Returns the cells of the copy and of contenders: GB/s and percent of copy, or all in microseconds."""
    found = {name: median(seconds, scale=1e6) for name, seconds in row["seconds"].items()}
    if percents:
        found |= {name: f"{percent:.0f}" for name, percent in row["percent_of_copy"].items()}
        found["copy"] = f"{row['copy_gb_s']:.0f}"
    for name, reason in row.get("failed", {}).items():
        found[name] = "wrong" if reason.startswith("wrong") else "raised"
    return [found.get(name, "") for name in names]  # a contender that was not measured has an empty cell


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")

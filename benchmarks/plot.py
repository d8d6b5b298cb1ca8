"""Draws a results file, as svg and png: percent of copy over width, and a roofline.

A picture is made for each dtype that has rows for it. Without a FILE the documents' own pictures are drawn again.
"""

import hashlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from benchmarks import results
from extension_cpp.__main__ import Parser
from tests.opspec import timed_specs

# Okabe and Ito's colours, which colour-blind people can tell apart. In print without colours the markers differ.
LOOKS = {
    "ours": ("#0072B2", "o"),
    "eager": ("#E69F00", "s"),
    "compile": ("#009E73", "^"),
    "liger": ("#CC79A7", "D"),
    "quack": ("#D55E00", "v"),
}
Groups = dict[tuple[str, str], list[results.Row]]  # the rows of large tensors, by op and pass
LIMIT: dict[str, Any] = {"color": "black", "linewidth": 1, "linestyle": "--"}
# The documents' pictures: the stem of the file, the ops, and the kind and dtype of the picture.
PUBLISHED: dict[str, tuple[str, tuple[str, ...] | None, str]] = {
    "docs/norms-h200.svg": ("h200-norms", ("layer_norm", "rms_norm"), "widths-bfloat16"),
    "docs/norms-cpu.svg": ("cpu", ("layer_norm", "rms_norm"), "widths-bfloat16"),
    "docs/roofline-h200.svg": ("h200-norms", None, "roofline-bfloat16"),
}


def line(axes: Axes, name: str, points: Sequence[tuple[float, float]], style: str) -> None:
    color, marker = LOOKS.get(name, ("#56B4E9", "P"))  # a peer of a few ops
    x, y = ([point[i] for point in points] for i in (0, 1))
    axes.plot(x, y, color=color, marker=marker, markersize=4, linewidth=1.3, linestyle=style, label=name)


def widths(every: Groups, title: str) -> Figure | None:
    """Draws percent of copy over width, in a row of panels for each op that has several widths, with forward and
    backward side by side. Multiples of 8 are joined by a line, and other widths stand on the right."""
    groups = {key: group for key, group in every.items() if len(group) > 1}
    ops = list(dict.fromkeys(op for op, _ in groups))
    if not ops:
        return None
    figure = Figure(figsize=(8, 1 + 1.9 * len(ops)), layout="constrained")
    axes = figure.subplots(len(ops), 2, squeeze=False, sharey="row")
    for op, pair in zip(ops, axes, strict=True):
        for step, one in zip(("forward", "backward"), pair, strict=True):
            if (op, step) not in groups:
                one.remove()
                continue
            rows = sorted(groups[op, step], key=lambda row: (row["cols"] % 8 > 0, row["cols"]))
            even = sum(row["cols"] % 8 == 0 for row in rows)
            one.axhline(100, **LIMIT, label="copy")
            for name in results.names(rows):
                shares = [(i, row["percent_of_copy"][name]) for i, row in enumerate(rows) if name in row["seconds"]]
                line(one, name, [point for point in shares if point[0] < even], "-")
                line(one, name, [point for point in shares if point[0] >= even], "none")
            one.set_xticks(range(len(rows)), [str(row["cols"]) for row in rows], rotation=30, fontsize=8)
            one.set_title(f"{op} {step}", fontsize=9)
            one.grid(alpha=0.3)
            if op == ops[-1]:
                one.set_xlabel("width", fontsize=9)
        for one in pair:  # after both panels, because limits that are set do not follow later data
            one.set_ylim(bottom=0)
    figure.suptitle(title, fontsize=11)
    figure.supylabel("percent of copy", fontsize=9)
    legend(figure)
    return figure


def legend(figure: Figure) -> None:
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=len(found), fontsize=9)


def name_above(axes: Axes, rows: dict[float, list[results.Row]]) -> None:
    """Writes the names of the rows of each x, in rising order, above the axes, and connects them to x by a line."""
    low, high = (math.log(end) for end in axes.get_xlim())
    at_x, place = axes.get_xaxis_transform(), 0.0  # as a share of the width
    arrow = {"arrowstyle": "-", "linewidth": 0.5, "relpos": (0, 0), "shrinkB": 0}
    style: dict[str, Any] = {"rotation": 60, "rotation_mode": "anchor", "va": "center", "fontsize": 7}
    for x, group in rows.items():
        lines = [f"{row['op'].replace('_p0', ', p = 0,')} {row['pass']}" for row in group]
        place = max(place, (math.log(x) - low) / (high - low))
        axes.annotate("\n".join(lines), (x, 1), (place, 1.06), at_x, axes.transAxes, arrow, **style)
        place += 0.012 + 0.02 * len(lines)


def roofline(groups: Groups, title: str) -> Figure | None:
    """Draws operations per second over operations per byte, for large tensors. Each op is at its best width."""
    benches = {spec.name: spec.bench for spec in timed_specs()}
    chosen, by_intensity = list[results.Row](), dict[float, list[results.Row]]()
    for (op, step), group in groups.items():
        if op in benches and (operations := benches[op].operations):  # not every op counts its operations
            chosen.append(max(group, key=lambda row: row["percent_of_copy"].get("ours", 0)))
            moved = (benches[op].forward, benches[op].backward)[step == "backward"]
            itemsize = 4 if chosen[-1]["dtype"] == "float32" else 2
            by_intensity.setdefault(operations[step == "backward"] / (moved * itemsize), []).append(chosen[-1])
    if not chosen:
        return None
    figure = Figure(figsize=(8, 6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots()
    roof = max(row["copy_gb_s"] for row in chosen)
    ends = [0.8 * min(by_intensity), 1.25 * max(by_intensity)]
    axes.plot(ends, [roof * x for x in ends], **LIMIT, label="bandwidth of copy")
    for name in results.names(chosen):
        timed = [(x, row) for x, group in by_intensity.items() for row in group if name in row["seconds"]]
        # A bandwidth counts the bytes that the op must move.
        points = [(x, x * (row["copy_gb_s"] * row["percent_of_copy"][name] / 100)) for x, row in timed]
        line(axes, name, points, "none")
    axes.set(xscale="log", yscale="log")
    name_above(axes, dict(sorted(by_intensity.items())))
    for axis, base, digits in ((axes.xaxis, 2.0, (1.0,)), (axes.yaxis, 10.0, (1.0, 2.0, 5.0))):
        axis.set_major_locator(LogLocator(base, digits, numticks=99))
        axis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3, which="major")
    axes.set_xlabel("arithmetic operations for each byte that the op must move", fontsize=9)
    axes.set_ylabel("billions of arithmetic operations a second", fontsize=9)
    legend(figure)
    return figure


def pictures(path: Path, ops: Sequence[str] | None = None) -> Iterator[tuple[str, Figure]]:
    """Yields the names and figures of all pictures for which the file has rows."""
    found = results.read(path)
    for dtype in dict.fromkeys(row["dtype"] for row in found["rows"]):
        groups: Groups = {}
        for row in (row for row in found["rows"] if row["dtype"] == dtype and row["sizes"] == "large"):
            if ops is None or row["op"] in ops:
                groups.setdefault((row["op"], row["pass"]), []).append(row)
        title = f"{found['machine']['device']}, {dtype}: "
        if figure := widths(groups, title + "percent of copy over width"):
            yield f"{path.stem}-widths-{dtype}", figure
        if figure := roofline(groups, title + "roofline of the ops named below, each at its best width"):
            yield f"{path.stem}-roofline-{dtype}", figure


def svg(figure: Figure, description: str | None = None) -> str:
    """Returns the figure as text. It has no date and no random names, so that a figure always gives the same text."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "benchmarks", "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Description": description})
    return out.getvalue()


def published(name: str) -> str:
    """Returns a published picture as SVG text. Its description is the digest of the rows that it shows, by which a test
    finds a stale picture."""
    source, ops, picture = PUBLISHED[name]
    path = results.PUBLISHED / f"{source}.json"
    rows = [row for row in results.read(path)["rows"] if ops is None or row["op"] in ops]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return svg(dict(pictures(path, ops))[f"{source}-{picture}"], description=digest)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks plot", description=(__doc__ or "").replace("\n", " "))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    names = [spec.name for spec in timed_specs()]
    parser.add_argument("--op", nargs="+", choices=names, metavar="OP", help="these alone (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out/plots"), help="folder (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in () if options.files else PUBLISHED:
        (results.ROOT / name).write_text(published(name))
        print(name)
    for path in options.files:
        options.out.mkdir(parents=True, exist_ok=True)
        for name, figure in pictures(path, options.op):
            (options.out / f"{name}.svg").write_text(svg(figure))
            figure.savefig(options.out / f"{name}.png", dpi=120)
            print(f"{options.out / name}.svg and .png")
    return 0

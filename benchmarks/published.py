"""The tables of figures in the documents, each from results files: what `make docs` writes between its markers, and the
page of all tables, which `make site` writes."""

import csv
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import results
from benchmarks.table import MARK, are_older, markdown, runs, table

K = 1024


@dataclass(frozen=True)
class Line:
    """A line of a summary: the rows of an op at some widths. A goal stands for float32 and bfloat16."""

    name: str
    op: str
    columns: str
    widths: tuple[int, ...]
    goal: str = ""


def read(stem: str) -> tuple[list[results.Row], str]:
    """The rows of large tensors of a file, on most of its threads, and the device."""
    found = results.read(results.PUBLISHED / f"{stem}.json")
    rows = [row for row in found["rows"] if results.sizes(row) == "large"]
    most = max(row.get("threads", 0) for row in rows)
    return [row for row in rows if row.get("threads", 0) == most], found["machine"]["device"]


def best_peer(row: results.Row) -> list[float]:
    """None where each peer is wrong or raised."""
    return sorted(percent for name, percent in row["percent_of_copy"].items() if name != "ours")[-1:]


def ours(row: results.Row) -> list[float]:
    return [row["percent_of_copy"]["ours"]] if "ours" in row["percent_of_copy"] else []


def span(values: list[float]) -> str:
    words = [f"{value:.0f}" for value in (min(values), max(values))] if values else ["-"]
    return " to ".join(dict.fromkeys(words))


def cell(rows: list[results.Row], step: str, figure: Callable[[results.Row], list[float]]) -> str:
    """The figures in float32 and in bfloat16."""
    same = [row for row in rows if row["pass"] == step]
    dtypes = ("float32", "bfloat16")
    kinds = [[percent for row in same if row["dtype"] == dtype for percent in figure(row)] for dtype in dtypes]
    return " / ".join(map(span, kinds)) if same else "-"


def summary(stem: str, lines: Sequence[Line]) -> str:
    """Percent of copy, ours and the best peer's."""
    rows, device = read(stem)
    chosen = [[row for row in rows if row["op"] == line.op and row["cols"] in line.widths] for line in lines]
    every = [row for each in chosen for row in each]
    all_older = all(are_older(every, device))
    one_run = len({row["run"] for row in every}) == 1
    body = []
    for line, each in zip(lines, chosen, strict=True):
        mark = MARK if not all_older and any(are_older(each, device)) else ""
        cells = [line.name + mark, line.columns, line.goal]
        for step in ("forward", "backward"):
            cells += [cell(each, step, ours), cell(each, step, best_peer)]
        body.append(cells + ([] if one_run else [", ".join(map(str, sorted({row["run"] for row in each})))]))
    head = ["op", "columns", "goal", "forward", "best peer", "backward", "best peer"]
    lines_of_text = markdown(head + ([] if one_run else ["run"]), body)
    return "\n".join([*lines_of_text, "", f"`{stem}.json`: {runs(every, device)}."]) + "\n"


def norm(name: str, op: str, apart: bool = False) -> list[Line]:
    """The widths of a norm: a line for 64K and 128K or, `apart`, two."""
    wide = [Line(name, op, "64K, 128K", (64 * K, 128 * K), "97, 95")]
    if apart:
        wide = [Line(name, op, "64K", (64 * K,), "97, 95"), Line(name, op, "128K", (128 * K,), "92, 92")]
    return [Line(name, op, "1K to 16K", (K, 4 * K, 16 * K), "97, 95"), *wide, Line(name, op, "1025", (1025,), "88, 88")]


NORMS = [
    *norm("layer_norm", "layer_norm", apart=True),
    *norm("rms_norm", "rms_norm"),
    *norm("add_layer_norm, p = 0.1", "add_layer_norm"),
    *norm("add_layer_norm, p = 0", "add_layer_norm_p0"),
    Line("add_rms_norm, p = 0.1", "add_rms_norm", "1K to 128K", (K, 4 * K, 16 * K, 64 * K, 128 * K), "-, 95"),
    Line("add_rms_norm, p = 0.1", "add_rms_norm", "1025", (1025,), "-, 88"),
    *norm("add_rms_norm, p = 0", "add_rms_norm_p0"),
]
OTHERS = [
    Line("layer_norm_dropout, p = 0.1", "layer_norm_dropout", "1K to 16K", (K, 4 * K, 8 * K, 16 * K)),
    Line("dropout, p = 0.1", "dropout", "any", (K,)),
    Line("reduce_sum", "reduce_sum", "768 to 64K", (768, K, 4 * K, 8 * K, 16 * K, 64 * K), "100"),
    Line("muladd", "muladd", "any", (K,), "102, 100"),
    Line("scale_bias_relu", "scale_bias_relu", "768 to 64K", (768, K, 4 * K, 8 * K, 16 * K, 64 * K), "99, 95"),
]
LOSSES = [
    Line(op, op, columns, widths, goal)
    for op, columns, widths, goal in (
        ("softmax", "4096, 32768", (4096, 32768), "97, 97"),
        ("softmax", "128256", (128256,), "97, 97"),
        ("log_softmax", "4096, 32768", (4096, 32768), "97, 97"),
        ("log_softmax", "128256", (128256,), "97, 97"),
        ("cross_entropy", "4096", (4096,), ""),
        ("cross_entropy", "32768", (32768,), "97, 95"),
        ("cross_entropy", "128256", (128256,), "97, 95"),
        ("token_log_probs", "4096, 32768", (4096, 32768), "92"),
        ("token_log_probs", "128256", (128256,), "92"),
    )
]
GATES = [
    Line(op, op, "4096" if op == "bias_gelu" else "any", (K, 4096), goal)
    for op, goal in (
        ("bias_gelu", "97, 92"),
        ("silu", "97, 95"),
        ("gelu", "97, 95"),
        ("swiglu", "97, 95"),
        ("geglu", "97, 95"),
        ("rotary_embedding", "94, 94"),
    )
]
SCANS = [
    Line("cumsum", "cumsum", "rows of 32", (32,), "90, 90"),
    Line("cumsum", "cumsum", "rows of 4096", (4096,), "90, 90"),
    Line("cumsum", "cumsum", "rows of 2^26", (2**26,), "90, 90"),
    Line("cumsum", "cumsum", "a row of 2^28", (2**28,), "80, 80"),
    Line("cumsum", "cumsum_columns", "32 columns", (32,), "90, 90"),
    Line("cumsum", "cumsum_columns", "4096 columns", (4096,), "90, 90"),
    Line("cumsum", "cumsum_columns", "2^26 columns of 2 / 4 steps", (2**26,), "90, 90"),
    Line("logcumsumexp", "logcumsumexp", "rows of 4096", (4096,)),
    Line("logcumsumexp", "logcumsumexp_columns", "4096 columns", (4096,)),
    Line("linear_recurrence", "linear_recurrence", "rows of 8192", (8192,), "90, 85"),
    Line("linear_recurrence", "linear_recurrence_columns", "8192 columns", (8192,), "90, 85"),
]
CPU = [
    Line(op, op, str(width), (width,), goal)
    for op, width, goal in (
        ("layer_norm", 1024, "120 / 90; 100 / 85"),
        ("layer_norm", 8192, "100 / 85; 90 / 70"),
        ("rms_norm", 1024, "130 / 105; 105 / 100"),
        ("rms_norm", 8192, "110 / 105; 95 / 80"),
        ("add_layer_norm", 4096, "80 / 60; 90 / 70"),
        ("add_rms_norm", 4096, ""),
        ("layer_norm_dropout", 4096, ""),
        ("dropout", 1024, ""),
        ("scale_bias_relu", 1024, "120 / 100; 100 / 88"),
        ("mish", 1024, "90 / 50; 95 / 55"),
        ("muladd", 1024, "110 / 107; 100 / 90"),
        ("relu", 1024, ""),
        ("reduce_sum", 1024, "120 / 166"),
    )
]
CPU_OTHERS = [
    Line(op, op, str(width), (width,), goal)
    for op, width, goal in (
        ("softmax", 4096, "85 / 50; 100 / 90"),
        ("log_softmax", 4096, ""),
        ("cross_entropy", 4096, "85 / 50; 85 / 50"),
        ("token_log_probs", 4096, ""),
        ("rotary_embedding", 1024, ""),
        ("swiglu", 1024, "110 / 65; 95 / 60"),
        ("geglu", 1024, ""),
        ("gelu", 1024, ""),
        ("silu", 1024, ""),
        ("bias_gelu", 4096, ""),
        ("cumsum", 4096, "120 / 85"),
        ("cumsum_columns", 4096, "115 / 110"),
    )
]

# The ops of the README's table at 4096 columns in bfloat16, and the files that have them.
OVERVIEW = ("layer_norm", "rms_norm", "add_layer_norm", "bias_gelu", "cross_entropy")
OVERVIEW_FILES = ("h100", "h100-gates", "h100-losses")


def overview() -> str:
    """Percent of copy in bfloat16: one line per op, ours and the best other, the winner in bold."""
    lines, said = {}, []
    for stem in OVERVIEW_FILES:
        rows, device = read(stem)
        rows = [row for row in rows if (row["dtype"], row["cols"]) == ("bfloat16", 4096) and row["op"] in OVERVIEW]
        said.append(f"`{stem}.json`: {runs(rows, device)}")
        for op in {row["op"] for row in rows}:
            lines[op] = [f"`{op}`", *(ours_and_best(rows, op, step) for step in ("forward", "backward"))]
    body = [lines[op] for op in OVERVIEW]
    return "\n".join([*markdown(["", f"{device}, forward", "backward"], body), "", "; ".join(said) + "."]) + "\n"


def ours_and_best(rows: list[results.Row], op: str, step: str) -> str:
    (row,) = (row for row in rows if (row["op"], row["pass"]) == (op, step))
    peers = {name: percent for name, percent in row["percent_of_copy"].items() if name != "ours"}
    best = max(peers, key=lambda name: peers[name])
    figures = [f"{row['percent_of_copy']['ours']:.0f}", f"{peers[best]:.0f}"]
    ours, other = (f"**{each}**" if int(each) == max(map(int, figures)) else each for each in figures)
    return f"{ours}, {best} {other}"


def training(model: str) -> str:
    """A step of a model as it is, compiled at its best, and converted without compiling."""
    found = results.read(results.PUBLISHED / "models-h100.json", ("model", "way", "seconds"))
    rows = {row["way"]: row for row in found["rows"] if row["model"] == model}
    best = "stock compiled, no mask" if "stock compiled, no mask" in rows else "stock compiled"
    chosen = {"as it is": rows["stock"], "at best under torch.compile": rows[best]}
    chosen["converted and not compiled"] = rows["linear loss"]
    said = [
        f"{1e3 * row['seconds']['median']:.1f} ms and {row['peak_bytes'] / 1e9:.1f} GB at the peak {way}"
        for way, row in chosen.items()
    ]
    figures = f"A training step takes {said[0]}, {said[1]}, and {said[2]}."
    return f"{figures} `models-h100.json`: {runs([*chosen.values()], found['machine']['device'])}.\n"


def host_ratios() -> str:
    """What a call of layer_norm costs beside PyTorch's."""
    both, plain = "forward and backward", "torch.library.register_autograd"
    lines = {
        "forward without gradients (goal 1.0)": ("native", "forward, no_grad"),
        f"{both} (goal 1.1)": ("native", both),
        f"{both}, beside {plain} (goal 0.84)": ("register_autograd", both),
    }
    columns, said = {}, []
    for stem in ("host-cpu", "host-h200"):
        found = results.read(results.PUBLISHED / f"{stem}.json", ("way", "pass", "seconds"))
        spent = {(row["way"], row["pass"]): row["seconds"]["median"] for row in found["rows"]}
        ratios = [spent["function", step] / spent[way, step] for way, step in lines.values()]
        columns[found["machine"]["device"]] = [f"{ratio:.2f}" for ratio in ratios]
        said.append(f"`{stem}.json`: {runs(found['rows'], found['machine']['device'])}")
    body = [[name, *cells] for name, *cells in zip(lines, *columns.values(), strict=True)]
    head = ["beside torch.nn.functional.layer_norm", *columns]
    return "\n".join([*markdown(head, body), "", "; ".join(said) + "."]) + "\n"


def curves(stem: str, beside: str) -> str:
    """Loss curves: how far each is from that of `beside`, and the milliseconds of a step where they were kept."""
    with (results.PUBLISHED / f"{stem}.csv").open() as file:
        columns = {name: [value for value in values if value] for name, *values in csv.reader(file)}
    body = []
    for name in (name for name in columns if "_" not in name and name != "step"):
        losses, others = (list(map(float, columns[each])) for each in (name, beside))
        apart = [abs(a - b) for a, b in zip(losses, others, strict=True)]
        distances = ["", ""] if name == beside else [f"{max(apart):.2g}", f"{statistics.mean(apart):.2g}"]
        cells = [name, *distances, f"{losses[-1]:.4f}"]
        if validation := columns.get(f"validation_{name}"):
            cells.append(f"{float(validation[-1]):.4f}")
        if times := columns.get(f"ms_{name}"):
            cells.append(f"{statistics.median(map(float, times)):.1f}")
        body.append(cells)
    head = ["", "largest distance", "mean distance", "last loss"]
    head += ["last validation loss"] * ("validation_ours" in columns) + ["ms a step"] * ("ms_ours" in columns)
    return "\n".join(markdown(head, body)) + "\n"


def whole(stem: str) -> str:
    return table(results.PUBLISHED / f"{stem}.json")


CURVES = ("train-text-cpu", "train-text-h100", "recurrent-text-cpu", "recurrent-text-h100")
# Files whose whole table stands on a page of the repository.
WHOLE = {
    "docs/performance_training.md": ("models-h100", "linear-loss-h100"),
    "docs/scan.md": ("scan-steps-h100",),
    "docs/distributed.md": ("processes-h100", "processes-h100-65536-bytes"),
}
# The files whose tables only the site has, by the heading above them.
ON_THE_SITE = {
    "GPU": ("h100", "h200", "h100-losses", "h100-strips", "h100-gates", "h100-scans"),
    "CPU": ("cpu", "cpu-xeon", "cpu-plain-malloc", "cpu-gates", "cpu-scans"),
    "What a call costs": ("host-cpu", "host-h200"),
}


def site_page() -> str:
    """The page of the tables in ON_THE_SITE."""
    parts = [
        "# Tables of the published runs",
        "Percent of copy, unless a column is in microseconds: [performance](performance.md) says what that is and how "
        "it was measured. The raw numbers, with each row's spread and commit, are in "
        "[benchmarks/results](../benchmarks/results/README.md). raised: the contender refuses that shape.",
    ]
    for heading, stems in ON_THE_SITE.items():
        parts += [f"## {heading}", *(f"### {stem}.json\n\n{whole(stem).rstrip()}" for stem in stems)]
    return "\n\n".join(parts) + "\n"


SUMMARIES = {
    "norms": ("h100", NORMS),
    "ops on an H200": ("h200", OTHERS),
    "losses": ("h100-losses", LOSSES),
    "gates": ("h100-gates", GATES),
    "scans": ("h100-scans", SCANS),
    "CPU": ("cpu", CPU),
    "more on the CPU": ("cpu-gates", CPU_OTHERS),
}
# The page, the name in its markers, and what stands between them.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("README.md", "speed", overview),
    ("README.md", "training", partial(training, "llama-3.2-1b")),
    *(("docs/performance.md", name, partial(summary, *what)) for name, what in SUMMARIES.items()),
    ("docs/performance.md", "a call", host_ratios),
    *(("docs/performance_training.md", stem, partial(curves, stem, "torch")) for stem in CURVES),
    *((page, stem, partial(whole, stem)) for page, stems in WHOLE.items() for stem in stems),
]

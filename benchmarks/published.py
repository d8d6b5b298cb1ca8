"""Makes the tables of figures in the documents from results files. `make docs` writes them between markers, and `make
site` writes the page of all tables."""

import csv
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import results
from benchmarks.table import MARK, are_older, markdown, runs, table

# The rows of the summary tables in docs/performance.md: an op, some widths, and a goal for float32 and bfloat16.
LINES = list(csv.DictReader(Path(__file__).with_name("summaries.csv").read_text().splitlines()))


def read(stem: str) -> tuple[list[results.Row], str]:
    """Returns the rows of a results file that timed large tensors, and the device's name."""
    found = results.read(results.PUBLISHED / f"{stem}.json")
    return [row for row in found["rows"] if row["sizes"] == "large"], found["machine"]["device"]


def span(values: list[float]) -> str:
    words = [f"{value:.0f}" for value in (min(values), max(values))] if values else ["-"]
    return " to ".join(dict.fromkeys(words))


def cells(rows: list[results.Row], step: str) -> list[str]:
    """Returns the cells of our figures and of the best peers', each in float32 and in bfloat16. A contender that is
    wrong or raised has no figure."""
    same, ours, best = [row for row in rows if row["pass"] == step], [], []
    for dtype in ("float32", "bfloat16"):
        percents = [row["percent_of_copy"] for row in same if row["dtype"] == dtype]
        peers = [[each[name] for name in each if name != "ours"] for each in percents]
        ours.append(span([each["ours"] for each in percents if "ours" in each]))
        best.append(span([max(each) for each in peers if each]))
    return [" / ".join(each) if same else "-" for each in (ours, best)]


def sourced(lines: list[str], *sources: str) -> str:
    """Returns a table, followed by the files and runs of its figures."""
    return "\n".join([*lines, "", "; ".join(sources) + "."]) + "\n"


def source(stem: str, rows: Sequence[results.Row], device: str) -> str:
    return f"`{stem}.json`: {runs(rows, device)}"


def summary(name: str) -> str:
    """Returns a summary table of docs/performance.md, with percent of copy of our ops and of the best peers."""
    lines = [line for line in LINES if line["table"] == name]
    rows, device = read(lines[0]["file"])
    widths = {(line["op"], width) for line in lines for width in line["widths"].split()}
    every = [row for row in rows if (row["op"], str(row["cols"])) in widths]
    has_runs, all_older, body = len({row["run"] for row in every}) > 1, all(are_older(every, device)), []
    for line in lines:
        same = [row for row in every if row["op"] == line["op"] and str(row["cols"]) in line["widths"].split()]
        mark = MARK if not all_older and any(are_older(same, device)) else ""
        numbers = ", ".join(map(str, sorted({row["run"] for row in same})))
        figures = [*cells(same, "forward"), *cells(same, "backward"), *[numbers] * has_runs]
        body.append([line["name"] + mark, line["columns"], line["goal"], *figures])
    head = ["op", "columns", "goal", "forward", "best peer", "backward", "best peer", *["run"] * has_runs]
    return sourced(markdown(head, body), source(lines[0]["file"], every, device))


# The ops of the README's table at 4096 columns in bfloat16, and the files that have them.
OVERVIEW = ("layer_norm", "rms_norm", "add_layer_norm", "bias_gelu", "cross_entropy")
OVERVIEW_FILES = ("h200-norms", "h200", "h200-gates", "h200-losses")


def overview() -> str:
    """Returns a table of percent of copy in bfloat16, for each op ours and the best peer's, with the higher in bold."""
    lines, said = dict[tuple[str, str], str](), []
    for stem in OVERVIEW_FILES:
        rows, device = read(stem)
        rows = [row for row in rows if (row["dtype"], row["cols"]) == ("bfloat16", 4096) and row["op"] in OVERVIEW]
        said.append(source(stem, rows, device))
        lines |= {(row["op"], row["pass"]): ours_and_best(row["percent_of_copy"]) for row in rows}
    body = [[f"`{op}`", lines[op, "forward"], lines[op, "backward"]] for op in OVERVIEW]
    return sourced(markdown(["", f"{device}, forward", "backward"], body), *said)


def ours_and_best(percents: dict[str, float]) -> str:
    best = max((name for name in percents if name != "ours"), key=lambda name: percents[name])
    figures = [f"{percents[name]:.0f}" for name in ("ours", best)]
    ours, other = (f"**{each}**" if int(each) == max(map(int, figures)) else each for each in figures)
    return f"{ours}, {best} {other}"


def training() -> str:
    """Describes Llama's training step: unchanged, compiled in the fastest way, and converted without compiling."""
    found = results.read(results.PUBLISHED / "models-h200.json", ("model", "way", "seconds"))
    rows = {row["way"]: row for row in found["rows"] if row["model"] == "llama-3.2-1b"}
    chosen = [rows[way] for way in ("stock", "stock compiled, no mask", "linear loss")]
    times = (
        f"{1e3 * row['seconds']['median']:.1f} ms and {row['peak_bytes'] / 1e9:.1f} GB at the peak" for row in chosen
    )
    figures = "{} as it is, {} at best under torch.compile, and {} converted and not compiled".format(*times)
    return f"A training step takes {figures}. {source('models-h200', chosen, found['machine']['device'])}.\n"


def host_ratios() -> str:
    """Returns the cost of a call of layer_norm, relative to PyTorch's."""
    recorded, both = "forward, grad", "forward and backward"
    lines = {
        "forward without gradients (goal 1.25 on a CPU, 1.05 on a GPU)": ("function", "native", "forward, no_grad"),
        "forward with gradients (2.0, 1.5)": ("function", "native", recorded),
        "the same by hand: an autograd.Function around the kernel": ("by hand", "native", recorded),
        f"{both} (1.45, 1.25)": ("function", "native", both),
        "the same by hand": ("by hand", "native", both),
        f"{both}, beside torch.library.register_autograd (0.84)": ("function", "register_autograd", both),
    }
    columns, said = {}, []
    for stem in ("host-epyc", "host-xeon", "host-h200"):
        found = results.read(results.PUBLISHED / f"{stem}.json", ("way", "pass", "seconds"))
        spent = {(row["way"], row["pass"]): row["seconds"]["median"] for row in found["rows"]}
        ratios = [spent[way, step] / spent[other, step] for way, other, step in lines.values()]
        columns[found["machine"]["device"]] = [f"{ratio:.2f}" for ratio in ratios]
        said.append(source(stem, found["rows"], found["machine"]["device"]))
    body = [[name, *cells] for name, *cells in zip(lines, *columns.values(), strict=True)]
    return sourced(markdown(["beside torch.nn.functional.layer_norm", *columns], body), *said)


def curves(stem: str) -> str:
    """Makes a table of loss curves: each distance from torch's, and the milliseconds of a step if known."""
    with (results.PUBLISHED / f"{stem}.csv").open() as file:
        columns = {name: [value for value in values if value] for name, *values in csv.reader(file)}
    body = []
    for name in (name for name in columns if "_" not in name and name != "step"):
        losses, others = (list(map(float, columns[each])) for each in (name, "torch"))
        apart = [abs(a - b) for a, b in zip(losses, others, strict=True)]
        distances = ["", ""] if name == "torch" else [f"{max(apart):.2g}", f"{statistics.mean(apart):.2g}"]
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


CURVES = ("train-text-cpu", "train-text-h200", "recurrent-text-cpu", "recurrent-text-h100")
# For each page of the repository, the results files whose whole tables are on it.
WHOLE = {
    "docs/performance_training.md": ("models-h200", "linear-loss-h200"),
    "docs/scan.md": ("scan-steps-h200",),
    "docs/distributed.md": ("processes-h200",),
}
# Results files whose tables are only on the site, by the heading above their tables.
ON_THE_SITE = {
    "GPU": ("h200-norms", "h200", "h200-losses", "h200-strips", "h200-gates", "h200-scans"),
    "CPU": ("cpu", "cpu-gates", "cpu-scans"),
    "What a call costs": ("host-epyc", "host-xeon", "host-h200"),
}


def site_page() -> str:
    parts = [
        "# Tables of the published runs",
        "Percent of copy, unless a column is in microseconds: [performance](performance.md) says what that is and how "
        "it was measured. The raw numbers, with each row's spread and commit, are in "
        "[benchmarks/results](../benchmarks/results/README.md). raised: the contender refuses that shape.",
    ]
    for heading, stems in ON_THE_SITE.items():
        parts += [f"## {heading}", *(f"### {stem}.json\n\n{whole(stem).rstrip()}" for stem in stems)]
    return "\n\n".join(parts) + "\n"


# For each table: the page, the name in the page's markers, and the function that makes the text between the markers.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("README.md", "speed", overview),
    ("README.md", "training", training),
    *(("docs/performance.md", name, partial(summary, name)) for name in dict.fromkeys(line["table"] for line in LINES)),
    ("docs/performance.md", "a call", host_ratios),
    *(("docs/performance_training.md", stem, partial(curves, stem)) for stem in CURVES),
    *((page, stem, partial(whole, stem)) for page, stems in WHOLE.items() for stem in stems),
]

"""Writes a results file as one HTML page that contains its pictures and loads nothing else."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks import plot, results
from benchmarks.table import spread
from extension_cpp.__main__ import Parser

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0; }
th, td { padding: 2px 10px; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { position: sticky; top: 0; background: white; }
.best { font-weight: bold; }
svg { max-width: 100%; height: auto; }
"""
READING = (
    "Percent of copy: the bandwidth that the op's floor (every input read once, every output written once) comes to, "
    "as a share of what a copy reaches in the same turns: of one such tensor, or, beside small tensors and sweeps, of "
    "as many bytes. Times are medians, with the range from 10 to 90 % after them. The fastest of a row is bold."
)


def cell(row: results.Row, name: str, shares: bool) -> str:
    if name in row.get("failed", {}):
        return f"<td>{escape(row['failed'][name])}</td>"
    if name not in row["seconds"]:
        return "<td></td>"
    others = [time["median"] for other, time in row["seconds"].items() if other != "copy"]
    best = ' class="best"' if row["seconds"][name]["median"] == min(others) else ""
    share = row["percent_of_copy"][name] if name != "copy" else row["copy_gb_s"]
    return f"<td{best}>{f'{share:.0f}, ' if shares else ''}{spread(row['seconds'][name], 1e6)}</td>"


def figures(rows: list[results.Row], about: dict, shares: bool) -> str:
    names = ["copy", *results.names(rows)]
    units = {name: "GB/s, us" if name == "copy" else "% of copy, us" for name in names} if shares else {}
    head = ["op", "pass", "dtype", "shape", "threads", *(f"{name}, {units.get(name, 'us')}" for name in names)]
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"]
    for row in rows:
        threads = row.get("threads", about["threads"])
        what = [row["op"], row["pass"], row["dtype"], f"{row['rows']} x {row['cols']}", str(threads)]
        cells = [f"<td>{escape(text)}</td>" for text in what] + [cell(row, name, shares) for name in names]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{chr(10).join(lines)}</table>"


def page(path: Path) -> str:
    found = results.read(path)
    title = escape(f"extension_cpp on {found['machine']['device']}")
    drawn = (plot.svg(figure) for _, figure in plot.pictures(path))
    pictures = "\n".join(text[text.index("<svg") :] for text in drawn)
    tables = [figures(found["rows"], found["machine"], shares=True)]
    for key, what in results.OTHERS:
        if rows := results.other(found["rows"], key):
            tables.append(f"<h2>The same, {escape(what)}</h2>{figures(rows, found['machine'], shares=False)}")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>
<body><h1>{title}</h1><p>{escape(results.in_words(found))}</p>
{pictures}
<p>{READING}</p>
{chr(10).join(tables)}
</body></html>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, help="the page (default: FILE with .html, in out/)")
    options = parser.parse_args(arguments)
    path = options.out or Path("out") / f"{options.file.stem}.html"
    text = page(options.file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(path)
    return 0

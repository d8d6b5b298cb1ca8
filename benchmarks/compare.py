"""Prints which calls are faster or slower in one results file than in another, by more than the spread of both."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from benchmarks import results
from benchmarks.timing import Time
from extension_cpp.__main__ import Parser


def is_beyond(before: Time, after: Time) -> bool:
    """Returns whether the ranges of two times, from 10 % to 90 %, do not overlap."""
    return after["low"] > before["high"] or after["high"] < before["low"]


def changes(before: dict, after: dict) -> Iterator[tuple[results.Row, str, Time, Time]]:
    """Yields row, name and both times of everything that both files have timed, including the copy."""
    rows = {results.key(row): row for row in before["rows"]}
    for row in after["rows"]:
        old = rows.get(results.key(row), {})
        for kind in ("seconds", *(other for other, _ in results.OTHERS)):
            for name, time in row.get(kind, {}).items():
                if name in old.get(kind, {}):
                    yield row, name if kind == "seconds" else f"{name}, {kind}", old[kind][name], time


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    before, after = results.read(options.before), results.read(options.after)
    console = Console(highlight=False)
    for name, value in after["machine"].items():
        if before["machine"].get(name, value) != value:
            console.print(f"Not the same {name}: {before['machine'][name]} before, {value} after.", markup=False)
    found = list(changes(before, after))
    if not found:
        console.print("The two files have no measurement in common.")
        return 0
    numbers = (Column(heading, justify="right", no_wrap=True) for heading in ("before us", "after us", "change"))
    table = Table(Column("what", overflow="fold"), *numbers)  # the first column may wrap, so that the figures fit
    ratios = [(b["median"] / a["median"], row, name, a, b) for row, name, a, b in found if is_beyond(a, b)]
    for ratio, row, name, *times in sorted(ratios, key=lambda each: -each[0]):
        what = f"{row['op']} {row['pass']}, {row['dtype']}, {row['rows']} x {row['cols']}: {name}"
        table.add_row(what, *(f"{time['median'] * 1e6:.4g}" for time in times), f"{100 * ratio - 100:+.1f} %")
    if ratios:
        console.print(table)
    slower = sum(ratio > 1 for ratio, *_ in ratios)
    console.print(
        f"Of {len(found)} times {slower} are slower, {len(ratios) - slower} faster, "
        f"and {len(found) - len(ratios)} within the spread."
    )
    return 0

"""Prints which calls are faster or slower in one results file than in another, by more than the spread of both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import results
from extension_cpp.__main__ import Parser


@dataclass(frozen=True)
class Change:
    row: results.Row
    name: str
    before: dict[str, float]
    after: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.after["median"] / self.before["median"]

    @property
    def beyond(self) -> bool:
        """Returns whether the times before and after have ranges, from 10 % to 90 %, that do not overlap."""
        return self.after["low"] > self.before["high"] or self.after["high"] < self.before["low"]


def changes(before: dict, after: dict) -> Iterator[Change]:
    """Yields the changes of everything that both files have timed, including the copy."""
    rows = {results.key(row): row for row in before["rows"]}
    for row in after["rows"]:
        old = rows.get(results.key(row), {})
        for kind in ("seconds", *(other for other, _ in results.OTHERS)):
            for name, time in row.get(kind, {}).items():
                if name in old.get(kind, {}):
                    yield Change(row, name if kind == "seconds" else f"{name}, {kind}", old[kind][name], time)


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
    table = Table()
    table.add_column("what", overflow="fold")  # this column may wrap, so that the figures fit
    for heading in ("before us", "after us", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    beyond = sorted((change for change in found if change.beyond), key=lambda change: -change.ratio)
    for change in beyond:
        row = change.row
        times = [f"{seconds['median'] * 1e6:.4g}" for seconds in (change.before, change.after)]
        what = f"{row['op']} {row['pass']}, {row['dtype']}, {row['rows']} x {row['cols']}: {change.name}"
        table.add_row(what, *times, f"{100 * change.ratio - 100:+.1f} %")
    if beyond:
        console.print(table)
    slower = sum(change.ratio > 1 for change in beyond)
    console.print(
        f"Of {len(found)} times {slower} are slower, {len(beyond) - slower} faster, "
        f"and {len(found) - len(beyond)} within the spread."
    )
    return 0

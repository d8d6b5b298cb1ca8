"""The documents say what the repository holds."""

from pathlib import Path

import pytest

import extension_cpp
from benchmarks.table import table

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    "results", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem
)
def test_performance_tables_are_those_of_the_results(results: Path) -> None:
    assert table(results) in (ROOT / "docs" / "performance.md").read_text(), f"python -m benchmarks.table {results}"


def test_readme_names_every_function() -> None:
    text = (ROOT / "README.md").read_text()
    for name in set(extension_cpp.__all__) - {"nn", "reference"}:
        assert f"`{name}(" in text

"""Tests docs/port.md: names in its table exist, and its steps turn examples/port/before into an op of equal results."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from extension_cpp import __main__ as command
from tests import test_scaffold
from tests.forked import python
from tests.test_docs import ROOT, blocks
from tests.test_scaffold import run, run_python, with_objects

tree = test_scaffold.tree  # imports the fixture
PAGE = ROOT / "docs" / "port.md"
HERE = "planted_index_sum"  # differs from the page's my_index_sum, which a reader may have added to this repository


def code(language: str) -> list[str]:
    return [text.replace("my_index_sum", HERE) for _, _, text in blocks(PAGE, language)]


def table() -> list[list[str]]:
    rows = [line.strip("|").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


def known_names() -> set[str]:
    """Returns every word of the C, C++, CUDA and Python sources. Only these may occur in the table's right column."""
    folders = [ROOT / "extension_cpp", ROOT / "templates"]
    suffixes = {".h", ".c", ".cpp", ".cu", ".cuh", ".py"}
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    return {word for path in [*files, ROOT / "build_library.py"] for word in re.findall(r"\w+", path.read_text())}


def test_the_right_column_names_what_exists() -> None:
    rows = table()
    assert len(rows) > 20 and all(len(row) == 3 for row in rows)
    known = known_names()
    spans = [span for _, becomes, _ in rows[1:] for span in re.findall(r"`([^`]+)`", becomes)]
    words = {word for span in spans for word in re.findall(r"[A-Za-z_]\w+", span)}
    assert len(words) > 30 and words - known - {"my_op"} == set()


def typed_in(tree: Path) -> None:
    """Applies the edits of the page. A diff's lines with - occur once in its file, and those with + replace them."""
    edits = code("diff")
    assert len(edits) == 4
    for edit in edits:
        header = re.match(r"--- (\S+)\n\+\+\+ .*\n", edit)
        assert header, edit
        lines = edit[header.end() :].splitlines()
        old, new = ("\n".join(line[1:] for line in lines if line[:1] in (" ", sign)) for sign in "-+")
        file = tree / header[1]
        assert file.read_text().count(old) == 1, f"{header[1]} does not have {old}"
        file.write_text(file.read_text().replace(old, new))
    formula = next(text for text in code("python no-run") if text.startswith("def "))
    reference = tree / "extension_cpp" / "reference.py"
    reference.write_text(re.sub(rf"def {HERE}\(.*?\n(?=\n\n|\Z)", lambda _: formula, reference.read_text(), flags=re.S))


@pytest.fixture
def ported(tree: Path) -> Path:
    """Returns a copy of this repository after the page's commands and edits."""
    new = next(text for text in code("sh") if " new " in text)
    words = shlex.split(new.replace("\\\n", " "), comments=True)
    assert words[:3] == ["python", "-m", "extension_cpp"]
    assert command.main(words[3:]) == 0
    typed_in(tree)
    return tree


def test_nothing_is_left_to_write(ported: Path) -> None:
    """After the page's edits, no file of `new --schema` lacks a formula."""
    for path in (ported / "extension_cpp" / "csrc" / HERE).iterdir():
        assert "WRITE THE FORMULA" not in path.read_text(), path
    reference = (ported / "extension_cpp" / "reference.py").read_text()
    assert reference.count("def planted_index_sum") == 1 and "index_add" in reference
    compile(reference, "reference.py", "exec")


@pytest.mark.slow
def test_before_and_after_have_the_same_results(ported: Path, tmp_path: Path, device: str) -> None:
    """The extension before the port and the op after it give the same results, and the op passes tests/battery."""
    before = ported / "examples" / "port" / "before"
    run(sys.executable, "setup.py", "build_ext", "--inplace", cwd=before)
    environment = with_objects(ported)
    run(sys.executable, "build_library.py", cwd=ported, env=environment)
    compare = next(text for text in code("python no-run") if "index_sum import" in text)
    told = run_python("-c", compare, cwd=ported).stdout
    assert "after: 1 different results" in told
    words = ["-q", "-p", "no:cacheprovider", "--assert=plain", "--device", "cpu", "tests/battery", "-k", HERE]
    done = python("-m", "pytest", *words, cwd=ported)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]

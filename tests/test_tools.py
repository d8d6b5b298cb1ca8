"""Tests benchmarks and scripts: what is timed, what counts as a change of speed, and what a release checks."""

import hashlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import extension_cpp
from benchmarks import compare, results, timing
from extension_cpp.command import once
from scripts import matrix, release
from tests.forked import python


def test_only_the_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the call is timed, without the function `ready` before it and without the first two rounds."""
    now, calls = 0.0, []

    def pass_time(seconds: float) -> None:
        nonlocal now
        now += seconds

    def call(name: str, seconds: float) -> None:
        calls.append(name)
        pass_time(seconds if calls.count(name) > 2 else 100 * seconds)

    def ready(name: str) -> None:
        calls.append(f"ready {name}")
        pass_time(1000.0)

    monkeypatch.setattr(once, "time", types.SimpleNamespace(perf_counter=lambda: now))
    times = timing.take_turns({"a": lambda: call("a", 1.0), "b": lambda: call("b", 2.0)}, "cpu", 9, ready)
    assert times == {name: {"median": t, "low": t, "high": t} for name, t in (("a", 1.0), ("b", 2.0))}
    assert calls == ["ready a", "a", "ready b", "b"] * 11


@pytest.mark.parametrize(
    "low, median, high, beyond",
    [
        (0.98, 1.05, 1.12, False),  # 5 % slower, and the ranges overlap
        (1.04, 1.05, 1.12, False),  # the ranges touch
        (1.041, 1.05, 1.12, True),
        (0.90, 0.95, 0.96, False),
        (0.90, 0.95, 0.959, True),
        (0.50, 3.00, 9.00, False),
        (1.00, 1.00, 1.00, False),
    ],
)
def test_a_change_is_one_beyond_the_spread_of_both(low: float, median: float, high: float, beyond: bool) -> None:
    before = {"low": 0.96, "median": 1.0, "high": 1.04}
    after = {"low": low, "median": median, "high": high}
    assert compare.is_beyond(before, after) is beyond
    assert compare.is_beyond(after, before) is beyond


@pytest.mark.parametrize("columns", [44, 80, 200])
def test_changes_are_printed_in_full(columns: int, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    published = results.read(results.PUBLISHED / "h200.json")
    row = next(row for row in published["rows"] if row["op"] == "add_layer_norm" and row["pass"] == "backward")
    for name, factor in (("before", 1.0), ("after", 1.5)):
        times = {"compile": {figure: 12345e-6 * factor for figure in ("low", "median", "high")}}
        (tmp_path / name).write_text(json.dumps(published | {"rows": [row | {"call_seconds": times}]}))
    monkeypatch.setenv("COLUMNS", str(columns))
    assert compare.main([str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("\u2502")]
    assert max(map(len, lines)) <= columns
    what, *figures = ([line.split("\u2502")[i].strip() for line in lines] for i in range(1, 5))
    shape = f"{row['rows']} x {row['cols']}"
    words = f"add_layer_norm backward, {row['dtype']}, {shape}: compile, call_seconds"
    assert "".join(what).replace(" ", "") == words.replace(" ", "")  # 44 columns break a long name
    assert [cells[0] for cells in figures] == ["1.234e+04", "1.852e+04", "+50.0 %"]


# ---- releases and the matrix of versions ----


def test_the_matrix_has_the_oldest_torch_and_the_newest_of_each_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["torchvision==0.1.0", 'torch==2.15.0; python_version >= "3.11"', 'torch==2.14.1; python_version < "3.11"']
    (tmp_path / "requirements.txt").write_text("\n".join(lines))
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    assert matrix.plan([(3, 10)]) == [((3, 10), "2.10"), ((3, 10), "2.14")]
    assert matrix.plan([(3, 10), (3, 11), (3, 14)]) == [
        ((3, 10), "2.10"),
        ((3, 11), "2.15"),
        ((3, 14), "2.15"),
    ]


def test_a_release_is_checked_against_pytorch() -> None:
    told = python("-c", release.CHECK, cwd=matrix.ROOT)
    assert told.returncode == 0 and f"torch {torch.__version__} extension_cpp" in told.stdout, told.stderr


def test_the_matrix_copies_what_its_tests_import() -> None:
    """matrix.py copies every file that its tests import. If one were missing, pytest would run no test."""
    left_out = matrix.tests_of_the_checkout()
    assert {"test_build.py", "test_docs.py", "test_tools.py"} <= left_out and "test_norm.py" not in left_out
    copied = {*matrix.FOLDERS, *(Path(name).stem for name in matrix.FILES), "extension_cpp"}
    for path in (path for folder in matrix.FOLDERS for path in (matrix.ROOT / folder).rglob("*.py")):
        names = re.findall(r"^ *(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
        tops = {name.split(".")[0] for name in names}
        missing = {top for top in tops - copied if any((matrix.ROOT / f"{top}{end}").exists() for end in ("", ".py"))}
        missing |= {name for name in names if f"{name.removeprefix('tests.')}.py" in left_out}
        assert not missing or path.name in left_out, path


def test_the_matrix_counts_files_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test file that cannot be imported counts as a failure, although pytest reports an error instead."""
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "FOLDERS", [])
    monkeypatch.setattr(matrix, "FILES", [])
    monkeypatch.setattr(matrix, "tests_of_the_checkout", list)
    (library := tmp_path / ".matrix" / "library.so").parent.mkdir()
    library.write_bytes(b"library")

    def run(command: list[str], **options) -> subprocess.CompletedProcess:
        for word in map(str, command):
            if word.startswith("--junitxml="):
                suite = '<testsuite tests="20" failures="1" errors="2" skipped="4" time="7.4"/>'
                Path(word.removeprefix("--junitxml=")).write_text(f"<testsuites>{suite}</testsuites>")
        return subprocess.CompletedProcess(command, 0, f"3.10\n{library}\n")

    monkeypatch.setattr(matrix.subprocess, "run", run)
    cells, sha256 = matrix.run_tests(Path("python"), Path("a.whl"), [])
    assert cells == ["3.10", "13", "3", "4", "7"] and sha256 == hashlib.sha256(b"library").hexdigest()


@pytest.mark.parametrize("wrong", ["result", "gradient of x", "gradient of the weight"])
def test_a_release_that_computes_wrongly_is_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = extension_cpp.rms_norm

    def scaled(x: torch.Tensor) -> torch.Tensor:
        """Returns x, with a gradient that is 0.1 % larger."""
        return 1.001 * x - 0.001 * x.detach()

    def rms_norm(x, shape, weight, eps):
        if wrong == "result":
            return 1.001 * right(x, shape, weight, eps)
        return right(scaled(x), shape, weight, eps) if wrong.endswith("x") else right(x, shape, scaled(weight), eps)

    monkeypatch.setattr(extension_cpp, "rms_norm", rms_norm)
    with pytest.raises(AssertionError, match="not close"):
        exec(release.CHECK, {})


def test_a_release_is_checked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release is checked in a folder outside the repository, without its PYTHONPATH, and with the requested wheel."""
    monkeypatch.setenv("PYTHONPATH", str(matrix.ROOT))
    monkeypatch.setenv("GLIBC", "2.28")
    commands = []

    def run(command: list[str], **options) -> subprocess.CompletedProcess:
        commands.append(command[1:])
        assert options["check"] and not {"PYTHONPATH", "GLIBC"} & options["env"].keys()
        assert options["env"]["USE_CUDA"] == "0"
        assert command[1:3] == ["-m", "venv"] or not Path(options["cwd"]).is_relative_to(matrix.ROOT)
        return subprocess.CompletedProcess(command, 0, "said\n")

    monkeypatch.setattr(release.subprocess, "run", run)
    assert release.check("python3", "torch==2.10.*", "a.whl", USE_CUDA="0").startswith("said: right; installed in ")
    made, installed, checked = commands
    assert made[:2] == ["-m", "venv"] and checked[-1] == release.CHECK
    assert installed[:3] == ["-m", "pip", "install"] and installed[-2:] == ["torch==2.10.*", "a.whl"]


def test_a_release_lists_all_that_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release lists checksums of the wheel and the source distribution, after both have been checked."""
    made = {"a-1-py3-none-any.whl": b"wheel", "a-1.tar.gz": b"source"}
    (tmp_path / "a-1-py3-none-any.whl").write_bytes(b"wheel")
    checked = []

    def build_sdist(command: list[str], **options) -> None:
        assert command[-1] == release.BUILD_SDIST and options["cwd"] == matrix.ROOT
        (tmp_path / "a-1.tar.gz").write_bytes(b"source")

    monkeypatch.setattr(release, "DIST", tmp_path)
    monkeypatch.setattr(release, "check", lambda *words, **_: checked.append(words) or "right")
    monkeypatch.setattr(release.subprocess, "run", build_sdist)
    monkeypatch.setattr(release.sys, "argv", ["release"])
    found = {(3, 10): "oldest", (3, 12): "middle", (3, 14): "newest"}
    monkeypatch.setattr(matrix, "interpreters", lambda named: found)
    release.main()
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert lines == [f"{hashlib.sha256(content).hexdigest()}  {name}" for name, content in made.items()]
    torches = [torch for _, torch in matrix.plan(list(found))]
    wheel, sdist = (str(tmp_path / name) for name in made)
    by_wheel = [(name, f"torch=={torch}.*", wheel) for name, torch in zip(found.values(), torches, strict=True)]
    assert checked == [*by_wheel, ("newest", sdist)]


def test_a_missing_gpu_is_one_error() -> None:
    """pytest --device cuda without a GPU says so once, and not for each file of tests."""
    command = [sys.executable, "-m", "pytest", "--device", "cuda", "tests/test_tools.py", "tests/test_mish.py"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=matrix.ROOT, env=hidden, capture_output=True, text=True, check=False)
    assert run.returncode == 4 and (run.stdout + run.stderr).count("finds no GPU that it can use here") == 1

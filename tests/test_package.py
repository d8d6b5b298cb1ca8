"""Tests a package made by new-package: its first op, further ops from schemas, its commands, and its updates."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from extension_cpp import __main__ as command
from extension_cpp.command import package
from tests import test_scaffold
from tests.test_new_operator import battery
from tests.test_scaffold import LONG, contents, environment, lint, refused, run, run_python

tree = test_scaffold.tree  # imports the fixture
FIRST = ["--schema", "planted_scale(Tensor x, float scale=1.0) -> Tensor", "--grad", "x"]
SECOND = ["--schema", "planted_pick(Tensor logits, SymInt k) -> (Tensor weights, Tensor indices)"]
SECOND += ["--dtype", "indices=int64", "--shape", "weights=[*logits[:-1], k]", "indices=weights"]
SECOND += ["--role", "logits=[*, experts]", "--work", "rows"]


def make(folder: Path, *words: str, name: str = "my_kernels") -> Path:
    assert command.main(["new-package", str(folder), "--name", name, *words]) == 0
    return folder


def without_torch(tree: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in `tree`, a copy of the repository, with a Python whose torch cannot be imported."""
    (tree.parent / "torch.py").write_text("raise AssertionError('this command imports torch')")
    path = {"PYTHONPATH": str(tree.parent)}
    command = [sys.executable, "-m", "extension_cpp", *map(str, words)]
    return subprocess.run(command, cwd=tree, env=environment("cpu") | path, capture_output=True, text=True)


def test_commands_that_write_sources_import_no_torch(tree: Path) -> None:
    """Commands that write sources import no torch. With --in PATH they change the package that contains PATH."""
    folder, whole = tree.parent / "made", contents(tree)
    done = without_torch(tree, "new-package", folder, "--name", "my_kernels", *FIRST)
    assert done.returncode == 0, done.stderr
    before = contents(folder)
    for words in (["new", "planted_pick", *SECOND], ["remove", "planted_pick"]):
        done = without_torch(tree, *words, "--in", folder / "docs")
        assert done.returncode == 0, done.stderr
        assert f"in {folder}:\n" in done.stdout and "my_kernels/ops.py" in done.stdout
    after = contents(folder)
    assert after == before and contents(tree) == whole


def test_a_new_package_names_the_files_that_are_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path / "made", *FIRST)
    named, rest = capsys.readouterr().out.split("  and ")
    paths = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    own = set(named.splitlines()[1:])
    copied = int(rest.split()[0])
    assert own <= {f"  {path}" for path in paths} and len(own) + copied == len(paths)
    assert rest.startswith(f"{copied} copied files, see copied.sha256\n") and "  my_kernels/ops.py" in own
    assert not any("/registration/" in path or "/common/" in path for path in own)


def test_ops_of_schemas_are_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files made from a schema are formatted, for a package's first op and for one that its own `new` command adds."""
    name = LONG
    folder = make(tmp_path / "a pâckage", *FIRST, "--op", "planted_scale", name=name)
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does
    words = [sys.executable, "-m", name, "new", "planted_pick", *SECOND]
    done = subprocess.run(words, cwd=folder, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 141 and done.stderr == ""
    lint(folder, mypy=False)
    monkeypatch.chdir(folder / name / "csrc")
    assert command.main(["new", "planted_pick", *SECOND]) == 1  # the package already has the op
    ops = (folder / name / "ops.py").read_text()
    assert re.search(r'__all__ = \[[^]]*"planted_scale",\n    "planted_pick",\n\]', ops)
    changes_of_first = (folder / "CHANGELOG.md").read_text()
    assert "`planted_scale`" in changes_of_first


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--name", "my_kernels", *FIRST, "--op", "other"],
            "expected the schema of other, but got one of planted_scale",
        ),
        (["--name", "my_kernels", *FIRST, "--kind", "rows"], "expected --schema or --kind, but got both"),
        (["--name", "my_kernels", "--op", "common"], "extension_cpp/csrc/common exists"),
        (["--name", "my_kernels", "--op", "judge"], "tests/test_judge.py exists"),
        (["--name", "my_kernels", "--op", ""], "but got an empty one"),
        (["--name", "my_kernels", "--grad", "x"], "--grad goes with --schema"),
        (["--name", "my_kernels", "--dry-run"], "--dry-run goes with --update"),
        ([], "expected --name, or --update"),
        (["--update"], "expected a package that new-package wrote, with a file copied.sha256, but got "),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert sentence in refused(capsys, "new-package", str(tmp_path / "made"), *words)
    assert contents(tmp_path) == {}


def test_a_package_names_no_file_that_it_lacks(tmp_path: Path) -> None:
    folder = make(tmp_path / "made", *FIRST)
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    roots = "csrc|docs|scripts|tests|benchmarks|examples|templates|functional|registration|command|convert|common"
    word = re.compile(rf"(?<![\w/.}}-])(?:my_kernels/)?(?:{roots})/[\w/.-]*\w(?![\w/.{{-])")
    written = {"csrc/my_op", "tests/test_my_op.py"}  # files that the reader will write
    lacking = []
    for path in files:
        text = (folder / path).read_text()
        for found in word.findall(text):
            ends = tuple(f"{found}{end}" for end in ("", ".py", ".h"))
            has = any(
                f"/{each}".endswith(tuple(f"/{end}" for end in ends)) or f"/{found}/" in f"/{each}" for each in files
            )
            if not has and found not in written:
                lacking.append(f"{path}: {found}")
    assert not lacking, "\n".join(sorted(lacking))


def test_an_update_brings_what_the_user_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path / "made")
    copies = package.copies()
    assert command.main(["new-package", "--update", str(folder)]) == 0
    assert "Changed" not in capsys.readouterr().out  # because the version is the same
    judge = folder / "tests" / "judge.py"
    original = judge.read_text()
    judge.write_text("# mine\n")
    (folder / "my_kernels" / "csrc" / "library.cpp").unlink()
    (folder / "my_kernels" / "ops.py").write_text("# mine\n")
    (folder / "tests" / "new_here.py").write_text("# mine\n")
    later = {place: text + "# later\n" for place, text in copies.items() if place.endswith(".py")}
    gone = "tests/guarded.py"
    later = copies | later | {"tests/also_new.py": "# later\n", "tests/new_here.py": "# later\n"}
    del later[gone]
    monkeypatch.setattr(package, "copies", lambda: later)
    before = contents(folder)
    assert command.main(["new-package", "--update", str(folder / "docs"), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert contents(folder) == before and "Nothing was written." in told
    left = told.split("because you changed them:\n")[1].split("Nothing")[0].split()
    assert left == ["my_kernels/csrc/library.cpp", "tests/judge.py", "tests/new_here.py"]
    assert command.main(["new-package", "--update", str(folder)]) == 0
    after = contents(folder)
    changed = {str(path) for path in before if after.get(path) != before[path]}
    expected = {place.replace("extension_cpp", "my_kernels") for place in copies if place.endswith(".py")}
    assert changed == (expected | {package.MANIFEST}) - {"tests/judge.py"}
    assert after.keys() - before.keys() == {Path("tests/also_new.py")} and Path(gone) not in after
    capsys.readouterr()
    assert command.main(["new-package", "--update", str(folder)]) == 0  # nothing is new, and all files stay the same
    assert contents(folder) == after
    assert capsys.readouterr().out.split("because you changed them:\n")[1].split("Next")[0].split() == left
    judge.write_text(original)
    assert command.main(["new-package", "--update", str(folder)]) == 0
    assert judge.read_text().endswith("# later\n")


@pytest.mark.slow
def test_only_values_fail_in_a_package_of_two_schemas(tmp_path: Path) -> None:
    folder = make(tmp_path / "made", *FIRST)
    run_python("-m", "my_kernels", "new", "planted_pick", *SECOND, cwd=folder)
    build = environment("cpu") | {"DEBUG": "1"}
    run(sys.executable, "build_library.py", cwd=folder, env=build)
    others, missing = battery(folder, ["planted_scale", "planted_pick"], "tests")
    assert not others and missing
    reference = folder / "my_kernels" / "reference.py"
    reference.write_text(re.sub(r"raise NotImplementedError.*", "return x * scale", reference.read_text(), count=1))
    done = run(sys.executable, "benchmark.py", "--shape", "8", "8", cwd=folder, env=build)
    assert re.search(r"^planted_scale +[\d.]+ +[\d.]+ +[\d.]+$", done.stdout, re.MULTILINE)
    assert "planted_pick" in done.stdout and ast.parse(reference.read_text())

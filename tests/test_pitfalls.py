"""Tests the wrong code in docs/pitfalls*.md: each diff is applied to a copy, built, and must be caught by a test.

The first lines of a diff name the file, the op and the test:

    --- extension_cpp/csrc/relu/relu_cpu_kernel.h
    +++ nan_swallowed: relu, test_nan_and_inf_at_each_position

The test "import" means that the import of the package fails.

Only objects that the diff changes are compiled, at this machine's instruction set, and linked with the objects of the
last build. Diffs of CUDA code need a GPU. The diff that only a slow test catches needs --slow."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import build_library
import extension_cpp
from tests.forked import python
from tests.test_c import build_folder, level_here
from tests.test_docs import ROOT, blocks

SLOW = "test_more_than_two_to_the_31_elements"


@dataclass(frozen=True)
class Mutant:
    file: Path  # relative to the root of the repository
    name: str
    op: str
    test: str
    right: str
    wrong: str

    def __str__(self) -> str:
        return self.name

    @property
    def cuda(self) -> bool:
        return self.file.suffix in (".cu", ".cuh") or self.file.name == "op.h"


def parse(code: str) -> Mutant:
    header = re.match(r"--- (\S+)\n\+\+\+ (\w+): (\w+), (\w+)\n", code)
    assert header, f"no header: {code}"
    lines = code[header.end() :].splitlines()
    assert all(line[:1] in "+- " for line in lines), code
    right, wrong = ("\n".join(line[1:] for line in lines if line[:1] in (" ", sign)) for sign in "-+")
    return Mutant(Path(header[1]), header[2], header[3], header[4], right, wrong)


PITFALLS = sorted((ROOT / "docs").glob("pitfalls*.md"))
MUTANTS = [parse(code) for document in PITFALLS for _, _, code in blocks(document, "diff")]


def ninja(tool: str) -> str:
    command = [sys.executable, "-m", "ninja", "-C", str(build_folder()), "-t", tool]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def objects_of(mutant: Mutant) -> list[str]:
    """Returns the object files that include the changed file, for the op's folder and this CPU's instruction set."""
    others = set(build_library.X86_LEVELS) - {level_here()}
    folder = mutant.file.parent.name
    if "common" in mutant.file.parts:
        shims = build_library.CSRC.glob("*/*.cpp")
        folder = next(shim.parent.name for shim in shims if f'"{mutant.op}(' in shim.read_text())
    found = []
    for entry in ninja("deps").split("\n\n"):
        name, *inputs = entry.replace(": #deps", "\n").split("\n")
        parts = Path(name).parts
        sources = [Path(line.strip()).relative_to("../..") for line in inputs if line.strip().startswith("../../")]
        # Several .cu or .cpp files may be compiled as one file, whose name is not that of any of them.
        together = any(source.suffix in (".cu", ".cpp") and source.parent.name == folder for source in sources)
        is_its_own = folder in parts or together or Path(name).stem == mutant.file.name
        if is_its_own and parts[0] not in others and mutant.file in sources:
            found.append(name)
    assert found, f"{mutant.file} is in no object of {folder}"
    return found


def build(mutant: Mutant, csrc: Path, library: Path) -> None:
    """Compiles the objects that the change affects, from csrc, and links them with the others of the last build."""
    commands = {entry["output"]: shlex.split(entry["command"]) for entry in json.loads(ninja("compdb"))}
    replaced = {name: str(library.parent / name.replace("/", "_")) for name in objects_of(mutant)}

    def run(command: list[str], places: dict[str, str]) -> None:
        command = [places.get(word, word.replace("../../extension_cpp/csrc", str(csrc))) for word in command]
        result = subprocess.run(command, cwd=build_folder(), capture_output=True, text=True)
        assert result.returncode == 0, result.stderr

    for name, path in replaced.items():
        command = commands[name]
        if "-include" in command:  # omits the precompiled header, which contains other headers as they were
            at = command.index("-include")
            command = command[:at] + command[at + 2 :]
        run(command, {name: path, f"{name}.d": f"{path}.d"})
    run(commands[build_library.LIBRARY], {**replaced, build_library.LIBRARY: str(library)})


def run_tests(mutant: Mutant, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the mutant's test on a changed copy of the package, which has only the spec of the mutant's op."""
    shutil.copytree(
        extension_cpp.LIBRARY.parent, folder / "extension_cpp", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "tests" / "specs").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", folder)
    names = ["__init__.py", "conftest.py", "checks.py", "forked.py", "judge.py", "loops.py", "opspec.py"]
    names += ["test_norm.py", "test_norm_kernels.py"]
    for name in [*names, "specs/__init__.py", f"specs/{mutant.op}.py"]:
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    shutil.copytree(ROOT / "tests" / "battery", folder / "tests" / "battery")
    file = folder / mutant.file
    file.write_text(file.read_text().replace(mutant.right, mutant.wrong))
    if file.suffix != ".py":
        build(mutant, folder / "extension_cpp" / "csrc", folder / "extension_cpp" / build_library.LIBRARY)
    if mutant.test == "import":
        return python("-c", "import extension_cpp", cwd=folder)
    # Collecting all files and rewriting assertions would take most of the time. Only files with the test are collected.
    tests = [path for path in (folder / "tests").rglob("test_*.py") if f"def {mutant.test}(" in path.read_text()]
    command = ["-m", "pytest", "-x", "-q", "--assert=plain", "-p", "no:cacheprovider", *tests, "-k", mutant.test]
    command += ["--device", "cuda" if mutant.cuda else "cpu", *(["--slow"] if mutant.test == SLOW else [])]
    return python(*command, cwd=folder)


@pytest.fixture(scope="module")
def buildable(request: pytest.FixtureRequest) -> None:
    if build_folder() is None:
        pytest.skip("the objects of this library are not in build/: it was installed, or built elsewhere")


def needs(mutant: Mutant, config: pytest.Config) -> str:
    """Returns the reason why this run cannot test the mutant, or "" if it can."""
    if mutant.cuda and not torch.cuda.is_available():
        return "a CUDA mutant needs a GPU"
    if mutant.name == "device_guard_missing" and torch.cuda.device_count() < 2:
        return "this mutant is wrong on a second GPU alone"
    if mutant.test == SLOW and not config.getoption("--slow"):
        return "slow tier: run with --slow"
    return ""


each_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=str)


@each_mutant
def test_right_code_is_what_the_sources_have(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.right) == 1, f"{mutant.file} has changed, or has this twice"
    assert mutant.right != mutant.wrong


# Without --slow one diff of C and one of Python are tested, and with --slow all diffs.
QUICK = ("nan_swallowed", "fake_with_other_strides")


@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, marks=[] if each.name in QUICK else pytest.mark.slow, id=each.name) for each in MUTANTS],
)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path, buildable: None, pytestconfig: pytest.Config) -> None:
    if missing := needs(mutant, pytestconfig):
        pytest.skip(missing)
    result = run_tests(mutant, tmp_path / "a tree")
    assert result.returncode == 1, f"{mutant.name} was not caught:\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
    print(next(line for line in (result.stdout + result.stderr).splitlines() if line.startswith(("E ", "ImportError"))))


def test_what_changes_nothing_is_not_caught(tmp_path: Path, buildable: None) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == "nan_swallowed")
    result = run_tests(dataclasses.replace(mutant, wrong=mutant.right), tmp_path / "a tree")
    assert result.returncode == 0, result.stdout

"""Tests one wheel, with one compiled library, in clean environments of several versions of Python and PyTorch.

    python scripts/matrix.py dist/*.whl [--python PATH]... [-- PYTEST ARGUMENTS]

The oldest Python gets the oldest supported torch, and the others get the torch that requirements.txt names for them,
which is the newest. A single Python gets both. The environments stay in .matrix/ for later runs. The tests run on the
installed wheel: they are copied to a folder from which Python cannot find the checkout's package.
"""

import argparse
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
TORCH_OLDEST = "2.10"
PYTHON_OLDEST = (3, 10)
NOT_NEEDED = re.compile(
    r"#|(torch|ruff|mypy|clang-format|pre-commit|nbclient|ipykernel|kernels|kernel-abi-check|mkdocs[\w-]*|pymdown[\w-]*)=="
)
# Files copied for the tests beside the installed package. Tests that need more of the checkout are left out.
FOLDERS, FILES = ("benchmarks", "examples", "tests"), ("build_library.py", "pyproject.toml")
BUILDS = "build_library|check_environment|scripts|tests.test_(?:docs|scaffold|new_operator)"
OF_THE_CHECKOUT = re.compile(rf"^ *(?:from|import) (?:{BUILDS})\b", re.MULTILINE)

ASK_PYTHON = "import sys, venv, ensurepip; print(sys.version_info[0], sys.version_info[1])"
ASK_ENVIRONMENT = """
import platform, torch, extension_cpp
from pathlib import Path
library = Path(extension_cpp.__file__).with_name("libextension_cpp.so")
print(platform.python_version(), torch.__version__, platform.libc_ver()[1], library, sep="\\n")
"""


def interpreters(named: list[str]) -> dict[tuple[int, int], str]:
    """Returns one Python of every minor version from 3.10 up: the given ones, or else those on PATH and in pyenv."""
    candidates = named
    if not named:
        candidates = [path for minor in range(10, 30) if (path := shutil.which(f"python3.{minor}"))]
        candidates += sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin/python3")))
    found: dict[tuple[int, int], str] = {}
    for candidate in candidates:
        asked = subprocess.run([candidate, "-c", ASK_PYTHON], capture_output=True, text=True)
        if asked.returncode == 0:
            major, minor = map(int, asked.stdout.split())
            if (major, minor) >= PYTHON_OLDEST:
                found.setdefault((major, minor), candidate)
        elif named:
            sys.exit(f"error: {candidate} cannot make environments: {asked.stderr.strip().splitlines()[-1]}")
    if not found:
        sys.exit("error: no Python from 3.10 up that can make environments was found; name some with --python.")
    return dict(sorted(found.items()))


def newest_torch(python: tuple[int, int]) -> str:
    """Returns the minor version of the torch that requirements.txt names for a Python."""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if line.startswith("torch=="):
            asked = Requirement(line)
            if asked.marker is None or asked.marker.evaluate({"python_version": "{}.{}".format(*python)}):
                return ".".join(str(asked.specifier).removeprefix("==").split(".")[:2])
    raise LookupError(f"requirements.txt names no torch for Python {python}")


def plan(versions: list[tuple[int, int]]) -> list[tuple[tuple[int, int], str]]:
    return [(versions[0], TORCH_OLDEST), *((each, newest_torch(each)) for each in versions[1:] or versions)]


def environment(interpreter: str, version: tuple[int, int], torch: str) -> Path:
    """Returns the Python of the environment in .matrix. pip installs what it lacks of requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [line for line in lines if not NOT_NEEDED.match(line)]
    folder = ROOT / ".matrix" / f"python{version[0]}.{version[1]}-torch{torch}"
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted, f"torch=={torch}.*"], check=True)
    return python


def tests_of_the_checkout() -> set[str]:
    """Returns the tests that build the library or run a program of the checkout."""
    paths = (ROOT / "tests").glob("test_*.py")
    return {"test_examples.py", "test_site.py"} | {p.name for p in paths if OF_THE_CHECKOUT.search(p.read_text())}


def run_tests(python: Path, wheel: Path, arguments: list[str]) -> tuple[list[str], str]:
    """Installs the wheel and tests it. Returns the table's cells, and the library's sha256."""
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--force-reinstall", "--no-deps", "--no-index", str(wheel)], check=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ignored = shutil.ignore_patterns("__pycache__", ".venv", "build", *tests_of_the_checkout())
        for copied in FOLDERS:
            shutil.copytree(ROOT / copied, folder / copied, ignore=ignored)
        for copied in FILES:
            shutil.copy(ROOT / copied, folder)
        asked = subprocess.run([python, "-c", ASK_ENVIRONMENT], cwd=folder, check=True, capture_output=True, text=True)
        *cells, library = asked.stdout.splitlines()
        if not Path(library).is_relative_to(ROOT / ".matrix"):
            sys.exit(f"error: {python} loads {library}, which is not the installed wheel's.")
        report = folder / "report.xml"
        subprocess.run([python, "-m", "pytest", "-q", f"--junitxml={report}", *arguments], cwd=folder)
        if not report.exists():
            sys.exit(f"error: the tests did not run with {python}.")
        suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    cells += [str(passed), str(failed), str(count["skipped"]), f"{float(suite.attrib['time']):.0f}"]
    return cells, hashlib.sha256(Path(library).read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", action="append", default=[], help="an interpreter to use; may be repeated")
    # argparse would take the words after -- for itself if --python comes after the wheel.
    words = sys.argv[1:]
    own, for_pytest = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    options = parser.parse_args(own)
    found = interpreters(options.python)
    console, hashes, failed = Console(), set(), 0
    table = Table("Python", "torch", "glibc", "passed", "failed", "skipped", "seconds", title=options.wheel.name)
    for version, torch in plan(list(found)):
        console.rule(f"Python {version[0]}.{version[1]}, torch {torch}")
        python = environment(found[version], version, torch)
        cells, digest = run_tests(python, options.wheel.resolve(), for_pytest)
        hashes.add(digest)
        failed += int(cells[4])
        table.add_row(*cells)
    console.print(table)
    if len(hashes) != 1:
        sys.exit("error: the environments hold different libraries; they must all test one file.")
    console.print(f"one library in all of them: sha256 {hashes.pop()}", soft_wrap=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()

"""Measures how many errors the tests detect: plants the errors of planted_errors.py in the sources, one at a time.

    python -m tests.planted [NUMBER | FILE]... [--cpu | --gpu] [--jobs N] [--everything]
    python -m tests.planted --check    # only checks that each error's passage still occurs in its file

Each error is planted in a copy of the checkout, in which ninja compiles only the changed files. A test kills the error
if the test fails in this copy and passes in an unchanged copy. The exit status is 1 if an error that is not marked
`survives` is not killed.
"""

import argparse
import collections
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import build_library
from tests.planted_errors import CSRC, ERRORS, Planted

ROOT = build_library.ROOT
FOREIGN = 5  # `judge` gives up when this many tests also fail in an unchanged copy


def planted_text(root: Path, error: Planted) -> str:
    """Returns the text of the error's file with the error in it, or "" unless the replaced passage occurs just once."""
    path = root / error.file
    text = path.read_text() if path.exists() else ""
    return text.replace(error.old, error.new) if text.count(error.old) == 1 else ""


def copy_checkout(to: Path) -> None:
    """Copies the files that git does not ignore, the library and the builds, with their times, which ninja compares."""
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in (*names, f"extension_cpp/{build_library.LIBRARY}"):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    for folder in (ROOT / "build").glob("release-*"):
        shutil.copytree(folder, to / "build" / folder.name)


def run(command: list[str], root: Path, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"TORCH_CUDA_ARCH_LIST": "native", **os.environ, "PYTHONPATH": str(root)}  # native: as in `make`
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout)


def build(root: Path) -> bool:
    return run([sys.executable, "build_library.py"], root).returncode == 0


def failing_test(root: Path, output: str) -> str:
    """Returns the name of the test that failed, or of the running test if pytest's process crashed."""
    last = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed = json.loads(last.read_text()) if last.exists() else {}
    begun = re.findall(r"^(tests/\S+?\.py::.*?)(?: (?:PASSED|FAILED|SKIPPED|ERROR|XFAIL).*)?$", output, re.MULTILINE)
    return next(iter(failed), begun[-1].strip() if begun else "")


def judge(root: Path, unchanged: Path, tests: list[str], timeout: float) -> tuple[str, str]:
    """Runs the tests in `root`, where an error is planted. Returns the verdict on it and the test that decided it."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-v", "--color=no", "--cache-clear"]
    foreign: list[str] = []
    while len(foreign) < FOREIGN:
        try:
            done = run([*pytest, *tests, *(f"--deselect={test}" for test in foreign)], root, timeout)
        except subprocess.TimeoutExpired:
            return "timeout", ""
        if done.returncode == 0:
            return "survived", ""
        if foreign and done.returncode == 5:  # no other test is left
            break
        test = failing_test(root, done.stdout)
        if not test:
            sys.exit(f"error: pytest ended with {done.returncode} and names no test: {done.stdout}{done.stderr}")
        if run([*pytest, test], unchanged).returncode == 0:
            return "killed", test
        foreign.append(test)
    return "fails without it, too", foreign[0]


def measure(error: Planted, built: Path, unchanged: Path, everything: bool, timeout: float) -> tuple[str, str]:
    """Plants an error in a copy of `built` and returns the verdict of `judge`, which repeats tests in `unchanged`."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "tree")
        shutil.copytree(built, root)
        if not (text := planted_text(root, error)):
            return "no longer applies", ""
        (root / error.file).write_text(text)
        if (error.file.startswith(CSRC) or error.file == "build_library.py") and not build(root):
            return "does not build", ""
        return judge(root, unchanged, ["tests"] if everything else shlex.split(error.tests), timeout)


def chosen(options: argparse.Namespace) -> dict[int, Planted]:
    """Returns the errors that the command line selects, as a dictionary from their numbers."""
    return {
        number: error
        for number, error in enumerate(ERRORS, 1)
        if (not options.which or str(number) in options.which or error.file in options.which)
        and (options.cpu == options.gpu or options.gpu == error.gpu)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="numbers of errors, or files (default: all)")
    parser.add_argument("--cpu", action="store_true", help="only errors that need no GPU")
    parser.add_argument("--gpu", action="store_true", help="only errors that a GPU alone shows")
    parser.add_argument("--jobs", type=int, default=1, help="errors at a time (default: 1)")
    parser.add_argument("--everything", action="store_true", help="run all tests for each error, not those it names")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for the tests of an error (default: 7200)")
    parser.add_argument("--check", action="store_true", help="run no test")
    options = parser.parse_args()
    if not (errors := chosen(options)):
        parser.error("no error has such a number or file")
    if options.check:
        gone = [number for number, error in errors.items() if not planted_text(ROOT, error)]
        print(f"{len(errors) - len(gone)} of {len(errors)} errors apply. Others: {gone}")
        return int(bool(gone))
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        built, unchanged = Path(name, "built"), Path(name, "unchanged")
        copy_checkout(built)
        if not build(built):
            sys.exit("error: the unchanged checkout does not build.")
        shutil.copytree(built, unchanged)

        def verdict_on(number: int) -> str:
            start = time.monotonic()
            verdict, test = measure(errors[number], built, unchanged, options.everything, options.timeout)
            seconds = time.monotonic() - start
            print(f"{number:3d}  {seconds:6.0f} s  {errors[number].file}: {verdict}  {test}", flush=True)
            return verdict

        verdicts = dict(zip(errors, pool.map(verdict_on, errors), strict=True))
    count = collections.Counter(verdicts.values())
    print(", ".join(f"{number} {verdict}" for verdict, number in count.items()))
    return int(any(verdict != "killed" and not errors[number].survives for number, verdict in verdicts.items()))


if __name__ == "__main__":
    sys.exit(main())

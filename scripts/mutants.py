"""Plants small errors in the code, one at a time, and sees whether a test fails.

    python -m scripts.mutants [--count 150] [--jobs 1] [--minutes 20] [--seed 0] [--files PART...]

universalmutator makes the mutants, and a sample of them is drawn: half from Python, half from the CPU kernels and
their shims. Each mutant is put into a copy of the tree and compiled if it is C. Then groups of tests run, the
likeliest to fail first, until a test fails that passes without the mutant. Changes of comments and annotations, code
that does not compile, and C that compiles to the same library do not count. build/mutants/results.jsonl keeps what is
known, so that a stopped run can be continued. For a mutant that survives, write a test and delete its lines there, so
that it is judged again, or add it to tests/equivalent_mutants.txt with the reason why it changes nothing. The exit
status is 1 if fewer than 95 % of the others were found. One whose tests take longer than --minutes, as an endless loop
does, counts as found and has its own column: look at it.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Column, Table

from scripts.mutants_drawn import PACKAGE, ROOT, Group, Mutant, draw, tests_of

FOLDER = ROOT / "build" / "mutants"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
LIBRARY = f"{PACKAGE}/lib{PACKAGE}.so"
ENOUGH = 0.95  # the share of mutants to find, of those that are not equivalent


class Judge:
    """Runs tests on mutants, each in a copy of the tree. Several threads may use it."""

    def __init__(self, jobs: int, seconds: float, keep: Callable[..., None] = lambda mutant, **result: None) -> None:
        self.seconds, self.keep = seconds, keep
        self.base = FOLDER / "base"
        self.environment = {**os.environ, "USE_CUDA": "0", "CUDA_VISIBLE_DEVICES": ""}
        if jobs > 1:
            few = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "MAX_JOBS": "4"}
            self.environment.update(few)
        self.stopping = threading.Event()
        self.running: set[subprocess.Popen[bytes]] = set()
        self.fails: dict[str, bool] = {}  # whether a test also fails without a mutant

    def run(self, command: Sequence[str], tree: Path) -> tuple[int | None, str]:
        """The exit status and the output of a command; None if it took too long and its processes were killed."""
        temporary = tree.with_name(f"{tree.name}-tmp")
        temporary.mkdir(exist_ok=True)
        environment = {**self.environment, "TMPDIR": str(temporary)}
        with (temporary / "output").open("w+") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=tree,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.running.add(process)
            if self.stopping.is_set():
                self.stop()
            try:
                status = process.wait(self.seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.running.discard(process)
            return status, (temporary / "output").read_text(errors="replace")

    def stop(self) -> None:
        self.stopping.set()
        for process in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def note(self, mutant: Mutant, **known: object) -> None:
        if not self.stopping.is_set():  # the result of a killed test says nothing about the mutant
            self.keep(mutant, **known)

    def make_base(self) -> None:
        """A fresh copy of the files in git, built for the CPU. It keeps file times, so ninja rebuilds nothing."""
        shutil.rmtree(FOLDER / "trees", ignore_errors=True)
        for path in self.base.glob("*"):
            if path.is_dir() and path.name != "build":  # the copy of build/ saves a minute or two
                shutil.rmtree(path)
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.splitlines():
            (self.base / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.base / name)
        built = ROOT / "build" / "release-cpu"
        if built.exists() and not (self.base / "build").exists():
            shutil.copytree(built, self.base / "build" / "release-cpu")
        environment = {name: value for name, value in self.environment.items() if name != "MAX_JOBS"}
        subprocess.run([sys.executable, "build_library.py"], cwd=self.base, env=environment, check=True)
        # Python's bytecode, which is part of every copy.
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests"],
            cwd=self.base,
            env=environment,
            stdout=subprocess.DEVNULL,
        )

    @contextlib.contextmanager
    def tree(self) -> Iterator[Path]:
        (FOLDER / "trees").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER / "trees", ignore_cleanup_errors=True) as folder:
            yield Path(shutil.copytree(self.base, Path(folder) / "tree", symlinks=True))

    def pytest(self, tree: Path, tests: Sequence[str]) -> tuple[int | None, str]:
        options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--device", "cpu"]
        return self.run(["-m", "pytest", *options, *tests], tree)

    def fails_anyway(self, test: str) -> bool:
        """Whether a test fails without a mutant. A file: whether it cannot be imported."""
        if test not in self.fails:
            with self.tree() as tree:
                status, _ = self.pytest(tree, [test] if "::" in test else ["--collect-only", test])
            self.fails[test] = status != 0
            if self.fails[test] and not self.stopping.is_set():
                print(f"left out, as it fails without a mutant: {test}", flush=True)
        return self.fails[test]

    def test(self, tree: Path, group: Group) -> tuple[str, str]:
        """The state (killed, survived or timeout), and the test that killed the mutant."""
        left_out: set[str] = set()
        while True:
            options = [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in sorted(left_out)]
            status, output = self.pytest(tree, [*group, *options])
            if status is None:
                return "timeout", " ".join(group)
            if status in (0, 5):  # 5: there is no such test
                return "survived", ""
            if status == 4:  # wrong arguments, such as a file that git does not know: every mutant would seem killed
                raise RuntimeError(f"pytest could not begin:\n{output[-1000:]}")
            failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
            by = failed[0] if failed else f"exit status {status}"
            if not failed or by in left_out or not self.fails_anyway(by):
                return "killed", by
            left_out |= {test for test, fails in list(self.fails.items()) if fails}

    def judge(self, mutant: Mutant, passed: Sequence[Group] = ()) -> str:
        """The state: killed, survived, timeout or invalid. Groups that passed before are not run again."""
        with self.tree() as tree:
            path = tree / mutant.file
            path.write_text(mutant.put_into(path.read_text()))
            result, by = "survived", ""
            if path.suffix != ".py":
                status, _ = self.run(["build_library.py"], tree)
                if status != 0 or (tree / LIBRARY).read_bytes() == (self.base / LIBRARY).read_bytes():
                    result = "invalid"
            for group in tests_of(mutant) if result == "survived" else []:
                if group in passed:
                    continue
                result, by = self.test(tree, group)
                if result != "survived":
                    break
                self.note(mutant, passed=group)
        self.note(mutant, result=result, by=by)
        return result


class Results:
    """The results so far, in a file to which lines are added."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.results: dict[Mutant, str] = {}
        self.passed: dict[Mutant, list[Group]] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            known = json.loads(line)
            mutant = Mutant(**known["mutant"])
            if "result" in known:
                self.results[mutant] = known["result"]
            else:
                self.passed.setdefault(mutant, []).append(tuple(known["passed"]))

    def keep(self, mutant: Mutant, **known: object) -> None:
        with self.lock, self.path.open("a") as file:
            file.write(json.dumps({"mutant": asdict(mutant), **known}) + "\n")


class Share:
    """A part of the sample. Only mutants that may be needed are begun, so it does not matter which ends first."""

    def __init__(self, drawn: Iterator[Mutant], count: int) -> None:
        self.drawn, self.wanted = drawn, count

    def begin(self) -> Mutant | None:
        mutant = next(self.drawn, None) if self.wanted > 0 else None
        self.wanted = self.wanted - 1 if mutant is not None else 0
        return mutant

    def end(self, result: str) -> None:
        self.wanted += result == "invalid"


def try_all(judge: Judge, known: Results, drawn: list[Iterator[Mutant]], count: int, jobs: int) -> dict[Mutant, str]:
    """Judges mutants until count of them compile, as many from each iterator."""
    tried: dict[Mutant, str] = {}
    shares = [Share(mutants, (count + place) // len(drawn)) for place, mutants in enumerate(drawn)]
    running: dict[Future[str], tuple[Share, Mutant]] = {}
    pool = ThreadPoolExecutor(jobs)  # without `with`, which would wait for the threads when the run is stopped
    while True:
        share = max(shares, key=lambda share: share.wanted)
        mutant = share.begin() if len(running) < jobs else None
        if mutant is not None and mutant in known.results:
            tried[mutant] = known.results[mutant]
            share.end(tried[mutant])
        elif mutant is not None:
            running[pool.submit(judge.judge, mutant, known.passed.get(mutant, []))] = share, mutant
        elif running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                share, mutant = running.pop(future)
                tried[mutant] = known.results[mutant] = future.result()
                share.end(tried[mutant])
                print(f"{tried[mutant]:9} {mutant}", flush=True)
        elif all(share.wanted <= 0 for share in shares):
            pool.shutdown()
            return tried


def equivalent() -> set[tuple[str, str, str]]:
    """File, right line and wrong line of each mutant that is known to change nothing."""
    text = EQUIVALENT.read_text() if EQUIVALENT.exists() else ""
    found = re.findall(r"^(\S+)\n- (.*)\n\+ (.*)\n", text, re.MULTILINE)
    return {(file, right.strip(), wrong.strip()) for file, right, wrong in found}


def report(results: dict[Mutant, str]) -> bool:
    """Prints the table and the mutants to look at. Returns whether enough were found."""
    known = equivalent()
    counts: dict[str, Counter[str]] = {}
    kinds = ("killed", "timeout", "survived", "equivalent", "invalid")
    for mutant, result in results.items():
        if result == "survived" and (mutant.file, mutant.right.strip(), mutant.wrong.strip()) in known:
            result = "equivalent"
        counts.setdefault(mutant.file, Counter())[result] += 1
        if result in ("survived", "timeout"):
            print(f"{result}: {mutant.file}:{mutant.line}\n- {mutant.right}\n+ {mutant.wrong}")
    table = Table(Column("file", overflow="fold"), *kinds[:-1], "not counted")
    total = sum(counts.values(), Counter[str]())
    for name, count in [*sorted(counts.items()), ("all", total)]:
        table.add_row(name.removeprefix(f"{PACKAGE}/"), *(str(count[kind]) for kind in kinds))
    Console().print(table)
    found = total["killed"] + total["timeout"]
    if rest := found + total["survived"]:
        print(f"found: {found} of {rest}, {found / rest:.1%}")
    return found >= ENOUGH * rest


def interrupt(*_: object) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # `timeout` sends the signal twice
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="how many that compile")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--minutes", type=float, default=20, help="for a group of tests; for longer ones: timeout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=[], metavar="PART", help="only files whose path has one of these")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    known = Results(FOLDER / "results.jsonl")
    judge = Judge(options.jobs, 60 * options.minutes, known.keep)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    try:
        judge.make_base()
        tried = try_all(judge, known, draw(options.files, options.seed), options.count, options.jobs)
    except KeyboardInterrupt:
        judge.stop()
        report(known.results)
        print("stopped: the same command goes on", flush=True)
        os._exit(1)  # does not wait for the threads, which would begin other tests
    sys.exit(0 if report(tried) else 1)


if __name__ == "__main__":
    main()

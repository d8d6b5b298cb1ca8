"""Plants small errors in the code, one at a time, and sees whether a test fails.

    python -m scripts.mutants [--count 150] [--seed 0] [--files PART...] [--minutes 20]

universalmutator makes the mutants, and a seeded sample of them is drawn: half from Python, half from the CPU kernels
and their shims. Each mutant is put into a copy of the tree (build/mutants) and compiled if it is C. Then tests run
until one fails. Changes of comments and annotations, and code that does not compile, do not count. Results are kept in
build/mutants/results.jsonl, so that a run that was stopped can go on. For a mutant that survives, write a test, or add
it to tests/equivalent_mutants.txt with the reason why it changes nothing. The exit status is 1 if fewer than 95 % of
the others were killed.
"""

import argparse
import ast
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "mutants"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.txt"
PACKAGE = "extension_cpp"
PYTHON_FILES = ("ops", "second_order", "autograd", "checks", "op_checks", "plain", "nested", "modules", "convert")
ENOUGH = 0.95  # the share of mutants to kill, of those that are not equivalent

# The tests of a file, the likeliest to fail first. The tests of a C file are the battery and the tests of its ops.
TESTS = {
    "convert": ["tests/test_convert.py"],
    "nested": ["tests/test_nested.py"],
    "modules": ["tests/test_nn.py", "tests/test_convert.py", "tests/test_norm.py", "tests/test_fused_norm.py"],
}
OF_OPS = ["autograd", "options", "nested", "dropout", "fused_norm", "norm", "muladd", "reduce_sum", "mish", "nn"]
EVERYTHING = ["tests/battery", *(f"tests/test_{name}.py" for name in OF_OPS)]


@dataclass(frozen=True)
class Mutant:
    file: str  # from the root
    line: int
    right: str
    wrong: str

    def __str__(self) -> str:
        return f"{self.file}: {self.right.strip()}  ->  {self.wrong.strip()}"


def sources(parts: list[str]) -> list[Path]:
    """The files to mutate; with parts, only those whose path contains one of them."""
    csrc = [path for path in sorted((ROOT / PACKAGE / "csrc").rglob("*")) if path.suffix in (".c", ".h", ".cpp")]
    csrc = [path for path in csrc if "cuda" not in path.name]
    found = [*(ROOT / PACKAGE / f"{name}.py" for name in PYTHON_FILES), *csrc]
    return [path for path in found if not parts or any(part in str(path.relative_to(ROOT)) for part in parts)]


def code(path: Path, text: str) -> str | None:
    """A file without comments and annotations, for comparison; None if it is not valid Python."""
    if path.suffix != ".py":
        return re.sub(r"\s+", " ", re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL))
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0].value.value = ""  # a docstring
        for name in ("annotation", "returns"):  # which mypy reads
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(""))
    return ast.dump(tree)


def mutants_of(path: Path) -> Iterator[Mutant]:
    text = path.read_text()
    right, before = code(path, text), text.splitlines()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, folder)
        tool = Path(sys.executable).with_name("mutate")
        command = [str(tool), path.name, "--noCheck", "--mutantDir", "."]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for file in sorted(Path(folder).glob(f"{path.stem}.mutant.*{path.suffix}")):
            wrong = file.read_text()
            after = wrong.splitlines()
            changed = [i for i, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
            if len(before) == len(after) and len(changed) == 1 and code(path, wrong) not in (None, right):
                yield Mutant(str(path.relative_to(ROOT)), changed[0] + 1, before[changed[0]], after[changed[0]])


def tests_of(file: str) -> list[str]:
    path = Path(file)
    if path.suffix == ".py":
        return TESTS.get(path.stem, EVERYTHING)
    op = path.parent.name
    if op == "common":
        return EVERYTHING
    own = [f"tests/test_{name}.py" for name in ("norm", "fused_norm") if op == "norm"] or [f"tests/test_{op}.py"]
    found = [name for name in own if (ROOT / name).exists()]
    return ["tests/battery", *found, "-k", f"{op} or test_{op}"]


def run(command: list[str], seconds: float) -> int | None:
    """The exit status of a command in the copy of the tree. None: it took longer, and its processes were killed."""
    environment = {**os.environ, "USE_CUDA": "0"}
    with subprocess.Popen(
        command,
        cwd=FOLDER / "tree",
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None


def make_tree() -> None:
    """A fresh copy of what git knows, with the library that was built."""
    tree = FOLDER / "tree"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
            shutil.copy(ROOT / name, target)
    shutil.copy(ROOT / PACKAGE / f"lib{PACKAGE}.so", tree / PACKAGE)


def judge(mutant: Mutant, seconds: float) -> str:
    """killed, survived or invalid."""
    path = FOLDER / "tree" / mutant.file
    right = path.read_text()
    lines = right.splitlines(keepends=True)
    lines[mutant.line - 1] = lines[mutant.line - 1].replace(mutant.right, mutant.wrong)
    path.write_text("".join(lines))
    try:
        if path.suffix != ".py" and run([sys.executable, "build_library.py"], seconds) != 0:
            return "invalid"
        test = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--device", "cpu"]
        return "survived" if run([*test, *tests_of(mutant.file)], seconds) == 0 else "killed"
    finally:
        path.write_text(right)


def equivalent() -> set[tuple[str, str, str]]:
    """File, right and wrong line of each that is known to change nothing."""
    text = EQUIVALENT.read_text() if EQUIVALENT.exists() else ""
    found = re.findall(r"^(\S+)\n- (.*)\n\+ (.*)\n", text, re.MULTILINE)
    return {(file, right.strip(), wrong.strip()) for file, right, wrong in found}


def report(results: list[tuple[Mutant, str]]) -> bool:
    """Prints the table and the survivors; whether enough were killed."""
    known = equivalent()
    counts: dict[str, Counter[str]] = {}
    left = []
    for mutant, result in results:
        if result == "survived" and (mutant.file, mutant.right.strip(), mutant.wrong.strip()) in known:
            result = "equivalent"
        if result == "survived":
            left.append(mutant)
        counts.setdefault(mutant.file, Counter())[result] += 1
    table = Table("file", "killed", "survived", "equivalent", "not compiled")
    for name, count in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        table.add_row(name, *(str(count[kind]) for kind in ("killed", "survived", "equivalent", "invalid")))
    console = Console()
    console.print(table)
    for mutant in left:
        console.print(f"survived: {mutant.file}:{mutant.line}\n- {mutant.right}\n+ {mutant.wrong}", markup=False)
    killed = sum(count["killed"] for count in counts.values())
    return killed >= ENOUGH * (killed + len(left))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150, help="how many that compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=[], metavar="PART", help="only files whose path has one of these")
    parser.add_argument("--minutes", type=float, default=20, help="for the tests of one; longer counts as killed")
    options = parser.parse_args()
    make_tree()
    pool = [mutant for path in sources(options.files) for mutant in mutants_of(path)]
    random.Random(options.seed).shuffle(pool)
    halves = [[mutant for mutant in pool if mutant.file.endswith(".py") is python] for python in (True, False)]
    pool = [mutant for pair in itertools.zip_longest(*halves) for mutant in pair if mutant is not None]
    kept = FOLDER / "results.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    before = {Mutant(**line["mutant"]): line["result"] for line in lines}
    results: list[tuple[Mutant, str]] = []
    checked: set[tuple[str, ...]] = set()
    for mutant in pool:
        if sum(result != "invalid" for _, result in results) >= options.count:
            break
        result = before.get(mutant)
        if result is None:
            tests = tuple(tests_of(mutant.file))
            if (
                tests not in checked
                and run([sys.executable, "-m", "pytest", "-x", "-q", *tests], 60 * options.minutes) != 0
            ):
                sys.exit(f"error: the tests of {mutant.file} fail without a mutant, or take longer than --minutes.")
            checked.add(tests)
            result = judge(mutant, 60 * options.minutes)
            with kept.open("a") as file:
                file.write(json.dumps({"mutant": asdict(mutant), "result": result}) + "\n")
        print(f"{result:9} {mutant}", flush=True)
        results.append((mutant, result))
    sys.exit(0 if report(results) else 1)


if __name__ == "__main__":
    main()

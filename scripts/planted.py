"""Measures the tests: plants the errors of planted_errors.py one by one, and counts those that no test sees.

    python -m scripts.planted [NUMBER | FILE]... [--cpu | --gpu] [--jobs N] [--everything] [--json FILE]
    python -m scripts.planted --check    # only whether each error still applies, and compiles where that is cheap

Each error is planted in a copy of the checkout, in which ninja compiles only what changed. A test that fails there has
killed the error if it passes in an unchanged copy. Exit status: 1 if an error survived that is not marked `survives`.
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
from dataclasses import asdict, dataclass
from pathlib import Path

import build_library
from scripts.planted_errors import CSRC, ERRORS, Planted

ROOT = build_library.ROOT
BATTERY = "tests/battery"
KERNELS = f"{BATTERY} tests/test_c.py tests/test_recorded_bits.py"
# pytest's arguments for an error, by the beginning of its file's name; the longest counts.
PICKS = {
    "": "tests",
    CSRC: KERNELS,
    CSRC + "common/": f"{KERNELS} tests/test_dropout.py tests/test_options.py tests/test_reduce_sum.py",
    CSRC + "common/shim/": f"{KERNELS} tests/test_library.py tests/test_muladd.py tests/test_options.py",
    CSRC + "mish/": f"{KERNELS} tests/test_mish.py -k mish",
    CSRC + "norm/": f"{KERNELS} tests/test_norm*.py tests/test_fused_norm.py -k norm",
    CSRC + "reduce_sum/": f"{KERNELS} tests/test_reduce_sum.py -k reduce_sum",
    CSRC + "relu/": f"{KERNELS} -k relu",
    CSRC + "rotary_embedding/": f"{KERNELS} tests/test_rotary*.py -k rotary",
    CSRC + "rows/": f"{KERNELS} tests/test_norm_kernels.py tests/test_strips.py tests/test_clusters.py "
    "tests/test_long_rows.py tests/test_loss*.py tests/test_large_logits.py",
    CSRC + "scan/": f"{KERNELS} tests/test_scan*.py -k 'scan or sum or recurrence'",
    CSRC + "softmax/": f"{KERNELS} tests/test_strips.py tests/test_long_rows.py -k softmax",
    "extension_cpp/": f"{BATTERY} tests/test_library.py",
    "extension_cpp/command/": "tests/test_commands.py tests/test_scaffold.py",
    "extension_cpp/convert/": "tests/test_convert*.py",
    "extension_cpp/distributed/": "tests/test_sharding.py",
    "extension_cpp/functional/norm": f"{BATTERY} tests/test_norm.py tests/test_fused_norm.py -k norm",
    "extension_cpp/functional/pointwise.py": f"{BATTERY} tests/test_autograd.py tests/test_activation.py -k relu",
    "extension_cpp/functional/rotary": f"{BATTERY} tests/test_autocast.py tests/test_rotary*.py -k rotary",
    "extension_cpp/functional/scans.py": f"{BATTERY} tests/test_autograd.py tests/test_scan*.py",
    "extension_cpp/functional/sharding_rules.py": "tests/test_sharding.py",
    "extension_cpp/modules.py": "tests/test_nn.py tests/test_layers.py tests/test_scan.py",
    "extension_cpp/registration/": f"{BATTERY} tests/test_autograd.py tests/test_muladd.py tests/test_nested*.py",
    "Makefile": "tests/test_build.py tests/test_tools.py",
    "benchmarks/": "tests/test_benchmark*.py",
    "build_library.py": "tests/test_build.py tests/test_tools.py",
    "scripts/": "tests/test_tools.py tests/test_sass_diff.py",
    "setup.py": "tests/test_build.py tests/test_tools.py",
}
FOREIGN = 5  # failures that an unchanged copy has, too, before the tests count as useless


@dataclass
class Result:
    number: int
    file: str
    verdict: str  # one of VERDICTS
    test: str = ""
    seconds: float = 0.0


VERDICTS = ("killed", "survived", "no longer applies", "does not build", "timeout", "fails without it, too")


def plant(root: Path, error: Planted) -> bool:
    """Changes the file below root. False if the passage is not there exactly once."""
    path = root / error.file
    text = path.read_text() if path.exists() else ""
    if text.count(error.old) == 1:
        path.write_text(text.replace(error.old, error.new))
    return text.count(error.old) == 1


def copy_checkout(to: Path) -> None:
    """Git's files and what was built, with the times that ninja compares."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, names.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    for folder in (ROOT / "build").glob("release-*"):
        shutil.copytree(folder, to / "build" / folder.name)
    library = Path("extension_cpp", build_library.LIBRARY)
    if (ROOT / library).exists():
        shutil.copy2(ROOT / library, to / library)


def run(command: list[str], root: Path, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.setdefault("TORCH_CUDA_ARCH_LIST", "native")  # as `make`
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=timeout)


def build(root: Path) -> bool:
    return run([sys.executable, "build_library.py"], root).returncode == 0


def picked(error: Planted, everything: bool) -> list[str]:
    pick = error.tests or PICKS[max(filter(error.file.startswith, PICKS), key=len)]
    words = shlex.split("tests" if everything else pick)
    found = [
        sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(word)) if "*" in word else [word] for word in words
    ]
    return [word for some in found for word in some]


def failing_test(root: Path, output: str) -> str:
    """The test that failed, or in which the process ended."""
    last = root / ".pytest_cache" / "v" / "cache" / "lastfailed"
    failed = json.loads(last.read_text()) if last.exists() else {}
    begun = re.findall(r"^(tests/\S+?\.py::.*?)(?: (?:PASSED|FAILED|SKIPPED|ERROR|XFAIL).*)?$", output, re.MULTILINE)
    return next(iter(failed), begun[-1].strip() if begun else "")


def judge(root: Path, unchanged: Path, error: Planted, options: argparse.Namespace) -> tuple[str, str]:
    """The verdict on an error that is planted and built in root, and the test that decided."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-v", "--color=no"]
    foreign: list[str] = []
    while len(foreign) < FOREIGN:
        deselected = [f"--deselect={test}" for test in foreign]
        try:
            done = run([*pytest, *picked(error, options.everything), *deselected], root, options.timeout)
        except subprocess.TimeoutExpired:
            return "timeout", ""
        if done.returncode == 0:
            return "survived", ""
        test = failing_test(root, done.stdout)
        if not test:
            sys.exit(f"error: pytest ended with {done.returncode} and names no test: {done.stdout}{done.stderr}")
        if run([*pytest, test], unchanged).returncode == 0:
            return "killed", test
        foreign.append(test)
    return "fails without it, too", foreign[0]


def measure(number: int, built: Path, options: argparse.Namespace) -> Result:
    """Plants one error in a copy of the built checkout. Tests run there and in `unchanged`, beside `built`."""
    error, start = ERRORS[number - 1], time.monotonic()
    result = Result(number, error.file, "no longer applies")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "tree")
        shutil.copytree(built, root)
        if plant(root, error):
            needs_build = error.file.startswith(CSRC) or error.file == "build_library.py"
            if needs_build and not build(root):
                result.verdict = "does not build"
            else:
                result.verdict, result.test = judge(root, built.with_name("unchanged"), error, options)
    result.seconds = round(time.monotonic() - start, 1)
    print(line(result), flush=True)
    return result


def line(result: Result) -> str:
    by = f" by {result.test}" if result.test else ""
    return f"{result.number:3d}  {result.seconds:6.0f} s  {result.file}: {result.verdict}{by}"


# ---- --check ----


def syntax_error(root: Path, file: str) -> str:
    """What a compiler says about the changed file; "" also where asking one would take long (CUDA)."""
    path = root / file
    if path.suffix == ".py":
        try:
            compile(path.read_text(), file, "exec")
        except SyntaxError as error:
            return str(error)
    csrc = root / CSRC
    own = csrc / Path(file).relative_to(CSRC).parts[0] if file.startswith(CSRC) else csrc
    if file.startswith(CSRC + "common/shim/") or path.suffix == ".cpp":
        torch = build_library.torch_folder() / "include"
        target = "-DTORCH_TARGET_VERSION=0x{:02x}{:02x}000000000000".format(*build_library.TORCH_MINIMUM)
        command = ["c++", *build_library.CXX_FLAGS, f"-isystem{torch}", target, "-DTORCH_EXTENSION_NAME=extension_cpp"]
        sources = [path if path.suffix == ".cpp" else csrc / "relu" / "relu.cpp"]
    elif path.suffix in (".c", ".h") and not path.name.endswith("plan.h"):
        level = [*build_library.X86_LEVELS["v3"], "-DCPU_LEVEL_V3"]
        command = ["cc", *build_library.c_flags(["cc"]), *level]
        sources = [path] if path.suffix == ".c" else sorted(own.glob("*_cpu.c")) or sorted(csrc.glob("*/*_cpu.c"))
    else:
        return ""
    command += [*build_library.COMMON_FLAGS, "-fsyntax-only", f"-I{csrc}"]
    return run([*command, *map(str, sources)], root).stderr


def check(numbers: list[int]) -> int:
    """The exit status: 1 if an error does not apply or does not compile."""
    wrong = 0
    for number in numbers:
        error = ERRORS[number - 1]
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            if error.file.startswith(CSRC):
                shutil.copytree(ROOT / CSRC, root / CSRC)
            else:
                (root / error.file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / error.file, root / error.file)
            said = syntax_error(root, error.file) if plant(root, error) else "no longer applies"
        if said:
            wrong += 1
            print(f"{number:3d}  {error.file}: {said}")
    print(f"{len(numbers) - wrong} of {len(numbers)} errors apply and compile.")
    return int(wrong > 0)


def chosen(options: argparse.Namespace) -> list[int]:
    """The numbers of the errors that the options name."""
    found = []
    for number, error in enumerate(ERRORS, 1):
        is_named = not options.which or any(word in (str(number), error.file) for word in options.which)
        if is_named and not (options.cpu and error.gpu) and not (options.gpu and not error.gpu):
            found.append(number)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help="numbers of errors, or files (default: all)")
    parser.add_argument("--cpu", action="store_true", help="only errors that need no GPU")
    parser.add_argument("--gpu", action="store_true", help="only errors that a GPU alone shows")
    parser.add_argument(
        "--jobs", type=int, default=1, help="errors at a time, each in a folder of its own (default: 1)"
    )
    parser.add_argument("--everything", action="store_true", help="run all tests for each error")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds for the tests of an error (default: 7200)")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--check", action="store_true", help="run no test")
    options = parser.parse_args()
    numbers = chosen(options)
    if not numbers:
        parser.error("no error has such a number or file")
    if options.check:
        return check(numbers)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        built = Path(name, "built")
        copy_checkout(built)
        if not build(built):
            sys.exit("error: the unchanged checkout does not build.")
        shutil.copytree(built, built.with_name("unchanged"))
        results = list(pool.map(lambda number: measure(number, built, options), numbers))
    count = collections.Counter(result.verdict for result in results)
    print(", ".join(f"{count[verdict]} {verdict}" for verdict in VERDICTS if count[verdict]))
    if decided := count["killed"] + count["survived"]:
        print(f"killed: {100 * count['killed'] / decided:.0f} % of {decided}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return int(any(result.verdict == "survived" and not ERRORS[result.number - 1].survives for result in results))


if __name__ == "__main__":
    sys.exit(main())

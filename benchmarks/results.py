"""Reads and writes results files: one machine, its settings, one row per measurement. A later run continues a file.

Each row has the number of the run that measured it, the commit of that run and a digest of the op's kernels."""

import functools
import hashlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

import extension_cpp
from build_library import CSRC
from extension_cpp.command import info

Row = dict[str, Any]

# Further figures of a row on a GPU. `seconds` is the time from the first kernel of a call to the end.
OTHERS = (
    ("kernel_seconds", "the kernels alone, replayed as a CUDA graph"),
    ("call_seconds", "from the call on, as a user meets it: the GPU waits for the host"),
)

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "benchmarks" / "results"


def about(device: str, libraries: dict[str, str | None] | None = None, **settings: Any) -> dict[str, Any]:
    """Returns the machine, the settings of a run, and the versions of what it compares."""
    compiler = importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None
    ours = extension_cpp.__version__.split("+")[0]  # a file can be continued with another build of the same version
    versions = {"extension_cpp": ours, "triton": compiler, "cuda": torch.version.cuda} | (libraries or {})
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else info.cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    return machine | settings | {"versions": versions}


def commit() -> str | None:
    """Returns the commit of the source tree, with -dirty if tracked files other than figures and documents have changed
    since, or None if git does not know it."""
    git = functools.partial(subprocess.check_output, cwd=ROOT, stderr=subprocess.DEVNULL, text=True)
    tracked = ["--untracked-files=no", "--", ".", ":(exclude)benchmarks/results", ":(exclude)docs", ":(exclude)*.md"]
    try:
        head, changed = git(["git", "rev-parse", "--short=12", "HEAD"]), git(["git", "status", "--porcelain", *tracked])
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.strip() + ("-dirty" if changed else "")


def is_clean(known: str | None) -> bool:
    return known is not None and not known.endswith("-dirty")


def folder(op: str, sources: dict[str, str]) -> str:
    """Returns the folder of csrc/ whose shim registers the op. `op` may be a benchmark's variant of an op, whose name
    begins with the op's name."""
    shims = {path: text for path, text in sources.items() if path.endswith(".cpp")}
    names = {name: path.split("/")[0] for path, text in shims.items() for name in re.findall(r'"(\w+)\(', text)}
    while op and op not in names:
        op = op.rpartition("_")[0]
    return names[op]


def digest_of(sources: dict[str, str], ops: Iterable[str], device: str) -> str:
    """Returns the digest of the folders of these ops, and of the folders that they include, without common/. `sources`
    are the texts of csrc's files by path. Comments, spaces, includes and files for the other device do not count."""
    other = "cpu" if device == "cuda" else ".cu"
    folders, added = set[str](), {folder(op, sources) for op in ops}
    while added:
        folders |= added
        texts = (text for path, text in sources.items() if path.split("/")[0] in added)
        added = {name for text in texts for name in re.findall(r'#include "(\w+)/', text)} - folders - {"common"}
    found = hashlib.sha256()
    for path, text in sorted(sources.items()):
        if path.split("/")[0] in folders and other not in path:
            bare = re.sub(r"//[^\n]*|/\*.*?\*/|#include[^\n]*", "", text, flags=re.DOTALL)
            found.update(f"{path} {''.join(bare.split())}\n".encode())
    return found.hexdigest()[:12]


@functools.cache
def sources() -> dict[str, str]:
    paths = (path for path in CSRC.rglob("*") if path.suffix in (".c", ".cpp", ".cu", ".cuh", ".h"))
    return {path.relative_to(CSRC).as_posix(): path.read_text() for path in paths}


@functools.cache
def digest(ops: tuple[str, ...], device: str) -> str:
    """Returns the digest by which tables mark rows that were timed with older kernels."""
    return digest_of(sources(), ops, device)


def is_older(row: Row, device: str) -> bool:
    """Returns whether the kernels that a row timed have changed since, or are not known."""
    try:
        return bool(row["kernel"] != digest(tuple(row["of"]), device))
    except LookupError:  # an op that is gone
        return True


def run(device: str, rows: Iterable[Row] = ()) -> Callable[..., Row]:
    """Starts the next run of a file that has these rows. Returns a function that makes the entries of a row that say
    which run measured which kernels."""
    number, known = 1 + max((row["run"] for row in rows), default=0), commit()

    def of(*ops: str) -> Row:
        """Returns the run, commit, ops and kernels of a row. With uncommitted changes the kernels are not known."""
        kernel = digest(ops, device) if is_clean(known) else None
        return {"run": number, "commit": known, "of": list(ops), "kernel": kernel}

    return of


def read(path: Path, columns: Iterable[str] = ("op", "pass", "percent_of_copy")) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path} cannot be read as a results file: {error}")
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not isinstance(found.get("machine"), dict):
        sys.exit(f"error: {path} is not a results file: expected an object with machine and rows")
    if not all({"run", "commit", *columns} <= row.keys() for row in rows):
        sys.exit(f"error: {path} has rows of another kind: expected run, commit, {', '.join(columns)}")
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Replaces the file in one step, with one line for each row and six digits for each number that is not whole. A run
    that is stopped here leaves the earlier file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    found = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.6g}"))
    lists = {name: ",\n".join(map(json.dumps, each)) for name, each in found.items() if isinstance(each, list)}
    values = {name: f"[\n{lists[name]}\n]" if name in lists else json.dumps(found[name]) for name in found}
    part.write_text("{" + ",\n".join(f"{json.dumps(name)}: {value}" for name, value in values.items()) + "}\n")
    part.replace(path)


def key(row: Row) -> tuple[str | int, ...]:
    """Returns what was measured. Rows with the same key are the same work."""
    return row["op"], row["pass"], row["dtype"], row["rows"], row["cols"], row["sizes"]


def names(rows: list[Row]) -> list[str]:
    """Returns the contenders in their order, without the copy."""
    every = dict.fromkeys(name for row in rows for name in (*row["seconds"], *row.get("failed", {})))
    return [name for name in every if name != "copy"]


def other(rows: list[Row], key: str) -> list[Row]:
    """Returns the rows that have these figures, with the figures as `seconds`."""
    return [row | {"seconds": row[key]} for row in rows if key in row]


def continued(path: Path, about: Row, columns: Iterable[str] = ("op", "pass"), anew: bool = False) -> dict[str, Any]:
    """Returns the results in the file, with this run's description. Ends the program if the file is from another
    machine or has other settings. With `anew`, or if there is no file, the results are empty."""
    if anew or not path.exists():
        return {"machine": about, "rows": []}
    found = read(path, columns)
    for name, value in about.items():
        if (there := found["machine"].get(name, value)) != value:
            what = f"{path} was measured with {name} {there}, and this run has {value}"
            sys.exit(f"error: {what}: give another file with --json")
    return {"machine": about, "rows": found["rows"]}

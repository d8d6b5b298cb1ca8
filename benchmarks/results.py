"""A results file: one machine, its settings, and one row per measurement. An interrupted run continues its file."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import extension_cpp

Row = dict[str, Any]
Key = tuple[str, str, str, int, int, int, str]

# Further figures of a row on a GPU. `seconds` is the time from the first kernel of a call to the end.
OTHERS = (
    ("kernel_seconds", "the kernels alone, replayed as a CUDA graph"),
    ("call_seconds", "from the call on, as a user meets it: the GPU waits for the host"),
)

ROOT = Path(__file__).resolve().parent.parent


def machine(device: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def in_words(about: dict[str, Any]) -> str:
    """The machine and the settings in one line."""
    facts = [about["device"], f"{about['threads']} CPU threads"]
    facts += [f"{name} {about[name]}" for name in ("torch", "python", "rounds", "commit") if about.get(name)]
    libraries = about.get("versions", {}).items()
    return ", ".join(facts + [f"{name} {version or 'absent'}" for name, version in libraries])


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def commit() -> str | None:
    """The commit of the source tree, with -dirty if files have changed since; None if git does not know it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str | None]:
    try:
        import triton

        compiler = triton.__version__
    except ImportError:
        compiler = None
    return {"extension_cpp": extension_cpp.__version__, "triton": compiler, "cuda": torch.version.cuda}


def read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {path} cannot be read as a results file: {error}")
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not isinstance(found.get("machine"), dict):
        sys.exit(f"error: {path} is not a results file: expected an object with machine and rows")
    if not all({"op", "pass", "percent_of_copy"} <= row.keys() for row in rows):
        sys.exit(f"error: {path} has rows of another kind than python -m benchmarks writes")
    return found


def write(path: Path, results: dict[str, Any]) -> None:
    """Replaces the file in one step. A run that is stopped here leaves the earlier file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(results, indent=1))
    os.replace(part, path)


def key(row: Row, about: dict[str, Any]) -> Key:
    """What was measured. Rows with one key are the same work on the same number of threads, for one picture."""
    work = row["op"], row["pass"], row["dtype"], row["rows"], row["cols"]
    return *work, row.get("threads", about["threads"]), sizes(row)


def sizes(row: Row) -> str:
    return row.get("sizes", "large")


def names(rows: list[Row]) -> list[str]:
    """The contenders in their order, without the copy."""
    found = {name: None for row in rows for name in (*row["seconds"], *row.get("failed", {})) if name != "copy"}
    return list(found)


def other(rows: list[Row], key: str) -> list[Row]:
    """The rows that have these figures, which take the place of `seconds`."""
    return [row | {"seconds": row[key]} for row in rows if key in row]


def new(about: dict[str, Any]) -> dict[str, Any]:
    return {"machine": about, "rows": []}


def continued(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The results in the file, under this run's description. Refuses a file from another machine or other settings."""
    if not path.exists():
        return new(about)
    found = read(path)
    for name, value in about.items():
        there = found["machine"].get(name, value)
        if name not in ("threads", "commit") and there != value:
            sys.exit(
                f"error: {path} was measured with {name} {there}, and this run has {value}: "
                "give another file with --json"
            )
    return {"machine": about | {"threads": found["machine"]["threads"]}, "rows": found["rows"]}

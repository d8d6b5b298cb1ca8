"""Lists the kernels of the compiled library, with the resources that each kernel uses.

The columns are registers per thread, bytes of stack per thread (spilled registers), and bytes of static shared memory
per CTA; dynamic shared memory is chosen at launch and is not listed:

    python scripts/kernel_resources.py norm --stack
    python scripts/kernel_resources.py --summary    # number of kernels, size of the library, slowest translation units

Reads the library with cuobjdump, which comes with the CUDA toolkit and with the package triton.
"""

import argparse
import collections
import csv
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "extension_cpp" / "libextension_cpp.so"
USAGE = re.compile(r"Function (\w+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)")

# Budgets of a library built for one architecture, which tests/test_budgets.py checks.
LIBRARY_MB = 16
NORM_KERNELS = 1000


def find_cuobjdump() -> str | None:
    """Returns the path of cuobjdump on PATH or in Triton's package, or None if there is neither."""
    triton = importlib.util.find_spec("triton")
    tools = Path(triton.origin).parent / "backends" / "nvidia" / "bin" if triton and triton.origin else Path()
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=str(tools))


def cuobjdump() -> str:
    return find_cuobjdump() or sys.exit(
        "error: cuobjdump was not found; it comes with the CUDA toolkit and with the package triton."
    )


def short_names(mangled: Iterable[str]) -> list[str]:
    """Returns the demangled names without result types, parameters and casts of template arguments."""
    command, lines = ["c++filt", "--no-params"], "\n".join(mangled)
    names = subprocess.run(command, input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    return [re.sub(r"\((?:int|bool|[\w:]+::\w+)\)(?=[\w-])", "", name) for name in names]


def kernels(library: Path, arch: str) -> list[tuple[str, int, int, int]]:
    """Returns name, registers, stack and shared memory of every kernel compiled for `arch`."""
    usage = subprocess.run([cuobjdump(), "-res-usage", "-arch", arch, library], capture_output=True, text=True).stdout
    rows = USAGE.findall(usage)
    if not rows:
        sys.exit(f"error: {library.name} has no kernels for {arch}.")
    names = short_names([name for name, *_ in rows])
    numbers = [(int(registers), int(stack), int(shared)) for _, registers, stack, shared in rows]
    return sorted((name, *three) for name, three in zip(names, numbers, strict=True))


def families(names: list[str]) -> dict[str, int]:
    """Returns the number of kernels in each family, most first: "norm" if the name has that before "<", or else the
    kernel's namespace, or the first part of its name."""
    heads = (name.removeprefix("(anonymous namespace)::").partition("<")[0] for name in names)
    found = ("norm" if "norm" in head else head.partition("::")[0].removesuffix("_cuda") for head in heads)
    return dict(collections.Counter(found).most_common())


def seconds(log: str, plan: str) -> list[tuple[float, str]]:
    """Returns the seconds of the last compilation of each translation unit, slowest first.

    `log` is the text of .ninja_log, which also has files that were deleted. `plan` is the text of build.ninja.
    """
    objects = set(re.findall(r"^build (\S+\.(?:o|gch)):", plan, re.MULTILINE))
    rows = [line.split("\t") for line in log.splitlines() if not line.startswith("#")]
    last = {output: (int(end) - int(start)) / 1000 for start, end, _, output, _ in rows if output in objects}
    return sorted(((time, output.removesuffix(".o")) for output, time in last.items()), reverse=True)


def print_summary(arch: str) -> None:
    """Prints the figures that have budgets. Without cuobjdump or CUDA the numbers of kernels are missing."""
    print(f"library: {LIBRARY.stat().st_size / 1e6:.1f} MB (budget for one architecture: {LIBRARY_MB} MB)")
    if find_cuobjdump() is None:
        print("kernels: unknown, cuobjdump was not found")
    elif b"architectures=none" in LIBRARY.read_bytes():
        print("kernels: none, the library was built without CUDA")
    else:
        count = families([name for name, *_ in kernels(LIBRARY, arch)])
        print(f"kernels for {arch}: {sum(count.values())} (budget for norm: {NORM_KERNELS})")
        for name, number in count.items():
            print(f"  {number:5d}  {name}")
    logs = (ROOT / "build").glob("*/.ninja_log")
    if log := max(logs, key=lambda log: log.stat().st_mtime, default=None):
        print(f"slowest translation units of build/{log.parent.name}, seconds beside whatever else ran at the time:")
        for time, source in seconds(log.read_text(), log.with_name("build.ninja").read_text())[:8]:
            print(f"  {time:5.1f}  {source}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("words", nargs="*", help="only kernels whose name has one of these words")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--stack", action="store_true", help="only kernels that use the stack")
    summary = "number of kernels by family, size of the library, slowest translation units"
    parser.add_argument("--summary", action="store_true", help=summary)
    options = parser.parse_args()
    if not LIBRARY.exists():
        sys.exit("error: the library is not built; run `make build`.")
    if options.summary:
        print_summary(options.arch)
        return
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["kernel", "registers", "stack", "shared"])
    for name, *numbers in kernels(LIBRARY, options.arch):
        if (numbers[1] > 0 or not options.stack) and (not options.words or any(w in name for w in options.words)):
            out.writerow([name, *numbers])


if __name__ == "__main__":
    main()

"""Lists the kernels of the compiled library, with what each takes of the chip.

That is registers a thread, bytes of stack a thread (spilled registers), and static shared memory a block (kernels with
a ring take up to 227 KB in all when they are launched):

    python scripts/kernel_resources.py norm --stack

Reads the library with cuobjdump (of the CUDA toolkit; Triton brings one along).
"""

import argparse
import csv
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = Path(__file__).resolve().parent.parent / "extension_cpp" / "libextension_cpp.so"
USAGE = re.compile(r"Function (\w+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def cuobjdump() -> str:
    """The path of cuobjdump: of PATH, or of Triton."""
    triton = importlib.util.find_spec("triton")
    tools = Path(triton.origin).parent / "backends" / "nvidia" / "bin" if triton and triton.origin else Path()
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=str(tools))
    if found is None:
        sys.exit("error: cuobjdump was not found; it comes with the CUDA toolkit and with the package triton.")
    return found


def short_name(name: str) -> str:
    """A demangled name without result type, parameters and casts of template arguments."""
    name = re.sub(r"^void |(?<=>)\([^<>]*(?:<[^<>]*>)?[^<>]*\)$", "", name)
    return re.sub(r"\((?:int|bool|[\w:]+::\w+)\)(?=[\w-])", "", name)


def short_names(mangled: list[str]) -> list[str]:
    lines = "\n".join(mangled)
    names = subprocess.run(["c++filt"], input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    return [short_name(name) for name in names]


def kernels(library: Path, arch: str) -> list[tuple[str, int, int, int]]:
    """Name, registers, stack and shared memory of every kernel compiled for `arch`."""
    usage = subprocess.run([cuobjdump(), "-res-usage", "-arch", arch, library], capture_output=True, text=True).stdout
    rows = USAGE.findall(usage)
    if not rows:
        sys.exit(f"error: {library.name} has no kernels for {arch}.")
    names = short_names([name for name, *_ in rows])
    numbers = [(int(registers), int(stack), int(shared)) for _, registers, stack, shared in rows]
    return sorted((name, *three) for name, three in zip(names, numbers, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("words", nargs="*", help="only kernels whose name has one of these words")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--stack", action="store_true", help="only kernels that use the stack")
    options = parser.parse_args()
    if not LIBRARY.exists():
        sys.exit("error: the library is not built; run `make build`.")
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["kernel", "registers", "stack", "shared"])
    for name, *numbers in kernels(LIBRARY, options.arch):
        if (numbers[1] > 0 or not options.stack) and (not options.words or any(w in name for w in options.words)):
            out.writerow([name, *numbers])


if __name__ == "__main__":
    main()

"""Shows whether a renaming or a move left the machine code of the GPU kernels unchanged.

Compares two builds of the library, one from before the change and one from after it:

    python -m scripts.sass_diff BEFORE.so AFTER.so --rename norm_cuda=norm

Kernels are compared by the text of their instructions. Addresses, hexadecimal encodings and function names are left
out. Kernels are paired by their demangled names, after --rename was applied to the names of BEFORE. Kernels whose names
have no partner are paired by equal code. Exit status: 0 if every kernel is identical or renamed, else 1.
"""

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scripts.kernel_resources import cuobjdump, short_names

Code = tuple[str, ...]  # the instructions of one kernel, in order
Kernels = Counter[tuple[str, Code]]  # name and code; several translation units may have the same kernel

FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;")
SYMBOL = re.compile(r"\b_Z\w+")


def parse(lines: Iterable[str]) -> list[tuple[str, Code]]:
    """Returns the mangled name and the instructions of each function in the output of `cuobjdump -sass`."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if function := FUNCTION.match(line):
            found.append((function[1], []))
        elif (instruction := INSTRUCTION.match(line)) and found:
            # Interning saves memory: a library has millions of instructions, but few different ones.
            found[-1][1].append(sys.intern(SYMBOL.sub("NAME", " ".join(instruction[1].split()))))
    return [(name, tuple(code)) for name, code in found]


def disassemble(library: Path, arch: str) -> Kernels:
    """Returns every kernel with its short demangled name."""
    command = [cuobjdump(), "-sass", "-arch", arch, str(library)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        functions = parse(process.stdout)
    if not functions:
        sys.exit(f"error: {library} has no kernels for {arch}.")
    names, codes = zip(*functions, strict=True)
    return Counter(zip(short_names(names), codes, strict=True))


def rename(kernels: Kernels, renamings: Sequence[tuple[str, str]]) -> Kernels:
    """Returns the kernels with OLD replaced by NEW in their names, if OLD is a whole word there."""
    renamed: Kernels = Counter()
    for (name, code), count in kernels.items():
        for old, new in renamings:
            name = new.join(re.split(rf"(?<!\w){re.escape(old)}(?!\w)", name))
        renamed[name, code] += count
    return renamed


def differing(before: Code, after: Code) -> int:
    """Returns how many instructions differ, regardless of order, or 1 if they differ only in order."""
    old, new = Counter(before), Counter(after)
    return max((old - new).total(), (new - old).total(), 1)


def compare(before: Kernels, after: Kernels) -> dict[str, list[str]]:
    """Pairs the kernels by name, and those without a partner by equal code. Returns the kernels by what became of them,
    with a line of text for each."""
    found: dict[str, list[str]] = {"identical": [name for name, _ in (before & after).elements()]}
    found |= {"renamed": [], "changed": []}
    gone, new = list((before - after).elements()), list((after - before).elements())
    for key, state in ((0, "changed"), (1, "renamed")):
        for name, code in gone.copy():
            if other := next((other for other in new if other[key] == (name, code)[key]), None):
                gone.remove((name, code))
                new.remove(other)
                differ = f": {differing(code, other[1])} of {len(code)} -> {len(other[1])} instructions"
                found[state].append(name + (differ if state == "changed" else f" -> {other[0]}"))
    for state, alone in (("only before", gone), ("only after", new)):
        found[state] = [f"{name}: {len(code)} instructions" for name, code in alone]
    return found


def table(found: Mapping[str, Sequence[str]]) -> str:
    """Returns a line for each kernel that is not identical, and the number of kernels in each state."""
    titles = {state: state for state in found if state != "identical"} | {"renamed": "renamed, identical"}
    lines = [f"{title:18s}  {line}" for state, title in titles.items() for line in sorted(found[state])]
    return "\n".join([*lines, ", ".join(f"{len(kernels)} {state}" for state, kernels in found.items())])


def renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals):
        raise argparse.ArgumentTypeError(f"expected OLD=NEW, got '{text}'")
    return old, new


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("before", type=Path, metavar="BEFORE.so")
    parser.add_argument("after", type=Path, metavar="AFTER.so")
    parser.add_argument("--arch", default="sm_90", help="default: sm_90")
    words = "whole words of names"
    parser.add_argument(
        "--rename", type=renaming, nargs="+", action="extend", default=[], metavar="OLD=NEW", help=words
    )
    options = parser.parse_args(arguments)
    for library in (options.before, options.after):
        if not library.is_file():
            parser.error(f"{library}: no such file")
    before = rename(disassemble(options.before, options.arch), options.rename)
    found = compare(before, disassemble(options.after, options.arch))
    print(table(found))
    return 1 if found["changed"] or found["only before"] or found["only after"] else 0


if __name__ == "__main__":
    sys.exit(main())

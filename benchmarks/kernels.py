"""Computes a digest of the sources of an op's kernels, by which tables mark rows that were timed with older kernels."""

import functools
import hashlib
import re
from collections.abc import Iterable

from build_library import CSRC


def folder(op: str, sources: dict[str, str]) -> str:
    """Returns the folder of csrc/ whose shim registers the op. `op` may be a benchmark's variant of an op, whose name
    begins with the op's name."""
    words = op.split("_")
    for count in range(len(words), 0, -1):
        schema = f'"{"_".join(words[:count])}('
        for path, text in sources.items():
            if path.endswith(".cpp") and schema in text:
                return path.split("/")[0]
    raise LookupError(f"no file of csrc registers {op}")


def digest_of(sources: dict[str, str], ops: Iterable[str], device: str) -> str:
    """Returns the digest of the folders of these ops, and of the folders that they include, without common/. `sources`
    are the texts of csrc's files by path. Comments, white space, includes and files for the other device do not
    count."""
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
    return digest_of(sources(), ops, device)

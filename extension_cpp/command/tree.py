"""The repository or package (tree) that `new` and `remove` change: its root, free names, edits, and writing of files.

This module needs neither torch nor the library. It reads and checks everything before it writes the first byte. If
something stops the writing, all changes are undone.
"""

import builtins
import contextlib
import keyword
import re
import signal
import subprocess
import symtable
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .errors import CannotMake, require
from .schema import C_KEYWORDS

PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has the necessary files of a checkout in this folder, at the same paths (pyproject.toml).
INSTALLED = PACKAGE / "tree"
TREE = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent

# The files of a repository, or of a package made by new-package, that name each op.
EDITED = ("extension_cpp/ops.py", "extension_cpp/reference.py", "extension_cpp/_ops.pyi", "docs/ops.md", "README.md")

LONGEST = 28  # characters; with a longer name a line of Python in a template would have more than 120 columns
C_SUFFIXES = (".c", ".h", ".cpp", ".cu", ".cuh")


@dataclass
class Plan:
    """New and changed files by path, with their new text, and the files to delete."""

    new: dict[Path, str] = field(default_factory=dict)
    changed: dict[Path, str] = field(default_factory=dict)
    removed: list[Path] = field(default_factory=list)


@dataclass
class Addition:
    """Holds what one op adds to a tree: files by path, and its parts of the EDITED files."""

    name: str
    files: dict[str, str] = field(default_factory=dict)
    entry: str = ""
    reference: str = ""  # the definition, in which "{line}" stands for the number of its second line in the file
    stub: str = ""
    row: str = ""
    section: str = ""
    own: set[str] = field(default_factory=set)  # names that the op's own module defines beside the function


def tree_of(folder: Path) -> tuple[Path, str] | None:
    """Returns the root of the tree around a folder and the name of its package, or None."""
    for root in (folder, *folder.parents):
        build = root / "build_library.py"
        found = re.search(r'^NAMESPACE = "(\w+)"', build.read_text(), re.MULTILINE) if build.is_file() else None
        if found is not None:
            return root, found[1]
    return None


# ---- names ----


def check_identifier(what: str, name: str) -> None:
    """Refuses a name that C, C++ or Python does not allow, or that breaks the package's naming rules."""
    require(name, f"expected a name for the {what}, but got an empty one")
    length = len(name)
    require(length <= LONGEST, f"expected a name of at most {LONGEST} characters for the {what}, but got {length}")
    require(
        re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name),
        f"expected the {what}'s name to be lower-case letters from a to z and digits, a letter first, words joined by "
        f"single underscores, but got {name!r}",
    )
    if name in C_KEYWORDS or keyword.iskeyword(name):
        raise CannotMake(f"expected a name that is free for the {what}, but '{name}' is a keyword of C, C++ or Python")


def top_level_names(text: str) -> set[str]:
    """Returns the names that the text of a Python file defines or imports."""
    symbols = symtable.symtable(text, "text", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def sources() -> dict[str, str]:
    """Returns the texts of this repository's files that name ops, by their path."""
    shims = (TREE / "extension_cpp" / "csrc").rglob("*.cpp")
    places = [*EDITED, "extension_cpp/__init__.py", *(str(path.relative_to(TREE)) for path in sorted(shims))]
    return {place: (TREE / place).read_text() for place in places}


def in_tree(texts: dict[str, str]) -> dict[Path, str]:
    return {TREE / place: text for place, text in texts.items()}


def check_free(op: Addition, texts: dict[str, str], exists: Callable[[str], bool] | None = None) -> None:
    """Refuses an op's name that is taken in the tree of these texts, or that hides a builtin in ops.py."""
    exists = exists or (lambda place: (TREE / place).exists())
    name, taken = op.name, f"the name '{op.name}' is taken"
    folders = ("", "extension_cpp/", "extension_cpp/csrc/", "examples/")
    modules = f"extension_cpp/{name}.py", f"extension_cpp/functional/{name}.py"
    for place in (*(folder + name for folder in folders), *modules):
        require(not exists(place), f"{taken}: {place} exists")
    require(name not in dir(builtins), f"{taken}: it is a builtin of Python")
    for place, text in texts.items():
        found = re.findall(r'\b(?:m\.def|DEF\w*)\((?:\s*m,)?\s*"(\w+)', text) if place.endswith(".cpp") else []
        ops = {f"{op}{suffix}" for op in found for suffix in ("", "_no_grad", "_all_results")}
        for each in (name, f"{name}_backward"):
            require(each not in ops, f"{taken}: {place} has the op {each}")
    require(name not in op.own, f"{taken}: the op's own code needs it")
    for place in ("extension_cpp/ops.py", "extension_cpp/reference.py", "extension_cpp/__init__.py"):
        for each in (name, f"{name}_functions"):  # what ops.py imports for the op
            require(each not in top_level_names(texts[place]), f"{taken}: {place} has {each}")
    for place in op.files:
        require(not exists(place), f"{place} exists; nothing is overwritten")


# ---- edits ----


def imports_of(name: str) -> list[str]:
    """Returns the import lines of ops.py for an op."""
    return [f"from .functional import {name} as {name}_functions\n", f"from .functional.{name} import {name}\n"]


def with_entry(text: str, name: str, entry: str) -> str:
    """Adds an operator to the text of ops.py: its imports, its name in __all__, and its entry."""
    listed = re.search(r"^__all__ = \[.*\n(?: .*\n)*", text, re.MULTILINE)
    if listed is None:
        raise CannotMake("extension_cpp/ops.py has no __all__")
    require("from .registration.entries" in text, "extension_cpp/ops.py imports nothing from .registration.entries")
    text = f'{text[: listed.end()]}    "{name}",\n{text[listed.end() :]}\n{entry}'
    imports = re.findall(r"^from \.functional.*\n", text, re.MULTILINE)
    added = sorted(imports + imports_of(name))
    # ops.py of a package of an earlier version imports only the marks that its ops use.
    lacking = sorted({*re.findall(r"=([A-Z_]+),", entry)} - {*re.findall(r"\w+", text[: listed.start()])})
    added += [f"from .registration.entries import {', '.join(lacking)}\n"] if lacking else []
    return text.replace("".join(imports) + "from .reg", "".join(added) + "from .reg", 1)


def with_row(text: str, row: str) -> str:
    """Adds a row to the table of functions of a page."""
    table = re.search(r"^\| function \|.*\n(?:\|.*\n)*", text, re.MULTILINE)
    if table is None:
        raise CannotMake("the page of the operators has no table that begins with '| function |'")
    return text[: table.end()] + row + text[table.end() :]


def with_count(text: str, more: int) -> str:
    """Changes the number of operators that README.md names."""
    return re.sub(r"\*\*(\d+) fast operators\*\*", lambda n: f"**{int(n[1]) + more} fast operators**", text)


def with_op(texts: dict[str, str], op: Addition) -> dict[str, str]:
    """Returns the EDITED files of these texts with one more op."""
    ops, table, stub, page, readme = EDITED
    reference = texts[table] + "\n\n"
    sections, modules, after = texts[page].partition("\n## Modules\n")  # a package's page has no modules
    changed = {
        ops: with_entry(texts[ops], op.name, op.entry),
        table: reference + op.reference.replace("{line}", str(reference.count("\n") + 2)),
        stub: texts[stub] + op.stub,
        page: with_row(f"{sections}\n{op.section}{modules}{after}", op.row),
        readme: with_count(texts[readme], 1),
    }
    return {place: text for place, text in changed.items() if text != texts[place]}


def without_op(texts: dict[str, str], name: str) -> dict[str, str]:
    """Returns the EDITED files of these texts without an op, as they were before with_op()."""
    ops, table, stub, page, readme = EDITED
    passages = [
        *((ops, f"^{re.escape(line)}", f"'{line.strip()}'") for line in imports_of(name)),
        (ops, rf"\n^# ---- {name} ----\n.*?(?=\n^# ---- |\Z)", f"a section '# ---- {name} ----'"),
        (ops, rf'^    "{name}",\n', f"{name} in __all__"),
        (table, rf"\n\n^def {name}\(.*?(?=\n\n^(?:def|class|@) ?|\Z)", f"a function {name}"),
        (page, rf"^\| \[`{name}\([^\n]*\n", f"a row of {name}"),
        (page, rf"\n^## {name}\n.*?(?=\n^## |\Z)", f"a section {name}"),
    ]
    if f"\ndef {name}(" in texts[stub]:  # only differentiable operators are in it
        types = rf"(?:^def {name}(?:_double)?(?:_backward)?\((?:.|\n)*?: \.\.\.\n)+"
        passages.append((stub, types, f"the types of {name}"))
    changed = {place: texts[place] for place in EDITED}
    for place, pattern, what in passages:
        changed[place], count = re.subn(pattern, "", changed[place], flags=re.DOTALL | re.MULTILINE)
        require(count == 1, f"expected {place} to have {what} once, but found it {count} times")
    changed[readme] = with_count(changed[readme], -1)
    return {place: text for place, text in changed.items() if text != texts[place]}


# ---- writing ----


def laid_out(texts: dict[Path, str]) -> dict[Path, str]:
    """Returns the texts formatted as `make lint` requires, because line breaks depend on the length of the op's name.
    Without clang-format and ruff the texts stay unformatted; `make format` formats them later."""
    ruff = ["ruff", "format", "--quiet", "--isolated", "--line-length=120", "--target-version=py310"]
    clang_format = ["clang-format", "-i", f"--style=file:{TREE / '.clang-format'}"]
    with tempfile.TemporaryDirectory() as folder:
        copies = {path: Path(folder, f"{number}{path.suffix}") for number, path in enumerate(texts)}
        for path, copy in copies.items():
            copy.write_text(texts[path])
        for (program, *options), suffixes in ((ruff, (".py", ".pyi")), (clang_format, C_SUFFIXES)):
            files = [copy for copy in copies.values() if copy.suffix in suffixes]
            there = Path(sysconfig.get_path("scripts"), program)
            if files and there.exists():
                subprocess.run([there, *options, *files], capture_output=True, check=True)
        return {path: copy.read_text() for path, copy in copies.items()}


@contextlib.contextmanager
def on_signals(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


def stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # the status with which a shell reports a process that this signal ended


def write(plan: Plan) -> None:
    """Writes all files of the plan or, if something stops it, none."""
    for each in plan.new:
        require(not each.exists(), f"{each} exists; nothing is overwritten")
    before = {path: path.read_bytes() for path in (*plan.changed, *plan.removed)}
    undo = contextlib.ExitStack()
    path = None
    try:
        with on_signals(stop, signal.SIGTERM):
            for path, text in laid_out(plan.new | plan.changed).items():
                for folder in reversed(path.parents):
                    if not folder.is_dir():
                        folder.mkdir()
                        undo.callback(folder.rmdir)
                if path in plan.new:
                    undo.callback(path.unlink, missing_ok=True)
                else:
                    undo.callback(path.write_bytes, before[path])
                path.write_text(text)
                if text.startswith("#!"):
                    path.chmod(0o755)
            for path in plan.removed:
                undo.callback(path.write_bytes, before[path])
                path.unlink()
    except BaseException as error:
        with on_signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):  # a second signal must not stop this
            undo.close()
        if isinstance(error, OSError):  # the error of a full disk names no file
            where = error.filename or path
            raise CannotMake(f"cannot write {where}: {error.strerror}; everything is as it was") from error
        raise


def report(plan: Plan, root: Path) -> None:
    for heading, paths in (("Wrote", plan.new), ("Removed", plan.removed), ("Changed", plan.changed)):
        if paths:
            print(f"{heading} in {root}:")
            print("".join(f"  {path.relative_to(root)}\n" for path in paths), end="")

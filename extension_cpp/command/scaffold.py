"""python -m extension_cpp new, remove and new-package: the templates under other names.

This module needs neither torch nor the library. It reads and checks everything before it writes the first byte. If
something stops it later, it takes back what it wrote.
"""

import builtins
import contextlib
import ctypes
import importlib.util
import keyword
import re
import shlex
import shutil
import signal
import subprocess
import symtable
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from . import generate, generate_python, generate_shim, generate_tests
from .errors import CannotMake
from .roles import Operator
from .schema import C_KEYWORDS

PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has the files of a checkout that are needed here in a folder of its own, at the same paths (pyproject.toml).
INSTALLED = PACKAGE / "tree"
TREE = INSTALLED if INSTALLED.is_dir() else PACKAGE.parent

OP_KINDS = ("pointwise", "rows", "reduction", "scan", "index", "inplace", "stencil", "segments")
KINDS = (*OP_KINDS, "accessor")
# What the templates compute.
FIRST_OP = {"pointwise": "square", "rows": "mean_square", "reduction": "rms_norm", "scan": "decayed_sum"}
FIRST_OP |= {"index": "gather_rows", "inplace": "momentum_step", "stencil": "causal_conv"}
FIRST_OP |= {"segments": "segment_sum"}

# The files of a new package: its own, from templates/package, and those that are the same as this package's.
OWN = ["MANIFEST.in", "Makefile", "README.md", "extension_cpp/__init__.py", "pyproject.toml", "requirements.txt"]
SHARED = [".ci/run", ".clang-format", ".gitignore", "LICENSE"]
SHARED += ["build_library.py", "check_environment.py", "setup.py"]
SHARED += ["extension_cpp/_namespace.py", "extension_cpp/_ops.py", "extension_cpp/py.typed"]
SHARED += ["extension_cpp/functional/__init__.py", "extension_cpp/registration/*.py"]
SHARED += ["extension_cpp/csrc/library.cpp", "extension_cpp/csrc/common/*.h", "extension_cpp/csrc/common/*/*"]
SHARED += ["tests/__init__.py", "tests/checks.py", "tests/conftest.py", "tests/forked.py", "tests/judge.py"]
SHARED += [
    "tests/opspec.py",
    "tests/specs/__init__.py",
    "tests/battery/*.py",
    "tests/test_judge.py",
    "tests/test_library.py",
]
SHARED += ["tests/guarded.py", "tests/c/guarded_allocator.c"]

LONGEST = 28  # with a longer name a line of Python in a template would have more than 120 columns
TORCH_NAMESPACES = ("aten", "prim", "prims", "at", "c10", "std")  # namespaces of operators and of C++

C_SUFFIXES = (".c", ".h", ".cpp", ".cu", ".cuh")

PLACEHOLDER = re.compile("kernel_template|ops_template")


@dataclass
class Plan:
    """New and changed files, by path, with the text that each will have; and the files to delete."""

    new: dict[Path, str] = field(default_factory=dict)
    changed: dict[Path, str] = field(default_factory=dict)
    removed: list[Path] = field(default_factory=list)


# ---- names ----


def check_identifier(what: str, name: str) -> None:
    """Refuses a name that C, C++ or Python does not allow, or that would be a bad name."""
    if not name:
        raise CannotMake(f"expected a name for the {what}, but got an empty one")
    if len(name) > LONGEST:
        raise CannotMake(f"expected a name of at most {LONGEST} characters for the {what}, but got {len(name)}")
    if not re.fullmatch("[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise CannotMake(
            f"expected the {what}'s name to be lower-case letters from a to z and digits, a letter first, words joined "
            f"by single underscores, but got {name!r}"
        )
    if name in C_KEYWORDS or keyword.iskeyword(name):
        raise CannotMake(f"expected a name that is free for the {what}, but '{name}' is a keyword of C, C++ or Python")


def top_level_names(path: Path) -> set[str]:
    """What a Python file defines or imports."""
    symbols = symtable.symtable(path.read_text(), str(path), "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def names_of(name: str, kind: str) -> tuple[set[str], set[str]]:
    """What a template's op adds to ops.py, and what its own module has beside the function."""
    template = TREE / "templates" / kind
    symbols = top_level_names(template / "ops_template.py")
    section = {PLACEHOLDER.sub(name, symbol) for symbol in symbols if PLACEHOLDER.search(symbol)}
    own = top_level_names(template / "functional_template.py") if kind != "accessor" else set()
    return section, own - {"kernel_template"}


def check_free(name: str, section: set[str], own: set[str]) -> None:
    """Refuses an op's name that something in this tree has, or that hides a builtin in ops.py.

    `section` and `own` are names_of() the op.
    """
    package = TREE / "extension_cpp"
    for place in (
        f"{name}",
        f"extension_cpp/{name}",
        f"extension_cpp/{name}.py",
        f"extension_cpp/csrc/{name}",
        f"extension_cpp/functional/{name}.py",
        f"examples/{name}",
    ):
        if (TREE / place).exists():
            raise CannotMake(f"the name '{name}' is taken: {place} exists")
    if name in dir(builtins):
        raise CannotMake(f"the name '{name}' is taken: it is a builtin of Python")
    for source in sorted((package / "csrc").rglob("*.cpp")):
        found = set(re.findall(r'\b(?:m\.def|DEF\w*)\((?:\s*m,)?\s*"(\w+)', source.read_text()))
        taken = (found | {f"{op}_no_grad" for op in found}) & {name, f"{name}_backward"}
        if taken:
            raise CannotMake(f"the name '{name}' is taken: {source.relative_to(TREE)} has the op {min(taken)}")
    if name in own:
        raise CannotMake(f"the name '{name}' is taken: the op's own code needs it")
    for path in (package / "ops.py", package / "reference.py", package / "__init__.py"):
        taken = section & top_level_names(path)
        if taken:
            raise CannotMake(f"the name '{name}' is taken: {path.relative_to(TREE)} has {min(taken)}")


def check_module(what: str, name: str) -> None:
    """Refuses a name under which Python would find another module, or that cannot be a C++ namespace."""
    found = importlib.util.find_spec(name)  # a folder that is no package has no origin
    if name in sys.stdlib_module_names or name in TORCH_NAMESPACES or (found is not None and found.origin is not None):
        raise CannotMake(f"expected a name that is free for the {what}, but there is a module or namespace '{name}'")
    if hasattr(ctypes.CDLL(None), name):
        raise CannotMake(f"expected a name that is free for the {what}, but C has a function '{name}'")


# ---- what goes where ----


def section_of(path: Path, start: str, name: str) -> str:
    """A template under the op's name, from the line that begins with `start` to the end."""
    text = path.read_text()
    return PLACEHOLDER.sub(name, text[text.index(f"\n{start}") :].strip("\n")) + "\n"


def op_files(kind: str, name: str) -> dict[str, str]:
    """The files of an op, by their paths in a tree: kernels, shim, Python, spec, test."""
    template = TREE / "templates" / kind
    kernels = sorted((template / "kernel_template").iterdir())
    places = {f"extension_cpp/csrc/{name}/{PLACEHOLDER.sub(name, path.name)}": path for path in kernels}
    places |= {f"extension_cpp/functional/{name}.py": template / "functional_template.py"}
    places |= {f"tests/specs/{name}.py": template / "spec_template.py"}
    places |= {f"tests/test_{name}.py": template / "test_template.py"}
    return {place: PLACEHOLDER.sub(name, path.read_text()) for place, path in places.items()}


def imports_of(name: str) -> list[str]:
    """What ops.py imports for an op."""
    return [f"from .functional import {name} as {name}_functions\n", f"from .functional.{name} import {name}\n"]


def with_entry(text: str, name: str, entry: str) -> str:
    """ops.py with one more operator: its imports, its name in __all__, its entry."""
    listed = re.search(r"^__all__ = \[.*\n(?: .*\n)*", text, re.MULTILINE)
    if listed is None:
        raise CannotMake("extension_cpp/ops.py has no __all__")
    text = f'{text[: listed.end()]}    "{name}",\n{text[listed.end() :]}\n{entry}'
    imports = re.findall(r"^from \.functional.*\n", text, re.MULTILINE)
    return text.replace("".join(imports), "".join(sorted(imports + imports_of(name))))


def documents(kind: str) -> tuple[str, str]:
    """The template's row of docs/ops.md's table and its section there, as `make docs` will write them."""
    row, section = (TREE / "templates" / kind / "docs_template.md").read_text().split("\n\n", 1)
    return row + "\n", section


def with_row(text: str, row: str) -> str:
    """The text of a page with one more row under its table of functions."""
    table = re.search(r"^\| function \|.*\n(?:\|.*\n)*", text, re.MULTILINE)
    if table is None:
        raise CannotMake("the page of the operators has no table that begins with '| function |'")
    return text[: table.end()] + row + text[table.end() :]


def with_count(text: str, more: int) -> str:
    """README.md, which says how many operators there are."""
    return re.sub(r"\*\*(\d+) fast operators\*\*", lambda n: f"**{int(n[1]) + more} fast operators**", text)


def with_section(text: str, section: str) -> str:
    """docs/ops.md with one more section after the sections of the other ops."""
    if text.count("\n## Modules\n") != 1:
        raise CannotMake("docs/ops.md has no heading '## Modules'")
    return text.replace("\n## Modules\n", f"\n{section}\n## Modules\n")


def plan_op(name: str, kind: str) -> Plan:
    check_identifier("op", name)
    check_free(name, *names_of(name, kind))
    template, package = TREE / "templates" / kind, TREE / "extension_cpp"
    plan = Plan({TREE / place: text for place, text in op_files(kind, name).items()})
    entry = section_of(template / "ops_template.py", "# ---- ", name)
    plan.changed[package / "ops.py"] = with_entry((package / "ops.py").read_text(), name, entry)
    section = section_of(template / "reference_template.py", "def ", name)
    plan.changed[package / "reference.py"] = (package / "reference.py").read_text() + f"\n\n{section}"
    if (stub := template / "stub_template.pyi").exists():  # an operator that is not differentiable has no entry
        text = (package / "_ops.pyi").read_text()
        plan.changed[package / "_ops.pyi"] = text + section_of(stub, "def ", name)
    plan.changed[TREE / "README.md"] = with_count((TREE / "README.md").read_text(), 1)
    row, section = (PLACEHOLDER.sub(name, text) for text in documents(kind))
    page = TREE / "docs" / "ops.md"
    plan.changed[page] = with_row(with_section(page.read_text(), section), row)
    return plan


def with_marks(text: str, marks: Iterable[str]) -> str:
    """ops.py that imports these marks of registration/entries.py, too."""
    imported = re.search(r"^from \.registration\.entries import (?:\(([^)]*)\)|(.*))\n", text, re.MULTILINE)
    if imported is None:
        raise CannotMake("extension_cpp/ops.py imports nothing from .registration.entries")
    names = {*re.findall(r"\w+", imported[1] or imported[2]), *marks}
    ordered = sorted(names, key=lambda name: (not name.isupper(), name.lower()))
    line = f"from .registration.entries import {', '.join(ordered)}\n"
    if len(line) > 121:
        line = "from .registration.entries import (\n" + "".join(f"    {name},\n" for name in ordered) + ")\n"
    return text[: imported.start()] + line + text[imported.end() :]


def plan_operator(operator: Operator) -> Plan:
    """The files of an operator that --schema describes."""
    name, package, folder = operator.name, TREE / "extension_cpp", f"extension_cpp/csrc/{operator.name}/{operator.name}"
    check_identifier("op", name.removesuffix("_"))
    symbols = {f"{name}_functions", name}
    check_free(name, symbols, {"Any", "FLOATING", "Gradients", "Match", "SAME", "Tensor", "torch"})
    page, table = TREE / "docs" / "ops.md", package / "reference.py"
    texts = {
        f"{folder}.h": generate.header(operator),
        f"{folder}.cpp": generate_shim.shim(operator),
        f"{folder}_cpu.c": generate.cpu(operator),
        f"{folder}_cpu_kernel.h": generate.cpu_kernel(operator),
        f"{folder}_cuda.cu": generate.cuda(operator),
        f"extension_cpp/functional/{name}.py": generate_python.functional(operator),
        f"tests/specs/{name}.py": generate_tests.spec(operator),
        f"tests/test_{name}.py": generate_tests.test(operator),
    }
    plan = Plan({TREE / place: text for place, text in texts.items()})
    entry = generate_python.entry(operator)
    ops = with_entry((package / "ops.py").read_text(), name, entry)
    plan.changed[package / "ops.py"] = with_marks(ops, re.findall(r"(?:backward|nested|sharding)=([A-Z_]+),", entry))
    text = table.read_text() + "\n\n"
    plan.changed[table] = text + generate_python.reference(operator, "extension_cpp/reference.py", text.count("\n") + 1)
    plan.changed[package / "_ops.pyi"] = (package / "_ops.pyi").read_text() + generate_python.stub(operator)
    plan.changed[TREE / "README.md"] = with_count((TREE / "README.md").read_text(), 1)
    row, section = generate_python.documents(operator)
    plan.changed[page] = with_row(with_section(page.read_text(), section), row)
    return plan


def cut(path: Path, text: str, pattern: str, what: str) -> str:
    """The text of this file without the one passage that matches a pattern."""
    text, count = re.subn(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    if count != 1:
        raise CannotMake(f"expected {path.relative_to(TREE)} to have {what} once, but found it {count} times")
    return text


def plan_removal(name: str) -> Plan:
    """The reverse of plan_op: takes out only what `new` writes, and nothing that other code uses."""
    check_identifier("op", name)
    package = TREE / "extension_cpp"
    folder, page = package / "csrc" / name, TREE / "docs" / "ops.md"
    if not (folder / f"{name}.cpp").exists():
        example = " (an example is a folder: delete it)" if (TREE / "examples" / name).exists() else ""
        raise CannotMake(f"there is no op '{name}': no {folder.relative_to(TREE)}/{name}.cpp{example}")
    python = package / f"functional/{name}.py", TREE / f"tests/specs/{name}.py", TREE / f"tests/test_{name}.py"
    plan = Plan(removed=[path for path in (*sorted(folder.rglob("*")), *python) if path.is_file()])
    for path in (*plan.removed, *compiled(name)):
        if path.resolve() != TREE.resolve() / path.relative_to(TREE):
            raise CannotMake(f"{path} is behind a symbolic link, and 'remove' deletes only what 'new' wrote")
    check_unused(name, plan)
    stub = package / "_ops.pyi"
    types = rf"(?:^def {name}(?:_double)?(?:_backward)?\((?:.|\n)*?: \.\.\.\n)+"
    if f"\ndef {name}(" in stub.read_text():  # an operator that is not differentiable has no entry
        plan.changed[stub] = cut(stub, stub.read_text(), types, f"the types of {name}")
    for path, pattern, what in (
        *((package / "ops.py", f"^{re.escape(line)}", f"'{line.strip()}'") for line in imports_of(name)),
        (package / "ops.py", rf"\n^# ---- {name} ----\n.*?(?=\n^# ---- |\Z)", f"a section '# ---- {name} ----'"),
        (package / "ops.py", rf'^    "{name}",\n', f"{name} in __all__"),
        (package / "reference.py", rf"\n\n^def {name}\(.*?(?=\n\n^(?:def|class|@) ?|\Z)", f"a function {name}"),
        (page, rf"^\| \[`{name}\([^\n]*\n", f"a row of {name}"),
        (page, rf"^## {name}\n.*?(?=^## )", f"a section {name}"),
    ):
        plan.changed[path] = cut(path, plan.changed.get(path, path.read_text()), pattern, what)
    plan.changed[TREE / "README.md"] = with_count((TREE / "README.md").read_text(), -1)
    return plan


def compiled(name: str) -> list[Path]:
    """The folders with what was compiled of an op."""
    return [*TREE.glob(f"build/*/{name}"), *TREE.glob(f"build/*/*/{name}")]


def check_unused(name: str, plan: Plan) -> None:
    """Refuses to take out an op that other code calls. A test that calls it fails by itself."""
    word = re.compile(
        rf'\b(?:ops|extension_cpp|reference|_ops)\.{name}(?:_\w+)?\b|#include "{name}/|Gate\([^)]*"{name}"'
    )
    sources = [path for part in ("extension_cpp", "benchmarks", "examples") for path in (TREE / part).rglob("*")]
    for path in sorted(sources):
        if path in plan.removed or path.suffix not in (".py", *C_SUFFIXES) or "build" in path.parts:
            continue
        found = word.search(path.read_text())
        if found is not None:
            raise CannotMake(f"{path.relative_to(TREE)} uses {found[0]}; take that out first")


def plan_accessor(name: str) -> Plan:
    check_identifier("example", name)
    check_free(name, *names_of(name, "accessor"))
    template = TREE / "templates" / "accessor"
    # A test imports the file that has its name. That file must not hide another module or define the name again.
    if name in {"torch", "pytest"} | top_level_names(template / "ops_template.py"):
        raise CannotMake(f"the name '{name}' is taken: the example's own code needs it")
    check_module("example", name)
    plan = Plan()
    for path in sorted(template.iterdir()):
        if path.is_file():
            file = PLACEHOLDER.sub(name, path.name.replace("test_template", "test_kernel_template"))
            plan.new[TREE / "examples" / name / file] = PLACEHOLDER.sub(name, path.read_text())
    return plan


def plan_package(folder: Path, name: str, kind: str) -> Plan:
    check_identifier("package", name)
    op = FIRST_OP[kind]
    if name in ("tests", "build", "dist", "build_library"):
        raise CannotMake(f"expected a name that is free for the package, but its tree has '{name}' for something else")
    check_module("package", name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CannotMake(f"{folder} exists; nothing is overwritten, so name a folder that does not, or an empty one")
    texts = {place: (TREE / "templates" / "package" / place).read_text() for place in OWN}
    texts |= {str(path.relative_to(TREE)): path.read_text() for pattern in SHARED for path in TREE.glob(pattern)}
    texts |= op_files(kind, op)
    template = TREE / "templates" / kind
    for file in ("ops", "reference"):
        texts[f"extension_cpp/{file}.py"] = (template / f"{file}_template.py").read_text()
    row = re.sub(r"\[(`.*?`)\]\(.*?\)", r"\1", documents(kind)[0])  # a new package has no docs/ops.md
    texts["README.md"] = with_row(texts["README.md"], row)
    license_text = texts.pop("LICENSE")  # its copyright line stays as it is

    def renamed(text: str) -> str:
        text = text.replace("kernel_template", op)
        return re.sub("extension_cpp|EXTENSION_CPP", lambda found: name if found[0].islower() else name.upper(), text)

    plan = Plan({folder / renamed(place): renamed(text) for place, text in sorted(texts.items())})
    plan.new[folder / "LICENSE"] = license_text
    return plan


# ---- writing ----


def laid_out(texts: dict[Path, str]) -> dict[Path, str]:
    """The texts, with the C and C++ files formatted as `make lint` wants them: line breaks depend on the name's length.

    Without clang-format and ruff the texts are returned as they are; `make format` formats them later.
    """
    scripts = Path(sysconfig.get_path("scripts"))

    def in_style(path: Path, text: str) -> str:
        command: list[str | Path]
        if path.suffix in C_SUFFIXES:
            command = [scripts / "clang-format", f"--style=file:{TREE / '.clang-format'}", f"--assume-filename={path}"]
        elif path.suffix in (".py", ".pyi"):
            command = [scripts / "ruff", "format", "--quiet", "--line-length=120", f"--stdin-filename={path}", "-"]
        else:
            return text
        if not Path(command[0]).exists():
            return text
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout

    return {path: in_style(path, text) for path, text in texts.items()}


def make_folder(folder: Path, made: list[Path]) -> None:
    if folder.is_dir():
        return
    make_folder(folder.parent, made)
    folder.mkdir()
    made.append(folder)


@contextlib.contextmanager
def on_signals(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)


def stop(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # a shell's exit status of a process that this signal ended


def undo(made: list[Path], before: dict[Path, bytes]) -> None:
    with on_signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):  # a second one must not stop this
        for path, content in before.items():
            path.write_bytes(content)
        for path in reversed(made):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


def write(plan: Plan) -> None:
    """Writes all files of the plan or, if something stops it, none."""
    taken = next((path for path in plan.new if path.exists()), None)
    if taken is not None:
        raise CannotMake(f"{taken} exists; nothing is overwritten")
    made: list[Path] = []
    before = {path: path.read_bytes() for path in (*plan.changed, *plan.removed)}
    path = None
    try:
        with on_signals(stop, signal.SIGTERM):
            for path, text in laid_out(plan.new).items():
                make_folder(path.parent, made)
                made.append(path)
                path.write_text(text)
                if text.startswith("#!"):
                    path.chmod(0o755)
            for path, text in laid_out(plan.changed).items():
                path.write_text(text)
            for path in plan.removed:
                path.unlink()
    except BaseException as error:
        undo(made, before)
        if isinstance(error, OSError):  # a full disk has no file's name
            where = error.filename or path
            raise CannotMake(f"cannot write {where}: {error.strerror}; everything is as it was") from error
        raise


def report(plan: Plan, root: Path) -> None:
    for heading, paths in (("Wrote", plan.new), ("Removed", plan.removed), ("Changed", plan.changed)):
        if paths:
            print(f"{heading} in {root}:")
            print("".join(f"  {path.relative_to(root)}\n" for path in paths), end="")


# ---- the commands ----

NEXT = {
    "op": """
Next:
  make test ARGS="-k {name}"    builds it and tests it as it stands
  Then put your arithmetic into {name}_cpu_kernel.h and {name}_cuda.cu, and your formula into {name}.h,
  functional/{name}.py (docstring and derivatives) and reference.py; what it alone promises into its test.
  make docs    writes what its docstring says by then into docs/ops.md
docs/TEMPLATE_USAGE.md says more. "python -m extension_cpp remove {name}" takes it out again.""",
    "operator": """
Next:
  make test ARGS="-k {name}"    builds it; the tests of its values say where the formula is missing
  Write the formula into reference.py, {name}_cpu_kernel.h and {name}_cuda.cu, and say what it is in {name}.h and
  functional/{name}.py.
  make docs    writes what its docstring says by then into docs/ops.md
docs/TEMPLATE_USAGE.md says more. "python -m extension_cpp remove {name}" takes it out again.""",
    "example": """
Next:
  python -m pytest -s examples/{name}    compiles it and tests it as it stands
  Then put your arithmetic into {name}.cpp and {name}_cuda.cu (f and derivative), and into reference in {name}.py.
  To take it out again, delete the folder.""",
    "removal": """
Next:
  make build    without it: until then the library still holds the op""",
    "package": """
Next:
  cd {folder}
  make test    builds it in a .venv of its own and tests it; PYTHON=/path/to/python: in an environment of yours
  Then put your arithmetic into {name}/csrc/{op}/. README.md says how to rename the op, and how to add another.""",
}


def check_place(command: str) -> None:
    """Refuses to change this tree where the current folder belongs to another: a package of new-package, a second
    checkout."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        build = folder / "build_library.py"
        found = re.search(r'^NAMESPACE = "(\w+)"', build.read_text(), re.MULTILINE) if build.is_file() else None
        if found is None:
            continue
        if folder.samefile(TREE):
            return
        by_hand = "README.md there says how to add an op by hand"
        raise CannotMake(
            f"'{command}' works on the extension_cpp in {TREE}, and you are in the package {found[1]} in {folder}: "
            f"{'run it in that folder' if found[1] == 'extension_cpp' else by_hand}"
        )


def new(name: str, kind: str, operator: Operator | None = None) -> None:
    """Adds an op to this source tree; for the kind accessor, an example. An operator comes from --schema."""
    check_place("new")
    if TREE == INSTALLED:
        raise CannotMake(
            "'new' adds an op to a checkout of extension_cpp, and this one is installed; to make a package of your own "
            "use 'python -m extension_cpp new-package DIR --name my_kernels'"
        )
    if operator is not None:
        plan, following = plan_operator(operator), "operator"
    elif kind == "accessor":
        plan, following = plan_accessor(name), "example"
    else:
        plan, following = plan_op(name, kind), "op"
    write(plan)
    report(plan, TREE)
    print(NEXT[following].format(name=name))


def remove(name: str) -> None:
    """Takes an op out of this source tree: what `new` wrote, and what was compiled of it."""
    check_place("remove")
    if TREE == INSTALLED:
        raise CannotMake("'remove' takes an op out of a checkout of extension_cpp, and this one is installed")
    plan = plan_removal(name)
    write(plan)
    for folder in (TREE / "extension_cpp" / "csrc" / name, *compiled(name)):
        shutil.rmtree(folder)
    report(plan, TREE)
    print(NEXT["removal"])


def new_package(folder: Path, name: str, kind: str) -> None:
    """Writes a package of its own, with one op."""
    plan = plan_package(folder, name, kind)
    write(plan)
    report(plan, folder)
    print(NEXT["package"].format(folder=shlex.quote(str(folder)), name=name, op=FIRST_OP[kind]))

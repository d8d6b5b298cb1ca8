"""Implements `new` and `remove`, which add an op from a schema to the user's tree, and remove it again.

A package made by new-package has its own copy of this file, of the files that it imports, and of the code that ops
share. The command runs in the tree that it changes, so that its files fit the others there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from . import generate, generate_python, generate_shim, generate_tests, roles, schema, tree
from .errors import CannotMake, require
from .schema import Operator
from .tree import Addition, Plan

NEXT = """
Next:
  make test ARGS="-k {name}"    builds it and tests it{state}
  Write the formula into {name}_cpu_kernel.h, {name}_cuda.cu and reference.py, and say what it is in {name}.h and
  functional/{name}.py (docstring and derivatives); what it alone promises, into its test.
docs/TEMPLATE_USAGE.md says more. "python -m extension_cpp remove {name}" takes it out again."""
NEXT_WITHOUT = """
Next:
  make build    without it: until then the library still holds the op"""
UNWRITTEN = "; the tests of its values say where the formula is missing"
OF_SCHEMA = ("dtype", "shape", "role", "grad", "save", "work")


# ---- the command line ----


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one sentence, without the usage that argparse would print before it."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def add_place(command: argparse.ArgumentParser) -> None:
    text = "a folder in the tree to change (default: the current folder)"
    command.add_argument("--in", dest="place", metavar="DIR", type=Path, default=Path(), help=text)


def add_new(commands: "argparse._SubParsersAction[Parser]", description: str) -> Parser:
    new = commands.add_parser("new", help="add an op to the tree in which you are", description=description)
    new.add_argument("name", metavar="NAME", help="the op: lower case, free in C, C++, Python and this package")
    add_place(new)
    add_schema(new)
    new.set_defaults(run=run_new, kind=None)
    return new


def add_remove(commands: "argparse._SubParsersAction[Parser]") -> None:
    remove = commands.add_parser(
        "remove",
        help="take an op out of the tree in which you are",
        description="Deletes all that `new` wrote: the op's kernels, spec and test, and its parts of ops.py, "
        "reference.py, README and docs/ops.md; and what was compiled of it. Refuses an op that other code "
        "uses. Needs nothing compiled.",
    )
    remove.add_argument("name", metavar="NAME", help="the op")
    add_place(remove)
    remove.set_defaults(run=lambda options: remove_op(options.name))


def add_schema(command: argparse.ArgumentParser) -> None:
    """Adds --schema and its options, which describe an operator in place of a template."""
    group = command.add_argument_group(
        "an operator of your own", "in place of --kind; docs/TEMPLATE_USAGE.md says more"
    )
    group.add_argument("--schema", help='PyTorch\'s text, such as "topk(Tensor x, SymInt k) -> (Tensor y, Tensor i)"')
    for option, form, text in (
        ("--dtype", "NAME=DTYPE", "of results and arguments (default: that of the first tensor)"),
        ("--shape", "NAME=SHAPE", 'of results: "x", or "[*x[:-1], k]" (default: the first tensor\'s)'),
        ("--role", "NAME=ROLE", 'of arguments: "[*, n]", like:x, mask:x, index:SIZE or any'),
    ):
        group.add_argument(option, nargs="+", default=[], metavar=form, help=text)
    group.add_argument("--grad", type=_names, metavar="NAMES", help="the differentiable arguments")
    group.add_argument("--save", type=_names, metavar="NAMES", help='what backward reads; "" is nothing')
    group.add_argument("--work", help="the work items: flat (default), rows or items=SHAPE")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def described(options: argparse.Namespace, name: str | None) -> Operator | None:
    """Returns the operator of --schema, or None without --schema. A `name` must equal the operator's."""
    if options.schema is None:
        given = next((option for option in OF_SCHEMA if getattr(options, option)), None)
        require(given is None, f"--{given} goes with --schema")
        return None
    require(options.kind is None, "expected --schema or --kind, but got both")
    operator = schema.parse(options.schema)
    require(name in (None, operator.name), f"expected the schema of {name}, but got one of {operator.name}")
    roles.describe(operator, options)
    return operator


def run_new(options: argparse.Namespace) -> None:
    operator = described(options, options.name)
    if operator is None:
        raise CannotMake("expected --schema: a package has no templates")
    new(from_schema(operator), UNWRITTEN)


def run_elsewhere(options: argparse.Namespace) -> int | None:
    """Runs the command of the tree to change and returns its exit status, or None if that is this tree."""
    place = options.place.resolve()
    found = tree.tree_of(place)
    if found is None:
        raise CannotMake(
            f"'{options.command}' works on a checkout of extension_cpp or a package made by "
            f"new-package, and {place} is in neither: go there, or name it with --in DIR"
        )
    root, name = found
    if root.samefile(tree.TREE):
        return None
    lacks = f"the package {name} in {root} has no command of its own; 'new-package --update {root}' brings it"
    require((root / name / "command" / Path(__file__).name).exists(), lacks)
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [sys.executable, "-m", name, *options.words, "--in", str(root)]
    return subprocess.run(words, cwd=root, env=os.environ | {"PYTHONPATH": path}).returncode


def dispatch(parser: Parser, words: Sequence[str] | None) -> int:
    """Runs one of the parser's commands and returns its exit status."""
    words = sys.argv[1:] if words is None else words
    options = parser.parse_args(words)
    if options.command is None:
        parser.error(f"expected one of the commands {', '.join(options.commands)}")
    options.words = words
    try:
        status = run_elsewhere(options) if "place" in options else None
        return status if status is not None else options.run(options) or 0
    except CannotMake as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run_command(main: Callable[[], int]) -> NoReturn:
    """Runs main() and exits with its status. An interrupt or a closed pipe (`info | head`) causes no traceback."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()  # flushes here, because Python's own flush at exit would print a traceback
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards what is still in the buffer
        status = 141  # as a shell reports SIGPIPE
    sys.exit(status)


# ---- adding an op ----


def from_schema(operator: Operator) -> Addition:
    """Returns an op whose kernels write zeros until the user writes the formula."""
    name, folder = operator.name, f"extension_cpp/csrc/{operator.name}/{operator.name}"
    tree.check_identifier("op", name.removesuffix("_"))
    row, section = generate_python.documents(operator)
    functional = generate_python.functional(operator)
    underived = "WRITES" if operator.written else "NOT_DIFFERENTIABLE"
    files = {
        f"{folder}.h": generate.header(operator),
        f"{folder}.cpp": generate_shim.shim(operator),
        f"{folder}_cpu.c": generate.cpu(operator),
        f"{folder}_cpu_kernel.h": generate.cpu_kernel(operator),
        f"{folder}_cuda.cu": generate.cuda(operator),
        f"extension_cpp/functional/{name}.py": functional,
        f"tests/specs/{name}.py": generate_tests.spec(operator),
        f"tests/test_{name}.py": generate_tests.test(operator),
    }
    return Addition(
        name,
        files,
        entry=generate_python.entry(name, tree.top_level_names(functional), underived),
        reference=generate_python.reference(operator),
        stub=generate_python.stub(operator),
        row=row,
        section=section,
        own={"call", "checks", "torch"},
    )


def new(op: Addition, state: str) -> None:
    """Adds an op to this repository. `state` says what its tests do before the user writes anything."""
    texts = tree.sources()
    tree.check_free(op, texts)
    plan = Plan(tree.in_tree(op.files), tree.in_tree(tree.with_op(texts, op)))
    tree.write(plan)
    tree.report(plan, tree.TREE)
    print(NEXT.format(name=op.name, state=state))


# ---- removing an op ----


def remove_op(name: str) -> None:
    """Removes an op from this repository: only what `new` writes and the compiled files, and nothing that other code
    uses."""
    tree.check_identifier("op", name.removesuffix("_"))
    folder = tree.TREE / "extension_cpp" / "csrc" / name
    example = " (an example is a folder: delete it)" if (tree.TREE / "examples" / name).exists() else ""
    lacks = f"no {folder.relative_to(tree.TREE)}/{name}.cpp{example}"
    require((folder / f"{name}.cpp").exists(), f"there is no op '{name}': {lacks}")
    compiled = [*tree.TREE.glob(f"build/*/{name}"), *tree.TREE.glob(f"build/*/*/{name}")]
    places = f"extension_cpp/functional/{name}.py", f"tests/specs/{name}.py", f"tests/test_{name}.py"
    python = (tree.TREE / place for place in places)
    plan = Plan(removed=[path for path in (*sorted(folder.rglob("*")), *python) if path.is_file()])
    for path in (*plan.removed, *compiled):
        is_there = path.resolve() == tree.TREE.resolve() / path.relative_to(tree.TREE)
        require(is_there, f"{path} is behind a symbolic link, and 'remove' deletes only what 'new' wrote")
    check_unused(name, plan)
    plan.changed = tree.in_tree(tree.without_op(tree.sources(), name))
    tree.write(plan)
    for path in (folder, *compiled):
        shutil.rmtree(path)
    tree.report(plan, tree.TREE)
    print(NEXT_WITHOUT)


def check_unused(name: str, plan: Plan) -> None:
    """Refuses to remove an op that other code calls. A test that calls it fails by itself."""
    modules = "ops|extension_cpp|reference|_ops"
    word = re.compile(rf'\b(?:{modules})\.{name}(?:_\w+)?\b|#include "{name}/|Gate\([^)]*"{name}"')
    sources = [path for part in ("extension_cpp", "benchmarks", "examples") for path in (tree.TREE / part).rglob("*")]
    for path in sorted(sources):
        if path in plan.removed or path.suffix not in (".py", *tree.C_SUFFIXES) or "build" in path.parts:
            continue
        found = word.search(path.read_text())
        if found is not None:
            raise CannotMake(f"{path.relative_to(tree.TREE)} uses {found[0]}; take that out first")

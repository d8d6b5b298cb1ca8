"""The command line: python -m extension_cpp demo, info, new, remove, new-package, check."""

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import extension_cpp

from .command import scaffold

DEMO_NEEDS = ("rich", "matplotlib")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence, where argparse would put the usage in front of it."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, but got '{text}'")
    return int(text)


def parser() -> Parser:
    top = Parser(prog="python -m extension_cpp", description="PyTorch operators in plain C and CUDA C: see them work.")
    top.add_argument("--version", action="version", version=f"extension_cpp {extension_cpp.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    top.set_defaults(commands=commands.choices)
    demo = commands.add_parser(
        "demo",
        help="compare every operator with eager PyTorch, then convert and train a small language model",
        description="Shows every operator's error and speed beside eager PyTorch's. Then trains a small byte-level "
        "language model on the English text that ships with Python, once as torch.nn has it and once converted to this "
        "package's operators, and compiles both. Writes a picture of both loss curves into out/. Under 2 minutes on 2 "
        "cores. Exit status 1: the losses differ by more than 1e-3 within the first 50 steps.",
    )
    demo.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where a GPU and this build allow it, else cpu"
    )
    demo.add_argument(
        "--steps", type=positive, metavar="N", help="training steps of each model (default: 300)", default=300
    )
    demo.set_defaults(run=run_demo)
    information = commands.add_parser(
        "info",
        help="say what was built, what this machine has, and whether they fit",
        description="Prints whether the library and this machine fit and what to do where they do not, versions, what "
        "the library was built for and what this machine has. Put it into a bug report. Exit status 1: the package "
        "cannot be used here. With --plan: which GPU kernel a norm runs, and in which shape.",
    )
    information.add_argument("--schemas", action="store_true", help="print the schema of every operator, too")
    add_plan(information)
    information.set_defaults(run=run_info)
    new = commands.add_parser(
        "new",
        help="add an op to this source tree, from a template",
        description="Copies a template under another name: kernels, schema, Python function, reference, spec, test and "
        "README's row; for the kind accessor a folder of examples/. What it writes compiles and passes its tests as it "
        "stands; then change the arithmetic. Needs nothing compiled.",
    )
    new.add_argument("name", metavar="NAME", help="the op: lower case, free in C, C++, Python and this package")
    add_kind(new, scaffold.KINDS)
    add_schema(new)
    new.set_defaults(run=run_new, kind=None)
    remove = commands.add_parser(
        "remove",
        help="take an op out of this source tree again",
        description="Deletes all that `new` wrote: the op's kernels, spec and test, and its parts of ops.py, "
        "reference.py, README and docs/ops.md; and what was compiled of it. Refuses an op that other code "
        "uses. Needs nothing compiled.",
    )
    remove.add_argument("name", metavar="NAME", help="the op")
    remove.set_defaults(run=lambda options: scaffold.remove(options.name))
    package = commands.add_parser(
        "new-package",
        help="write a package of its own, with one op from a template",
        description="Writes a stand-alone package: build script, tests, CI script and one op, whose wheel is one file "
        "for every Python from 3.10 and every torch from 2.10.",
    )
    package.add_argument("folder", metavar="DIR", type=Path, help="where to: a folder that does not exist or is empty")
    package.add_argument("--name", required=True, help="the package, its C++ namespace and torch.ops.NAME")
    add_kind(package, scaffold.OP_KINDS)
    package.set_defaults(run=lambda options: scaffold.new_package(options.folder, options.name, options.kind))
    add_check(commands)
    return top


def add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="try an operator that somebody else registered",
        description="Imports MODULE, calls the operator with samples, and prints a line for each check: opcheck, "
        "values beside the reference in float64, gradients, other sizes and layouts, cached results, what is written "
        "after the call, time. docs/check.md says more. Exit status 1: a check refuses the operator.",
    )
    check.add_argument("module", metavar="MODULE", help="the module whose import registers the operator")
    check.add_argument("operator", metavar="OP", help="such as my_package::my_op, or aten::mul.Tensor")
    check.add_argument("--reference", metavar="MODULE:FUNCTION", help="the same in plain PyTorch, for float64 tensors")
    check.add_argument(
        "--sample",
        action="append",
        default=[],
        help='the arguments, such as "(torch.randn(64, 1024), 1e-5)"; may be given several times',
    )
    check.add_argument("--spec", metavar="FILE", help="a Python file with `spec`, an OpSpec, or samples(device, dtype)")
    check.add_argument("--random", action="store_true", help="its results are random: compare statistics and seeds")
    check.add_argument("--device", choices=("cpu", "cuda"), help="default: all where the operator has a kernel")
    check.set_defaults(run=run_check)


def add_schema(command: argparse.ArgumentParser) -> None:
    """What --schema makes an operator of, in place of a template."""
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
    group.add_argument(
        "--grad", type=lambda text: text.split(","), metavar="NAMES", help="the differentiable arguments"
    )
    group.add_argument("--save", type=lambda text: text.split(","), metavar="NAMES", help="what backward reads")
    group.add_argument("--work", help="the work items: flat (default), rows or items=SHAPE")


def run_new(options: argparse.Namespace) -> None:
    of_schema = [name for name in ("dtype", "shape", "role", "grad", "save", "work") if getattr(options, name)]
    if options.schema is None:
        if of_schema:
            raise scaffold.CannotMake(f"--{of_schema[0]} goes with --schema")
        return scaffold.new(options.name, options.kind or scaffold.KINDS[0])
    if options.kind is not None:
        raise scaffold.CannotMake("expected --schema or --kind, but got both")
    from .command import roles, schema

    parsed = schema.parse(options.schema)
    if parsed.name != options.name:
        raise scaffold.CannotMake(f"expected the schema of {options.name}, but got one of {parsed.name}")
    words = options.dtype, options.shape, options.role
    return scaffold.new(
        options.name, "", roles.describe(parsed, *words, options.grad, options.save, options.work or "flat")
    )


def add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--plan",
        nargs=3,
        metavar=("OP", "DTYPE", "ROWSxCOLS"),
        help="print how an H100 would run a norm, such as: --plan rms_norm bfloat16 4096x5120",
    )
    command.add_argument("--backward", action="store_true", help="with --plan: its backward")
    command.add_argument("--weights", metavar="DTYPE", help="with --plan: the type of the weights")


def plan_arguments(options: argparse.Namespace) -> tuple[str, str, int, int]:
    """--plan's words, checked."""
    from .command import info

    op, dtype, shape = options.plan
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", shape)
    if op not in info.NORMS:
        raise SystemExit(f"error: expected OP to be one of {', '.join(info.NORMS)}, but got '{op}'")
    for name in (dtype, options.weights or dtype):
        if name not in info.DTYPES:
            raise SystemExit(f"error: expected DTYPE to be one of {', '.join(info.DTYPES)}, but got '{name}'")
    if match is None:
        raise SystemExit(f"error: expected ROWSxCOLS such as 4096x5120, but got '{shape}'")
    return op, dtype, int(match[1]), int(match[2])


def add_kind(command: argparse.ArgumentParser, kinds: Sequence[str]) -> None:
    command.add_argument("--kind", choices=kinds, default=kinds[0], help=f"the template (default: {kinds[0]})")


def missing_for(what: str) -> str:
    """A sentence if a package that shows things is missing; else nothing."""
    names = " ".join(name for name in DEMO_NEEDS if importlib.util.find_spec(name) is None)
    return f"{what} needs {names}, not installed here: {sys.executable} -m pip install {names}" if names else ""


def fail(message: object) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


def run_demo(options: argparse.Namespace) -> int:
    if problem := extension_cpp.load_error or missing_for("the demo"):
        return fail(problem)
    from .command import demo

    try:
        return demo.run(options.device, options.steps)
    except demo.CannotRun as error:
        return fail(error)


def run_info(options: argparse.Namespace) -> int:
    from .command import info

    if (options.backward or options.weights) and not options.plan:
        return fail("--backward and --weights go with --plan")
    if options.plan and not extension_cpp.load_error:
        return info.run_plan(*plan_arguments(options), options.backward, options.weights)
    return info.run(str(extension_cpp.load_error or ""), options.schemas)


def run_check(options: argparse.Namespace) -> int:
    from .command import check

    try:
        return check.run(options)
    except check.CannotCheck as error:
        return fail(error)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.command is None:
        parser().error(f"expected one of the commands {', '.join(options.commands)}")
    try:
        return options.run(options) or 0
    except scaffold.CannotMake as error:
        return fail(error)


def run_command(main: Callable[[], int]) -> NoReturn:
    """Exits with the status of main(); an interrupt and a closed pipe (`info | head`) end it without a traceback."""
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()  # here, because Python's own flush at exit would print a traceback
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        status = 141  # as a shell reports SIGPIPE
    sys.exit(status)


if __name__ == "__main__":
    run_command(main)

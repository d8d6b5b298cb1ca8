"""Implements the command line: python -m extension_cpp demo, info, new, remove, new-package, check."""

import argparse
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import extension_cpp

from .command import info, package, scaffold
from .command.errors import CannotMake
from .command.new import Parser, add_new, add_remove, add_schema, dispatch, run_command


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
    information.add_argument(
        "--plan",
        nargs=3,
        metavar=("OP", "DTYPE", "ROWSxCOLS"),
        help="print how an H100 would run a norm, such as: --plan rms_norm bfloat16 4096x5120",
    )
    information.add_argument("--backward", action="store_true", help="with --plan: its backward")
    information.add_argument("--weights", metavar="DTYPE", help="with --plan: the type of the weights")
    information.set_defaults(run=info.run)
    new = add_new(
        commands,
        "Makes an op of a schema, or copies a template under another name: kernels, schema, Python function, "
        "reference, spec, test and documents; for the kind accessor a folder of examples/. What it writes compiles; a "
        "template passes its tests as it stands. Needs nothing compiled.",
    )
    add_kind(new, scaffold.KINDS)
    new.set_defaults(run=scaffold.run_new, kind=None)
    add_remove(commands)
    add_package(commands)
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


def add_package(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = commands.add_parser(
        "new-package",
        help="write a package of its own, with one op",
        description="Writes a stand-alone package: build script, tests, CI script and one op, whose wheel is one file "
        "for every Python from 3.10 and every torch from 2.10. With --update: brings a package this version of the "
        "files that it has a copy of.",
    )
    command.add_argument("folder", metavar="DIR", type=Path, help="where to: a folder that does not exist or is empty")
    command.add_argument("--name", help="the package, its C++ namespace and torch.ops.NAME")
    command.add_argument("--op", help="the name of its first op (default: the schema's or the template's own)")
    command.add_argument("--update", action="store_true", help="update the copied files of the package in DIR")
    command.add_argument("--dry-run", action="store_true", help="with --update: list the files, and write nothing")
    add_kind(command, scaffold.OP_KINDS)
    add_schema(command)
    command.set_defaults(run=package.run, kind=None)


def add_kind(command: argparse.ArgumentParser, kinds: Sequence[str]) -> None:
    command.add_argument("--kind", choices=kinds, default=kinds[0], help=f"the template (default: {kinds[0]})")


def missing_for(what: str) -> str:
    """Returns a message that names the packages for the demo that are not installed, or "" if none is missing."""
    names = " ".join(name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None)
    return f"{what} needs {names}, not installed here: {sys.executable} -m pip install {names}" if names else ""


def run_demo(options: argparse.Namespace) -> int:
    if problem := extension_cpp.load_error or missing_for("the demo"):
        raise CannotMake(problem)
    from .command import demo

    return demo.run(options.device, options.steps)


def run_check(options: argparse.Namespace) -> int:
    from .command import check

    return check.run(options)


def main(words: Sequence[str] | None = None) -> int:
    return dispatch(parser(), words)


if __name__ == "__main__":
    run_command(main)

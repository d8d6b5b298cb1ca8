"""The command line: python -m extension_cpp new, remove."""

from collections.abc import Sequence

from .command.new import Parser, add_new, add_remove, dispatch, run_command


def main(words: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m extension_cpp", description="Adds operators to this package, and takes them out.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parser.set_defaults(commands=commands.choices)
    add_new(commands, "Makes an op of a schema: kernels, Python function, reference, spec, test and documents.")
    add_remove(commands)
    return dispatch(parser, words)


if __name__ == "__main__":
    run_command(main)

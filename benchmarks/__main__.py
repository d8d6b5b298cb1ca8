"""python -m benchmarks times the ops (run.py). Its commands compare and plot show results.

host times what a call of layer_norm costs the host in each software layer, or a call of other ops. linear_loss times
linear_cross_entropy beside its matrix products. processes times the training step of an example on one process and on
several.
"""

import importlib
import sys
from collections.abc import Sequence

from extension_cpp.__main__ import run_command

COMMANDS = ("compare", "host", "linear_loss", "plot", "processes")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words.pop(0) if words and words[0] in COMMANDS else "run"
    return importlib.import_module(f"benchmarks.{name}").main(words)


if __name__ == "__main__":
    run_command(main)

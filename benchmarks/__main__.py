"""python -m benchmarks: times the ops (run.py); compare, plot and report look at what was written."""

import importlib
import sys
from collections.abc import Sequence

LOOKS = ("compare", "plot", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in LOOKS:
        return importlib.import_module(f"benchmarks.{words[0]}").main(words[1:])
    return importlib.import_module("benchmarks.run").main(words)


if __name__ == "__main__":
    sys.exit(main())

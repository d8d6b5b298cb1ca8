"""Implements ``only`` and ``skip`` of nn.convert, by which the caller chooses what is changed."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from .activations import KNOWN

# The functions that `changed` may name, without suffixes such as " with approximate='tanh'".
FUNCTIONS = (
    "layer_norm",
    "rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    *dict.fromkeys(known.function for known in KNOWN.values()),
    *dict.fromkeys(known.gated for known in KNOWN.values()),
    "dropout",
    "softmax",
    "log_softmax",
    "rotary_embedding",
    "cross_entropy",
    "linear_cross_entropy",
)


class Choice:
    """Decides by ``only`` and ``skip`` of convert which modules of a model may change."""

    def __init__(self, only: Iterable[str] | None, skip: Iterable[str], model: torch.nn.Module) -> None:
        self.only = None if only is None else _items("only", only, model)
        self.skip = _items("skip", skip, model)

    def may_change(self, name: str) -> bool:
        """Returns whether a module may be changed, as far as its name decides."""
        if any(fnmatchcase(name, item) for item in self.skip if item not in FUNCTIONS):
            return False
        return self.only is None or any(item in FUNCTIONS or fnmatchcase(name, item) for item in self.only)

    def wants(self, name: str, function: str) -> bool:
        """Returns whether the caller wants a module to call a function."""

        def named(items: list[str]) -> bool:
            return any(item == function if item in FUNCTIONS else fnmatchcase(name, item) for item in items)

        function = function.split(" ")[0]
        return (self.only is None or named(self.only)) and not named(self.skip)


def _items(argument: str, items: Iterable[str], model: torch.nn.Module) -> list[str]:
    """Returns the items as a list, and refuses an item that matches nothing, because it is a mistake of the caller."""
    listed = [items] if isinstance(items, str) else list(items)
    names = [name for name, _ in model.named_modules()]
    for item in listed:
        if item not in FUNCTIONS and not any(fnmatchcase(name, item) for name in names):
            raise ValueError(
                f"extension_cpp.nn.convert: expected {argument} to hold functions ({', '.join(FUNCTIONS)}) or patterns "
                f"of module names, but '{item}' is neither"
            )
    return listed

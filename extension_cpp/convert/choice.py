"""Implements ``only`` and ``skip`` of nn.convert, by which the caller chooses what is changed."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

import torch

from .activations import KNOWN

# The names of functions in Converted.changed, without suffixes such as " with approximate='tanh'".
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
        """Returns whether ``only`` and ``skip`` may allow a change of the module with this name, whatever it calls."""
        if any(fnmatchcase(name, item) for item in self.skip if item not in FUNCTIONS):
            return False
        return self.only is None or any(item in FUNCTIONS or fnmatchcase(name, item) for item in self.only)

    def wants(self, name: str, function: str) -> bool:
        """Returns whether ``only`` and ``skip`` allow that the module with this name calls the function."""

        def named(items: list[str]) -> bool:
            return any(item == function if item in FUNCTIONS else fnmatchcase(name, item) for item in items)

        function = function.split(" ")[0]
        return (self.only is None or named(self.only)) and not named(self.skip)


def _items(argument: str, items: Iterable[str], model: torch.nn.Module) -> list[str]:
    """Returns the items as a list. Raises ValueError if an item is neither a function nor matches a module's name."""
    listed = [items] if isinstance(items, str) else list(items)
    names = [name for name, _ in model.named_modules()]
    for item in listed:
        if item not in FUNCTIONS and not any(fnmatchcase(name, item) for name in names):
            raise ValueError(
                f"extension_cpp.nn.convert: expected {argument} to hold functions ({', '.join(FUNCTIONS)}) or patterns "
                f"of module names, but '{item}' is neither"
            )
    return listed

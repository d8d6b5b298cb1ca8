"""Registers what autocast does with the arguments of an operator."""

from collections.abc import Callable
from typing import Any

import torch
from torch import DispatchKey, DispatchKeySet

from .autograd import library_for, qualified
from .calls import CASTING, NO_GRAD, overload_of


def register_autocast(op: str, device_type: str, cast_inputs: torch.dtype) -> None:
    """Works as torch.library.register_autocast, for an operator and for its no-grad overload."""
    op = qualified(op)
    CASTING.add(op)
    for name in (op, op + NO_GRAD):
        library = library_for(f"Autocast {device_type} {name}", op)
        torch.library.register_autocast(name, device_type, cast_inputs, lib=library)


def register_autocast_rule(op: str, rule: Callable[[str, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Makes autocast call an operator, or its no-grad overload, with what rule(device_type, arguments) returns.

    `arguments` has the arguments of the call by position, defaults included.
    """
    op = qualified(op)
    CASTING.add(op)
    keys = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
    for name in (op, op + NO_GRAD):
        overload = overload_of(name)
        defaults = tuple(argument.default_value for argument in overload._schema.arguments)
        for device_type in ("cpu", "cuda"):

            def kernel(
                *args: Any, overload: Any = overload, device_type: str = device_type, defaults: Any = defaults
            ) -> Any:
                with torch._C._ExcludeDispatchKeyGuard(keys):
                    return overload(*rule(device_type, (*args, *defaults[len(args) :])))

            library = library_for(f"Autocast {device_type} {name}", op)
            library.impl(name.split("::")[1], kernel, f"Autocast{device_type.upper()}")

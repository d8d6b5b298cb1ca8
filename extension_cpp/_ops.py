"""The operators as Python functions: what calls.operators makes of them. Their types may be in _ops.pyi."""

from typing import TYPE_CHECKING, Any

from .registration.calls import operators

globals().update(vars(operators()))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

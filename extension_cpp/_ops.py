"""Makes the operators available as Python functions, by calls.operators(). _ops.pyi has the types of those with a
no-grad overload."""

from typing import TYPE_CHECKING, Any

from .registration.calls import operators

globals().update(vars(operators()))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

"""The operators as Python functions: what autograd.operators makes of them. Their types may be in _ops.pyi."""

from typing import TYPE_CHECKING, Any

from .registration.autograd import operators

globals().update(vars(operators()))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

"""Holds a Python function for each operator, made by calls.operators(). _ops.pyi has the functions' types."""

from typing import TYPE_CHECKING, Any

from .registration.calls import operators

globals().update(vars(operators()))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

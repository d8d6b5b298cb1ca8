"""The operators as Python functions: what autograd.operators makes of them."""

from typing import TYPE_CHECKING, Any

from extension_cpp.autograd import operators

globals().update(vars(operators("extension_cpp")))

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

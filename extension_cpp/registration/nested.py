"""Runs operators on jagged nested tensors: an operator on rows or elements runs once, on the rows of all tensors.

Importing this module registers a rule for every operator. Operators whose entry in ops.py is not marked BY_ROWS raise
an error for nested tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from . import checks
from .autograd import library_for
from .calls import overloads, without_suffix
from .entries import BY_ROWS, NESTED, PADDED, Mark


def register_nested(op: Any) -> None:
    """Registers what an operator does with jagged tensors: it runs on their values(), or raises an error."""
    overload = op._schema.name.split("::")[1]
    name = without_suffix(overload)
    mark = NESTED.get(name.removesuffix("_backward").removesuffix("_double"))
    rule = _by_rows(name) if mark is BY_ROWS else _refuse(name, mark)
    library = library_for(f"Nested {op}", op._schema.name)
    torch.library.register_torch_dispatch(op, NestedTensor, rule, lib=library)


def _refuse(name: str, mark: Mark | None) -> Callable[..., Any]:
    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A sum along a sequence cannot run on values() alone, which does not say where the sequence ends.
        hint = "pad it (to_padded_tensor)" if mark is PADDED else "call it on the tensor's values()"
        checks.fail(name, f"expected no nested tensor; {hint}")

    return rule


def _by_rows(name: str) -> Callable[..., Any]:
    def rule(mode: Any, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = next(x for x in args if isinstance(x, NestedTensor))
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if isinstance(x, NestedTensor):
                jagged = f"expected {argument.name} to be jagged in dimension 1"
                checks.check(name, x._ragged_idx == 1, f"{jagged}, but got {x._ragged_idx}")
                same = f"expected {argument.name} to have the offsets of the other nested tensors"
                checks.check(name, x._size[1] == first._size[1], same)
            elif argument.name == "normalized_shape":
                dims = first.dim() - 2
                expected = f"expected normalized_shape to have at most {dims} dimensions, those behind the jagged one"
                checks.check(name, len(x) <= dims, f"{expected}, but got {list(x)}")
        results = func(*(x.values() if isinstance(x, NestedTensor) else x for x in args), **kwargs)
        shape = first.values().shape
        return torch.utils._pytree.tree_map_only(Tensor, lambda y: _like(y, first) if y.shape == shape else y, results)

    return rule


def _like(values: Tensor, nested: NestedTensor) -> Tensor:
    """Returns a nested tensor with the structure of `nested` and other values."""
    return torch.nested.nested_tensor_from_jagged(values, nested.offsets(), nested.lengths())


for _name, _op in overloads().items():
    if "." not in _name:
        register_nested(_op)

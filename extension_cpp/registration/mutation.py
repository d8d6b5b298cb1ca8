"""Registers with autograd the operators that write into an argument."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import DispatchKey, DispatchKeySet, Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_iter, tree_map_only

from .autograd import has_tangent, keys_below, library_for, qualified
from .calls import overload_of

_AFTER_VIEWS = keys_below(DispatchKey.ADInplaceOrView)


def register_mutation(op: str) -> None:
    """Tells autograd that an operator writes into the arguments that have Tensor(a!) in its schema.

    Each call increases the version counter of every argument that it writes into, so that a backward which needs the
    former values raises an error. An argument that requires grad is an error, because the operator has no derivative.

    Args:
        op: "name" or "name.overload" of an operator of this package, or of any with "namespace::" before it.
    """
    op = qualified(op)
    overload = overload_of(op)
    places = [
        (place, argument.name)
        for place, argument in enumerate(overload._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    written = " and ".join(name for _, name in places)
    refusal = f"{op}: expected no argument to require grad: it writes into {written}, and is not differentiable"
    if all(overload._schema.arguments[place].is_out for place, _ in places):  # in the words of PyTorch
        refusal = (
            f"{op}: functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )

    def targets(args: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Tensor]:
        for place, name in places:
            given = args[place] if place < len(args) else keywords.get(name)
            yield from (x for x in tree_iter(given) if isinstance(x, Tensor))

    # For tensors made in inference mode, which have no version counter, the dispatcher skips this kernel.
    def counted(keys: DispatchKeySet, *args: Any, **keywords: Any) -> Any:
        tensors = [x for x in tree_iter((args, keywords)) if isinstance(x, Tensor)]
        if (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)) or has_tangent(*tensors):
            raise RuntimeError(refusal)
        results = overload.redispatch(keys & _AFTER_VIEWS, *args, **keywords)
        increment_version(targets(args, keywords))
        return results

    # This kernel is for views like z.conj().imag, whose values are the negatives of those in memory. PyTorch's own
    # kernel for such views fails with an internal assertion if an operator returns nothing.
    def negated(*args: Any, **keywords: Any) -> Any:
        plain_args, plain_keywords = tree_map_only(Tensor, torch.resolve_neg, (args, keywords))
        results = overload(*plain_args, **plain_keywords)
        for x, plain in zip(targets(args, keywords), targets(plain_args, plain_keywords), strict=True):
            if x is not plain:
                x.copy_(plain)
        return results

    name = op.split("::")[1]
    library_for(f"ADInplaceOrView {op}", op).impl(name, counted, "ADInplaceOrView", with_keyset=True)
    library_for(f"Negative {op}", op).impl(name, negated, "Negative")
    library_for(op, op).impl(name, torch.library.fallthrough_kernel, "Autograd")

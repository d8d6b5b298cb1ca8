"""Supports operators that take or return lists of tensors. Autograd sees each tensor of a list as a separate one."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from torch._functorch.utils import unwrap_dead_wrappers


def is_list(of_schema: Any) -> bool:
    """Returns whether an argument or a result of a schema is a list of tensors."""
    return str(of_schema.type) == "List[Tensor]"


def list_places(op: Any) -> frozenset[int]:
    """Returns the positions of the arguments of an operator that are lists of tensors."""
    return frozenset(place for place, argument in enumerate(op._schema.arguments) if is_list(argument))


def one_by_one(args: tuple[Any, ...], lists: frozenset[int]) -> tuple[Any, ...]:
    """Returns the arguments with each list of tensors replaced by its tensors."""
    if not lists:
        return args
    return tuple(itertools.chain.from_iterable(x if place in lists else (x,) for place, x in enumerate(args)))


class FunctionOfLists:
    """Applies an autograd.Function for an operator with lists of tensors. The Function gets each tensor of a list as a
    separate argument. Its last argument is a tuple with the length of each list, and None for each other argument."""

    def __init__(self, make: Any, forward: Any, backward: Any, lists: frozenset[int], returns_list: bool) -> None:
        self.lists, self.returns_list = lists, returns_list

        def forward_of_tensors(ctx: Any, *args: Any) -> Any:
            ctx.lengths = args[-1]
            ctx.needs_input_grad = _in_lists(ctx.needs_input_grad, ctx.lengths, tuple)
            output = forward(ctx, *_in_lists(args, ctx.lengths, list))
            return tuple(output) if returns_list else output

        def backward_of_tensors(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            gradients = tuple(backward(ctx, list(grads)) if returns_list else backward(ctx, *grads))
            each = (x if n is None else x or [None] * n for x, n in zip(gradients, ctx.lengths, strict=True))
            return *one_by_one(tuple(each), lists), None

        self.function = make(forward_of_tensors, backward_of_tensors)

    def apply(self, *args: Any) -> Any:
        lengths = tuple(len(x) if i in self.lists else None for i, x in enumerate(args))
        results = self.function.apply(*unwrap_dead_wrappers(one_by_one(args, self.lists)), lengths)
        return list(results) if self.returns_list else results


def _in_lists(values: Iterable[Any], lengths: tuple[int | None, ...], kind: Callable[..., Any]) -> tuple[Any, ...]:
    left = iter(values)
    return tuple(next(left) if n is None else kind(itertools.islice(left, n)) for n in lengths)

"""`register`, which makes an entry of the table in ops.py: all that Python registers for one operator."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from .autograd import (
    Gradients,
    own_ops,
    register_autocast,
    register_autocast_rule,
    register_autograd,
    register_fake,
    register_not_differentiable,
)
from .mutation import register_mutation


class Mark(str):
    """A value of an entry that is no function."""


# In place of a backward: the derivative of this order is not implemented, and a call of it raises.
NO_SECOND, NO_THIRD = Mark("second"), Mark("third")
# In place of a backward: the operator has no derivative, because it writes into an argument or helps another operator.
WRITES, NOT_DIFFERENTIABLE = Mark("writes"), Mark("not differentiable")
# In place of an autocast rule. Only for CUDA: if both device types have one, torch.compile uses the second registration
# for both.
FLOAT32_ON_CUDA = Mark("float32")
# What nested.py does with the operator and its backward operators: it runs once, on the rows of all tensors together;
# or it refuses jagged tensors, and says that they must be padded. Without a mark it refuses them, too.
BY_ROWS, PADDED = Mark("by rows"), Mark("padded")

NESTED: dict[str, Mark] = {}  # the mark of each operator that has one
AUTOCAST_RULES: dict[str, Callable[..., Any]] = {}  # of each operator that has one


def register(
    op: str,
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Gradients] | Mark,
    setup_context: Callable[..., None] | None = None,
    plain: Callable[..., Any] | None = None,
    autocast: Callable[..., tuple[Any, ...]] | Mark | None = None,
    nested: Mark | None = None,
) -> None:
    """Registers an operator's fake, derivative and autocast rule, and notes what nested.py makes of it.

    Without a setup_context the operator saves its inputs. autograd.py says what the functions take and return.
    """
    register_fake(op)(fake)
    if backward is WRITES:
        register_mutation(op)
    elif backward is NOT_DIFFERENTIABLE:
        register_not_differentiable(op)
    elif isinstance(backward, Mark):
        register_autograd(op, _not_implemented(op, backward))
    else:
        register_autograd(op, backward, setup_context=setup_context or _save_inputs(op), plain=plain)
    if autocast is FLOAT32_ON_CUDA:
        register_autocast(op, "cuda", torch.float32)
    elif callable(autocast):
        register_autocast_rule(op, autocast)
        AUTOCAST_RULES[op] = autocast
    if nested is not None:
        NESTED[op] = nested


def _save_inputs(op: str) -> Callable[..., None]:
    """A setup_context that saves the tensors, the first arguments of an operator. The others become ctx.options."""
    schema = getattr(own_ops, op).default._schema
    count = sum(str(argument.type) == "Tensor" for argument in schema.arguments)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.options = inputs[count:]

    return setup_context


def _not_implemented(op: str, order: str) -> Callable[..., NoReturn]:
    name = op.removesuffix("_backward").removesuffix("_double")

    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(f"extension_cpp::{name}: the {order} derivative is not implemented")

    return backward

"""Implements reduce_sum."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import _ops
from ..registration import checks
from ..registration.autograd import Gradients
from .common import check_dim, is_int


def reduce_sum(input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Sums over one dimension, several or all of them, as torch.sum does.

    Args:
        input: called ``x`` here, any shape.
        dim: the dimension or dimensions to sum over; negative ones count from the end; None or () means all.
        keepdim: whether the summed dimensions stay, with size 1.

    Returns:
        The sums, contiguous, of ``x``'s dtype. A sum over no elements is 0.

    Raises:
        RuntimeError: ``dim`` is not an int, is out of range or named twice, or the dtype is not floating point.

    Differentiable, to any order; the gradient is an expanded view, not written to memory. At most a few dozen terms are
    added in float32 (float64: float64), and these partial sums in float64, in an order that only ``x``'s shape decides.
    """
    return _ops.reduce_sum(input, (dim,) if type(dim) is int else _as_dims(dim), keepdim)


def _as_dims(dim: Any) -> tuple[int, ...] | None:
    """Returns the dimensions as ints, or fails if one is not an int."""
    dims = dim if isinstance(dim, Sequence) or dim is None else (dim,)
    if not all(map(is_int, dims or ())):
        checks.fail("reduce_sum", f"expected dim to be an int, a sequence of ints or None, but got {dim!r}")
    return dims if dims is None else tuple(operator.index(d) for d in dims)


def reduced_dims(x: Tensor, dim: Sequence[int] | None) -> set[int]:
    """Returns the dimensions that reduce_sum sums over, as non-negative numbers."""
    return {d % x.dim() for d in dim} if dim and x.dim() else set(range(x.dim()))


def reduce_sum_fake(x: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    checks.check_dtype("reduce_sum", "x", x)
    dims, seen = max(x.dim(), 1), set[int]()
    for d in dim or ():
        check_dim("reduce_sum", x, d)
        checks.check("reduce_sum", d % dims not in seen, f"expected each dim once, but got {d % dims} twice")
        seen.add(d % dims)
    reduced = reduced_dims(x, dim)
    shape = [1 if d in reduced else size for d, size in enumerate(x.shape) if keepdim or d not in reduced]
    return x.new_empty(shape)


def reduce_sum_setup_context(ctx: Any, inputs: tuple[Tensor, Sequence[int] | None, bool], output: Tensor) -> None:
    x, dim, keepdim = inputs
    ctx.shape = x.shape
    ctx.summed_away = () if keepdim else sorted(reduced_dims(x, dim))


def reduce_sum_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    # The gradient of each term is that of its sum. So the result is a view of grad_out with stride 0, as for torch.sum.
    for d in ctx.summed_away:
        grad_out = grad_out.unsqueeze(d)
    return {"x": grad_out.expand(ctx.shape)}

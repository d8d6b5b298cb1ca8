"""Implements softmax and log_softmax."""

from typing import Any

from torch import Tensor

from .. import _ops
from ..registration.autograd import Gradients
from .common import as_dim, fake_like, wide


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Softmax over one dimension: ``exp(x) / sum(exp(x))``, computed relative to the largest element.

    Args:
        input: called ``x`` here, any shape.
        dim: the dimension of the sum; negative ones count from the end.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. No ``dim`` needs a transposed copy.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point.

    Differentiable, to any order; backward saves only the result. An element of -inf gives 0. A row that is all -inf, or
    has a NaN or +inf, gives NaN, as in torch.softmax. Batch-invariant for rows of equal alignment: a row's result has
    the same bits for any number of rows, and for any sizes of the dimensions before ``dim``. Autocast casts half inputs
    to float32 on CUDA, as in PyTorch.
    """
    return _ops.softmax(input, as_dim("softmax", dim))


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Logarithm of the softmax over one dimension: ``x - log(sum(exp(x)))``, computed relative to the largest element.

    Args:
        input, dim: as for softmax.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. No ``dim`` needs a transposed copy.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point.

    Differentiable, to any order; backward saves only the result. NaN, infinities, batch invariance and autocast are as
    for softmax.
    """
    return _ops.log_softmax(input, as_dim("log_softmax", dim))


class Softmax:
    """Holds the functions that ops.py registers for softmax or log_softmax and its backward operator."""

    def __init__(self, op: str) -> None:
        self.backward_op = getattr(_ops, f"{op}_backward")
        self.fake = fake_like(op, "x", along_dim=True)
        self.backward_fake = fake_like(f"{op}_backward", "grad_out", "y", along_dim=True)

    def setup_context(self, ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        _, ctx.dim = inputs
        ctx.save_for_backward(output)

    def backward(self, ctx: Any, grad_out: Tensor) -> Gradients:
        (y,) = ctx.saved_tensors
        return {"x": self.backward_op(grad_out, y, ctx.dim)}


SOFTMAX, LOG_SOFTMAX = Softmax("softmax"), Softmax("log_softmax")


def softmax_second(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x = (g - sum(g * y)) * y. As a linear map of g = grad_out this is symmetric.
    (grad_out, y), (dim,) = ctx.saved_tensors, ctx.options
    g, p, v = wide(grad_out), wide(y), wide(grad_grad_x)
    grad_y = v * (g - (g * p).sum(dim, keepdim=True)) - g * (v * p).sum(dim, keepdim=True)
    return {"grad_out": _ops.softmax_backward(grad_grad_x, y, dim), "y": grad_y.to(y.dtype)}


def log_softmax_second(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x = g - exp(y) * sum(g), where g = grad_out.
    (grad_out, y), (dim,) = ctx.saved_tensors, ctx.options
    v_p = wide(grad_grad_x) * wide(y).exp()
    grad_grad_out = wide(grad_grad_x) - v_p.sum(dim, keepdim=True)
    grad_y = -v_p * wide(grad_out).sum(dim, keepdim=True)
    return {"grad_out": grad_grad_out.to(grad_out.dtype), "y": grad_y.to(y.dtype)}


def softmax_backward_plain(grad_out: Tensor, y: Tensor, dim: int) -> Tensor:
    g, p = wide(grad_out), wide(y)
    return ((g - (g * p).sum(dim, keepdim=True)) * p).to(y.dtype)


def log_softmax_backward_plain(grad_out: Tensor, y: Tensor, dim: int) -> Tensor:
    g = wide(grad_out)
    return (g - wide(y).exp() * g.sum(dim, keepdim=True)).to(y.dtype)

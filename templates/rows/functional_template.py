"""Implements kernel_template: the public function, and the functions that ops.py registers."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..registration.autograd import Gradients
from ..registration.match import FLOATING, SAME, Match


def kernel_template(x: Tensor) -> Tensor:
    """The mean square of every row: ``mean(x^2)`` over the last dimension.

    Args:
        x: shape (..., features).

    Returns:
        A contiguous tensor of shape (...), of ``x``'s dtype; NaN where there are no features.

    Raises:
        RuntimeError: ``x`` has no dimension, or its dtype is not floating point.

    Differentiable, to any order. Saves ``x``. Batch-invariant: a row's result does not depend on the other rows.
    """
    return _ops.kernel_template(x)


def kernel_template_fake(x: Tensor) -> Tensor:
    match = Match("kernel_template")
    match("x", x, FLOATING, "[*, cols]")
    return x.new_empty(x.shape[:-1])


def kernel_template_backward_fake(grad_out: Tensor, x: Tensor) -> Tensor:
    match = Match("kernel_template_backward")
    match("x", x, FLOATING, "[*, cols]")
    match("grad_out", grad_out, SAME, "[*]")
    return x.new_empty(x.shape)


def kernel_template_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (x,) = ctx.saved_tensors
    return {"x": _ops.kernel_template_backward(grad_out, x)}


def kernel_template_second(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x = grad_out * 2 x / cols is linear in grad_out and in x. Autograd differentiates these operations again.
    grad_out, x = ctx.saved_tensors
    grad_grad_out = (grad_grad_x * x).sum(-1) * 2 / x.shape[-1] if x.shape[-1] else torch.zeros_like(grad_out)
    return {"grad_out": grad_grad_out, "x": kernel_template_backward_plain(grad_out, grad_grad_x)}


def kernel_template_plain(x: Tensor) -> Tensor:
    """Computes the op in plain tensor operations, for forward-mode differentiation."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1).to(x.dtype)


def kernel_template_backward_plain(grad_out: Tensor, x: Tensor) -> Tensor:
    return (2 * grad_out).unsqueeze(-1) * x / x.shape[-1]

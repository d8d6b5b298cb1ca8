"""Implements kernel_template: the public function, and the functions that ops.py registers."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops, reference
from ..registration import checks
from ..registration.autograd import Gradients


def kernel_template(x: Tensor) -> Tensor:
    """The square of every element: ``x * x``.

    Args:
        x: any shape.

    Returns:
        A tensor of ``x``'s shape, and of ``x``'s strides where ``x`` is dense, else dense and in ``x``'s order of
        dimensions, as torch.empty_like.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable, to any order. Saves ``x``.
    """
    return _ops.kernel_template(x)


def kernel_template_fake(x: Tensor) -> Tensor:
    checks.check_dtype("kernel_template", "x", x)
    return torch.empty_like(x)


def kernel_template_backward_fake(grad_out: Tensor, x: Tensor) -> Tensor:
    checks.check_dtype("kernel_template_backward", "x", x)
    checks.check_like("kernel_template_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x)


def kernel_template_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (x,) = ctx.saved_tensors
    return {"x": _ops.kernel_template_backward(grad_out, x)}


def kernel_template_second(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x = grad_out * f'(x). Its derivative in grad_out is f'(x), and in x it is grad_out * f''(x), here 2 *
    # grad_out. Plain tensor operations let autograd differentiate again, to any order.
    grad_out, x = ctx.saved_tensors
    return {"grad_out": _ops.kernel_template_backward(grad_grad_x, x), "x": grad_grad_x * (2 * grad_out)}


kernel_template_plain = reference.kernel_template  # for forward-mode differentiation


def kernel_template_backward_plain(grad_out: Tensor, x: Tensor) -> Tensor:
    return grad_out * (2 * x)

"""The public functions. One section for each op: function, fake, setup_context, backward, register_autograd."""

from typing import Any

import torch
from torch import Tensor

from .registration import checks
from .registration.autograd import Gradients, operators, register_autograd, register_fake

_ops = operators()


# ---- kernel_template ----


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


@register_fake("kernel_template")
def _(x: Tensor) -> Tensor:
    checks.check_dtype("kernel_template", "x", x)
    return torch.empty_like(x)


@register_fake("kernel_template_backward")
def _(grad_out: Tensor, x: Tensor) -> Tensor:
    checks.check_dtype("kernel_template_backward", "x", x)
    checks.check_like("kernel_template_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x)


def _kernel_template_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _kernel_template_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (x,) = ctx.saved_tensors
    return {"x": _ops.kernel_template_backward(grad_out, x)}


register_autograd(
    "kernel_template",
    _kernel_template_backward,
    setup_context=_kernel_template_setup_context,
    plain=lambda x: x * x,  # the same in plain tensor operations, for forward-mode differentiation
)


def _kernel_template_backward_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _kernel_template_double_backward(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x = grad_out * f'(x). Its derivative is f'(x) in grad_out, and grad_out * f''(x) in x, here 2 * grad_out.
    # Written in plain tensor operations, so that autograd can differentiate it again, to any order.
    grad_out, x = ctx.saved_tensors
    return {"grad_out": _ops.kernel_template_backward(grad_grad_x, x), "x": grad_grad_x * (2 * grad_out)}


register_autograd(
    "kernel_template_backward",
    _kernel_template_double_backward,
    setup_context=_kernel_template_backward_setup_context,
    plain=lambda grad_out, x: grad_out * (2 * x),
)

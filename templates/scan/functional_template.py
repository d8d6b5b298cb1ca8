"""Implements kernel_template: the public function, and the functions that ops.py registers."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops, reference
from ..registration import checks
from ..registration.autograd import Gradients


def kernel_template(x: Tensor, decay: float) -> Tensor:
    """The running sum of every row, with decay: ``y_k = decay * y_(k-1) + x_k`` over the last dimension.

    Args:
        x: shape (..., steps).
        decay: what is left of the sum after a step, between 0 and 1; 1 gives the cumulative sum.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        RuntimeError: ``x`` has no dimension, its dtype is not floating point, or ``decay`` is not between 0 and 1.

    Differentiable in ``x``, to any order. The gradient is the same sum from the last step to the first. It saves
    no tensor. NaN and infinities spread to later steps only. Batch-invariant: a row's result does not depend on the
    other rows.
    """
    return _ops.kernel_template(x, decay)


def _check_kernel_template(op: str, name: str, x: Tensor, decay: float) -> None:
    """Makes the kernel's checks, with the same messages."""
    checks.check_dtype(op, name, x)
    checks.check(op, x.dim() > 0, f"expected {name} to have at least one dimension, but got shape []")
    if not 0 <= decay <= 1:
        checks.fail(op, f"expected decay to be between 0 and 1, but got {decay:g}")


def kernel_template_fake(x: Tensor, decay: float) -> Tensor:
    _check_kernel_template("kernel_template", "x", x, decay)
    return x.new_empty(x.shape)


def kernel_template_backward_fake(grad_out: Tensor, decay: float) -> Tensor:
    _check_kernel_template("kernel_template_backward", "grad_out", grad_out, decay)
    return grad_out.new_empty(grad_out.shape)


def kernel_template_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.decay = inputs


kernel_template_backward_setup_context = kernel_template_setup_context  # its inputs are a tensor and decay, too


def kernel_template_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    return {"x": _ops.kernel_template_backward(grad_out, ctx.decay)}


def kernel_template_second(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x is linear in grad_out, and its transpose is the forward scan.
    return {"grad_out": _ops.kernel_template(grad_grad_x, ctx.decay)}


def kernel_template_plain(x: Tensor, decay: float) -> Tensor:
    """Computes the op in plain tensor operations, for forward-mode differentiation."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return reference.kernel_template(wide, decay).to(x.dtype)


def kernel_template_backward_plain(grad_out: Tensor, decay: float) -> Tensor:
    return kernel_template_plain(grad_out.flip(-1), decay).flip(-1)

"""Implements kernel_template: the public function, and the functions that ops.py registers."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..registration import checks
from ..registration.autograd import Gradients
from ..registration.match import FLOATING, SAME, Match


def kernel_template(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, return_rstd: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Scales every row to a root mean square of 1: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: shape (..., features); the mean is taken over the last dimension.
        weight: shape (features,), dtype and device of ``x``; None stands for ones.
        eps: added to the mean square.
        return_rstd: also return ``1 / sqrt(mean(x^2) + eps)``.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype. With ``return_rstd`` a pair of it and a tensor of shape (..., 1)
        in float32 (float64: float64), which has no gradient.

    Raises:
        RuntimeError: ``x`` has no dimension, ``weight`` is not (features,) or differs from ``x`` in dtype or device, or
            a dtype is not floating point.

    Differentiable once in ``x`` and ``weight``; a second derivative raises. Backward saves ``x``, ``weight`` and
    the reciprocal root mean square of each row. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    # An operator's schema fixes the number of its results. So this operator always returns both, and the function drops
    # rstd, as torch.nn.functional.max_pool2d drops indices. This costs no time, because backward needs rstd anyway.
    y, rstd = _ops.kernel_template(x, weight, eps)
    return (y, rstd) if return_rstd else y


def kernel_template_fake(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    match = Match("kernel_template")
    match("x", x, FLOATING, "[*, cols]")
    match("weight", weight, SAME, "[cols]")
    return x.new_empty(x.shape), x.new_empty([*x.shape[:-1], 1], dtype=torch.promote_types(x.dtype, torch.float32))


def kernel_template_backward_fake(
    grad_out: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, needs_grad_x: bool, needs_grad_weight: bool
) -> tuple[Tensor, Tensor]:
    op = "kernel_template_backward"
    match = Match(op)
    match("x", x, FLOATING, "[*, cols]")
    match("weight", weight, SAME, "[cols]")
    match("grad_out", grad_out, SAME, "like x")
    checks.check_device(op, "rstd", rstd, "x", x)
    as_returned = rstd.dtype == torch.promote_types(x.dtype, torch.float32) and rstd.is_contiguous()
    checks.check(op, as_returned, "expected rstd as the forward returned it")
    checks.check_sizes(op, rstd.shape, [*x.shape[:-1], 1], "expected rstd as the forward returned it")
    grad_weight = x.new_empty(x.shape[-1:] if needs_grad_weight else 0)
    return x.new_empty(x.shape if needs_grad_x else 0), grad_weight


def kernel_template_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, weight, _ = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)  # otherwise autograd would allocate zeros as the gradient of rstd


def kernel_template_backward(ctx: Any, grad_out: Tensor | None, _: None) -> Gradients:
    if grad_out is None:
        return {}
    x, weight, rstd = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    grads = _ops.kernel_template_backward(grad_out, x, weight, rstd, needs_x, needs_weight)
    return dict(zip(("x", "weight"), grads, strict=True))


def kernel_template_plain(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Computes the op in plain tensor operations, for forward-mode differentiation."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * (1 if weight is None else weight)).to(x.dtype), rstd.detach()

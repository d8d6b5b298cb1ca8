"""Implements kernel_template: the public function, and the functions that ops.py registers."""

from typing import Any

from torch import Tensor

from .. import _ops, reference
from ..registration.autograd import Gradients
from ..registration.match import FLOATING, SAME, Match


def kernel_template(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A causal convolution of each channel: ``y[t] = bias + weight[0] * x[t-taps+1] + ... + weight[taps-1] * x[t]``.

    Terms with elements before ``x``'s first step are left out.

    Args:
        x: shape (..., channels, steps).
        weight: shape (channels, taps), dtype and device of ``x``; the last tap is that of the same step.
        bias: shape (channels,), dtype and device of ``x``; None is 0.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        RuntimeError: ``x`` has less than two dimensions, ``weight`` is not (channels, taps) or ``bias`` not
            (channels,), one of them differs from ``x`` in dtype or device, or the dtype is not floating point.

    Differentiable once in ``x``, ``weight`` and ``bias``; a second derivative raises. Saves ``x`` and ``weight``.
    Run-to-run deterministic, and batch-invariant: a row's result does not depend on the other rows.
    """
    return _ops.kernel_template(x, weight, bias)


def kernel_template_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    match = Match("kernel_template")
    match("x", x, FLOATING, "[*, channels, steps]")
    match("weight", weight, SAME, "[channels, taps]")
    match("bias", bias, SAME, "[channels]")
    return x.new_empty(x.shape)


def kernel_template_backward_fake(
    grad_out: Tensor, x: Tensor, weight: Tensor, needs_grad_x: bool, needs_grad_weight: bool, needs_grad_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    match = Match("kernel_template_backward")
    match("x", x, FLOATING, "[*, channels, steps]")
    match("weight", weight, SAME, "[channels, taps]")
    match("grad_out", grad_out, SAME, "like x")
    grad_x = x.new_empty(x.shape if needs_grad_x else 0)
    grad_weight = x.new_empty(weight.shape if needs_grad_weight else 0)
    return grad_x, grad_weight, x.new_empty(weight.shape[:1] if needs_grad_bias else 0)


def kernel_template_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    x, weight = ctx.saved_tensors
    grads = _ops.kernel_template_backward(grad_out, x, weight, *ctx.needs_input_grad)
    return dict(zip(("x", "weight", "bias"), grads, strict=True))


kernel_template_plain = reference.kernel_template  # for forward-mode differentiation

"""Implements kernel_template: the public function, and the functions that ops.py registers."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops, reference
from ..registration import checks
from ..registration.autograd import Gradients
from ..registration.match import FLOATING, INT64, Match


def kernel_template(x: Tensor, offsets: Tensor) -> Tensor:
    """Sums of segments of rows: ``out[s] = x[offsets[s]] + ... + x[offsets[s+1] - 1]``.

    Args:
        x: shape (rows, ...).
        offsets: int64, shape (segments + 1,): where each segment begins and, last, where the last one ends; from 0 to
            rows, none less than the one before. Rows outside of all segments are left out.

    Returns:
        A contiguous tensor of shape (segments, ...), of ``x``'s dtype; 0 for a segment without rows. On a GPU, where
        the call does not wait for the numbers, offsets that fall or are out of range give segments of other rows.

    Raises:
        RuntimeError: ``x`` has no dimension or is not floating point, ``offsets`` is not int64, has not one dimension,
            is empty or on another device; on the CPU also: a number of ``offsets`` is out of range or falls.

    Differentiable in ``x``, to any order. Saves ``offsets``. Run-to-run deterministic: a sum adds its rows in their
    order, in float64, and is rounded once.
    """
    return _ops.kernel_template(x, offsets)


def kernel_template_fake(x: Tensor, offsets: Tensor) -> Tensor:
    match = Match("kernel_template")
    match("x", x, FLOATING, "[rows, *]")
    match("offsets", offsets, INT64, "[borders]")
    check_offsets("kernel_template", offsets)
    return x.new_empty([offsets.shape[0] - 1, *x.shape[1:]])


def kernel_template_backward_fake(grad_out: Tensor, offsets: Tensor, rows: int) -> Tensor:
    op = "kernel_template_backward"
    match = Match(op)
    match("grad_out", grad_out, FLOATING, "[segments, *]")
    match("offsets", offsets, INT64, "[borders]")
    checks.check(op, rows >= 0, f"expected rows to be 0 or more, but got {rows}")
    check_offsets(op, offsets)
    match.sizes("grad_out", grad_out, [offsets.shape[0] - 1, *grad_out.shape[1:]], "out")
    return grad_out.new_empty([rows, *grad_out.shape[1:]])


def check_offsets(op: str, offsets: Tensor) -> None:
    checks.check(op, offsets.shape[0] > 0, "expected offsets to have at least one number, but got shape [0]")


def kernel_template_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    x, offsets = inputs
    ctx.save_for_backward(offsets)
    ctx.rows = x.shape[0]


def kernel_template_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (offsets,) = ctx.saved_tensors
    return {"x": _ops.kernel_template_backward(grad_out, offsets, ctx.rows)}


def kernel_template_backward_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def kernel_template_second(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    (offsets,) = ctx.saved_tensors  # the derivative of backward, which is linear in grad_out, is forward's sum
    return {"grad_out": _ops.kernel_template(grad_grad_x, offsets)}


def kernel_template_plain(x: Tensor, offsets: Tensor) -> Tensor:
    """Computes the op in plain tensor operations, for forward-mode differentiation."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return reference.kernel_template(wide, offsets).to(x.dtype)


def kernel_template_backward_plain(grad_out: Tensor, offsets: Tensor, rows: int) -> Tensor:
    segment = torch.bucketize(torch.arange(rows, device=offsets.device), offsets, right=True)
    none = grad_out.new_zeros([1, *grad_out.shape[1:]])
    return torch.cat([none, grad_out, none])[segment]

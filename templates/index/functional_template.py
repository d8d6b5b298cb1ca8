"""Implements kernel_template: the public function, and the functions that ops.py registers."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops, reference
from ..registration import checks
from ..registration.autograd import Gradients
from ..registration.match import FLOATING, INT64, Match


def kernel_template(x: Tensor, index: Tensor) -> Tensor:
    """Gathers rows: ``out[i] = x[index[i]]``.

    Args:
        x: shape (rows, ...).
        index: int64, shape (count,); numbers from 0 to below rows, in any order, any of them several times.

    Returns:
        A contiguous tensor of shape (count, ...), of ``x``'s dtype. On a GPU, where the call does not wait for the
        numbers, a row whose number is negative or too large is NaN, and gets no gradient.

    Raises:
        RuntimeError: ``x`` has no dimension or is not floating point, ``index`` is not int64, has not one dimension or
            is on another device; on the CPU also: a number of ``index`` is negative or too large.

    Differentiable in ``x``, to any order. Saves ``index``. Run-to-run deterministic: the gradient of a row is added in
    the order of ``index``, in float64, and rounded once.
    """
    return _ops.kernel_template(x, index)


def kernel_template_fake(x: Tensor, index: Tensor) -> Tensor:
    match = Match("kernel_template")
    match("x", x, FLOATING, "[rows, *]")
    match("index", index, INT64, "[count]")
    return x.new_empty([index.shape[0], *x.shape[1:]])


def kernel_template_backward_fake(grad_out: Tensor, index: Tensor, rows: int) -> Tensor:
    match = Match("kernel_template_backward")
    match("grad_out", grad_out, FLOATING, "[count, *]")
    match("index", index, INT64, "[count]")
    checks.check("kernel_template_backward", rows >= 0, f"expected rows to be 0 or more, but got {rows}")
    return grad_out.new_empty([rows, *grad_out.shape[1:]])


def kernel_template_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    x, index = inputs
    ctx.save_for_backward(index)
    ctx.rows = x.shape[0]


def kernel_template_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (index,) = ctx.saved_tensors
    return {"x": _ops.kernel_template_backward(grad_out, index, ctx.rows)}


def kernel_template_backward_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def kernel_template_second(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    (index,) = ctx.saved_tensors  # the derivative of backward, which is linear in grad_out, is forward's gather
    return {"grad_out": _ops.kernel_template(grad_grad_x, index)}


kernel_template_plain = reference.kernel_template  # for forward-mode differentiation


def kernel_template_backward_plain(grad_out: Tensor, index: Tensor, rows: int) -> Tensor:
    wide = grad_out.to(torch.promote_types(grad_out.dtype, torch.float32))
    return wide.new_zeros([rows, *wide.shape[1:]]).index_add(0, index, wide).to(grad_out.dtype)

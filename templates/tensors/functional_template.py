"""Implements kernel_template: the public function, and the functions that ops.py registers."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops, reference
from ..registration.autograd import Gradients
from ..registration.match import FLOATING, SAME, Match


def kernel_template(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """Multiplies the tensors of two lists, as torch._foreach_mul does: ``out[i] = xs[i] * ys[i]``.

    Args:
        xs: tensors of any shapes and strides, of one dtype, on one device; the list may be empty.
        ys: as many tensors; ``ys[i]`` has the shape, dtype and device of ``xs[i]``.

    Returns:
        A list of tensors; each has the shape, dtype and strides of ``torch.empty_like(xs[i])``.

    Raises:
        RuntimeError: the lists have different lengths, two tensors differ in dtype or device, ``ys[i]`` has another
            shape than ``xs[i]``, or the dtype is not floating point.

    Differentiable in all tensors, to any order. Saves the factors of those that require grad. On a GPU there is one
    launch for each 100 tensors, in both directions. A result is rounded once, and does not depend on the other tensors.
    """
    # Two empty lists have no tensor by whose device PyTorch could choose the operator's kernel.
    return _ops.kernel_template(xs, ys) if xs or ys else []


def kernel_template_fake(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    match = Match("kernel_template")
    match("xs", xs, FLOATING)
    match("ys", ys, SAME, "like xs")
    return [torch.empty_like(x) for x in xs]


def kernel_template_setup_context(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: list[Tensor]) -> None:
    xs, ys = inputs
    needs_xs, needs_ys = ctx.needs_input_grad  # for each tensor
    needed = zip([*ys, *xs], [*needs_xs, *needs_ys], strict=True)  # the gradient of xs[i] reads ys[i] and vice versa
    ctx.save_for_backward(*[other if is_needed else None for other, is_needed in needed])


def kernel_template_backward(ctx: Any, grads: list[Tensor]) -> Gradients:
    needed = [(i, other) for i, other in enumerate(ctx.saved_tensors) if other is not None]
    # All gradients are products, too, so one call of the operator computes them.
    products = _ops.kernel_template([grads[i % len(grads)] for i, _ in needed], [other for _, other in needed])
    found = {i: product for (i, _), product in zip(needed, products, strict=True)}
    gradients = [found.get(i) for i in range(2 * len(grads))]
    return {"xs": gradients[: len(grads)], "ys": gradients[len(grads) :]}


kernel_template_plain = reference.kernel_template  # for forward-mode differentiation

"""References of the scans: loops over the time steps with handwritten gradients, for tests/battery.

Their values and first gradients have the same bits as those of the loops in extension_cpp.reference under autograd
(test_scan.py), but take a third of the time. tests/battery calls the references thousands of times.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import extension_cpp

PART = 1 << 14  # time steps that the CPU scans as one part; equals SCAN_PART in csrc/scan/scan.h


def steps_of(x: Tensor, dim: int, reverse: bool = False) -> list[Tensor]:
    steps = list(x.unbind(dim))
    return steps[::-1] if reverse else steps


def back(steps: Tensor, dim: int, reverse: bool) -> Tensor:
    """Moves the time dimension of `steps`, which is dimension 0 in the order of calculation, to dimension `dim`."""
    return (steps.flip(0) if reverse else steps).movedim(0, dim).contiguous()


class Recurrence(torch.autograd.Function):
    """Computes h[t] = a[t] * h[t - 1] + b[t], where a has the shape of b."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h0: Tensor, dim: int, reverse: bool) -> Tensor:
        states = b.new_empty((b.shape[dim] + 1, *h0.shape))
        h = states[0].copy_(h0)
        later = states[1:]
        factors, terms = steps_of(a, dim, reverse), steps_of(b, dim, reverse)
        for into, factor, term in zip(later.unbind(), factors, terms, strict=True):
            h = torch.mul(factor, h, out=into).add_(term)
        ctx.save_for_backward(a, states)
        ctx.options = dim, reverse
        return back(later, dim, reverse)

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (a, states), (dim, reverse) = ctx.saved_tensors, ctx.options
        totals = torch.empty_like(states[1:])
        carried = None
        grads, factors = steps_of(grad_h, dim, not reverse), steps_of(a, dim, not reverse)
        for into, grad, factor in zip(totals.unbind()[::-1], grads, factors, strict=True):
            total = into.copy_(grad) if carried is None else torch.add(grad, carried, out=into)
            carried = total * factor
        return back(totals * states[:-1], dim, reverse), back(totals, dim, reverse), carried, None, None


def linear_recurrence(
    a: Tensor, b: Tensor, h0: Tensor | None = None, *, dim: int = -2, reverse: bool = False
) -> Tensor:
    """Computes extension_cpp.reference.linear_recurrence, with the handwritten gradient."""
    if b.numel() == 0 or b.dim() == 0:
        return extension_cpp.reference.linear_recurrence(a, b, h0, dim=dim, reverse=reverse)
    first = b.new_zeros(b.shape[:dim] + b.shape[dim:][1:]) if h0 is None else h0
    return Recurrence.apply(a.expand(b.shape), b, first, dim, reverse)


class LogCumSumExp(torch.autograd.Function):
    """Computes y[t] = logaddexp(y[t - 1], x[t])."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        first, *others = steps_of(x, dim)
        results = x.new_empty((x.shape[dim], *first.shape))
        y, *later = results.unbind()
        y.copy_(first)
        for into, step in zip(later, others, strict=True):
            y = torch.logaddexp(y, step, out=into)
        ctx.save_for_backward(x.movedim(dim, 0)[1:], results[:-1])
        ctx.dim = dim
        return back(results, dim, False)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x, y), dim = ctx.saved_tensors, ctx.dim
        totals = torch.empty((len(x) + 1, *x.shape[1:]), dtype=x.dtype, device=x.device)
        *before, last = totals.unbind()
        grads = steps_of(grad_y, dim, reverse=True)
        total = last.copy_(grads[0])
        divisors = (1 + torch.exp(x - y)).unbind()
        for into, grad, divisor in zip(before[::-1], grads[1:], divisors[::-1], strict=True):
            total = torch.add(grad, total / divisor, out=into)
        totals[1:] /= 1 + torch.exp(y - x)
        return back(totals, dim, False), None


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Computes torch.logcumsumexp, but not by PyTorch's gradient, which loses digits in logarithms of gradients."""
    if x.numel() == 0 or x.dim() == 0:
        return x * 1
    return LogCumSumExp.apply(x, dim)


def result_and_gradients(scan: Callable[..., Tensor], operands: list[Tensor]) -> list[Tensor]:
    *given, g = operands
    leaves = [x.detach().requires_grad_() for x in given]
    y = scan(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]

"""Implements cumsum, logcumsumexp and linear_recurrence. Plain forms compute in float32 (float64 for float64)."""

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _ops, reference
from ..registration import checks
from ..registration.autograd import Gradients
from .common import as_dim, check_dim, fake_like, wide

# ---- cumsum ----


def cumsum(input: Tensor, dim: int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Cumulative sums over one dimension: ``y[k] = x[0] + ... + x[k]``.

    Args:
        input: called ``x`` here, any shape.
        dim: the dimension to sum along; negative ones count from the end.
        exclusive: whether an element is left out of its own sum: ``y[k] = x[0] + ... + x[k - 1]``, ``y[0] = 0``.
        reverse: whether the sums begin at the last element: ``y[k] = x[k] + ... + x[-1]``.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. For a transposed ``x`` it keeps ``x``'s
        strides, unlike the result of torch.cumsum.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point; torch.cumsum sums integers.

    Differentiable, to any order; the gradient is a cumsum in the other direction, and nothing is saved. Terms are added
    in float32 or better (float64: float64) in a tree of fixed shape, so that every run gives the same bits, and each
    result is rounded once to ``x``'s dtype. In float32 and float64 the tree's partial sums round, too; where a partial
    sum overflows, a result can be infinite or NaN that a loop would keep finite. NaN and infinities reach only the sums
    that contain them. Batch-invariant: the sums along ``dim`` have the same bits for any sizes of the other dimensions,
    except that a single column is summed as a row. Any strides are read without a copy. Autocast casts half inputs to
    float32 on CUDA, as for torch.cumsum. Source: torch.cumsum.
    """
    return _ops.cumsum(input, as_dim("cumsum", dim), exclusive, reverse)


cumsum_fake = fake_like("cumsum", "x", along_dim=True, hint="; torch.cumsum takes others")


def cumsum_setup_context(ctx: Any, inputs: tuple[Tensor, int, bool, bool], output: Tensor) -> None:
    _, ctx.dim, ctx.exclusive, ctx.reverse = inputs


def cumsum_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    return {"x": _ops.cumsum(grad_out, ctx.dim, ctx.exclusive, not ctx.reverse)}


def cumsum_plain(x: Tensor, dim: int, exclusive: bool = False, reverse: bool = False) -> Tensor:
    return reference.cumsum(wide(x), dim, exclusive=exclusive, reverse=reverse).to(x.dtype)


# ---- logcumsumexp ----


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """Logarithms of cumulative sums of exponentials over one dimension: ``y[k] = log(exp(x[0]) + ... + exp(x[k]))``.

    Args:
        input: called ``x`` here, any shape.
        dim: the dimension to sum along; negative ones count from the end.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. Exponentials are taken relative to the
        largest element so far, so that none overflows. A result is -inf while all elements so far are -inf, and inf
        from the first inf on, as in torch.logcumsumexp.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point.

    Differentiable once. Backward saves ``x`` and the result. Backward adds gradients times factors of at most 1, while
    torch adds exponentials of the gradients' logarithms. The gradient is no more exact than the saved result: with half
    inputs far from 0 it has few digits, as in torch. Backward multiplies the factors of many steps. After some thousand
    steps the float32 gradient has therefore lost digits that torch's gradient keeps. NaN reaches later results only.
    Strides and batch invariance are as for cumsum. Source: torch.logcumsumexp.
    """
    return _ops.logcumsumexp(input, as_dim("logcumsumexp", dim))


logcumsumexp_fake = fake_like("logcumsumexp", "x", along_dim=True)
logcumsumexp_backward_fake = fake_like("logcumsumexp_backward", "grad_out", "x", "y", like="x", along_dim=True)


def logcumsumexp_setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    x, ctx.dim = inputs
    ctx.save_for_backward(x, output)


def logcumsumexp_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    x, y = ctx.saved_tensors
    return {"x": _ops.logcumsumexp_backward(grad_out, x, y, ctx.dim)}


def logcumsumexp_plain(x: Tensor, dim: int) -> Tensor:
    return torch.logcumsumexp(wide(x), dim).to(x.dtype)


# ---- linear_recurrence ----


def linear_recurrence(
    a: Tensor, b: Tensor, h0: Tensor | None = None, *, dim: int = -2, reverse: bool = False
) -> Tensor:
    """All states of a linear recurrence along one dimension: ``h[t] = a[t] * h[t - 1] + b[t]``.

    Args:
        a: the factors; their shape broadcasts to that of ``b``, without a copy: size 1 along ``dim`` is a constant
            factor, and (..., T, H, 1) beside (..., T, H, D) a factor for each head.
        b: any shape, such as (..., T, D); dtype and device of ``a``.
        h0: the state before the first step, of ``b``'s shape without ``dim``; None: zeros.
        dim: the dimension of the steps; negative ones count from the end.
        reverse: whether the recurrence runs from the last step to the first: ``h[t] = a[t] * h[t + 1] + b[t]``.

    Returns:
        The states ``h``, with the shape, dtype and strides of ``torch.empty_like(b)``. The last state,
        ``h.select(dim, -1)`` or, with ``reverse``, ``h.select(dim, 0)``, can be ``h0`` of the next call.

    Raises:
        RuntimeError: ``a`` does not broadcast to ``b``, ``h0`` has another shape, a dtype or device differs, ``dim`` is
            out of range, or the dtype is not floating point.

    Differentiable in ``a``, ``b`` and ``h0``, to any order; the gradient is a recurrence in the other direction, and
    backward saves ``a``, ``h0`` and the result. The state is float32 (float64: float64) and each result is rounded
    once. Steps run in parallel, in a tree of fixed shape, so that every run gives the same bits. If a product of
    neighbouring factors overflows or underflows, or a factor is infinite, a state may be infinite, NaN or 0 where a
    loop's is not. NaN and infinities reach later steps only. Strides and batch invariance are as for cumsum. Autocast
    promotes the tensors to the widest of their dtypes. Sources: Blelloch 1990, Prefix Sums and Their Applications;
    Martin and Cundy 2018, arXiv:1709.04057.
    """
    return _ops.linear_recurrence(a, b, h0, as_dim("linear_recurrence", dim), reverse)


def check_recurrence(op: str, a: Tensor, name: str, b: Tensor, h0: Tensor | None, dim: int) -> None:
    """Makes the checks of check_recurrence in csrc/scan/scan.cpp."""
    checks.check_same(op, "a", a, name, b)
    expected = f"expected a of a shape that broadcasts to {list(b.shape)}, that of {name}"
    message = f"{expected}, but got {list(a.shape)}"
    checks.check(op, a.dim() <= b.dim(), message)
    for of_a, of_b in zip(reversed(a.shape), reversed(b.shape), strict=False):
        checks.check(op, (of_a == 1) | (of_a == of_b), message)  # `|` also works for symbolic sizes, unlike `or`
    check_dim(op, b, dim)
    if h0 is None:
        return
    checks.check_same(op, "h0", h0, name, b)
    lines = [size for d, size in enumerate(b.shape) if d != dim % b.dim()]
    expected = f"expected h0 of shape {lines}, that of {name} without dim"
    checks.check_sizes(op, h0.shape, lines, f"{expected}, but got {list(h0.shape)}")


def linear_recurrence_fake(a: Tensor, b: Tensor, h0: Tensor | None, dim: int, reverse: bool) -> Tensor:
    checks.check_dtype("linear_recurrence", "b", b)
    check_recurrence("linear_recurrence", a, "b", b, h0, dim)
    return torch.empty_like(b)


def linear_recurrence_backward_fake(
    grad_h: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, dim: int, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    op = "linear_recurrence_backward"
    checks.check_dtype(op, "h", h)
    checks.check_like(op, "grad_h", grad_h, "h", h)
    check_recurrence(op, a, "h", h, h0, dim)
    return torch.empty_like(h), torch.empty_like(h), h.new_empty(0 if h0 is None else h0.shape)


def linear_recurrence_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, h0, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(a, output, h0)


def linear_recurrence_backward(ctx: Any, grad_h: Tensor) -> Gradients:
    a, h, h0 = ctx.saved_tensors
    grad_a, grad_b, grad_h0 = _ops.linear_recurrence_backward(grad_h, a, h, h0, ctx.dim, ctx.reverse)
    of_a = _sum_to(grad_a, a) if ctx.needs_input_grad[0] else None
    return {"a": of_a, "b": grad_b, "h0": None if h0 is None else grad_h0}


def linear_recurrence_backward_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, a, h, h0, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(a, h, h0, output[1])


def linear_recurrence_second(ctx: Any, grad_grad_a: Tensor, grad_grad_b: Tensor, grad_grad_h0: Tensor) -> Gradients:
    # For a scan that is not reversed, the backward operator computes
    #     grad_b = u, u[t] = grad_h[t] + a[t + 1] * u[t + 1];    grad_a[t] = u[t] * h[t - 1];    grad_h0 = a[0] * u[0].
    # With p, q, r for grad_grad_a, grad_grad_b, grad_grad_h0, the gradient w of grad_h runs in the other direction:
    #     w[t] = a[t] * w[t - 1] + p[t] * h[t - 1] + q[t],    w[-1] = r.
    a, h, h0, u = ctx.saved_tensors
    first = None if h0 is None else grad_grad_h0
    of_u = grad_grad_b + grad_grad_a * _earlier(h, h0, ctx.dim, ctx.reverse)
    w = _ops.linear_recurrence(a, of_u, first, ctx.dim, ctx.reverse)
    of_earlier_h = grad_grad_a * u
    return {
        "grad_h": w,
        "a": _sum_to(_earlier(w, first, ctx.dim, ctx.reverse) * u, a),
        "h": _earlier(of_earlier_h, None, ctx.dim, not ctx.reverse),
        "h0": None if h0 is None else _first_step(of_earlier_h, ctx.dim, ctx.reverse, h0),
    }


def _may_differ(a: Any, b: Any) -> bool:
    """Returns a != b, or True for sizes that torch.compile does not know because they depend on data."""
    if not isinstance(a, torch.SymInt) and not isinstance(b, torch.SymInt):
        return bool(a != b)
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(a != b))


def _sum_to(x: Tensor, like: Tensor) -> Tensor:
    """Sums x over the dimensions in which `like` broadcasts to x."""
    missing = x.dim() - like.dim()
    ones = [missing + d for d, size in enumerate(like.shape) if _may_differ(x.shape[missing + d], size)]
    dims = (*range(missing), *ones)
    return _ops.reduce_sum(x, dims, True).view(like.shape) if dims else x


def _earlier(x: Tensor, first: Tensor | None, dim: int, reverse: bool) -> Tensor:
    """Returns for each step x at the step before, in the direction of the scan. The first step gets `first`, or 0."""
    n = x.shape[dim] if x.dim() else 1
    if n == 0:
        return x
    if x.dim() == 0:
        return torch.zeros_like(x) if first is None else first
    start = torch.zeros_like(x.narrow(dim, 0, 1)) if first is None else first.unsqueeze(dim)
    return torch.cat([x.narrow(dim, 1, n - 1), start] if reverse else [start, x.narrow(dim, 0, n - 1)], dim)


def _first_step(x: Tensor, dim: int, reverse: bool, like: Tensor) -> Tensor:
    """Returns x at the first step in the direction of the scan, or zeros like `like` if there is no step."""
    if x.dim() == 0:
        return x
    return x.select(dim, -1 if reverse else 0) if x.shape[dim] > 0 else torch.zeros_like(like)


def linear_recurrence_plain(
    a: Tensor, b: Tensor, h0: Tensor | None = None, dim: int = -2, reverse: bool = False
) -> Tensor:
    first = None if h0 is None else wide(h0)
    return reference.linear_recurrence(wide(a), wide(b), first, dim=dim, reverse=reverse).to(b.dtype)


def linear_recurrence_backward_plain(
    grad_h: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, dim: int, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dim, factors = dim % max(h.dim(), 1), wide(a).expand(h.shape)
    u = linear_recurrence_plain(_earlier(factors, None, dim, not reverse), wide(grad_h), None, dim, not reverse)
    grad_a = u * _earlier(wide(h), None if h0 is None else wide(h0), dim, reverse)
    grad_h0 = h.new_empty(0) if h0 is None else _first_step(factors * u, dim, reverse, h0)
    return grad_a.to(h.dtype), u.to(h.dtype), grad_h0.to(h.dtype)


def linear_recurrence_autocast(device_type: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts all tensors to the widest of their dtypes, as PyTorch's promoting operators do. If a tensor is not
    floating point, nothing is cast, and the operator raises an error."""
    *tensors, dim, reverse = args
    dtypes = [x.dtype for x in tensors if x is not None]
    if not all(dtype.is_floating_point for dtype in dtypes):
        return args
    dtype = functools.reduce(torch.promote_types, dtypes)
    return *(x if x is None else x.to(dtype) for x in tensors), dim, reverse

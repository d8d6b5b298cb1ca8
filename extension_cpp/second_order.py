"""Second derivatives: for each op the setup_context and the backward of its backward operator.

In all of them, grad_grad_x stands for the gradient with respect to the backward operator's result grad_x. A function
returns the gradients of the backward operator's arguments by their names. Where it calls operators that have a
derivative themselves, or plain tensor operations, autograd goes on from there to any order.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _ops, plain
from .autograd import Gradients


def save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def not_implemented(op: str, derivative: str) -> Callable[..., NoReturn]:
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(f"extension_cpp::{op}: the {derivative} derivative is not implemented")

    return backward


def _computed(grads: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """None in place of the gradients of results that the backward operator did not compute."""
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


# ---- pointwise ops and activations ----


def muladd(ctx: Any, grad_grad_a: Tensor, grad_grad_b: Tensor) -> Gradients:
    # grad_a = grad_out * b and grad_b = grad_out * a.
    grad_out, a, b = ctx.saved_tensors
    return {
        "grad_out": _ops.muladd(grad_grad_a, b, 0.0) + _ops.muladd(grad_grad_b, a, 0.0),
        "a": _ops.muladd(grad_grad_b, grad_out, 0.0),
        "b": _ops.muladd(grad_grad_a, grad_out, 0.0),
    }


def scale_bias_relu_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, x, bias, ctx.scale, ctx.needs_x, ctx.needs_bias = inputs
    ctx.save_for_backward(x, bias)


def scale_bias_relu(ctx: Any, grad_grad_x: Tensor, grad_grad_bias: Tensor) -> Gradients:
    # Both gradients are linear in grad_out, masked where the output is zero; the mask itself has no derivative.
    x, bias = ctx.saved_tensors
    total = torch.zeros_like(x)
    if ctx.needs_x:
        total = total + grad_grad_x * ctx.scale
    if ctx.needs_bias:
        total = total + grad_grad_bias
    return {"grad_out": _ops.relu_backward(total, _ops.scale_bias_relu(x, bias, ctx.scale))}


def relu_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    _, y = inputs
    ctx.save_for_backward(y)


def relu(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    (y,) = ctx.saved_tensors
    return {"grad_out": _ops.relu_backward(grad_grad_x, y)}


def mish(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    grad_out, x = ctx.saved_tensors
    return {
        "grad_out": _ops.mish_backward(grad_grad_x, x),
        "x": _ops.mish_double_backward(grad_grad_x, grad_out, x),
    }


def silu(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    grad_out, x = ctx.saved_tensors
    return {
        "grad_out": _ops.silu_backward(grad_grad_x, x),
        "x": _ops.silu_double_backward(grad_grad_x, grad_out, x),
    }


def gelu_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    grad_out, x, ctx.tanh = inputs
    ctx.save_for_backward(grad_out, x)


def gelu(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    grad_out, x = ctx.saved_tensors
    return {
        "grad_out": _ops.gelu_backward(grad_grad_x, x, ctx.tanh),
        "x": _ops.gelu_double_backward(grad_grad_x, grad_out, x, ctx.tanh),
    }


def bias_gelu_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    grad_out, x, bias, ctx.tanh, ctx.needs_x, ctx.needs_bias = inputs
    ctx.save_for_backward(grad_out, x, bias)


def bias_gelu(ctx: Any, grad_grad_x: Tensor, grad_grad_bias: Tensor) -> Gradients:
    # Both gradients are grad_out * gelu'(x + bias), the second one summed over the rows.
    grad_out, x, bias = ctx.saved_tensors
    total = torch.zeros_like(x)
    if ctx.needs_x:
        total = total + grad_grad_x
    if ctx.needs_bias:
        total = total + grad_grad_bias
    grad_x = _ops.gelu_double_backward(total, grad_out, x + bias, ctx.tanh)
    return {
        "grad_out": _ops.bias_gelu_backward(total, x, bias, ctx.tanh, True, False)[0],
        "x": grad_x,
        "bias": grad_x.sum_to_size(bias.shape),
    }


# ---- gates: activation(gate) * up ----


def _of_gate(
    grad_grad_gate: Tensor,
    grad_grad_up: Tensor,
    grad_out: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    gated: Callable[[Tensor, Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], Tensor],
    double_backward: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Gradients:
    """The gradients of a gate's backward operator.

    With an activation a the operator gives grad_gate = grad_out * up * a'(gate) and grad_up = grad_out * a(gate). With
    p and q for grad_grad_gate and grad_grad_up:

        of grad_out: p * up * a'(gate) + q * a(gate)
        of gate: p * grad_out * up * a''(gate) + q * grad_out * a'(gate)
        of up: p * grad_out * a'(gate)

    Args:
        gated: ``gated(gate, up)`` is a(gate) * up.
        backward: ``backward(g, gate)`` is g * a'(gate).
        double_backward: ``double_backward(p, g, gate)`` is p * g * a''(gate).
    """
    p_up = grad_grad_gate * up
    return {
        "grad_out": backward(p_up, gate) + gated(gate, grad_grad_up),
        "gate": double_backward(p_up, grad_out, gate) + backward(grad_grad_up * grad_out, gate),
        "up": backward(grad_grad_gate * grad_out, gate),
    }


def swiglu(ctx: Any, grad_grad_gate: Tensor, grad_grad_up: Tensor) -> Gradients:
    return _of_gate(
        grad_grad_gate,
        grad_grad_up,
        *ctx.saved_tensors,
        gated=_ops.swiglu,
        backward=_ops.silu_backward,
        double_backward=_ops.silu_double_backward,
    )


def geglu_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.tanh = inputs
    ctx.save_for_backward(*tensors)


def geglu(ctx: Any, grad_grad_gate: Tensor, grad_grad_up: Tensor) -> Gradients:
    tanh = ctx.tanh
    return _of_gate(
        grad_grad_gate,
        grad_grad_up,
        *ctx.saved_tensors,
        gated=lambda gate, up: _ops.geglu(gate, up, tanh),
        backward=lambda g, gate: _ops.gelu_backward(g, gate, tanh),
        double_backward=lambda p, g, gate: _ops.gelu_double_backward(p, g, gate, tanh),
    )


# ---- norms ----


def _of_norm(
    normalized_shape: Sequence[int],
    grad_out: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    grads: Sequence[Tensor | None],
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of grad_out, x and weight through a norm's backward operator, which is layer_norm's if `centered`,
    else rms_norm's.

    They are the derivatives of <grad_grad_x, grad_x> + <grad_grad_weight, grad_weight> + <grad_grad_bias, grad_bias>.
    `grads` are grad_grad_x, grad_grad_weight and, for layer_norm, grad_grad_bias, None for what was not computed.

    With P of plain.project, grad_x is rstd * P(grad_out * weight), and P is symmetric. All of it is plain tensor
    operations on x, which autograd differentiates further.
    """
    grad_grad_x, grad_grad_weight, *grad_grad_bias = grads
    dims, dtype = tuple(range(-len(normalized_shape), 0)), rstd.dtype
    g, v = grad_out.to(dtype), None if grad_grad_x is None else grad_grad_x.to(dtype)
    w = None if weight is None else weight.to(dtype)
    xhat, rstd = plain.normalize(x.to(dtype), dims, rstd, centered)

    def mean(z: Tensor) -> Tensor:
        return z.mean(dims, keepdim=True)

    def project(z: Tensor) -> Tensor:
        return plain.project(z, xhat, dims, centered)

    grad_grad_out, grad_x, grad_weight = torch.zeros_like(xhat), torch.zeros_like(xhat), None
    if v is not None:
        gw = g if w is None else g * w
        h = rstd * project(v)
        grad_grad_out = h if w is None else h * w
        grad_weight = None if w is None else (g * h).sum_to_size(w.shape)
        along = mean(v * gw) - (mean(v) * mean(gw) if centered else 0) - mean(xhat * v) * mean(xhat * gw)
        grad_x = -rstd.square() * (xhat * along + mean(xhat * gw) * project(v) + mean(xhat * v) * project(gw))
    if grad_grad_weight is not None:
        u = grad_grad_weight.to(dtype)
        grad_grad_out = grad_grad_out + u * xhat
        grad_x = grad_x + rstd * project(u * g)
    for term in grad_grad_bias:
        if term is not None:
            grad_grad_out = grad_grad_out + term.to(dtype)
    return (
        grad_grad_out.to(grad_out.dtype),
        grad_x.to(x.dtype),
        None if grad_weight is None or weight is None else grad_weight.to(weight.dtype),
    )


def layer_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, x, ctx.normalized_shape, _, rstd, weight, _, *ctx.needs = inputs
    ctx.save_for_backward(grad_out, x, rstd, weight)


def layer_norm(ctx: Any, *grads: Tensor) -> Gradients:
    grad_grad_out, grad_x, grad_weight = _of_norm(
        ctx.normalized_shape, *ctx.saved_tensors, grads=_computed(grads, ctx.needs), centered=True
    )
    return {"grad_out": grad_grad_out, "x": grad_x, "weight": grad_weight}


def rms_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, x, ctx.normalized_shape, rstd, weight, *ctx.needs = inputs
    ctx.save_for_backward(grad_out, x, rstd, weight)


def rms_norm(ctx: Any, *grads: Tensor) -> Gradients:
    grad_grad_out, grad_x, grad_weight = _of_norm(
        ctx.normalized_shape, *ctx.saved_tensors, grads=_computed(grads, ctx.needs), centered=False
    )
    return {"grad_out": grad_grad_out, "x": grad_x, "weight": grad_weight}


def _of_add_norm(ctx: Any, grads: Sequence[Tensor], centered: bool) -> Gradients:
    """The gradients of the backward operator of add_layer_norm, if `centered`, or add_rms_norm.

    With s = sum, it gives grad_residual = norm_backward(grad_out) + grad_sum and grad_x = dropout(grad_residual).
    Dropout is symmetric, so grad_grad_x and grad_grad_residual both reach the one sum grad_residual. Without dropout
    grad_x is empty, and the gradient of x came in for residual.
    """
    grad_out, s, rstd, weight, seed = ctx.saved_tensors
    needs_x, needs_residual, *needs_weights = ctx.needs
    grad_grad_x, grad_grad_residual, *grad_grad_weights = grads
    total = grad_grad_residual if needs_x or needs_residual else None
    if total is not None and needs_x and ctx.p > 0:
        total = total + _ops.dropout(grad_grad_x, ctx.p, seed)
    computed = [total, *_computed(grad_grad_weights, needs_weights)]
    grad_grad_out, grad_s, grad_weight = _of_norm(
        ctx.normalized_shape, grad_out, s, rstd, weight, grads=computed, centered=centered
    )
    return {"grad_out": grad_grad_out, "grad_sum": total, "sum": grad_s, "weight": grad_weight}


def add_layer_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, _, s, ctx.normalized_shape, _, rstd, weight, _, ctx.p, seed, *ctx.needs = inputs
    ctx.save_for_backward(grad_out, s, rstd, weight, seed)


def add_layer_norm(ctx: Any, *grads: Tensor) -> Gradients:
    return _of_add_norm(ctx, grads, True)


def add_rms_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, _, s, ctx.normalized_shape, rstd, weight, ctx.p, seed, *ctx.needs = inputs
    ctx.save_for_backward(grad_out, s, rstd, weight, seed)


def add_rms_norm(ctx: Any, *grads: Tensor) -> Gradients:
    return _of_add_norm(ctx, grads, False)


def layer_norm_dropout_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, x, ctx.normalized_shape, _, rstd, weight, _, ctx.p, seed, *ctx.needs = inputs
    ctx.save_for_backward(grad_out, x, rstd, weight, seed)


def layer_norm_dropout(ctx: Any, *grads: Tensor) -> Gradients:
    grad_out, x, rstd, weight, seed = ctx.saved_tensors

    def drop(z: Tensor) -> Tensor:
        return _ops.dropout(z, ctx.p, seed) if ctx.p > 0 else z

    grad_grad_out, grad_x, grad_weight = _of_norm(
        ctx.normalized_shape, drop(grad_out), x, rstd, weight, grads=_computed(grads, ctx.needs), centered=True
    )
    return {"grad_out": drop(grad_grad_out), "x": grad_x, "weight": grad_weight}


# ---- scans ----


def sum_to(x: Tensor, like: Tensor) -> Tensor:
    """x summed over the dimensions in which `like` broadcasts to it."""
    missing = x.dim() - like.dim()
    ones = [missing + d for d, size in enumerate(like.shape) if size == 1 and x.shape[missing + d] != 1]
    dims = (*range(missing), *ones)
    return _ops.reduce_sum(x, dims, True).view(like.shape) if dims else x


def linear_recurrence_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, a, h, h0, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(a, h, h0, output[1])


def linear_recurrence(ctx: Any, grad_grad_a: Tensor, grad_grad_b: Tensor, grad_grad_h0: Tensor) -> Gradients:
    # The operator gives, for a scan that is not reversed,
    #     grad_b = u, u[t] = grad_h[t] + a[t + 1] * u[t + 1];    grad_a[t] = u[t] * h[t - 1];    grad_h0 = a[0] * u[0].
    # With p, q, r for grad_grad_a, grad_grad_b, grad_grad_h0, the gradient w of grad_h runs in the other direction:
    #     w[t] = a[t] * w[t - 1] + p[t] * h[t - 1] + q[t],    w[-1] = r.
    a, h, h0, u = ctx.saved_tensors
    first = None if h0 is None else grad_grad_h0
    of_u = grad_grad_b + grad_grad_a * plain.earlier(h, h0, ctx.dim, ctx.reverse)
    w = _ops.linear_recurrence(a, of_u, first, ctx.dim, ctx.reverse)
    of_earlier_h = grad_grad_a * u
    grad_h0 = None
    if h0 is not None:
        grad_h0 = plain.first_step(of_earlier_h, ctx.dim, ctx.reverse, h0)
    return {
        "grad_h": w,
        "a": sum_to(plain.earlier(w, first, ctx.dim, ctx.reverse) * u, a),
        "h": plain.earlier(of_earlier_h, None, ctx.dim, not ctx.reverse),
        "h0": grad_h0,
    }


# ---- softmax, rotary_embedding ----


def softmax_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    grad_out, y, ctx.dim = inputs
    ctx.save_for_backward(grad_out, y)


def softmax(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x = (g - sum(g * y)) * y, which is symmetric in g.
    grad_out, y = ctx.saved_tensors
    g, p, v = plain.wide(grad_out), plain.wide(y), plain.wide(grad_grad_x)
    grad_y = v * (g - (g * p).sum(ctx.dim, keepdim=True)) - g * (v * p).sum(ctx.dim, keepdim=True)
    return {"grad_out": _ops.softmax_backward(grad_grad_x, y, ctx.dim), "y": grad_y.to(y.dtype)}


def log_softmax(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x = g - exp(y) * sum(g).
    grad_out, y = ctx.saved_tensors
    v_p = plain.wide(grad_grad_x) * plain.wide(y).exp()
    grad_grad_out = plain.wide(grad_grad_x) - v_p.sum(ctx.dim, keepdim=True)
    grad_y = -v_p * plain.wide(grad_out).sum(ctx.dim, keepdim=True)
    return {"grad_out": grad_grad_out.to(grad_out.dtype), "y": grad_y.to(y.dtype)}


def rotary_embedding(ctx: Any, grad_grad_q: Tensor, grad_grad_k: Tensor) -> Gradients:
    # The backward operator multiplies by the transposed matrix, so its own backward is the operator.
    cos, sin = ctx.saved_tensors
    grad_q, grad_k = _ops.rotary_embedding(grad_grad_q, grad_grad_k, cos, sin, ctx.interleaved)
    return {"grad_q": grad_q, "grad_k": grad_k}

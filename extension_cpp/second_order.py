"""Second derivatives: for each op the setup_context and the backward of its backward operator.

In all of them, grad_grad_x stands for the gradient with respect to the backward operator's result grad_x. A function
returns the gradients of the backward operator's arguments by their names. Where it calls operators that have a
derivative themselves, or plain tensor operations, autograd goes on from there to any order.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _ops, checks, plain
from .autograd import Gradients, own_ops


def save_inputs(op: str) -> Callable[..., None]:
    """A setup_context that saves the tensors, the first arguments of an operator. The others become ctx.options."""
    schema = getattr(own_ops, op).default._schema
    count = sum(str(argument.type) == "Tensor" for argument in schema.arguments)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.options = inputs[count:]

    return setup_context


def not_implemented(op: str, derivative: str) -> Callable[..., NoReturn]:
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(f"extension_cpp::{op}: the {derivative} derivative is not implemented")

    return backward


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


def _of_activation(op: str) -> Callable[..., Gradients]:
    """The second derivative of an activation. Its third derivative is not implemented."""
    backward, double_backward = getattr(_ops, f"{op}_backward"), getattr(_ops, f"{op}_double_backward")

    def second_derivative(ctx: Any, grad_grad_x: Tensor) -> Gradients:
        grad_out, x = ctx.saved_tensors
        return {
            "grad_out": backward(grad_grad_x, x, *ctx.options),
            "x": double_backward(grad_grad_x, grad_out, x, *ctx.options),
        }

    return second_derivative


mish, silu, gelu = _of_activation("mish"), _of_activation("silu"), _of_activation("gelu")


def bias_gelu(ctx: Any, grad_grad_x: Tensor, grad_grad_bias: Tensor) -> Gradients:
    # Both gradients are grad_out * gelu'(x + bias), the second one summed over the rows.
    grad_out, x, bias = ctx.saved_tensors
    tanh, needs_x, needs_bias = ctx.options
    total = torch.zeros_like(x)
    if needs_x:
        total = total + grad_grad_x
    if needs_bias:
        total = total + grad_grad_bias
    grad_x = _ops.gelu_double_backward(total, grad_out, x + bias, tanh)
    return {
        "grad_out": _ops.bias_gelu_backward(total, x, bias, tanh, True, False)[0],
        "x": grad_x,
        "bias": grad_x.sum_to_size(bias.shape),
    }


# ---- gates: activation(gate) * up ----


def _of_gate(gate_op: str, activation: str) -> Callable[..., Gradients]:
    """The second derivative of a gate.

    With an activation a the backward operator gives grad_gate = grad_out * up * a'(gate) and grad_up = grad_out *
    a(gate). With p and q for grad_grad_gate and grad_grad_up:

        of grad_out: p * up * a'(gate) + q * a(gate)
        of gate: p * grad_out * up * a''(gate) + q * grad_out * a'(gate)
        of up: p * grad_out * a'(gate)
    """
    gated = getattr(_ops, gate_op)  # gated(gate, up) is a(gate) * up
    backward = getattr(_ops, f"{activation}_backward")  # backward(g, gate) is g * a'(gate)
    double_backward = getattr(_ops, f"{activation}_double_backward")  # (p, g, gate): p * g * a''(gate)

    def second_derivative(ctx: Any, p: Tensor, q: Tensor) -> Gradients:
        grad_out, gate, up = ctx.saved_tensors
        p_up = p * up
        return {
            "grad_out": backward(p_up, gate, *ctx.options) + gated(gate, q, *ctx.options),
            "gate": double_backward(p_up, grad_out, gate, *ctx.options) + backward(q * grad_out, gate, *ctx.options),
            "up": backward(p * grad_out, gate, *ctx.options),
        }

    return second_derivative


swiglu, geglu = _of_gate("swiglu", "silu"), _of_gate("geglu", "gelu")


# ---- scans ----


def _may_differ(a: Any, b: Any) -> bool:
    """a != b, and True for sizes that torch.compile does not know because they depend on data."""
    if not isinstance(a, torch.SymInt) and not isinstance(b, torch.SymInt):
        return bool(a != b)
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(a != b))


def sum_to(x: Tensor, like: Tensor) -> Tensor:
    """x summed over the dimensions in which `like` broadcasts to it."""
    missing = x.dim() - like.dim()
    ones = [missing + d for d, size in enumerate(like.shape) if _may_differ(x.shape[missing + d], size)]
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


def softmax(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x = (g - sum(g * y)) * y, which is symmetric in g.
    (grad_out, y), (dim,) = ctx.saved_tensors, ctx.options
    g, p, v = plain.wide(grad_out), plain.wide(y), plain.wide(grad_grad_x)
    grad_y = v * (g - (g * p).sum(dim, keepdim=True)) - g * (v * p).sum(dim, keepdim=True)
    return {"grad_out": _ops.softmax_backward(grad_grad_x, y, dim), "y": grad_y.to(y.dtype)}


def log_softmax(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    # grad_x = g - exp(y) * sum(g).
    (grad_out, y), (dim,) = ctx.saved_tensors, ctx.options
    v_p = plain.wide(grad_grad_x) * plain.wide(y).exp()
    grad_grad_out = plain.wide(grad_grad_x) - v_p.sum(dim, keepdim=True)
    grad_y = -v_p * plain.wide(grad_out).sum(dim, keepdim=True)
    return {"grad_out": grad_grad_out.to(grad_out.dtype), "y": grad_y.to(y.dtype)}


def rotary_embedding_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Of the operator, too."""
    _, _, cos, sin, ctx.interleaved = inputs
    if any(ctx.needs_input_grad[2:4]):
        reason = "their derivative is not implemented"
        checks.fail("rotary_embedding", f"expected cos and sin not to require grad: {reason}")
    ctx.save_for_backward(cos, sin)


def rotary_embedding(ctx: Any, grad_grad_q: Tensor, grad_grad_k: Tensor) -> Gradients:
    # The backward operator multiplies by the transposed matrix, so its own backward is the operator.
    cos, sin = ctx.saved_tensors
    grad_q, grad_k = _ops.rotary_embedding(grad_grad_q, grad_grad_k, cos, sin, ctx.interleaved)
    return {"grad_q": grad_q, "grad_k": grad_k}

"""The public functions. A section an op, in a fixed order: function, fake, setup_context, backward, register_autograd.

The kernels and the checks of their inputs are in csrc/<op>/; what a fake promises (shape, strides, dtype) is what
csrc/<op>/<op>.cpp allocates. reference.py holds the same functions in plain PyTorch.

Every op takes float64, float32, bfloat16 and float16 on CPU and CUDA, computes in float32 (float64: in float64), lets
NaN propagate, takes any strides, storage offset and number of elements, and is deterministic: the same bits for every
run and number of threads. On a jagged nested tensor all but reduce_sum, softmax, the losses and rotary_embedding work
on values(). A wrong argument raises RuntimeError with a sentence that names the op, the argument, what was expected and
what came.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from extension_cpp import _ops, autograd, checks, linear_loss, plain, second_order
from extension_cpp.autograd import (
    Gradients,
    has_tangent,
    is_recorded,
    register_autocast,
    register_autocast_rule,
    register_autograd,
    register_fake,
)

# ---- muladd ----


def muladd(a: Tensor, b: Tensor, c: float, *, out: Tensor | None = None) -> Tensor:
    """Multiplies two tensors element by element and adds a number: ``a * b + c``.

    Args:
        a: any shape.
        b: shape, dtype and device of ``a``.
        c: the number to add.
        out: where to write the result: shape, dtype and device of ``a``, not requiring grad; it may be ``a`` or ``b``
            itself, and must not overlap them otherwise.

    Returns:
        A tensor of ``a``'s shape, and of ``a``'s strides where ``a`` is dense, else dense and in ``a``'s order of
        dimensions, as torch.empty_like; ``out`` if given.

    Raises:
        RuntimeError: ``b`` or ``out`` differs from ``a`` in shape, dtype or device, a dtype is not floating point, or
            ``out`` requires grad, overlaps itself, or overlaps an input in part.

    Differentiable in ``a`` and ``b``, to any order; not with ``out``. The result is rounded once (fused multiply-add),
    and on an x86 CPU without that instruction the product, too.
    """
    if out is None:
        return _ops.muladd(a, b, c)
    if out.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("extension_cpp::muladd: expected out not to require grad, since out= is not differentiable")
    if (a.requires_grad or b.requires_grad) and torch.is_grad_enabled():
        raise RuntimeError(
            "extension_cpp::muladd: expected a and b not to require grad with out=, which is not differentiable"
        )
    if has_tangent(a, b, out):
        raise RuntimeError("extension_cpp::muladd: expected no tangents with out=, which is not differentiable")
    torch.ops.extension_cpp.muladd.out(a, b, c, out=out)
    return out


@register_fake("extension_cpp::muladd")
def _(a: Tensor, b: Tensor, c: float) -> Tensor:
    checks.check_dtype("muladd", "a", a)
    checks.check_like("muladd", "b", b, "a", a)
    return torch.empty_like(a)


@register_fake("extension_cpp::muladd.out")
def _(a: Tensor, b: Tensor, c: float, *, out: Tensor) -> None:
    checks.check_dtype("muladd", "a", a)
    checks.check_like("muladd", "b", b, "a", a)
    checks.check_like("muladd", "out", out, "a", a)
    checks.check_writable("muladd", out)
    checks.check_no_partial_overlap("muladd", out, "a", a)
    checks.check_no_partial_overlap("muladd", out, "b", b)


@register_fake("extension_cpp::muladd_backward")
def _(grad_out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    checks.check_dtype("muladd_backward", "a", a)
    checks.check_like("muladd_backward", "grad_out", grad_out, "a", a)
    checks.check_like("muladd_backward", "b", b, "a", a)
    return torch.empty_like(a), torch.empty_like(a)


def _muladd_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    a, b, _ = inputs
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _muladd_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    a, b = ctx.saved_tensors
    if a is None:
        return {"a": _ops.muladd(grad_out, b, 0.0)}
    if b is None:
        return {"b": _ops.muladd(grad_out, a, 0.0)}
    grad_a, grad_b = _ops.muladd_backward(grad_out, a, b)
    return {"a": grad_a, "b": grad_b}


register_autograd("extension_cpp::muladd", _muladd_backward, setup_context=_muladd_setup_context, plain=plain.muladd)
register_autograd(
    "extension_cpp::muladd_backward",
    second_order.muladd,
    setup_context=second_order.save_inputs,
    plain=plain.muladd_backward,
)


# ---- scale_bias_relu ----


def scale_bias_relu(x: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    """Scales, adds a bias over the last dimension and clips at zero: ``relu(x * scale + bias)``.

    Args:
        x: shape (..., features).
        bias: shape (features,), dtype and device of ``x``.
        scale: the factor.

    Returns:
        A tensor of ``x``'s shape, and of ``x``'s strides where ``x`` is dense, else dense and in ``x``'s order of
        dimensions, as torch.empty_like.

    Raises:
        RuntimeError: ``x`` has no dimension, ``bias`` is not (features,) or differs from ``x`` in dtype or device, or a
            dtype is not floating point.

    Differentiable in ``x`` and ``bias``, to any order. Backward saves ``x`` and ``bias`` alone and recomputes the
    mask; it reads and writes everything once, and sums the bias gradient over the rows in a fixed order.
    """
    return _ops.scale_bias_relu(x, bias, scale)


def _check_bias(op: str, x: Tensor, bias: Tensor) -> None:
    checks.check_dtype(op, "x", x)
    checks.check_same(op, "bias", bias, "x", x)
    checks.check(op, x.dim() > 0, "expected x to have at least one dimension, but got shape []")
    expected = f"expected bias of shape [{x.shape[-1]}], the last dimension of x"
    checks.check_sizes(op, bias.shape, x.shape[-1:], f"{expected}, but got {list(bias.shape)}")


@register_fake("extension_cpp::scale_bias_relu")
def _(x: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    _check_bias("scale_bias_relu", x, bias)
    return torch.empty_like(x)


@register_fake("extension_cpp::scale_bias_relu_backward")
def _(
    grad_out: Tensor, x: Tensor, bias: Tensor, scale: float, needs_grad_x: bool, needs_grad_bias: bool
) -> tuple[Tensor, Tensor]:
    _check_bias("scale_bias_relu_backward", x, bias)
    checks.check_like("scale_bias_relu_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x) if needs_grad_x else x.new_empty(0), bias.new_empty(bias.shape if needs_grad_bias else 0)


def _scale_bias_relu_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, bias, ctx.scale = inputs
    ctx.save_for_backward(x, bias)


def _scale_bias_relu_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    x, bias = ctx.saved_tensors
    needs_x, needs_bias, _ = ctx.needs_input_grad
    grad_x, grad_bias = _ops.scale_bias_relu_backward(grad_out, x, bias, ctx.scale, needs_x, needs_bias)
    return {"x": grad_x, "bias": grad_bias}


register_autograd(
    "extension_cpp::scale_bias_relu",
    _scale_bias_relu_backward,
    setup_context=_scale_bias_relu_setup_context,
    plain=plain.scale_bias_relu,
)
register_autograd(
    "extension_cpp::scale_bias_relu_backward",
    second_order.scale_bias_relu,
    setup_context=second_order.scale_bias_relu_setup_context,
    plain=plain.scale_bias_relu_backward,
)


# ---- relu ----


def relu(x: Tensor) -> Tensor:
    """Clips at zero: ``max(x, 0)``, NaN stays NaN.

    Args:
        x: any shape.

    Returns:
        A tensor of ``x``'s shape, and of ``x``'s strides where ``x`` is dense, else dense and in ``x``'s order of
        dimensions, as torch.empty_like.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable; the derivative at 0 is 0, and the second derivative is zero. Saves its result, not ``x``.
    """
    return _ops.relu(x)


@register_fake("extension_cpp::relu")
def _(x: Tensor) -> Tensor:
    checks.check_dtype("relu", "x", x)
    return torch.empty_like(x)


@register_fake("extension_cpp::relu_backward")
def _(grad_out: Tensor, y: Tensor) -> Tensor:
    checks.check_dtype("relu_backward", "y", y)
    checks.check_like("relu_backward", "grad_out", grad_out, "y", y)
    return torch.empty_like(y)


def _relu_setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _relu_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (y,) = ctx.saved_tensors
    return {"x": _ops.relu_backward(grad_out, y)}


register_autograd("extension_cpp::relu", _relu_backward, setup_context=_relu_setup_context, plain=plain.relu)
register_autograd(
    "extension_cpp::relu_backward",
    second_order.relu,
    setup_context=second_order.relu_setup_context,
    plain=plain.relu_backward,
)


# ---- mish ----


def mish(x: Tensor) -> Tensor:
    """Mish: ``x * tanh(softplus(x))``, softplus(x) = log(1 + exp(x)).

    Args:
        x: any shape.

    Returns:
        A tensor of ``x``'s shape, and of ``x``'s strides where ``x`` is dense, else dense and in ``x``'s order of
        dimensions, as torch.empty_like. Small results keep their digits (x * exp(x) down to where float32 ends), large
        ones are ``x``; at -inf the result is NaN, as torch.nn.functional.mish's.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable twice; a third derivative raises. Source: Misra 2019, arXiv:1908.08681.
    """
    return _ops.mish(x)


@register_fake("extension_cpp::mish")
def _(x: Tensor) -> Tensor:
    checks.check_dtype("mish", "x", x)
    return torch.empty_like(x)


@register_fake("extension_cpp::mish_backward")
def _(grad_out: Tensor, x: Tensor) -> Tensor:
    checks.check_dtype("mish_backward", "x", x)
    checks.check_like("mish_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x)


@register_fake("extension_cpp::mish_double_backward")
def _(grad_grad_x: Tensor, grad_out: Tensor, x: Tensor) -> Tensor:
    checks.check_dtype("mish_double_backward", "x", x)
    checks.check_like("mish_double_backward", "grad_grad_x", grad_grad_x, "x", x)
    checks.check_like("mish_double_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x)


def _mish_setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _mish_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (x,) = ctx.saved_tensors
    return {"x": _ops.mish_backward(grad_out, x)}


register_autograd("extension_cpp::mish", _mish_backward, setup_context=_mish_setup_context, plain=plain.mish)
register_autograd(
    "extension_cpp::mish_backward", second_order.mish, setup_context=second_order.save_inputs, plain=plain.mish_backward
)
register_autograd("extension_cpp::mish_double_backward", second_order.not_implemented("mish", "third"))


# ---- silu ----


def silu(x: Tensor) -> Tensor:
    """SiLU, also called swish: ``x * sigmoid(x)``.

    Args:
        x: any shape.

    Returns:
        A tensor of ``x``'s shape, and of ``x``'s strides where ``x`` is dense, else dense and in ``x``'s order of
        dimensions, as torch.empty_like. Small results keep their digits (x * exp(x) down to where float32 ends); at
        -inf the result is NaN, as torch.nn.functional.silu's.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable twice; a third derivative raises. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return _ops.silu(x)


@register_fake("extension_cpp::silu")
def _(x: Tensor) -> Tensor:
    checks.check_dtype("silu", "x", x)
    return torch.empty_like(x)


@register_fake("extension_cpp::silu_backward")
def _(grad_out: Tensor, x: Tensor) -> Tensor:
    checks.check_dtype("silu_backward", "x", x)
    checks.check_like("silu_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x)


@register_fake("extension_cpp::silu_double_backward")
def _(grad_grad_x: Tensor, grad_out: Tensor, x: Tensor) -> Tensor:
    checks.check_dtype("silu_double_backward", "x", x)
    checks.check_like("silu_double_backward", "grad_grad_x", grad_grad_x, "x", x)
    checks.check_like("silu_double_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x)


def _silu_setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _silu_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (x,) = ctx.saved_tensors
    return {"x": _ops.silu_backward(grad_out, x)}


register_autograd("extension_cpp::silu", _silu_backward, setup_context=_silu_setup_context, plain=plain.silu)
register_autograd(
    "extension_cpp::silu_backward", second_order.silu, setup_context=second_order.save_inputs, plain=plain.silu_backward
)
register_autograd("extension_cpp::silu_double_backward", second_order.not_implemented("silu", "third"))


# ---- gelu ----


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU: ``x * Phi(x)``, Phi the distribution function of the normal distribution, or its approximation by tanh.

    Args:
        x: any shape.
        approximate: "none", Phi(x) = (1 + erf(x / sqrt(2))) / 2; or "tanh", in its place
            (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2.

    Returns:
        A tensor of ``x``'s shape, and of ``x``'s strides where ``x`` is dense, else dense and in ``x``'s order of
        dimensions, as torch.empty_like. Small results keep their digits, which ``1 + erf`` would cancel.

    Raises:
        RuntimeError: the dtype is not floating point, or ``approximate`` is neither "none" nor "tanh".

    Differentiable twice; a third derivative raises. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return _ops.gelu(x, _is_tanh("gelu", approximate))


def _is_tanh(op: str, approximate: str) -> bool:
    """The operators' argument. The stable ABI can pass a string, but leaks it at each call."""
    if approximate not in ("none", "tanh"):
        checks.fail(op, f"expected approximate to be 'none' or 'tanh', but got {approximate!r}")
    return approximate == "tanh"


@register_fake("extension_cpp::gelu")
def _(x: Tensor, tanh: bool = False) -> Tensor:
    checks.check_dtype("gelu", "x", x)
    return torch.empty_like(x)


@register_fake("extension_cpp::gelu_backward")
def _(grad_out: Tensor, x: Tensor, tanh: bool) -> Tensor:
    checks.check_dtype("gelu_backward", "x", x)
    checks.check_like("gelu_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x)


@register_fake("extension_cpp::gelu_double_backward")
def _(grad_grad_x: Tensor, grad_out: Tensor, x: Tensor, tanh: bool) -> Tensor:
    checks.check_dtype("gelu_double_backward", "x", x)
    checks.check_like("gelu_double_backward", "grad_grad_x", grad_grad_x, "x", x)
    checks.check_like("gelu_double_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x)


def _gelu_setup_context(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
    x, ctx.tanh = inputs
    ctx.save_for_backward(x)


def _gelu_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (x,) = ctx.saved_tensors
    return {"x": _ops.gelu_backward(grad_out, x, ctx.tanh)}


register_autograd("extension_cpp::gelu", _gelu_backward, setup_context=_gelu_setup_context, plain=plain.gelu)
register_autograd(
    "extension_cpp::gelu_backward",
    second_order.gelu,
    setup_context=second_order.gelu_setup_context,
    plain=plain.gelu_backward,
)
register_autograd("extension_cpp::gelu_double_backward", second_order.not_implemented("gelu", "third"))


# ---- bias_gelu ----


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Adds a bias over the last dimension, and GELU: ``gelu(x + bias, approximate)``.

    Args:
        x: shape (..., features).
        bias: shape (features,), dtype and device of ``x``.
        approximate: "none" or "tanh", as for gelu.

    Returns:
        A tensor of ``x``'s shape, and of ``x``'s strides where ``x`` is dense, else dense and in ``x``'s order of
        dimensions, as torch.empty_like. It is rounded once: ``x + bias`` is kept in float32.

    Raises:
        RuntimeError: ``x`` has no dimension, ``bias`` is not (features,) or differs from ``x`` in dtype or device, a
            dtype is not floating point, or ``approximate`` is neither "none" nor "tanh".

    Differentiable twice in ``x`` and ``bias``; a third derivative raises. Backward saves ``x`` and ``bias`` alone; it
    reads and writes everything once, and sums the bias gradient over the rows in a fixed order.
    """
    return _ops.bias_gelu(x, bias, _is_tanh("bias_gelu", approximate))


@register_fake("extension_cpp::bias_gelu")
def _(x: Tensor, bias: Tensor, tanh: bool = False) -> Tensor:
    _check_bias("bias_gelu", x, bias)
    return torch.empty_like(x)


@register_fake("extension_cpp::bias_gelu_backward")
def _(
    grad_out: Tensor, x: Tensor, bias: Tensor, tanh: bool, needs_grad_x: bool, needs_grad_bias: bool
) -> tuple[Tensor, Tensor]:
    _check_bias("bias_gelu_backward", x, bias)
    checks.check_like("bias_gelu_backward", "grad_out", grad_out, "x", x)
    return torch.empty_like(x) if needs_grad_x else x.new_empty(0), bias.new_empty(bias.shape if needs_grad_bias else 0)


def _bias_gelu_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    x, bias, ctx.tanh = inputs
    ctx.save_for_backward(x, bias)


def _bias_gelu_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    x, bias = ctx.saved_tensors
    needs_x, needs_bias, _ = ctx.needs_input_grad
    grad_x, grad_bias = _ops.bias_gelu_backward(grad_out, x, bias, ctx.tanh, needs_x, needs_bias)
    return {"x": grad_x, "bias": grad_bias}


register_autograd(
    "extension_cpp::bias_gelu",
    _bias_gelu_backward,
    setup_context=_bias_gelu_setup_context,
    plain=plain.bias_gelu,
)
register_autograd(
    "extension_cpp::bias_gelu_backward",
    second_order.bias_gelu,
    setup_context=second_order.bias_gelu_setup_context,
    plain=plain.bias_gelu_backward,
)


# ---- swiglu ----


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The SwiGLU gate: ``silu(gate) * up``.

    Args:
        gate: any shape.
        up: shape, dtype and device of ``gate``. Both may be halves of one packed tensor, ``packed.chunk(2, -1)``: they
            are read where they lie, forward and backward.

    Returns:
        A tensor of ``gate``'s shape, and of ``gate``'s strides where ``gate`` is dense, else dense and in ``gate``'s
        order of dimensions, as torch.empty_like. It is rounded once.

    Raises:
        RuntimeError: ``up`` differs from ``gate`` in shape, dtype or device, or a dtype is not floating point.

    Differentiable twice; a third derivative raises. Backward saves ``gate`` and ``up`` alone. Source: Shazeer 2020,
    arXiv:2002.05202.
    """
    return _ops.swiglu(gate, up)


def _check_gate(op: str, gate: Tensor, up: Tensor) -> None:
    checks.check_dtype(op, "gate", gate)
    checks.check_like(op, "up", up, "gate", gate)


@register_fake("extension_cpp::swiglu")
def _(gate: Tensor, up: Tensor) -> Tensor:
    _check_gate("swiglu", gate, up)
    return torch.empty_like(gate)


@register_fake("extension_cpp::swiglu_backward")
def _(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    _check_gate("swiglu_backward", gate, up)
    checks.check_like("swiglu_backward", "grad_out", grad_out, "gate", gate)
    return torch.empty_like(gate), torch.empty_like(gate)


def _swiglu_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    gate, up = ctx.saved_tensors
    grad_gate, grad_up = _ops.swiglu_backward(grad_out, gate, up)
    return {"gate": grad_gate, "up": grad_up}


register_autograd("extension_cpp::swiglu", _swiglu_backward, setup_context=second_order.save_inputs, plain=plain.swiglu)
register_autograd(
    "extension_cpp::swiglu_backward",
    second_order.swiglu,
    setup_context=second_order.save_inputs,
    plain=plain.swiglu_backward,
)


# ---- geglu ----


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """The GeGLU gate: ``gelu(gate, approximate) * up``.

    Args:
        gate: any shape.
        up: shape, dtype and device of ``gate``. Both may be halves of one packed tensor, ``packed.chunk(2, -1)``: they
            are read where they lie, forward and backward.
        approximate: "none" or "tanh", as for gelu.

    Returns:
        A tensor of ``gate``'s shape, and of ``gate``'s strides where ``gate`` is dense, else dense and in ``gate``'s
        order of dimensions, as torch.empty_like. It is rounded once.

    Raises:
        RuntimeError: ``up`` differs from ``gate`` in shape, dtype or device, a dtype is not floating point, or
            ``approximate`` is neither "none" nor "tanh".

    Differentiable twice; a third derivative raises. Backward saves ``gate`` and ``up`` alone. Source: Shazeer 2020,
    arXiv:2002.05202.
    """
    return _ops.geglu(gate, up, _is_tanh("geglu", approximate))


@register_fake("extension_cpp::geglu")
def _(gate: Tensor, up: Tensor, tanh: bool = False) -> Tensor:
    _check_gate("geglu", gate, up)
    return torch.empty_like(gate)


@register_fake("extension_cpp::geglu_backward")
def _(grad_out: Tensor, gate: Tensor, up: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    _check_gate("geglu_backward", gate, up)
    checks.check_like("geglu_backward", "grad_out", grad_out, "gate", gate)
    return torch.empty_like(gate), torch.empty_like(gate)


def _geglu_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    gate, up, ctx.tanh = inputs
    ctx.save_for_backward(gate, up)


def _geglu_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    gate, up = ctx.saved_tensors
    grad_gate, grad_up = _ops.geglu_backward(grad_out, gate, up, ctx.tanh)
    return {"gate": grad_gate, "up": grad_up}


register_autograd("extension_cpp::geglu", _geglu_backward, setup_context=_geglu_setup_context, plain=plain.geglu)
register_autograd(
    "extension_cpp::geglu_backward",
    second_order.geglu,
    setup_context=second_order.geglu_setup_context,
    plain=plain.geglu_backward,
)


# ---- reduce_sum ----


def reduce_sum(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Sums over all dimensions, one or several, as torch.sum does.

    Args:
        x: any shape.
        dim: the dimension or dimensions to sum over, negative ones from the end; None or () means all.
        keepdim: whether summed dimensions stay, with size 1.

    Returns:
        The sums, contiguous, of ``x``'s dtype. A sum over no elements is 0.

    Raises:
        RuntimeError: ``dim`` is no int, out of range or named twice, or the dtype is not floating point.

    Differentiable, to any order; the gradient is an expanded view and costs nothing. Sums pass through float32 lanes
    (float64: float64) of at most a few dozen terms and then through float64, in an order that the shape alone fixes.
    """
    return _ops.reduce_sum(x, (dim,) if type(dim) is int else _as_dims(dim), keepdim)


def _as_dims(dim: Any) -> tuple[int, ...] | None:
    """The dimensions that a caller names, by anything that is an index; a bool is none, as in torch.sum."""
    dims = dim if isinstance(dim, Sequence) or dim is None else (dim,)
    for d in dims or ():
        if isinstance(d, bool) or not hasattr(d, "__index__"):
            checks.fail("reduce_sum", f"expected dim to be an int, a sequence of ints or None, but got {dim!r}")
    return dims if dims is None else tuple(operator.index(d) for d in dims)


def _reduced_dims(x: Tensor, dim: Sequence[int] | None) -> set[int]:
    return {d % x.dim() for d in dim} if dim and x.dim() else set(range(x.dim()))


def _check_dims(x: Tensor, dim: Sequence[int] | None) -> None:
    dims, seen = max(x.dim(), 1), set[int]()  # a 0-d tensor has the dimensions 0 and -1, as in PyTorch
    for d in dim or ():
        checks.check("reduce_sum", -dims <= d < dims, f"expected dim in [{-dims}, {dims - 1}], but got {d}")
        checks.check("reduce_sum", d % dims not in seen, f"expected each dim once, but got {d % dims} twice")
        seen.add(d % dims)


@register_fake("extension_cpp::reduce_sum")
def _(x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    checks.check_dtype("reduce_sum", "x", x)
    _check_dims(x, dim)
    reduced = _reduced_dims(x, dim)
    shape = [1 if d in reduced else size for d, size in enumerate(x.shape) if keepdim or d not in reduced]
    return x.new_empty(shape)


def _reduce_sum_setup_context(ctx: Any, inputs: tuple[Tensor, Sequence[int] | None, bool], output: Tensor) -> None:
    x, dim, keepdim = inputs
    ctx.shape = x.shape
    ctx.summed_away = () if keepdim else sorted(_reduced_dims(x, dim))


def _reduce_sum_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    # Each summand's gradient is the sum's: a view with stride 0, as torch.sum's is, not an op that writes it out.
    for d in ctx.summed_away:
        grad_out = grad_out.unsqueeze(d)
    return {"x": grad_out.expand(ctx.shape)}


register_autograd(
    "extension_cpp::reduce_sum", _reduce_sum_backward, setup_context=_reduce_sum_setup_context, plain=plain.reduce_sum
)


# ---- dropout ----


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeroes each element with probability ``p`` and scales the others by ``1 / (1 - p)``.

    Args:
        x: any shape.
        p: the probability, from 0 to 1, taken to the nearest multiple of 2^-32.
        training: False: returns ``x``.

    Returns:
        A contiguous tensor of ``x``'s shape; ``x`` itself if ``p`` is 0 or not ``training``. A dropped element is 0,
        also where ``x`` is NaN or infinite.

    Raises:
        RuntimeError: ``p`` is not between 0 and 1, or the dtype is not floating point.

    Differentiable, to any order. The mask is never stored: which elements are kept is a function of a seed, drawn from
    PyTorch's generator on ``x``'s device, and of the element's index in ``x``, the same on CPU and CUDA and for every
    dtype, layout and number of threads; backward makes the mask again. So torch.manual_seed rules, checkpointing makes
    the same mask again, and a CUDA graph draws a fresh one at every replay. Under torch.compile Inductor draws the
    seed: eager's, where torch._inductor.config.fallback_random is set. Elements 2k and 2k + 1 share a random word: that
    both are dropped has a probability within 2^-16 of p^2. Sources: Srivastava et al. 2014, JMLR 15; Philox 4x32-7 of
    Salmon et al. 2011.
    """
    checks.check_probability("dropout", p)
    checks.check_tensor("dropout", "x", x)
    if p == 0 or not training:
        return x
    return _ops.dropout(x, p, _seed(x, p))


@torch.fx.wrap  # torch.fx records the call: it has no device to give to torch.randint
def _seed(x: Tensor, p: float) -> Tensor:
    """One number for the whole of x, on its device, so that no random number passes through the host."""
    if p == 1:  # nothing is kept, whatever the seed
        seed = torch.zeros(1, dtype=torch.int64, device=x.device)
    else:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=x.device)
    return autograd.sharding.agreed(seed, x) if isinstance(x, autograd.DTENSOR) else seed


@register_fake("extension_cpp::dropout")
def _(x: Tensor, p: float, seed: Tensor) -> Tensor:
    checks.check_dtype("dropout", "x", x)
    checks.check_probability("dropout", p)
    checks.check_seed("dropout", seed, x)
    return x.new_empty(x.shape)


def _dropout_setup_context(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def _dropout_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (seed,) = ctx.saved_tensors
    return {"x": _ops.dropout(grad_out, ctx.p, seed)}


register_autograd(
    "extension_cpp::dropout", _dropout_backward, setup_context=_dropout_setup_context, plain=plain.dropout
)


# ---- layer_norm ----


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalization over the last dimensions: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Args:
        x: shape (..., *normalized_shape). Rows of unit stride are read where they lie (a slice, a packed QKV); other
            strides cost a copy.
        normalized_shape: the last dimensions of ``x``, over which mean and (biased) variance are taken.
        weight: shape normalized_shape, ``x``'s device, and its dtype, or float32 where ``x`` is half; None: ones.
        bias: as ``weight``, and of its dtype; None: zeros.
        eps: added to the variance.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        RuntimeError: normalized_shape is empty or not the end of ``x``'s shape; ``weight`` or ``bias`` has another
            shape, dtype or device; or ``x`` is not floating point.

    Differentiable in ``x``, ``weight`` and ``bias``, to any order. Backward saves ``x`` and a mean and a reciprocal
    standard deviation a row, in float32 (float64: float64). The variance is summed around a number near the mean, in as
    many passes as lose no digits; the rows of the weight gradients are summed in a fixed order. Batch-invariant: a row
    of the result has the same bits however many rows there are, if it begins equally far from a multiple of 16 bytes,
    as all rows do whose size is such a multiple. Under autocast on CUDA half inputs are cast to float32 and so is the
    result, as PyTorch's own; on the CPU PyTorch casts nothing, and nor does this. Source: Ba, Kiros and Hinton 2016,
    arXiv:1607.06450.
    """
    return _ops.layer_norm(x, normalized_shape, weight, bias, eps)


def _statistics(x: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """Room for a number a row, which broadcasts against x."""
    shape = [*x.shape[: x.dim() - len(normalized_shape)], *(1 for _ in normalized_shape)]
    return x.new_empty(shape, dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)


def _check_weight(op: str, name: str, weight: Tensor, x: Tensor, normalized_shape: Sequence[int]) -> None:
    checks.check_device(op, name, weight, "x", x)
    half = x.dtype.itemsize < 4
    checks.check(
        op,
        weight.dtype == x.dtype or (half and weight.dtype == torch.float32),
        f"expected {name} to be {checks.dtype_name(x)} like x{' or float32' if half else ''}, "
        f"but got {checks.dtype_name(weight)}",
    )
    expected = f"expected {name} of shape {list(normalized_shape)}, normalized_shape"
    checks.check_sizes(op, weight.shape, normalized_shape, f"{expected}, but got {list(weight.shape)}")


def _check_norm(
    op: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None = None
) -> None:
    """check_inputs of csrc/norm/norm.cpp."""
    dims = len(normalized_shape)
    checks.check_dtype(op, "x", x)
    checks.check(op, dims > 0, "expected normalized_shape to have at least one dimension, but got []")
    expected = f"expected normalized_shape to be the last dimensions of x, of shape {list(x.shape)}"
    checks.check_sizes(op, x.shape[-dims:], normalized_shape, f"{expected}, but got {list(normalized_shape)}")
    if weight is not None:
        _check_weight(op, "weight", weight, x, normalized_shape)
    if bias is not None:
        _check_weight(op, "bias", bias, x, normalized_shape)
        if weight is not None:
            checks.check_same(op, "bias", bias, "weight", weight)


def _check_norm_backward(
    op: str,
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    statistics: dict[str, Tensor],
    weight: Tensor | None,
    bias: Tensor | None = None,
) -> None:
    """The checks of norm_backward in csrc/norm/norm.cpp; statistics by name."""
    _check_norm(op, x, normalized_shape, weight, bias)
    checks.check_like(op, "grad_out", grad_out, "x", x)
    expected = _statistics(x, normalized_shape)
    for name, given in statistics.items():
        checks.check_device(op, name, given, "x", x)
        message = f"expected {name} as the forward returned it"
        checks.check(op, given.dtype == expected.dtype and given.is_contiguous(), message)
        checks.check(op, given.numel() == expected.numel(), message)


def _check_dropout(op: str, p: float, seed: Tensor | None, x: Tensor) -> None:
    """check_dropout of csrc/norm/norm_fused.cpp."""
    checks.check_probability(op, p)
    if seed is not None:
        checks.check_seed(op, seed, x)
    checks.check(op, p == 0 or seed is not None, "expected a seed with p > 0, but got None")


@register_fake("extension_cpp::layer_norm")
def _(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_norm("layer_norm", x, normalized_shape, weight, bias)
    return x.new_empty(x.shape), _statistics(x, normalized_shape), _statistics(x, normalized_shape)


@register_fake("extension_cpp::layer_norm_backward")
def _(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = {"mean": mean, "rstd": rstd}
    _check_norm_backward("layer_norm_backward", grad_out, x, normalized_shape, statistics, weight, bias)
    some = next((w for w in (weight, bias) if w is not None), x)
    grad_weight = some.new_empty(list(normalized_shape) if needs_grad_weight else 0)
    grad_bias = some.new_empty(list(normalized_shape) if needs_grad_bias else 0)
    return x.new_empty(x.shape if needs_grad_x else 0), grad_weight, grad_bias


def _layer_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, ctx.normalized_shape, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # else backward would fill zeros for mean and rstd


def _layer_norm_backward(ctx: Any, grad_out: Tensor | None, *_: None) -> Gradients:
    if grad_out is None:
        return {}
    x, weight, bias, mean, rstd = ctx.saved_tensors
    needs_x, _, *needs_weights, _ = ctx.needs_input_grad
    grad_x, grad_weight, grad_bias = _ops.layer_norm_backward(
        grad_out, x, ctx.normalized_shape, mean, rstd, weight, bias, needs_x, *needs_weights
    )
    return {"x": grad_x, "weight": grad_weight, "bias": grad_bias}


register_autograd(
    "extension_cpp::layer_norm", _layer_norm_backward, setup_context=_layer_norm_setup_context, plain=plain.layer_norm
)
# For one device type alone: of two registrations torch.compile takes the second for both.
register_autocast("extension_cpp::layer_norm", "cuda", torch.float32)
register_autograd(
    "extension_cpp::layer_norm_backward",
    second_order.layer_norm,
    setup_context=second_order.layer_norm_setup_context,
    plain=plain.layer_norm_backward,
)


# ---- rms_norm ----


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Root mean square normalization over the last dimensions: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: shape (..., *normalized_shape). Rows of unit stride are read where they lie; other strides cost a copy.
        normalized_shape: the last dimensions of ``x``, over which the mean is taken.
        weight: shape normalized_shape, ``x``'s device, and its dtype, or float32 where ``x`` is half; None: ones.
        eps: added to the mean square; None: the machine epsilon of the type of the arithmetic (float32, for float64
            float64), as torch.nn.functional.rms_norm's.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        RuntimeError: normalized_shape is empty or not the end of ``x``'s shape; ``weight`` has another shape, dtype or
            device; or ``x`` is not floating point.

    Differentiable in ``x`` and ``weight``, to any order. Backward saves ``x`` and a reciprocal root mean square a row,
    in float32 (float64: float64); the rows of the weight gradient are summed in a fixed order. Batch-invariant, as
    layer_norm is. Autocast does what it does to PyTorch's own: from torch 2.12 on, half inputs and the result are cast
    to float32 on CUDA. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return _ops.rms_norm(x, normalized_shape, weight, eps)


@register_fake("extension_cpp::rms_norm")
def _(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    _check_norm("rms_norm", x, normalized_shape, weight)
    return x.new_empty(x.shape), _statistics(x, normalized_shape)


@register_fake("extension_cpp::rms_norm_backward")
def _(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    needs_grad_x: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, Tensor]:
    _check_norm_backward("rms_norm_backward", grad_out, x, normalized_shape, {"rstd": rstd}, weight)
    grad_weight = (x if weight is None else weight).new_empty(list(normalized_shape) if needs_grad_weight else 0)
    return x.new_empty(x.shape if needs_grad_x else 0), grad_weight


def _rms_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.normalized_shape, weight, _ = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _rms_norm_backward(ctx: Any, grad_out: Tensor | None, _: None) -> Gradients:
    if grad_out is None:
        return {}
    x, weight, rstd = ctx.saved_tensors
    needs_x, _, needs_weight, _ = ctx.needs_input_grad
    grad_x, grad_weight = _ops.rms_norm_backward(grad_out, x, ctx.normalized_shape, rstd, weight, needs_x, needs_weight)
    return {"x": grad_x, "weight": grad_weight}


register_autograd(
    "extension_cpp::rms_norm", _rms_norm_backward, setup_context=_rms_norm_setup_context, plain=plain.rms_norm
)
if torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA"):
    register_autocast("extension_cpp::rms_norm", "cuda", torch.float32)
register_autograd(
    "extension_cpp::rms_norm_backward",
    second_order.rms_norm,
    setup_context=second_order.rms_norm_setup_context,
    plain=plain.rms_norm_backward,
)


# ---- add_layer_norm ----


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    p: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """Dropout, residual addition and layer normalization at once: ``s = residual + dropout(x, p)``, ``layer_norm(s)``.

    Args:
        x: shape (..., *normalized_shape). Rows of unit stride are read where they lie; other strides cost a copy.
        residual: shape, dtype and device of ``x``.
        normalized_shape, weight, bias, eps: as layer_norm's.
        p: the probability that an element of ``x`` is dropped, from 0 to 1.
        training: False: nothing is dropped.

    Returns:
        ``layer_norm(s)`` and ``s``, contiguous tensors of ``x``'s shape and dtype. ``s`` is rounded once to its dtype,
        and it is the rounded ``s`` that is normalized. Under autocast ``x`` and ``residual`` may differ in dtype, and
        take the one that ``residual + x`` has.

    Raises:
        RuntimeError: ``residual`` differs from ``x`` in shape, dtype or device, ``p`` is not between 0 and 1, or an
            argument is not what layer_norm takes.

    Differentiable in ``x``, ``residual``, ``weight`` and ``bias`` through both results, to any order. The mask is that
    of dropout for the same seed, and is not stored: backward saves ``s``, two numbers a row, and the seed. Without
    dropout one tensor is the gradient of both ``x`` and ``residual``. Both results are batch-invariant, as layer_norm's
    is; with dropout the mask goes by the elements' places in ``x``.
    """
    checks.check_probability("add_layer_norm", p)
    for name, tensor in (("x", x), ("residual", residual)):
        checks.check_tensor("add_layer_norm", name, tensor)
    p = p if training else 0.0
    x, residual = _under_autocast(x, residual)
    seed = _seed(x, p) if p else None
    return _ops.add_layer_norm(x, residual, normalized_shape, weight, bias, eps, p, seed)


@torch.fx.wrap  # torch.fx knows no dtypes
def _under_autocast(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """A branch comes in half there, and the residual stream in float32."""
    device = x.device.type
    if x.dtype != residual.dtype and device in ("cpu", "cuda") and torch.is_autocast_enabled(device):  # meta has none
        dtype = torch.promote_types(x.dtype, residual.dtype)
        return x.to(dtype), residual.to(dtype)
    return x, residual


@register_fake("extension_cpp::add_layer_norm")
def _(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_norm("add_layer_norm", x, normalized_shape, weight, bias)
    checks.check_like("add_layer_norm", "residual", residual, "x", x)
    _check_dropout("add_layer_norm", p, seed, x)
    mean, rstd = _statistics(x, normalized_shape), _statistics(x, normalized_shape)
    return x.new_empty(x.shape), x.new_empty(x.shape), mean, rstd


def _check_add_norm_backward(
    op: str,
    grad_out: Tensor,
    grad_sum: Tensor | None,
    s: Tensor,
    normalized_shape: Sequence[int],
    statistics: dict[str, Tensor],
    weights: Sequence[Tensor | None],
    p: float,
    seed: Tensor | None,
) -> None:
    if grad_sum is not None:
        checks.check_like(op, "grad_sum", grad_sum, "sum", s)
    _check_dropout(op, p, seed, s)
    _check_norm_backward(op, grad_out, s, normalized_shape, statistics, *weights)


def _add_norm_gradients(
    s: Tensor,
    weights: Sequence[Tensor | None],
    normalized_shape: Sequence[int],
    p: float,
    needs_x: bool,
    needs_residual: bool,
    needs_weights: Sequence[bool],
) -> tuple[Tensor, ...]:
    """What the backward of add_layer_norm and add_rms_norm allocates."""
    some = next((w for w in weights if w is not None), s)
    return (
        s.new_empty(s.shape if needs_x and p > 0 else 0),
        s.new_empty(s.shape if needs_x or needs_residual else 0),
        *(some.new_empty(list(normalized_shape) if needs else 0) for needs in needs_weights),
    )


@register_fake("extension_cpp::add_layer_norm_backward")
def _(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    needs_grad_x: bool,
    needs_grad_residual: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
) -> tuple[Tensor, ...]:
    _check_add_norm_backward(
        "add_layer_norm_backward",
        grad_out,
        grad_sum,
        sum,
        normalized_shape,
        {"mean": mean, "rstd": rstd},
        (weight, bias),
        p,
        seed,
    )
    needs = (needs_grad_weight, needs_grad_bias)
    return _add_norm_gradients(sum, (weight, bias), normalized_shape, p, needs_grad_x, needs_grad_residual, needs)


def _add_layer_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, ctx.normalized_shape, weight, bias, _, ctx.p, seed = inputs
    _, s, mean, rstd = output
    ctx.save_for_backward(s, weight, bias, mean, rstd, seed)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _grads_of_sum_alone(ctx: Any, grad_sum: Tensor | None, seed: Tensor | None) -> Gradients:
    """The gradients of x and residual where the norm itself is not used."""
    needs_dropout = ctx.needs_input_grad[0] and grad_sum is not None and ctx.p > 0
    return {"x": _ops.dropout(grad_sum, ctx.p, seed) if needs_dropout else grad_sum, "residual": grad_sum}


def _add_layer_norm_backward(ctx: Any, grad_out: Tensor | None, grad_sum: Tensor | None, *_: None) -> Gradients:
    s, weight, bias, mean, rstd, seed = ctx.saved_tensors
    if grad_out is None:
        return _grads_of_sum_alone(ctx, grad_sum, seed)
    needs_x, needs_residual, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    saved = s, ctx.normalized_shape, mean, rstd, weight, bias, ctx.p, seed
    grad_x, grad_residual, grad_weight, grad_bias = _ops.add_layer_norm_backward(
        grad_out, grad_sum, *saved, needs_x, needs_residual, needs_weight, needs_bias
    )
    grad_x = grad_x if ctx.p > 0 else grad_residual
    return {"x": grad_x, "residual": grad_residual, "weight": grad_weight, "bias": grad_bias}


register_autograd(
    "extension_cpp::add_layer_norm",
    _add_layer_norm_backward,
    setup_context=_add_layer_norm_setup_context,
    plain=plain.add_layer_norm,
)
register_autograd(
    "extension_cpp::add_layer_norm_backward",
    second_order.add_layer_norm,
    setup_context=second_order.add_layer_norm_setup_context,
    plain=plain.add_layer_norm_backward,
)


# ---- add_rms_norm ----


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    p: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """Dropout, residual addition and root mean square normalization at once: ``s = residual + dropout(x, p)``,
    ``rms_norm(s)``.

    Args:
        x: shape (..., *normalized_shape). Rows of unit stride are read where they lie; other strides cost a copy.
        residual: shape, dtype and device of ``x``.
        normalized_shape, weight, eps: as rms_norm's.
        p: the probability that an element of ``x`` is dropped, from 0 to 1.
        training: False: nothing is dropped.

    Returns:
        ``rms_norm(s)`` and ``s``, contiguous tensors of ``x``'s shape and dtype. ``s`` is rounded once to its dtype,
        and it is the rounded ``s`` that is normalized. Under autocast ``x`` and ``residual`` may differ in dtype, and
        take the one that ``residual + x`` has.

    Raises:
        RuntimeError: ``residual`` differs from ``x`` in shape, dtype or device, ``p`` is not between 0 and 1, or an
            argument is not what rms_norm takes.

    Differentiable in ``x``, ``residual`` and ``weight`` through both results, to any order. The mask is that of dropout
    for the same seed, and is not stored: backward saves ``s``, a number a row, and the seed. Without dropout one tensor
    is the gradient of both ``x`` and ``residual``. Both results are batch-invariant, as layer_norm's is; with dropout
    the mask goes by the elements' places in ``x``.
    """
    checks.check_probability("add_rms_norm", p)
    for name, tensor in (("x", x), ("residual", residual)):
        checks.check_tensor("add_rms_norm", name, tensor)
    p = p if training else 0.0
    x, residual = _under_autocast(x, residual)
    seed = _seed(x, p) if p else None
    return _ops.add_rms_norm(x, residual, normalized_shape, weight, eps, p, seed)


@register_fake("extension_cpp::add_rms_norm")
def _(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_norm("add_rms_norm", x, normalized_shape, weight)
    checks.check_like("add_rms_norm", "residual", residual, "x", x)
    _check_dropout("add_rms_norm", p, seed, x)
    return x.new_empty(x.shape), x.new_empty(x.shape), _statistics(x, normalized_shape)


@register_fake("extension_cpp::add_rms_norm_backward")
def _(
    grad_out: Tensor,
    grad_sum: Tensor | None,
    sum: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    p: float,
    seed: Tensor | None,
    needs_grad_x: bool,
    needs_grad_residual: bool,
    needs_grad_weight: bool,
) -> tuple[Tensor, ...]:
    _check_add_norm_backward(
        "add_rms_norm_backward", grad_out, grad_sum, sum, normalized_shape, {"rstd": rstd}, (weight,), p, seed
    )
    needs = (needs_grad_weight,)
    return _add_norm_gradients(sum, (weight,), normalized_shape, p, needs_grad_x, needs_grad_residual, needs)


def _add_rms_norm_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, ctx.normalized_shape, weight, _, ctx.p, seed = inputs
    _, s, rstd = output
    ctx.save_for_backward(s, weight, rstd, seed)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _add_rms_norm_backward(ctx: Any, grad_out: Tensor | None, grad_sum: Tensor | None, _: None) -> Gradients:
    s, weight, rstd, seed = ctx.saved_tensors
    if grad_out is None:
        return _grads_of_sum_alone(ctx, grad_sum, seed)
    needs_x, needs_residual, _, needs_weight, *_ = ctx.needs_input_grad
    saved = s, ctx.normalized_shape, rstd, weight, ctx.p, seed
    grad_x, grad_residual, grad_weight = _ops.add_rms_norm_backward(
        grad_out, grad_sum, *saved, needs_x, needs_residual, needs_weight
    )
    return {"x": grad_x if ctx.p > 0 else grad_residual, "residual": grad_residual, "weight": grad_weight}


register_autograd(
    "extension_cpp::add_rms_norm",
    _add_rms_norm_backward,
    setup_context=_add_rms_norm_setup_context,
    plain=plain.add_rms_norm,
)
register_autograd(
    "extension_cpp::add_rms_norm_backward",
    second_order.add_rms_norm,
    setup_context=second_order.add_rms_norm_setup_context,
    plain=plain.add_rms_norm_backward,
)


# ---- layer_norm_dropout ----


def layer_norm_dropout(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    p: float = 0.5,
    training: bool = True,
) -> Tensor:
    """Layer normalization and dropout at once: ``dropout(layer_norm(x), p)``.

    Args:
        x, normalized_shape, weight, bias, eps: as layer_norm's.
        p: the probability that an element of the result is dropped, from 0 to 1.
        training: False: nothing is dropped.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        RuntimeError: ``p`` is not between 0 and 1, or an argument is not what layer_norm takes.

    Differentiable in ``x``, ``weight`` and ``bias``, to any order. The mask is that of dropout for the same seed, and
    is not stored: backward saves ``x``, two numbers a row, and the seed. Autocast does what it does to layer_norm.
    Batch-invariant, as layer_norm is, but that the mask goes by the elements' places in ``x``.
    """
    checks.check_probability("layer_norm_dropout", p)
    checks.check_tensor("layer_norm_dropout", "x", x)
    if p == 0 or not training:
        return layer_norm(x, normalized_shape, weight, bias, eps)
    return _ops.layer_norm_dropout(x, normalized_shape, weight, bias, eps, p, _seed(x, p))


@register_fake("extension_cpp::layer_norm_dropout")
def _(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_norm("layer_norm_dropout", x, normalized_shape, weight, bias)
    _check_dropout("layer_norm_dropout", p, seed, x)
    return x.new_empty(x.shape), _statistics(x, normalized_shape), _statistics(x, normalized_shape)


@register_fake("extension_cpp::layer_norm_dropout_backward")
def _(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_dropout("layer_norm_dropout_backward", p, seed, x)
    statistics = {"mean": mean, "rstd": rstd}
    _check_norm_backward("layer_norm_dropout_backward", grad_out, x, normalized_shape, statistics, weight, bias)
    some = next((w for w in (weight, bias) if w is not None), x)
    grad_weight = some.new_empty(list(normalized_shape) if needs_grad_weight else 0)
    grad_bias = some.new_empty(list(normalized_shape) if needs_grad_bias else 0)
    return x.new_empty(x.shape if needs_grad_x else 0), grad_weight, grad_bias


def _layer_norm_dropout_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ctx.normalized_shape, weight, bias, _, ctx.p, seed = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd, seed)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _layer_norm_dropout_backward(ctx: Any, grad_out: Tensor | None, *_: None) -> Gradients:
    if grad_out is None:
        return {}
    x, weight, bias, mean, rstd, seed = ctx.saved_tensors
    needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    saved = x, ctx.normalized_shape, mean, rstd, weight, bias, ctx.p, seed
    grad_x, grad_weight, grad_bias = _ops.layer_norm_dropout_backward(
        grad_out, *saved, needs_x, needs_weight, needs_bias
    )
    return {"x": grad_x, "weight": grad_weight, "bias": grad_bias}


register_autograd(
    "extension_cpp::layer_norm_dropout",
    _layer_norm_dropout_backward,
    setup_context=_layer_norm_dropout_setup_context,
    plain=plain.layer_norm_dropout,
)
register_autocast("extension_cpp::layer_norm_dropout", "cuda", torch.float32)
register_autograd(
    "extension_cpp::layer_norm_dropout_backward",
    second_order.layer_norm_dropout,
    setup_context=second_order.layer_norm_dropout_setup_context,
    plain=plain.layer_norm_dropout_backward,
)


# ---- softmax and log_softmax ----


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Softmax over one dimension: ``exp(x) / sum(exp(x))``, computed relative to the largest element.

    Args:
        x: any shape.
        dim: the dimension of the sum, negative ones from the end.

    Returns:
        A tensor of ``x``'s shape and dtype, and of ``x``'s strides where ``x`` is dense, else dense and in ``x``'s
        order of dimensions, as torch.empty_like. No dimension costs a transposed copy.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point.

    Differentiable, to any order; backward saves the result alone. An element of -inf gives 0; a row of -inf alone, or
    with NaN or +inf, gives NaN, as torch.softmax. Batch-invariant at equal alignment: a row's result has the same bits
    whatever the number of rows. Autocast casts half inputs to float32 on CUDA, as for PyTorch's own.
    """
    return _ops.softmax(x, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Logarithm of the softmax over one dimension: ``x - log(sum(exp(x)))``, computed relative to the largest element.

    Args:
        x: any shape.
        dim: the dimension of the sum, negative ones from the end.

    Returns:
        A tensor of ``x``'s shape and dtype, and of ``x``'s strides where ``x`` is dense, else dense and in ``x``'s
        order of dimensions, as torch.empty_like. No dimension costs a transposed copy.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point.

    Differentiable, to any order; backward saves the result alone. NaN, infinities, batch invariance and autocast as for
    softmax.
    """
    return _ops.log_softmax(x, dim)


def _check_dim(op: str, x: Tensor, dim: int) -> None:
    dims = max(x.dim(), 1)  # a 0-d tensor has the dimensions 0 and -1, as in PyTorch
    checks.check(op, -dims <= dim < dims, f"expected dim in [{-dims}, {dims - 1}], but got {dim}")


def _softmax_fake(op: str) -> Any:
    def fake(x: Tensor, dim: int = -1) -> Tensor:
        checks.check_dtype(op, "x", x)
        _check_dim(op, x, dim)
        return torch.empty_like(x)

    return fake


def _softmax_backward_fake(op: str) -> Any:
    def fake(grad_out: Tensor, y: Tensor, dim: int) -> Tensor:
        checks.check_dtype(op, "y", y)
        checks.check_like(op, "grad_out", grad_out, "y", y)
        _check_dim(op, y, dim)
        return torch.empty_like(y)

    return fake


def _softmax_setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(output)


def _softmax_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (y,) = ctx.saved_tensors
    return {"x": _ops.softmax_backward(grad_out, y, ctx.dim)}


def _log_softmax_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (y,) = ctx.saved_tensors
    return {"x": _ops.log_softmax_backward(grad_out, y, ctx.dim)}


for _name, _of_x, _of_grad in (
    ("softmax", _softmax_backward, second_order.softmax),
    ("log_softmax", _log_softmax_backward, second_order.log_softmax),
):
    _op, _backward_op = f"extension_cpp::{_name}", f"extension_cpp::{_name}_backward"
    register_fake(_op)(_softmax_fake(_name))
    register_fake(_backward_op)(_softmax_backward_fake(f"{_name}_backward"))
    register_autograd(_op, _of_x, setup_context=_softmax_setup_context, plain=getattr(plain, _name))
    register_autograd(
        _backward_op,
        _of_grad,
        setup_context=second_order.softmax_setup_context,
        plain=getattr(plain, f"{_name}_backward"),
    )
    register_autocast(_op, "cuda", torch.float32)


# ---- cross_entropy ----


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Cross-entropy between logits and class indices.

    With z = logits, or ``softcap * tanh(logits / softcap)``, C classes, s = label_smoothing and a row's target t::

        lse  = log(sum_c exp(z_c))
        loss = weight_t * ((1 - s) * (lse - z_t) + z_loss * lse^2) + s / C * sum_c weight_c * (lse - z_c)

    Args:
        logits: shape (C,), (N, C) or (N, C, d1, ...). Rows of unit stride are read where they lie, and other strides
            cost a copy.
        target: int64, shape (), (N,) or (N, d1, ...): the class of each row.
        weight: shape (C,), the dtype of ``logits``, or float32 beside a half type: a weight for each class, not
            differentiable; None: ones.
        ignore_index: rows with this target are left out of the loss and the gradient.
        reduction: "mean", the sum of the losses over the sum of the targets' weights; "sum"; or "none".
        label_smoothing: between 0 and 1.
        z_loss: the factor of lse^2, which keeps the logits' normalizer near 1.
        softcap: a bound of the logits' size; None: none.

    Returns:
        The loss, of shape () or, with "none", of ``target``'s shape; of ``logits``' dtype, under autocast float32. Its
        mean over no row is NaN, as PyTorch's.

    Raises:
        RuntimeError: an argument has another shape, dtype or device, an option is out of range, or, on the CPU, a
            target is no class. On CUDA, where a check would wait for the device, that row's loss and gradient are NaN.
            A floating-point target, class probabilities, is refused.

    Differentiable in ``logits``, once. Forward reads the logits once and keeps a log-sum-exp for each row; backward
    reads and writes them once. Sums in float32 (float64: float64), over the rows in float64, in a fixed order. Batch-
    invariant at equal alignment. Sources: torch.nn.functional.cross_entropy; z_loss: Chowdhery et al. 2022,
    arXiv:2204.02311; softcap: Gemma Team 2024, arXiv:2408.00118.
    """
    number = _reduction("cross_entropy", reduction)
    if number == 1 and isinstance(logits, autograd.DTENSOR):
        return autograd.sharding.mean_cross_entropy(
            logits, target, weight, ignore_index, label_smoothing, z_loss, softcap, False
        )
    return _ops.cross_entropy(logits, target, weight, ignore_index, number, label_smoothing, z_loss, softcap, False)


def _float_cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """cross_entropy with a float32 loss for half logits, too: what nn.convert gives a language model."""
    number = _reduction("cross_entropy", reduction)
    if number == 1 and isinstance(logits, autograd.DTENSOR):
        return autograd.sharding.mean_cross_entropy(logits, target, None, ignore_index, 0.0, 0.0, None, True)
    return _ops.cross_entropy(logits, target, None, ignore_index, number, 0.0, 0.0, None, True)


def _reduction(op: str, reduction: str) -> int:
    """The operators' number for it, as in ATen."""
    if reduction not in ("none", "mean", "sum"):
        checks.fail(op, f"expected reduction to be 'none', 'mean' or 'sum', but got {reduction!r}")
    return ("none", "mean", "sum").index(reduction)


def _check_reduction(op: str, reduction: int) -> None:
    expected = f"expected reduction to be 0 (none), 1 (mean) or 2 (sum), but got {reduction}"
    checks.check(op, 0 <= reduction <= 2, expected)


def _check_loss(
    op: str,
    logits: Tensor,
    target: Tensor,
    class_dim: int,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> None:
    """check_inputs of csrc/loss/loss.cpp, without the targets' values."""
    checks.check_dtype(op, "logits", logits)
    checks.check(op, logits.dim() > 0, "expected logits to have at least one dimension, but got shape []")
    classes = logits.shape[class_dim]
    checks.check(op, classes > 0, f"expected at least one class, but got logits of shape {list(logits.shape)}")
    checks.check_device(op, "target", target, "logits", logits)
    dtype = checks.dtype_name(target)
    checks.check(op, target.dtype == torch.int64, f"expected target to be int64, class indices, but got {dtype}")
    shape = [size for d, size in enumerate(logits.shape) if d != class_dim % logits.dim()]
    expected = f"expected target of shape {shape}, that of logits without the classes"
    checks.check_sizes(op, target.shape, shape, f"{expected}, but got {list(target.shape)}")
    if weight is not None:
        checks.check_device(op, "weight", weight, "logits", logits)
        is_half = logits.dtype.itemsize < 4
        expected = f"expected weight to be {checks.dtype_name(logits)} like logits{' or float32' if is_half else ''}"
        fits = weight.dtype == logits.dtype or (is_half and weight.dtype == torch.float32)
        checks.check(op, fits, f"{expected}, but got {checks.dtype_name(weight)}")
        expected = f"expected weight of shape [{classes}], a number for each class"
        checks.check_sizes(op, weight.shape, [classes], f"{expected}, but got {list(weight.shape)}")
    expected = f"expected label_smoothing to be between 0 and 1, but got {label_smoothing:g}"
    checks.check(op, 0 <= label_smoothing <= 1, expected)
    if softcap is not None:
        checks.check(op, 0 < softcap < math.inf, f"expected softcap to be positive or None, but got {softcap:g}")


def _class_dim(logits: Tensor) -> int:
    return min(1, logits.dim() - 1)


def _loss_type(logits: Tensor) -> torch.dtype:
    """Of the losses inside, and of the statistics but lse."""
    return torch.promote_types(logits.dtype, torch.float32)


@register_fake("extension_cpp::cross_entropy")
def _(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: int = 1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    float_loss: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    op = "cross_entropy"
    _check_reduction(op, reduction)
    _check_loss(op, logits, target, _class_dim(logits), weight, label_smoothing, softcap)
    loss_type = _loss_type(logits)
    loss = logits.new_empty([] if reduction else target.shape, dtype=loss_type if float_loss else logits.dtype)
    lse = logits.new_empty(target.shape, dtype=torch.float64)
    return loss, lse, logits.new_empty([1 if reduction else 0], dtype=loss_type)


def _check_statistic(op: str, name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype, logits: Tensor) -> None:
    checks.check_device(op, name, x, "logits", logits)
    message = f"expected {name} as the forward returned it"
    checks.check(op, x.dtype == dtype and x.is_contiguous(), message)
    checks.check_sizes(op, x.shape, shape, message)


def _check_loss_grad(op: str, name: str, grad: Tensor, shape: Sequence[int], logits: Tensor) -> None:
    checks.check_device(op, name, grad, "logits", logits)
    loss_type = _loss_type(logits)
    expected = f"expected {name} to be {checks.dtype_name(logits)} like logits"
    if loss_type != logits.dtype:
        expected += f" or {str(loss_type).removeprefix('torch.')}"
    checks.check(op, grad.dtype in (logits.dtype, loss_type), f"{expected}, but got {checks.dtype_name(grad)}")
    expected = f"expected {name} of shape {list(shape)}, that of the result"
    checks.check_sizes(op, grad.shape, shape, f"{expected}, but got {list(grad.shape)}")


@register_fake("extension_cpp::cross_entropy_backward")
def _(
    grad_out: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    total: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    op = "cross_entropy_backward"
    _check_reduction(op, reduction)
    _check_loss(op, logits, target, _class_dim(logits), weight, label_smoothing, softcap)
    _check_loss_grad(op, "grad_out", grad_out, [] if reduction else target.shape, logits)
    _check_statistic(op, "lse", lse, target.shape, torch.float64, logits)
    _check_statistic(op, "total", total, [1 if reduction else 0], _loss_type(logits), logits)
    return logits.new_empty(logits.shape)


def _refuse_weight_gradient(op: str, needs: bool) -> None:
    if needs:
        checks.fail(op, "expected weight not to require grad: the derivative of the class weights is not implemented")


def _cross_entropy_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.options, _ = inputs
    _refuse_weight_gradient("cross_entropy", ctx.needs_input_grad[2])
    _, lse, total = output
    ctx.save_for_backward(logits, target, weight, lse, total)
    ctx.mark_non_differentiable(lse, total)
    ctx.set_materialize_grads(False)


def _cross_entropy_backward(ctx: Any, grad_out: Tensor | None, *_: None) -> Gradients:
    if grad_out is None:
        return {}
    logits, target, weight, lse, total = ctx.saved_tensors
    return {
        "logits": _ops.cross_entropy_backward(grad_out, logits, target, lse, total, weight, *ctx.options),
    }


register_autograd(
    "extension_cpp::cross_entropy",
    _cross_entropy_backward,
    setup_context=_cross_entropy_setup_context,
    plain=plain.cross_entropy,
)
register_autograd("extension_cpp::cross_entropy_backward", second_order.not_implemented("cross_entropy", "second"))
# The logits stay what they are, and the loss is float32: a cast of the logits would double what is read.
register_autocast_rule("extension_cpp::cross_entropy", lambda device_type, args: (*args[:8], True))


# ---- token_log_probs ----


def token_log_probs(logits: Tensor, target: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The log-probability of each row's target, and the entropy of each row's distribution.

    With ``log_p = log_softmax(logits / temperature)``: ``log_p[target]`` and ``-sum(exp(log_p) * log_p)``, where a
    class of probability 0 adds 0. What reinforcement learning on language models computes of every token.

    Args:
        logits: shape (..., C). Rows of unit stride are read where they lie, and other strides cost a copy.
        target: int64, shape (...): the class of each row.
        temperature: a positive number.

    Returns:
        The log-probabilities and the entropies, both of ``target``'s shape and float32 (float64 for float64 logits):
        a ratio of two probabilities needs these digits.

    Raises:
        RuntimeError: an argument has another shape, dtype or device, ``temperature`` is not positive, or, on the CPU, a
            target is no class. On CUDA, where a check would wait for the device, that row's results and gradient are
            NaN.

    Differentiable in ``logits`` through both, once; one read of the logits forward, one read and one write backward.
    Deterministic, and batch-invariant at equal alignment. Source: torch.log_softmax.
    """
    return _ops.token_log_probs(logits, target, temperature)


def _check_tokens(op: str, logits: Tensor, target: Tensor, temperature: float) -> None:
    _check_loss(op, logits, target, -1)
    checks.check(op, temperature > 0, f"expected temperature to be positive, but got {temperature:g}")


@register_fake("extension_cpp::token_log_probs")
def _(logits: Tensor, target: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    _check_tokens("token_log_probs", logits, target, temperature)
    loss_type = _loss_type(logits)
    log_probs, entropy = (logits.new_empty(target.shape, dtype=loss_type) for _ in range(2))
    return log_probs, entropy, logits.new_empty(target.shape, dtype=torch.float64)


@register_fake("extension_cpp::token_log_probs_backward")
def _(
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    temperature: float,
) -> Tensor:
    op = "token_log_probs_backward"
    _check_tokens(op, logits, target, temperature)
    _check_loss_grad(op, "grad_log_probs", grad_log_probs, target.shape, logits)
    _check_loss_grad(op, "grad_entropy", grad_entropy, target.shape, logits)
    checks.check_same(op, "grad_entropy", grad_entropy, "grad_log_probs", grad_log_probs)
    _check_statistic(op, "lse", lse, target.shape, torch.float64, logits)
    _check_statistic(op, "entropy", entropy, target.shape, _loss_type(logits), logits)
    return logits.new_empty(logits.shape)


def _token_log_probs_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, ctx.temperature = inputs
    _, entropy, lse = output
    ctx.save_for_backward(logits, target, lse, entropy.detach())
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # else backward would fill zeros for lse


def _token_log_probs_backward(
    ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
) -> Gradients:
    if grad_log_probs is None and grad_entropy is None:
        return {}
    logits, target, lse, entropy = ctx.saved_tensors
    grads = [torch.zeros_like(entropy) if grad is None else grad for grad in (grad_log_probs, grad_entropy)]
    return {"logits": _ops.token_log_probs_backward(*grads, logits, target, lse, entropy, ctx.temperature)}


register_autograd(
    "extension_cpp::token_log_probs",
    _token_log_probs_backward,
    setup_context=_token_log_probs_setup_context,
    plain=plain.token_log_probs,
)
register_autograd("extension_cpp::token_log_probs_backward", second_order.not_implemented("token_log_probs", "second"))


# ---- linear_cross_entropy ----


def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """cross_entropy of ``x @ linear_weight.T + linear_bias``, with at most 1 GiB of its logits in memory.

    Args:
        x: shape (..., features).
        linear_weight: shape (C, features), dtype and device of ``x``.
        target: int64, shape (...): the class of each row.
        linear_bias: shape (C,), dtype and device of ``x``; None: zeros.
        weight, reduction, ignore_index, label_smoothing, z_loss, softcap: as for cross_entropy.

    Returns:
        The loss, of shape () or, with "none", of ``target``'s shape; of ``x``'s dtype, under autocast float32.

    Raises:
        RuntimeError: an argument has another shape, dtype or device, an option is out of range, or, on the CPU, a
            target is no class. On CUDA, where a check would wait for the device, that row's loss is NaN, and so are its
            gradient of ``x`` and the gradients of ``linear_weight`` and ``linear_bias``.

    Differentiable in ``x``, ``linear_weight`` and ``linear_bias``, once. The rows go in chunks of at most 1 GiB of
    logits. Where a gradient is recorded, forward makes the gradients, too, and backward scales them; with "none" and in
    float16 backward makes the logits again. The gradient of the logits is rounded to ``x``'s dtype, as eager PyTorch
    does; each chunk but the first rounds the sum for ``linear_weight`` once more, so that with n chunks of half types
    this gradient's rounding error is up to sqrt(1 + (n - 1) / 2) of eager's. Deterministic. Under autocast the products
    have its dtype. Source: torch.nn.functional.linear_cross_entropy (PyTorch 2.13).
    """
    number = _reduction("linear_cross_entropy", reduction)
    for name, tensor in (("x", x), ("linear_weight", linear_weight), ("target", target)):
        checks.check_tensor("linear_cross_entropy", name, tensor)
    return _linear_cross_entropy(
        x, linear_weight, target, linear_bias, weight, number, ignore_index, label_smoothing, z_loss, softcap, False
    )


def _linear_cross_entropy(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *options: Any
) -> Tensor:
    needs = tuple(_may_need_grad(t) for t in (x, linear_weight, linear_bias))
    if options[1] == 1 and isinstance(x, autograd.DTENSOR):
        return autograd.sharding.mean_linear_cross_entropy(x, linear_weight, target, linear_bias, *options, *needs)
    return _ops.linear_cross_entropy(x, linear_weight, target, linear_bias, *options, *needs)


def _float_linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    softcap: float | None,
) -> Tensor:
    """linear_cross_entropy with a float32 loss for half inputs, too: what nn.convert gives a language model."""
    options = _reduction("linear_cross_entropy", reduction), ignore_index, 0.0, 0.0, softcap
    return _linear_cross_entropy(x, linear_weight, target, linear_bias, None, *options, True)


def _may_need_grad(x: Tensor | None) -> bool:
    """Whether the gradient of an argument is to be made. Where a graph is recorded, it may be trained later; inside
    torch.func's transforms requires_grad does not tell."""
    is_unknown = is_recorded() or torch._C._are_functorch_transforms_active()
    return x is not None and (is_unknown or x.requires_grad)


def _check_linear(
    op: str,
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
) -> None:
    checks.check_dtype(op, "x", x)
    checks.check(op, x.dim() > 0, "expected x to have at least one dimension, but got shape []")
    checks.check_same(op, "linear_weight", linear_weight, "x", x)
    shape = list(linear_weight.shape)
    expected = f"expected linear_weight of shape [classes, {x.shape[-1]}], the last dimension of x, but got {shape}"
    checks.check_sizes(op, shape, [shape[0] if shape else 0, x.shape[-1]], expected)
    if linear_bias is not None:
        checks.check_same(op, "linear_bias", linear_bias, "x", x)
        expected = f"expected linear_bias of shape [{shape[0]}], a number for each class"
        checks.check_sizes(op, linear_bias.shape, shape[:1], f"{expected}, but got {list(linear_bias.shape)}")
    _check_reduction(op, reduction)
    # Of logits without memory.
    logits = x.new_empty(1, dtype=x.dtype).expand(*x.shape[:-1], shape[0])
    _check_loss(op, logits, target, -1, weight, label_smoothing, softcap)


def _check_linear_values(*args: Any) -> None:
    """For kernels: on the CPU also each target."""
    x, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, _, softcap, *_ = args
    op = "linear_cross_entropy"
    _check_linear(op, x, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, softcap)
    if target.device.type == "cpu":
        wrong = target[((target < 0) | (target >= linear_weight.shape[0])) & (target != ignore_index)]
        expected = f"expected target in [0, {linear_weight.shape[0] - 1}] or ignore_index"
        checks.check(op, wrong.numel() == 0, f"{expected}, but got {wrong[0] if wrong.numel() else None}")


@register_fake("extension_cpp::linear_cross_entropy")
def _(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    float_loss: bool,
    needs_grad_x: bool,
    needs_grad_weight: bool,
    needs_grad_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_linear(
        "linear_cross_entropy",
        *(x, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, softcap),
    )
    loss = x.new_empty([] if reduction else target.shape, dtype=_loss_type(x) if float_loss else x.dtype)
    needs = needs_grad_x, needs_grad_weight, needs_grad_bias
    if not linear_loss.makes_gradients(x.dtype, reduction):
        needs = False, False, False
    return loss, *_linear_gradients(x, linear_weight, needs)


def _linear_gradients(x: Tensor, linear_weight: Tensor, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    needs_x, needs_weight, needs_bias = needs
    return (
        x.new_empty(x.shape if needs_x else 0),
        linear_weight.new_empty(linear_weight.shape if needs_weight else 0),
        linear_weight.new_empty(linear_weight.shape[:1] if needs_bias else 0),
    )


def _check_linear_backward(grad_out: Tensor, *args: Any) -> None:
    x, linear_weight, target, linear_bias, weight, *made = args[:8]
    reduction, ignore_index, label_smoothing, _, softcap, *needs = args[8:]
    op = "linear_cross_entropy_backward"
    _check_linear(op, x, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, softcap)
    _check_loss_grad(op, "grad_out", grad_out, [] if reduction else target.shape, x)
    shapes = [x.shape, linear_weight.shape, linear_weight.shape[:1]]
    names = ("grad_x", "grad_weight", "grad_bias")
    is_made = linear_loss.makes_gradients(x.dtype, reduction)
    for name, grad, shape, need in zip(names, made, shapes, needs, strict=True):
        _check_statistic(op, name, grad, shape if need and is_made else [0], x.dtype, x)


@register_fake("extension_cpp::linear_cross_entropy_backward")
def _(grad_out: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check_linear_backward(grad_out, *args)
    return _linear_gradients(args[0], args[1], args[13:])


def _linear_cross_entropy_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.reduction, ignore_index, label_smoothing, z_loss, softcap, _ = inputs[:11]
    _refuse_weight_gradient("linear_cross_entropy", ctx.needs_input_grad[4])
    ctx.options, ctx.needs = (ignore_index, label_smoothing, z_loss, softcap), inputs[11:]
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _linear_cross_entropy_backward(ctx: Any, grad_out: Tensor | None, *_: None) -> Gradients:
    if grad_out is None:
        return {}
    options = ctx.reduction, *ctx.options, *ctx.needs
    grads = _ops.linear_cross_entropy_backward(grad_out, *ctx.saved_tensors, *options)
    grads = (grad if need else None for grad, need in zip(grads, ctx.needs, strict=True))
    return dict(zip(("x", "linear_weight", "linear_bias"), grads, strict=True))


register_autograd(
    "extension_cpp::linear_cross_entropy",
    _linear_cross_entropy_backward,
    setup_context=_linear_cross_entropy_setup_context,
    plain=plain.linear_cross_entropy,
)
register_autograd(
    "extension_cpp::linear_cross_entropy_backward", second_order.not_implemented("linear_cross_entropy", "second")
)
linear_loss.register(_check_linear_values, _check_linear_backward)


def _linear_cross_entropy_autocast(device_type: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, linear_weight, target, linear_bias, *others = args
    dtype = torch.get_autocast_dtype(device_type)
    cast = (t if t is None or t.dtype is torch.float64 else t.to(dtype) for t in (x, linear_weight, linear_bias))
    x, linear_weight, linear_bias = cast
    others[6] = True  # float_loss
    return x, linear_weight, target, linear_bias, *others


register_autocast_rule("extension_cpp::linear_cross_entropy", _linear_cross_entropy_autocast)


# ---- rotary_embedding ----


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by the positions of their tokens: rotary position embedding, both in one kernel.

    Of each row x the first R elements are rotated in pairs (i, j), and the others are copied::

        y_i = cos_i * x_i - sin_i * x_j        j = i + R / 2, as for Llama, GPT-NeoX and Phi
        y_j = cos_j * x_j + sin_j * x_i        interleaved: i even, j = i + 1, as for GPT-J and Cohere

    Args:
        q: shape (T, D), (heads, T, D) or (B, heads, T, D).
        k: dtype, device and shape of ``q``, but for the number of heads.
        cos: shape (T, R), (1, T, R) or (B, T, R), R even and at most D: a column for each element that is rotated, also
            where the two of a pair are equal. ``q``'s dtype, or float32 beside a half type.
        sin: shape and dtype of ``cos``.
        interleaved: whether the two elements of a pair are neighbours.

    Returns:
        ``q`` and ``k`` rotated, each of its own shape and dtype, and of its strides where it is dense, else dense and
        in its order of dimensions, as torch.empty_like.

    Raises:
        RuntimeError: an argument has another shape, dtype or device, R is odd or larger than D, or ``cos`` or ``sin``
            requires grad.

    Differentiable in ``q`` and ``k``, to any order; backward keeps ``cos`` and ``sin`` alone. Rows of unit stride are
    read where they lie, as those of ``qkv.view(B, T, 3, heads, D)[:, :, 0].transpose(1, 2)``; other strides cost a
    copy. Batch-invariant. Sources: Su et al. 2021, arXiv:2104.09864; apply_rotary_pos_emb of Hugging Face transformers.
    """
    rotated = _ops.rotary_embedding(q, k, cos, sin, interleaved)
    return rotated[0], rotated[1]  # one by one, as torch.fx has a Proxy for both


def _check_rotary(op: str, grad: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    q_name, k_name = f"{grad}q", f"{grad}k"
    checks.check_dtype(op, q_name, q)
    checks.check_same(op, k_name, k, q_name, q)
    checks.check_device(op, "cos", cos, q_name, q)
    is_half = q.dtype.itemsize == 2
    expected = f"expected cos to be {checks.dtype_name(q)} like {q_name}{' or float32' if is_half else ''}"
    fits = cos.dtype == q.dtype or (is_half and cos.dtype == torch.float32)
    checks.check(op, fits, f"{expected}, but got {checks.dtype_name(cos)}")
    checks.check_same(op, "sin", sin, "cos", cos)
    shapes = "(tokens, width), (heads, tokens, width) or (batch, heads, tokens, width)"
    expected = f"expected {q_name} of shape {shapes}, but got {list(q.shape)}"
    checks.check(op, 2 <= q.dim() <= 4, expected)
    shape = ", ".join("*" if d == q.dim() - 3 else str(size) for d, size in enumerate(q.shape))
    expected = f"expected {k_name} of shape [{shape}] like {q_name}, with any number of heads, but got {list(k.shape)}"
    checks.check_sizes(op, k.shape, (*q.shape[:-3], *k.shape[-3:-2], *q.shape[-2:]), expected)
    batch, tokens, width = q.shape[0] if q.dim() == 4 else 1, q.shape[-2], q.shape[-1]
    batches = "1" if batch == 1 else f"1 or {batch}"
    rows = f"[{tokens}, rotated] or [{batches}, {tokens}, rotated]"
    expected = f"expected cos of shape {rows} for the tokens of {q_name}, but got {list(cos.shape)}"
    checks.check(op, 2 <= cos.dim() <= 3, expected)
    if cos.dim() == 3 and cos.shape[0] != 1:
        checks.check(op, cos.shape[0] == batch, expected)
    checks.check(op, cos.shape[-2] == tokens, expected)
    checks.check_shape(op, "sin", sin, "cos", cos)
    expected = f"expected cos to have an even number of columns, at most the {width} of {q_name}"
    checks.check(op, cos.shape[-1] % 2 == 0, f"{expected}, but got {cos.shape[-1]}")
    checks.check(op, cos.shape[-1] <= width, f"{expected}, but got {cos.shape[-1]}")


@register_fake("extension_cpp::rotary_embedding")
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    _check_rotary("rotary_embedding", "", q, k, cos, sin)
    return torch.empty_like(q), torch.empty_like(k)


@register_fake("extension_cpp::rotary_embedding_backward")
def _(grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    _check_rotary("rotary_embedding_backward", "grad_", grad_q, grad_k, cos, sin)
    return torch.empty_like(grad_q), torch.empty_like(grad_k)


def _rotary_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos, sin, ctx.interleaved = inputs
    if any(ctx.needs_input_grad[2:4]):
        reason = "their derivative is not implemented"
        checks.fail("rotary_embedding", f"expected cos and sin not to require grad: {reason}")
    ctx.save_for_backward(cos, sin)


def _rotary_backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Gradients:
    cos, sin = ctx.saved_tensors
    grad_q, grad_k = _ops.rotary_embedding_backward(grad_q, grad_k, cos, sin, ctx.interleaved)
    return {"q": grad_q, "k": grad_k}


register_autograd(
    "extension_cpp::rotary_embedding",
    _rotary_backward,
    setup_context=_rotary_setup_context,
    plain=plain.rotary_embedding,
)
register_autograd(
    "extension_cpp::rotary_embedding_backward",
    second_order.rotary_embedding,
    setup_context=_rotary_setup_context,
    plain=plain.rotary_embedding_backward,
)


def _rotary_autocast(device_type: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What differs goes to the wider type, cos and sin beside half types to float32: as type promotion, but that the
    results keep the type of q and k."""
    q, k, cos, sin, interleaved = args
    if q.dtype != k.dtype:
        dtype = torch.promote_types(q.dtype, k.dtype)
        q, k = q.to(dtype), k.to(dtype)
    if cos.dtype != q.dtype or sin.dtype != q.dtype:
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin = cos.to(dtype), sin.to(dtype)
    return q, k, cos, sin, interleaved


register_autocast_rule("extension_cpp::rotary_embedding", _rotary_autocast)

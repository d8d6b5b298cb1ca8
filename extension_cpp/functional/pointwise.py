"""Implements muladd and the activations, alone and after a bias."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import _ops, reference
from ..registration import checks
from ..registration.autograd import Gradients
from ..registration.calls import call
from .common import fake_like

# ---- muladd ----


def muladd(a: Tensor, b: Tensor, c: float, *, out: Tensor | None = None) -> Tensor:
    """Multiplies two tensors element by element and adds a number: ``a * b + c``.

    Args:
        a: any shape.
        b: shape, dtype and device of ``a``.
        c: the number to add.
        out: where to write the result: shape, dtype and device of ``a``. It may be ``a`` or ``b`` itself.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(a)``; ``out`` if given.

    Raises:
        RuntimeError: ``b`` or ``out`` differs from ``a`` in shape, dtype or device, a dtype is not floating point, or
            ``out`` requires grad, overlaps itself, or overlaps an input in part.

    Differentiable in ``a`` and ``b``, to any order; not with ``out``. The result is rounded once (fused multiply-add).
    On an x86 CPU without that instruction the product is rounded, too.
    """
    if out is None:
        return _ops.muladd(a, b, c)
    call("muladd.out", a, b, c, out=out)
    return out


muladd_fake = fake_like("muladd", "a", "b", like="a")
muladd_backward_fake = fake_like("muladd_backward", "grad_out", "a", "b", like="a", results=2)


def muladd_out_fake(a: Tensor, b: Tensor, c: float, *, out: Tensor) -> None:
    checks.check_dtype("muladd", "a", a)
    checks.check_like("muladd", "b", b, "a", a)
    checks.check_like("muladd", "out", out, "a", a)
    checks.check_writable("muladd", "out", out)
    checks.check_no_partial_overlap("muladd", "out", out, "a", a)
    checks.check_no_partial_overlap("muladd", "out", out, "b", b)


def muladd_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    a, b, _ = inputs
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def muladd_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    a, b = ctx.saved_tensors
    if a is None:
        return {"a": _ops.muladd(grad_out, b, 0.0)}
    if b is None:
        return {"b": _ops.muladd(grad_out, a, 0.0)}
    grad_a, grad_b = _ops.muladd_backward(grad_out, a, b)
    return {"a": grad_a, "b": grad_b}


def muladd_second(ctx: Any, grad_grad_a: Tensor, grad_grad_b: Tensor) -> Gradients:
    # grad_a = grad_out * b and grad_b = grad_out * a.
    grad_out, a, b = ctx.saved_tensors
    return {
        "grad_out": _ops.muladd(grad_grad_a, b, 0.0) + _ops.muladd(grad_grad_b, a, 0.0),
        "a": _ops.muladd(grad_grad_b, grad_out, 0.0),
        "b": _ops.muladd(grad_grad_a, grad_out, 0.0),
    }


def muladd_backward_plain(grad_out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return grad_out * b, grad_out * a


# ---- relu ----


def relu(input: Tensor) -> Tensor:
    """Clips at zero: ``max(x, 0)``. NaN stays NaN.

    Args:
        input: called ``x`` here, any shape.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable; the derivative at 0 is 0, and the second derivative is zero. Backward saves the result, not ``x``.
    """
    return _ops.relu(input)


def relu_fake(x: Tensor) -> Tensor:
    checks.check_dtype("relu", "x", x)
    return torch.empty_like(x)


relu_backward_fake = fake_like("relu_backward", "grad_out", "y")


def relu_setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def relu_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (y,) = ctx.saved_tensors
    return {"x": _ops.relu_backward(grad_out, y)}


def relu_backward_setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    _, y = inputs
    ctx.save_for_backward(y)


def relu_second(ctx: Any, grad_grad_x: Tensor) -> Gradients:
    (y,) = ctx.saved_tensors
    return {"grad_out": _ops.relu_backward(grad_grad_x, y)}


def relu_backward_plain(grad_out: Tensor, y: Tensor) -> Tensor:
    return torch.where(y <= 0, 0, grad_out)


# ---- mish, silu, gelu ----


def mish(input: Tensor) -> Tensor:
    """Mish: ``x * tanh(softplus(x))``, softplus(x) = log(1 + exp(x)).

    Args:
        input: called ``x`` here, any shape.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. For large negative ``x`` the results keep
        their digits: they are ``x * exp(x)`` down to the smallest float32. For large ``x`` they are ``x``. At -inf the
        result is NaN, as in torch.nn.functional.mish.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable twice; a third derivative raises. Source: Misra 2019, arXiv:1908.08681.
    """
    return _ops.mish(input)


def silu(input: Tensor) -> Tensor:
    """SiLU, also called swish: ``x * sigmoid(x)``.

    Args:
        input: called ``x`` here, any shape.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. For large negative ``x`` the results keep
        their digits: they are ``x * exp(x)`` down to the smallest float32. At -inf the result is NaN, as in
        torch.nn.functional.silu.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable twice; a third derivative raises. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return _ops.silu(input)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """GELU: ``x * Phi(x)``, where Phi is the distribution function of the normal distribution or an approximation.

    Args:
        input: called ``x`` here, any shape.
        approximate: "none": Phi(x) = (1 + erf(x / sqrt(2))) / 2; or "tanh":
            Phi(x) = (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. For large negative ``x`` the results keep
        the digits that the sum ``1 + erf`` or ``1 + tanh`` would cancel.

    Raises:
        RuntimeError: the dtype is not floating point, or ``approximate`` is neither "none" nor "tanh".

    Differentiable twice; a third derivative raises. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return _ops.gelu(input, is_tanh("gelu", approximate))


def is_tanh(op: str, approximate: str) -> bool:
    """Converts `approximate` to a bool for the operators. The stable ABI would leak a string argument at each call."""
    if approximate not in ("none", "tanh"):
        checks.fail(op, f"expected approximate to be 'none' or 'tanh', but got {approximate!r}")
    return approximate == "tanh"


class Activation:
    """Holds the functions that ops.py registers for an activation (x, *options), its backward and double backward."""

    def __init__(self, op: str) -> None:
        self.backward_op, self.double_backward_op = (getattr(_ops, f"{op}_{name}backward") for name in ("", "double_"))
        self.fake, self.backward_fake = fake_like(op, "x"), fake_like(f"{op}_backward", "grad_out", "x")
        self.double_backward_fake = fake_like(f"{op}_double_backward", "grad_grad_x", "grad_out", "x")

    def backward(self, ctx: Any, grad_out: Tensor) -> Gradients:
        (x,) = ctx.saved_tensors
        return {"x": self.backward_op(grad_out, x, *ctx.options)}

    def second(self, ctx: Any, grad_grad_x: Tensor) -> Gradients:
        grad_out, x = ctx.saved_tensors
        return {
            "grad_out": self.backward_op(grad_grad_x, x, *ctx.options),
            "x": self.double_backward_op(grad_grad_x, grad_out, x, *ctx.options),
        }


MISH, SILU, GELU = Activation("mish"), Activation("silu"), Activation("gelu")


def mish_backward_plain(grad_out: Tensor, x: Tensor) -> Tensor:
    t = torch.tanh(torch.nn.functional.softplus(x))
    return grad_out * (t + x * (1 - t * t) * torch.sigmoid(x))


def silu_backward_plain(grad_out: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return grad_out * (s + x * s * (1 - s))


def gelu_plain(x: Tensor, tanh: bool = False) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh" if tanh else "none")


def gelu_backward_plain(grad_out: Tensor, x: Tensor, tanh: bool) -> Tensor:
    if tanh:
        c = 2 * math.sqrt(2 / math.pi)
        s = torch.sigmoid(c * (x + 0.044715 * x**3))
        return grad_out * (s + x * s * (1 - s) * c * (1 + 3 * 0.044715 * x * x))
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad_out * (torch.special.ndtr(x) + x * density)


# ---- scale_bias_relu, bias_gelu ----


def scale_bias_relu(x: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    """Scales, adds a bias over the last dimension and clips at zero: ``relu(x * scale + bias)``.

    Args:
        x: shape (..., features).
        bias: shape (features,), dtype and device of ``x``.
        scale: the factor.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``.

    Raises:
        RuntimeError: ``x`` has no dimension, ``bias`` is not (features,) or differs from ``x`` in dtype or device, or a
            dtype is not floating point.

    Differentiable in ``x`` and ``bias``, to any order. Backward saves only ``x`` and ``bias`` and recomputes where the
    result is clipped. It reads and writes each tensor once, and sums the bias gradient over the rows in a fixed order.
    """
    return _ops.scale_bias_relu(x, bias, scale)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Adds a bias over the last dimension and applies GELU: ``gelu(x + bias, approximate)``.

    Args:
        x: shape (..., features).
        bias: shape (features,), dtype and device of ``x``.
        approximate: "none" or "tanh", as for gelu.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. The result is rounded to a half dtype
        only once: ``x + bias`` is float32 (float64: float64).

    Raises:
        RuntimeError: ``x`` has no dimension, ``bias`` is not (features,) or differs from ``x`` in dtype or device, a
            dtype is not floating point, or ``approximate`` is neither "none" nor "tanh".

    Differentiable twice in ``x`` and ``bias``; a third derivative raises. Backward saves only ``x`` and ``bias``. It
    reads and writes each tensor once, and sums the bias gradient over the rows in a fixed order.
    """
    return _ops.bias_gelu(x, bias, is_tanh("bias_gelu", approximate))


def check_bias(op: str, x: Tensor, bias: Tensor) -> None:
    checks.check_dtype(op, "x", x)
    checks.check_same(op, "bias", bias, "x", x)
    checks.check(op, x.dim() > 0, "expected x to have at least one dimension, but got shape []")
    expected = f"expected bias of shape [{x.shape[-1]}], the last dimension of x"
    checks.check_sizes(op, bias.shape, x.shape[-1:], f"{expected}, but got {list(bias.shape)}")


class Biased:
    """Holds the functions that ops.py registers for an operator (x, bias, option) and its backward operator."""

    def __init__(self, op: str) -> None:
        self.op, self.backward_op = op, getattr(_ops, f"{op}_backward")

    def fake(self, x: Tensor, bias: Tensor, option: Any) -> Tensor:
        check_bias(self.op, x, bias)
        return torch.empty_like(x)

    def backward_fake(
        self, grad_out: Tensor, x: Tensor, bias: Tensor, option: Any, needs_grad_x: bool, needs_grad_bias: bool
    ) -> tuple[Tensor, Tensor]:
        check_bias(f"{self.op}_backward", x, bias)
        checks.check_like(f"{self.op}_backward", "grad_out", grad_out, "x", x)
        grad_x = torch.empty_like(x) if needs_grad_x else x.new_empty(0)
        return grad_x, bias.new_empty(bias.shape if needs_grad_bias else 0)

    def backward(self, ctx: Any, grad_out: Tensor) -> Gradients:
        x, bias = ctx.saved_tensors
        grad_x, grad_bias = self.backward_op(grad_out, x, bias, *ctx.options, *ctx.needs_input_grad[:2])
        return {"x": grad_x, "bias": grad_bias}


SCALE_BIAS_RELU, BIAS_GELU = Biased("scale_bias_relu"), Biased("bias_gelu")


def scale_bias_relu_backward_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, x, bias, ctx.scale, ctx.needs_x, ctx.needs_bias = inputs
    ctx.save_for_backward(x, bias)


def _total(like: Tensor, *terms: Tensor | None) -> Tensor:
    return sum((term for term in terms if term is not None), torch.zeros_like(like))


def scale_bias_relu_second(ctx: Any, grad_grad_x: Tensor, grad_grad_bias: Tensor) -> Gradients:
    # grad_x and grad_bias are linear in grad_out, and 0 where the forward result is clipped. Where it is clipped does
    # not depend on grad_out and has no derivative.
    x, bias = ctx.saved_tensors
    total = _total(x, grad_grad_x * ctx.scale if ctx.needs_x else None, grad_grad_bias if ctx.needs_bias else None)
    return {"grad_out": _ops.relu_backward(total, _ops.scale_bias_relu(x, bias, ctx.scale))}


def bias_gelu_second(ctx: Any, grad_grad_x: Tensor, grad_grad_bias: Tensor) -> Gradients:
    # grad_x is grad_out * gelu'(x + bias), and grad_bias is the sum of the same product over the rows.
    grad_out, x, bias = ctx.saved_tensors
    tanh, needs_x, needs_bias = ctx.options
    total = _total(x, grad_grad_x if needs_x else None, grad_grad_bias if needs_bias else None)
    grad_x = _ops.gelu_double_backward(total, grad_out, x + bias, tanh)
    return {
        "grad_out": _ops.bias_gelu_backward(total, x, bias, tanh, True, False)[0],
        "x": grad_x,
        "bias": grad_x.sum_to_size(bias.shape),
    }


def scale_bias_relu_backward_plain(
    grad_out: Tensor, x: Tensor, bias: Tensor, scale: float, needs_grad_x: bool, needs_grad_bias: bool
) -> tuple[Tensor, Tensor]:
    g = relu_backward_plain(grad_out, reference.scale_bias_relu(x, bias, scale))
    grad_bias = g.sum_to_size(bias.shape) if needs_grad_bias else bias.new_empty(0)
    return g * scale if needs_grad_x else x.new_empty(0), grad_bias


def bias_gelu_plain(x: Tensor, bias: Tensor, tanh: bool = False) -> Tensor:
    return gelu_plain(x + bias, tanh)


def bias_gelu_backward_plain(
    grad_out: Tensor, x: Tensor, bias: Tensor, tanh: bool, needs_grad_x: bool, needs_grad_bias: bool
) -> tuple[Tensor, Tensor]:
    g = gelu_backward_plain(grad_out, x + bias, tanh)
    grad_bias = g.sum_to_size(bias.shape) if needs_grad_bias else bias.new_empty(0)
    return g if needs_grad_x else x.new_empty(0), grad_bias

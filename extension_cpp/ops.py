"""The public functions. One section for each op: function, fake, setup_context, backward, register_autograd.

The kernels and the checks of their inputs are in csrc/<op>/. A fake promises the shape, strides and dtype that
csrc/<op>/<op>.cpp allocates. The first section has what several ops share, norms.py and losses.py what norms and losses
share. second_order.py has the derivatives of the backward operators, reference.py the functions in plain PyTorch.

Every op takes float64, float32, bfloat16 and float16 on CPU and CUDA. It computes in float32, for float64 in float64.
NaN propagates. Inputs may have any strides, any storage offset and any number of elements. Results are deterministic:
the same bits in every run and, except linear_cross_entropy's, for every number of threads. Jagged nested tensors work
with every op except reduce_sum, softmax, the scans, the losses and rotary_embedding: the op runs on their values(). A
wrong argument raises RuntimeError with a sentence that names the op, the argument, what was expected and what it got. A
result like
``torch.empty_like(x)`` has ``x``'s strides if ``x`` is dense, else dense strides in ``x``'s order of dimensions. Where
rows of unit stride are read without a copy, other strides cost one.
A function that PyTorch also has names its first argument ``input``, as PyTorch does. Formulas, operators and messages
call it ``x``, for cross_entropy ``logits``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _ops, autocast_rules, checks, plain, second_order
from .autograd import (
    Gradients,
    own_ops,
    register_autocast,
    register_autocast_rule,
    register_autograd,
    register_fake,
)
from .entries import BY_ROWS, FLOAT32_ON_CUDA, NO_SECOND, NOT_DIFFERENTIABLE, WRITES, register
from .functional import dropout as drop
from .functional import linear_loss, losses
from .functional.common import as_dim, check_dim, fake_like
from .functional.dropout import dropout
from .functional.linear_loss import linear_cross_entropy
from .functional.losses import cross_entropy, token_log_probs
from .functional.norms import (
    ADD_LAYER_NORM,
    ADD_RMS_NORM,
    LAYER_NORM,
    LAYER_NORM_DROPOUT,
    RMS_NORM,
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_dropout,
    rms_norm,
)
from .mutation import register_mutation
from .op_checks import (
    as_dims,
    check_bias,
    check_dims,
    check_gate,
    check_muladd_out,
    check_recurrence,
    check_rotary,
    is_tanh,
    reduced_dims,
)

__all__ = [  # noqa: RUF022  # in the order of docs/ops.md
    "muladd",
    "scale_bias_relu",
    "relu",
    "mish",
    "silu",
    "gelu",
    "bias_gelu",
    "swiglu",
    "geglu",
    "reduce_sum",
    "dropout",
    "layer_norm",
    "rms_norm",
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm_dropout",
    "softmax",
    "log_softmax",
    "cumsum",
    "logcumsumexp",
    "linear_recurrence",
    "cross_entropy",
    "token_log_probs",
    "linear_cross_entropy",
    "rotary_embedding",
]


# ---- what the ops share ----


def _register_second_order(op: str) -> None:
    """The derivative of the operator <op>_backward, which second_order.py and plain.py have under the op's name. An op
    that second_order.py lacks is differentiable once."""
    backward_op, derivative = f"{op}_backward", getattr(second_order, op, None)
    if derivative is None:
        register_autograd(backward_op, second_order.not_implemented(op, "second"))
        return
    setup_context = getattr(second_order, f"{op}_setup_context", None) or second_order.save_inputs(backward_op)
    register_autograd(backward_op, derivative, setup_context=setup_context, plain=getattr(plain, backward_op))


def _register_op(
    op: str,
    fake: Callable[..., Any],
    backward_fake: Callable[..., Any],
    backward: Callable[..., Gradients],
    setup_context: Callable[..., None] | None = None,
) -> None:
    """The fakes and derivatives of an operator, which by default saves its inputs, and of its backward operator."""
    register_fake(op)(fake)
    register_fake(f"{op}_backward")(backward_fake)
    saves = setup_context or second_order.save_inputs(op)
    register_autograd(op, backward, setup_context=saves, plain=getattr(plain, op))
    _register_second_order(op)


def _register_activation(op: str) -> None:
    """The fakes and derivatives of an operator (x, *options) that has a backward and a double backward operator."""
    backward_op = getattr(_ops, f"{op}_backward")

    def backward(ctx: Any, grad_out: Tensor) -> Gradients:
        (x,) = ctx.saved_tensors
        return {"x": backward_op(grad_out, x, *ctx.options)}

    _register_op(op, fake_like(op, "x"), fake_like(f"{op}_backward", "grad_out", "x"), backward)
    register_fake(f"{op}_double_backward")(fake_like(f"{op}_double_backward", "grad_grad_x", "grad_out", "x"))
    register_autograd(f"{op}_double_backward", second_order.not_implemented(op, "third"))


def _register_biased(op: str) -> None:
    """The fakes and derivatives of an operator (x, bias, option)."""
    backward_op = getattr(_ops, f"{op}_backward")

    def fake(x: Tensor, bias: Tensor, option: Any) -> Tensor:
        check_bias(op, x, bias)
        return torch.empty_like(x)

    def backward_fake(
        grad_out: Tensor, x: Tensor, bias: Tensor, option: Any, needs_grad_x: bool, needs_grad_bias: bool
    ) -> tuple[Tensor, Tensor]:
        check_bias(f"{op}_backward", x, bias)
        checks.check_like(f"{op}_backward", "grad_out", grad_out, "x", x)
        grad_x = torch.empty_like(x) if needs_grad_x else x.new_empty(0)
        return grad_x, bias.new_empty(bias.shape if needs_grad_bias else 0)

    def backward(ctx: Any, grad_out: Tensor) -> Gradients:
        x, bias = ctx.saved_tensors
        grad_x, grad_bias = backward_op(grad_out, x, bias, *ctx.options, *ctx.needs_input_grad[:2])
        return {"x": grad_x, "bias": grad_bias}

    _register_op(op, fake, backward_fake, backward)


def _register_gate(op: str) -> None:
    """The fakes and derivatives of an operator (gate, up, *options)."""
    backward_op = getattr(_ops, f"{op}_backward")

    def fake(gate: Tensor, up: Tensor, *options: Any) -> Tensor:
        check_gate(op, gate, up)
        return torch.empty_like(gate)

    def backward_fake(grad_out: Tensor, gate: Tensor, up: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        check_gate(f"{op}_backward", gate, up)
        checks.check_like(f"{op}_backward", "grad_out", grad_out, "gate", gate)
        return torch.empty_like(gate), torch.empty_like(gate)

    def backward(ctx: Any, grad_out: Tensor) -> Gradients:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = backward_op(grad_out, gate, up, *ctx.options)
        return {"gate": grad_gate, "up": grad_up}

    _register_op(op, fake, backward_fake, backward)


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
    try:
        own_ops.muladd.out(a, b, c, out=out)
    except Exception:
        checks.check_tensors(own_ops.muladd.out._schema, (a, b, c, out))
        raise
    return out


@register_fake("muladd")
def _(a: Tensor, b: Tensor, c: float) -> Tensor:
    checks.check_dtype("muladd", "a", a)
    checks.check_like("muladd", "b", b, "a", a)
    return torch.empty_like(a)


@register_fake("muladd.out")
def _(a: Tensor, b: Tensor, c: float, *, out: Tensor) -> None:
    check_muladd_out("muladd", a, b, out)


register_mutation("muladd.out")


@register_fake("muladd_backward")
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


register_autograd("muladd", _muladd_backward, setup_context=_muladd_setup_context, plain=plain.muladd)
_register_second_order("muladd")


# ---- scale_bias_relu ----


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

    Differentiable in ``x`` and ``bias``, to any order. Backward saves only ``x`` and ``bias`` and recomputes the mask.
    It reads and writes each tensor once, and sums the bias gradient over the rows in a fixed order.
    """
    return _ops.scale_bias_relu(x, bias, scale)


_register_biased("scale_bias_relu")


# ---- relu ----


def relu(input: Tensor) -> Tensor:
    """Clips at zero: ``max(x, 0)``. NaN stays NaN.

    Args:
        input: ``x``, any shape.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable; the derivative at 0 is 0, and the second derivative is zero. Backward saves the result, not ``x``.
    """
    return _ops.relu(input)


@register_fake("relu")
def _(x: Tensor) -> Tensor:
    checks.check_dtype("relu", "x", x)
    return torch.empty_like(x)


@register_fake("relu_backward")
def _(grad_out: Tensor, y: Tensor) -> Tensor:
    checks.check_dtype("relu_backward", "y", y)
    checks.check_like("relu_backward", "grad_out", grad_out, "y", y)
    return torch.empty_like(y)


def _relu_setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _relu_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (y,) = ctx.saved_tensors
    return {"x": _ops.relu_backward(grad_out, y)}


register_autograd("relu", _relu_backward, setup_context=_relu_setup_context, plain=plain.relu)
_register_second_order("relu")


# ---- mish ----


def mish(input: Tensor) -> Tensor:
    """Mish: ``x * tanh(softplus(x))``, softplus(x) = log(1 + exp(x)).

    Args:
        input: ``x``, any shape.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. Small results keep their digits: they
        are ``x * exp(x)`` down to the smallest float32. Large results are ``x``. At -inf the result is NaN, as in
        torch.nn.functional.mish.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable twice; a third derivative raises. Source: Misra 2019, arXiv:1908.08681.
    """
    return _ops.mish(input)


_register_activation("mish")


# ---- silu ----


def silu(input: Tensor) -> Tensor:
    """SiLU, also called swish: ``x * sigmoid(x)``.

    Args:
        input: ``x``, any shape.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. Small results keep their digits: they
        are ``x * exp(x)`` down to the smallest float32. At -inf the result is NaN, as in torch.nn.functional.silu.

    Raises:
        RuntimeError: the dtype is not floating point.

    Differentiable twice; a third derivative raises. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return _ops.silu(input)


_register_activation("silu")


# ---- gelu ----


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """GELU: ``x * Phi(x)``, where Phi is the distribution function of the normal distribution or an approximation.

    Args:
        input: ``x``, any shape.
        approximate: "none": Phi(x) = (1 + erf(x / sqrt(2))) / 2; or "tanh":
            Phi(x) = (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. Small results keep their digits, which
        ``1 + erf`` would cancel.

    Raises:
        RuntimeError: the dtype is not floating point, or ``approximate`` is neither "none" nor "tanh".

    Differentiable twice; a third derivative raises. Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    return _ops.gelu(input, is_tanh("gelu", approximate))


_register_activation("gelu")


# ---- bias_gelu ----


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """Adds a bias over the last dimension and applies GELU: ``gelu(x + bias, approximate)``.

    Args:
        x: shape (..., features).
        bias: shape (features,), dtype and device of ``x``.
        approximate: "none" or "tanh", as for gelu.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. It is rounded once: ``x + bias`` is
        kept in float32.

    Raises:
        RuntimeError: ``x`` has no dimension, ``bias`` is not (features,) or differs from ``x`` in dtype or device, a
            dtype is not floating point, or ``approximate`` is neither "none" nor "tanh".

    Differentiable twice in ``x`` and ``bias``; a third derivative raises. Backward saves only ``x`` and ``bias``. It
    reads and writes each tensor once, and sums the bias gradient over the rows in a fixed order.
    """
    return _ops.bias_gelu(x, bias, is_tanh("bias_gelu", approximate))


_register_biased("bias_gelu")


# ---- swiglu ----


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The SwiGLU gate: ``silu(gate) * up``.

    Args:
        gate: any shape.
        up: shape, dtype and device of ``gate``. ``gate`` and ``up`` may be the halves of one packed tensor,
            ``packed.chunk(2, -1)``: forward and backward read them without a copy.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(gate)``. It is rounded once.

    Raises:
        RuntimeError: ``up`` differs from ``gate`` in shape, dtype or device, or a dtype is not floating point.

    Differentiable twice; a third derivative raises. Backward saves only ``gate`` and ``up``. Source: Shazeer 2020,
    arXiv:2002.05202.
    """
    return _ops.swiglu(gate, up)


_register_gate("swiglu")


# ---- geglu ----


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """The GeGLU gate: ``gelu(gate, approximate) * up``.

    Args:
        gate, up: as for swiglu.
        approximate: "none" or "tanh", as for gelu.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(gate)``. It is rounded once.

    Raises:
        RuntimeError: ``up`` differs from ``gate`` in shape, dtype or device, a dtype is not floating point, or
            ``approximate`` is neither "none" nor "tanh".

    Differentiable twice; a third derivative raises. Backward saves only ``gate`` and ``up``. Source: Shazeer 2020,
    arXiv:2002.05202.
    """
    return _ops.geglu(gate, up, is_tanh("geglu", approximate))


_register_gate("geglu")


# ---- reduce_sum ----


def reduce_sum(input: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Sums over one dimension, several or all of them, as torch.sum does.

    Args:
        input: ``x``, any shape.
        dim: the dimension or dimensions to sum over; negative ones count from the end; None or () means all.
        keepdim: whether the summed dimensions stay, with size 1.

    Returns:
        The sums, contiguous, of ``x``'s dtype. A sum over no elements is 0.

    Raises:
        RuntimeError: ``dim`` is not an int, is out of range or named twice, or the dtype is not floating point.

    Differentiable, to any order; the gradient is an expanded view and costs nothing. At most a few dozen terms are
    added in float32 (float64: float64), and these partial sums in float64, in an order that only the shape decides.
    """
    return _ops.reduce_sum(input, (dim,) if type(dim) is int else as_dims(dim), keepdim)


@register_fake("reduce_sum")
def _(x: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    checks.check_dtype("reduce_sum", "x", x)
    check_dims(x, dim)
    reduced = reduced_dims(x, dim)
    shape = [1 if d in reduced else size for d, size in enumerate(x.shape) if keepdim or d not in reduced]
    return x.new_empty(shape)


def _reduce_sum_setup_context(ctx: Any, inputs: tuple[Tensor, Sequence[int] | None, bool], output: Tensor) -> None:
    x, dim, keepdim = inputs
    ctx.shape = x.shape
    ctx.summed_away = () if keepdim else sorted(reduced_dims(x, dim))


def _reduce_sum_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    # The gradient of each term is the gradient of the sum: a view with stride 0, as for torch.sum. Nothing is written.
    for d in ctx.summed_away:
        grad_out = grad_out.unsqueeze(d)
    return {"x": grad_out.expand(ctx.shape)}


register_autograd("reduce_sum", _reduce_sum_backward, setup_context=_reduce_sum_setup_context, plain=plain.reduce_sum)


# ---- softmax and log_softmax ----


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Softmax over one dimension: ``exp(x) / sum(exp(x))``, computed relative to the largest element.

    Args:
        input: ``x``, any shape.
        dim: the dimension of the sum; negative ones count from the end.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. ``x`` is not transposed for any ``dim``.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point.

    Differentiable, to any order; backward saves only the result. An element of -inf gives 0. A row that is all -inf, or
    has a NaN or +inf, gives NaN, as in torch.softmax. Batch-invariant at equal alignment: a row's result has the same
    bits for any number of rows, and for any sizes of the dimensions before ``dim``. Autocast casts half inputs to
    float32 on CUDA, as in PyTorch.
    """
    return _ops.softmax(input, as_dim("softmax", dim))


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Logarithm of the softmax over one dimension: ``x - log(sum(exp(x)))``, computed relative to the largest element.

    Args:
        input, dim: as for softmax.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. ``x`` is not transposed for any ``dim``.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point.

    Differentiable, to any order; backward saves only the result. NaN, infinities, batch invariance and autocast are as
    for softmax.
    """
    return _ops.log_softmax(input, as_dim("log_softmax", dim))


def _register_softmax(op: str) -> None:
    backward_op = getattr(_ops, f"{op}_backward")

    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        _, ctx.dim = inputs
        ctx.save_for_backward(output)

    def backward(ctx: Any, grad_out: Tensor) -> Gradients:
        (y,) = ctx.saved_tensors
        return {"x": backward_op(grad_out, y, ctx.dim)}

    fakes = fake_like(op, "x", along_dim=True), fake_like(f"{op}_backward", "grad_out", "y", along_dim=True)
    _register_op(op, *fakes, backward, setup_context)
    register_autocast(op, "cuda", torch.float32)


_register_softmax("softmax")
_register_softmax("log_softmax")


# ---- cumsum ----


def cumsum(input: Tensor, dim: int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Cumulative sums over one dimension: ``y[k] = x[0] + ... + x[k]``.

    Args:
        input: ``x``, any shape.
        dim: the dimension to sum along; negative ones count from the end.
        exclusive: whether an element is left out of its own sum: ``y[k] = x[0] + ... + x[k - 1]``, ``y[0] = 0``.
        reverse: whether the sums begin at the last element: ``y[k] = x[k] + ... + x[-1]``.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. Unlike torch.cumsum it keeps the strides
        of a transposed ``x``.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point; torch.cumsum sums integers.

    Differentiable, to any order; the gradient is a cumsum in the other direction, and nothing is saved. Terms are added
    in float32 or better (float64: float64) along a fixed tree, so that every run gives the same bits, and each result
    is rounded once to ``x``'s dtype. In float32 and float64 the tree's partial sums round, too; where one overflows, a
    result can be infinite or NaN that a loop would keep finite. NaN and infinities reach only the sums that contain
    them. Batch-invariant: the sums of a line have the same bits for any number of lines, except that a single column is
    summed as a row. Any strides are read without a copy. Autocast casts half inputs to float32 on CUDA, as for
    torch.cumsum. Source: torch.cumsum.
    """
    return _ops.cumsum(input, as_dim("cumsum", dim), exclusive, reverse)


register_fake("cumsum")(fake_like("cumsum", "x", along_dim=True, hint="; torch.cumsum takes others"))


def _cumsum_setup_context(ctx: Any, inputs: tuple[Tensor, int, bool, bool], output: Tensor) -> None:
    _, ctx.dim, ctx.exclusive, ctx.reverse = inputs


def _cumsum_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    return {"x": _ops.cumsum(grad_out, ctx.dim, ctx.exclusive, not ctx.reverse)}


register_autograd("cumsum", _cumsum_backward, setup_context=_cumsum_setup_context, plain=plain.cumsum)
register_autocast("cumsum", "cuda", torch.float32)


# ---- logcumsumexp ----


def logcumsumexp(input: Tensor, dim: int) -> Tensor:
    """Logarithms of cumulative sums of exponentials over one dimension: ``y[k] = log(exp(x[0]) + ... + exp(x[k]))``.

    Args:
        input: ``x``, any shape.
        dim: the dimension to sum along; negative ones count from the end.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(x)``. Exponentials are taken relative to the
        largest element so far, so that none overflows. A result is -inf while all elements are, and inf from the first
        inf on, as in torch.logcumsumexp.

    Raises:
        RuntimeError: ``dim`` is out of range, or the dtype is not floating point.

    Differentiable once. Backward saves ``x`` and the result. It adds gradients times factors of at most 1, while
    torch adds exponentials of the gradients' logarithms. The gradient is no more exact than the saved result: with half
    inputs far from 0 it has few digits, as in torch. It multiplies the factors of many steps, so in float32 it loses
    digits after some thousand steps, which torch keeps. NaN reaches later results only. Strides and batch invariance
    are as for cumsum. Source: torch.logcumsumexp.
    """
    return _ops.logcumsumexp(input, as_dim("logcumsumexp", dim))


def _logcumsumexp_backward_fake(grad_out: Tensor, x: Tensor, y: Tensor, dim: int) -> Tensor:
    op = "logcumsumexp_backward"
    checks.check_dtype(op, "x", x)
    checks.check_like(op, "grad_out", grad_out, "x", x)
    checks.check_like(op, "y", y, "x", x)
    check_dim(op, x, dim)
    return torch.empty_like(x)


def _logcumsumexp_setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    x, ctx.dim = inputs
    ctx.save_for_backward(x, output)


def _logcumsumexp_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    x, y = ctx.saved_tensors
    return {"x": _ops.logcumsumexp_backward(grad_out, x, y, ctx.dim)}


_register_op(
    "logcumsumexp",
    fake_like("logcumsumexp", "x", along_dim=True),
    _logcumsumexp_backward_fake,
    _logcumsumexp_backward,
    _logcumsumexp_setup_context,
)


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
        A tensor with the shape, dtype and strides of ``torch.empty_like(b)``. Its last state, ``h.select(dim, -1)``
        or, with ``reverse``, ``h.select(dim, 0)``, can be h0 of the next call.

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


def _linear_recurrence_fake(a: Tensor, b: Tensor, h0: Tensor | None, dim: int, reverse: bool) -> Tensor:
    checks.check_dtype("linear_recurrence", "b", b)
    check_recurrence("linear_recurrence", a, "b", b, h0, dim)
    return torch.empty_like(b)


def _linear_recurrence_backward_fake(
    grad_h: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, dim: int, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    op = "linear_recurrence_backward"
    checks.check_dtype(op, "h", h)
    checks.check_like(op, "grad_h", grad_h, "h", h)
    check_recurrence(op, a, "h", h, h0, dim)
    return torch.empty_like(h), torch.empty_like(h), h.new_empty(0 if h0 is None else h0.shape)


def _linear_recurrence_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, h0, ctx.dim, ctx.reverse = inputs
    ctx.save_for_backward(a, output, h0)


def _linear_recurrence_backward(ctx: Any, grad_h: Tensor) -> Gradients:
    a, h, h0 = ctx.saved_tensors
    grad_a, grad_b, grad_h0 = _ops.linear_recurrence_backward(grad_h, a, h, h0, ctx.dim, ctx.reverse)
    of_a = second_order.sum_to(grad_a, a) if ctx.needs_input_grad[0] else None
    return {"a": of_a, "b": grad_b, "h0": None if h0 is None else grad_h0}


_register_op(
    "linear_recurrence",
    _linear_recurrence_fake,
    _linear_recurrence_backward_fake,
    _linear_recurrence_backward,
    _linear_recurrence_setup_context,
)
register_autocast_rule("linear_recurrence", autocast_rules.linear_recurrence)


# ---- rotary_embedding ----


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by the positions of their tokens: rotary position embedding, both in one kernel.

    The first R elements of each row x are rotated in pairs (i, j), and the others are copied::

        y_i = cos_i * x_i - sin_i * x_j        j = i + R / 2, as for Llama, GPT-NeoX and Phi
        y_j = cos_j * x_j + sin_j * x_i        interleaved: i even, j = i + 1, as for GPT-J and Cohere

    Args:
        q: shape (T, D), (heads, T, D) or (B, heads, T, D).
        k: dtype, device and shape of ``q``; only the number of heads may differ.
        cos: shape (T, R), (1, T, R) or (B, T, R), with R even and at most D. Each rotated element has its own column,
            even if the two columns of a pair are equal. Of ``q``'s dtype or, if that is half, float32.
        sin: shape and dtype of ``cos``.
        interleaved: whether the two elements of a pair are neighbours.

    Returns:
        ``q`` and ``k`` rotated, with the shapes, dtypes and strides of ``torch.empty_like(q)`` and
        ``torch.empty_like(k)``.

    Raises:
        RuntimeError: an argument has another shape, dtype or device, R is odd or larger than D, or ``cos`` or ``sin``
            requires grad.

    Differentiable in ``q`` and ``k``, to any order; backward saves only ``cos`` and ``sin``. Rows of unit stride are
    read without a copy, such as the rows of ``qkv.view(B, T, 3, heads, D)[:, :, 0].transpose(1, 2)``. Batch-invariant.
    Sources: Su et al. 2021, arXiv:2104.09864; apply_rotary_pos_emb of Hugging Face transformers.
    """
    rotated = _ops.rotary_embedding(q, k, cos, sin, interleaved)
    return rotated[0], rotated[1]  # by index: under torch.fx both are one Proxy, which cannot be unpacked


def _rotary_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    check_rotary("rotary_embedding", "", q, k, cos, sin)
    return torch.empty_like(q), torch.empty_like(k)


def _rotary_backward_fake(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    check_rotary("rotary_embedding_backward", "grad_", grad_q, grad_k, cos, sin)
    return torch.empty_like(grad_q), torch.empty_like(grad_k)


def _rotary_backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Gradients:
    cos, sin = ctx.saved_tensors
    grad_q, grad_k = _ops.rotary_embedding_backward(grad_q, grad_k, cos, sin, ctx.interleaved)
    return {"q": grad_q, "k": grad_k}


_register_op(
    "rotary_embedding",
    _rotary_fake,
    _rotary_backward_fake,
    _rotary_backward,
    second_order.rotary_embedding_setup_context,
)
register_autocast_rule("rotary_embedding", autocast_rules.rotary_embedding)


# ---- the table ----

# torch.rms_norm, which ours follows, casts from torch 2.12 on.
_CASTS = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")

# fmt: off
register("dropout", fake=drop.dropout_fake, setup_context=drop.dropout_setup_context, backward=drop.dropout_backward,
         plain=drop.dropout_plain, nested=BY_ROWS)

register("layer_norm", fake=LAYER_NORM.fake, setup_context=LAYER_NORM.setup_context, backward=LAYER_NORM.backward,
         plain=LAYER_NORM.plain, autocast=FLOAT32_ON_CUDA, nested=BY_ROWS)
register("layer_norm_backward", fake=LAYER_NORM.backward_fake, setup_context=LAYER_NORM.backward_setup_context,
         backward=LAYER_NORM.second, plain=LAYER_NORM.backward_plain)

register("rms_norm", fake=RMS_NORM.fake, setup_context=RMS_NORM.setup_context, backward=RMS_NORM.backward,
         plain=RMS_NORM.plain, autocast=FLOAT32_ON_CUDA if _CASTS else None, nested=BY_ROWS)
register("rms_norm_backward", fake=RMS_NORM.backward_fake, setup_context=RMS_NORM.backward_setup_context,
         backward=RMS_NORM.second, plain=RMS_NORM.backward_plain)

register("add_layer_norm", fake=ADD_LAYER_NORM.fake, setup_context=ADD_LAYER_NORM.setup_context,
         backward=ADD_LAYER_NORM.backward, plain=ADD_LAYER_NORM.plain, nested=BY_ROWS)
register("add_layer_norm_backward", fake=ADD_LAYER_NORM.backward_fake,
         setup_context=ADD_LAYER_NORM.backward_setup_context, backward=ADD_LAYER_NORM.second,
         plain=ADD_LAYER_NORM.backward_plain)

register("add_rms_norm", fake=ADD_RMS_NORM.fake, setup_context=ADD_RMS_NORM.setup_context,
         backward=ADD_RMS_NORM.backward, plain=ADD_RMS_NORM.plain, nested=BY_ROWS)
register("add_rms_norm_backward", fake=ADD_RMS_NORM.backward_fake, setup_context=ADD_RMS_NORM.backward_setup_context,
         backward=ADD_RMS_NORM.second, plain=ADD_RMS_NORM.backward_plain)

register("layer_norm_dropout", fake=LAYER_NORM_DROPOUT.fake, setup_context=LAYER_NORM_DROPOUT.setup_context,
         backward=LAYER_NORM_DROPOUT.backward, plain=LAYER_NORM_DROPOUT.plain, autocast=FLOAT32_ON_CUDA, nested=BY_ROWS)
register("layer_norm_dropout_backward", fake=LAYER_NORM_DROPOUT.backward_fake,
         setup_context=LAYER_NORM_DROPOUT.backward_setup_context, backward=LAYER_NORM_DROPOUT.second,
         plain=LAYER_NORM_DROPOUT.backward_plain)

register("cross_entropy", fake=losses.cross_entropy_fake, setup_context=losses.cross_entropy_setup_context,
         backward=losses.cross_entropy_backward, plain=losses.cross_entropy_plain,
         autocast=losses.cross_entropy_autocast)
register("cross_entropy_backward", fake=losses.cross_entropy_backward_fake, backward=NO_SECOND)
register("cross_entropy_chunk", fake=losses.cross_entropy_chunk_fake, backward=WRITES)
register("cross_entropy_scale", fake=losses.cross_entropy_scale_fake, backward=NOT_DIFFERENTIABLE)

register("token_log_probs", fake=losses.token_log_probs_fake, setup_context=losses.token_log_probs_setup_context,
         backward=losses.token_log_probs_backward, plain=losses.token_log_probs_plain)
register("token_log_probs_backward", fake=losses.token_log_probs_backward_fake, backward=NO_SECOND)

register("linear_cross_entropy", fake=linear_loss.linear_cross_entropy_fake,
         setup_context=linear_loss.linear_cross_entropy_setup_context,
         backward=linear_loss.linear_cross_entropy_backward, plain=linear_loss.linear_cross_entropy_plain,
         autocast=linear_loss.linear_cross_entropy_autocast, kernel=linear_loss.forward_kernel,
         no_grad_kernel=linear_loss.no_grad_kernel)
register("linear_cross_entropy_backward", fake=linear_loss.linear_cross_entropy_backward_fake, backward=NO_SECOND,
         kernel=linear_loss.backward_kernel)
# fmt: on

"""What several operators share: options, fakes, and the checks of csrc/<op>/<op>.cpp in the same order and words."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, linear_loss
from .autograd import has_tangent

# ---- muladd, activations, gates, reduce_sum, softmax and scans ----


def fake_like(op: str, *names: str) -> Callable[..., Tensor]:
    """The fake of an operator whose first arguments are the tensors `names`. The others and the result are like the
    last one."""

    def fake(*args: Any) -> Tensor:
        *others, like = args[: len(names)]
        checks.check_dtype(op, names[-1], like)
        for name, other in zip(names, others, strict=False):
            checks.check_like(op, name, other, names[-1], like)
        return torch.empty_like(like)

    return fake


def fake_along_dim(op: str, hint: str = "") -> Callable[..., Tensor]:
    """The fake of an operator (x, dim, *options) whose result is like x. A wrong dtype is refused with this hint."""

    def fake(x: Tensor, dim: int, *options: Any) -> Tensor:
        checks.check_dtype(op, "x", x, hint)
        check_dim(op, x, dim)
        return torch.empty_like(x)

    return fake


def check_no_gradients(op: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    """Fails if a call with out= would have to be differentiated."""
    if torch.is_grad_enabled() and out.requires_grad:
        checks.fail(op, "expected out not to require grad, since out= is not differentiable")
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        checks.fail(op, "expected a and b not to require grad with out=, which is not differentiable")
    if has_tangent(a, b, out):
        checks.fail(op, "expected no tangents with out=, which is not differentiable")


def check_bias(op: str, x: Tensor, bias: Tensor) -> None:
    checks.check_dtype(op, "x", x)
    checks.check_same(op, "bias", bias, "x", x)
    checks.check(op, x.dim() > 0, "expected x to have at least one dimension, but got shape []")
    expected = f"expected bias of shape [{x.shape[-1]}], the last dimension of x"
    checks.check_sizes(op, bias.shape, x.shape[-1:], f"{expected}, but got {list(bias.shape)}")


def is_tanh(op: str, approximate: str) -> bool:
    """`approximate` as the operators take it: a bool, since the stable ABI leaks a string at each call."""
    if approximate not in ("none", "tanh"):
        checks.fail(op, f"expected approximate to be 'none' or 'tanh', but got {approximate!r}")
    return approximate == "tanh"


def check_gate(op: str, gate: Tensor, up: Tensor) -> None:
    checks.check_dtype(op, "gate", gate)
    checks.check_like(op, "up", up, "gate", gate)


def as_dims(dim: Any) -> tuple[int, ...] | None:
    """The dimensions as ints. Anything with __index__ is taken, except a bool, which torch.sum refuses, too."""
    dims = dim if isinstance(dim, Sequence) or dim is None else (dim,)
    for d in dims or ():
        if isinstance(d, bool) or not hasattr(d, "__index__"):
            checks.fail("reduce_sum", f"expected dim to be an int, a sequence of ints or None, but got {dim!r}")
    return dims if dims is None else tuple(operator.index(d) for d in dims)


def reduced_dims(x: Tensor, dim: Sequence[int] | None) -> set[int]:
    """The dimensions that reduce_sum sums over, counted from the first."""
    return {d % x.dim() for d in dim} if dim and x.dim() else set(range(x.dim()))


def check_dims(x: Tensor, dim: Sequence[int] | None) -> None:
    dims, seen = max(x.dim(), 1), set[int]()  # a 0-d tensor has the dimensions 0 and -1, as in PyTorch
    for d in dim or ():
        checks.check("reduce_sum", -dims <= d < dims, f"expected dim in [{-dims}, {dims - 1}], but got {d}")
        checks.check("reduce_sum", d % dims not in seen, f"expected each dim once, but got {d % dims} twice")
        seen.add(d % dims)


def check_dim(op: str, x: Tensor, dim: int) -> None:
    dims = max(x.dim(), 1)  # a 0-d tensor has the dimensions 0 and -1, as in PyTorch
    checks.check(op, -dims <= dim < dims, f"expected dim in [{-dims}, {dims - 1}], but got {dim}")


def check_recurrence(op: str, a: Tensor, name: str, b: Tensor, h0: Tensor | None, dim: int) -> None:
    """check_recurrence of csrc/scan/scan.cpp."""
    checks.check_same(op, "a", a, name, b)
    expected = f"expected a of a shape that broadcasts to {list(b.shape)}, that of {name}"
    message = f"{expected}, but got {list(a.shape)}"
    checks.check(op, a.dim() <= b.dim(), message)
    for of_a, of_b in zip(reversed(a.shape), reversed(b.shape), strict=False):
        if of_a != 1:  # for symbolic sizes, too, PyTorch knows which are 1
            checks.check(op, of_a == of_b, message)
    check_dim(op, b, dim)
    if h0 is None:
        return
    checks.check_same(op, "h0", h0, name, b)
    lines = [size for d, size in enumerate(b.shape) if d != dim % b.dim()]
    expected = f"expected h0 of shape {lines}, that of {name} without dim"
    checks.check_sizes(op, h0.shape, lines, f"{expected}, but got {list(h0.shape)}")


# ---- losses ----


def reduction_number(op: str, reduction: str) -> int:
    """The reduction as the operators take it: a number, as in ATen."""
    if reduction not in ("none", "mean", "sum"):
        checks.fail(op, f"expected reduction to be 'none', 'mean' or 'sum', but got {reduction!r}")
    return ("none", "mean", "sum").index(reduction)


def check_reduction(op: str, reduction: int) -> None:
    expected = f"expected reduction to be 0 (none), 1 (mean) or 2 (sum), but got {reduction}"
    checks.check(op, 0 <= reduction <= 2, expected)


def check_loss(
    op: str,
    logits: Tensor,
    target: Tensor,
    class_dim: int,
    weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> None:
    """check_inputs of csrc/loss/loss.cpp, except that the values of the targets are not checked."""
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


def check_cross_entropy(
    op: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> None:
    check_reduction(op, reduction)
    check_loss(op, logits, target, class_dim(logits), weight, label_smoothing, softcap)


def class_dim(logits: Tensor) -> int:
    return min(1, logits.dim() - 1)


def loss_type(logits: Tensor) -> torch.dtype:
    """The dtype in which the losses are computed, and of the statistics other than lse."""
    return torch.promote_types(logits.dtype, torch.float32)


def refuse_weight_gradient(op: str, needs: bool) -> None:
    if needs:
        checks.fail(op, "expected weight not to require grad: the derivative of the class weights is not implemented")


def check_statistic(op: str, name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype, logits: Tensor) -> None:
    checks.check_device(op, name, x, "logits", logits)
    message = f"expected {name} as the forward returned it"
    checks.check(op, x.dtype == dtype and x.is_contiguous(), message)
    checks.check_sizes(op, x.shape, shape, message)


def check_loss_grad(op: str, name: str, grad: Tensor, shape: Sequence[int], logits: Tensor) -> None:
    checks.check_device(op, name, grad, "logits", logits)
    acc = loss_type(logits)
    expected = f"expected {name} to be {checks.dtype_name(logits)} like logits"
    if acc != logits.dtype:
        expected += f" or {str(acc).removeprefix('torch.')}"
    checks.check(op, grad.dtype in (logits.dtype, acc), f"{expected}, but got {checks.dtype_name(grad)}")
    expected = f"expected {name} of shape {list(shape)}, that of the result"
    checks.check_sizes(op, grad.shape, shape, f"{expected}, but got {list(grad.shape)}")


def check_tokens(op: str, logits: Tensor, target: Tensor, temperature: float) -> None:
    check_loss(op, logits, target, -1)
    checks.check(op, temperature > 0, f"expected temperature to be positive, but got {temperature:g}")


def check_linear(
    op: str,
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
    check_reduction(op, reduction)
    # Logits of the right shape that take no memory: one element, expanded.
    logits = x.new_empty(1, dtype=x.dtype).expand(*x.shape[:-1], shape[0])
    check_loss(op, logits, target, -1, weight, label_smoothing, softcap)


def check_targets(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Their values, on the CPU alone: elsewhere this would wait for the device."""
    if target.device.type == "cpu":
        wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
        expected = f"expected target in [0, {classes - 1}] or ignore_index"
        checks.check(op, wrong.numel() == 0, f"{expected}, but got {wrong[0] if wrong.numel() else None}")


def check_linear_values(*args: Any) -> None:
    """The checks of the kernels: those of the fake and, on the CPU, that each target is a class."""
    op, (_, linear_weight, target, _, _, _, ignore_index, *_) = "linear_cross_entropy", args
    check_linear(op, *args[:10])
    check_targets(op, target, linear_weight.shape[0], ignore_index)


def check_linear_backward(grad_out: Tensor, *args: Any) -> None:
    given, made, options, needs = args[:5], args[5:8], args[8:13], args[13:]
    x, linear_weight, target, *_ = given
    reduction, *_ = options
    op = "linear_cross_entropy_backward"
    check_linear(op, *given, *options)
    check_loss_grad(op, "grad_out", grad_out, [] if reduction else target.shape, x)
    shapes = [x.shape, linear_weight.shape, linear_weight.shape[:1]]
    names = ("grad_x", "grad_weight", "grad_bias")
    is_made = linear_loss.makes_gradients(x.dtype, reduction)
    for name, grad, shape, need in zip(names, made, shapes, needs, strict=True):
        check_statistic(op, name, grad, shape if need and is_made else [0], x.dtype, x)


# ---- rotary_embedding ----


def check_rotary(op: str, grad: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
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

"""What the three losses share, as norms.py has it for the norms: the checks of csrc/loss/loss.cpp in the same order and
words, the calls, the fakes, and the derivative. linear_loss.py has the kernels of linear_cross_entropy.

A loss returns, beside its results, statistics that only backward reads. They have no gradient.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _ops, autograd, checks, linear_loss
from .autograd import Gradients, is_recorded

# ---- checks ----


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
    z_loss: float = 0.0,
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
        checks.check_same_or_float32(op, "weight", weight, "logits", logits)
        expected = f"expected weight of shape [{classes}], a number for each class"
        checks.check_sizes(op, weight.shape, [classes], f"{expected}, but got {list(weight.shape)}")
    expected = f"expected label_smoothing to be between 0 and 1, but got {label_smoothing:g}"
    checks.check(op, 0 <= label_smoothing <= 1, expected)
    checks.check(op, -math.inf < z_loss < math.inf, f"expected z_loss to be finite, but got {z_loss:g}")
    if softcap is not None:
        limits = torch.finfo(loss_type(logits))
        expected = f"expected softcap to be None or a positive normal number of {limits.dtype}, but got {softcap:g}"
        checks.check(op, limits.tiny <= softcap <= limits.max, expected)


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
    check_loss(op, logits, target, class_dim(logits), weight, label_smoothing, z_loss, softcap)


def class_dim(logits: Tensor) -> int:
    return min(1, logits.dim() - 1)


def loss_type(logits: Tensor) -> torch.dtype:
    """The dtype in which the losses are computed, and of the statistics."""
    return torch.promote_types(logits.dtype, torch.float32)


def unevaluated_lse(most: Tensor, log_sum: Tensor, dtype: torch.dtype) -> Tensor:
    """most + log_sum, both float64, as the operators save it: two numbers for each row (csrc/loss/loss.h)."""
    lse = (most + log_sum).to(dtype)
    return torch.stack([lse, (log_sum - (lse - most)).to(dtype)], -1)


def refuse_weight_gradient(op: str, needs: bool) -> None:
    if needs:
        checks.fail(op, "expected weight not to require grad: the derivative of the class weights is not implemented")


def check_statistic(op: str, name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype, logits: Tensor) -> None:
    checks.check_device(op, name, x, "logits", logits)
    message = f"expected {name} as the forward returned it"
    checks.check(op, x.dtype == dtype and x.is_contiguous(), message)
    checks.check_sizes(op, x.shape, shape, message)


def check_loss_grad(op: str, name: str, grad: Tensor, shape: Sequence[int], logits: Tensor) -> None:
    checks.check_same_or_float32(op, name, grad, "logits", logits)
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
    check_loss(op, logits, target, -1, weight, label_smoothing, z_loss, softcap)


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


# ---- calls ----


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, *options: Any
) -> Tensor:
    """The operator, for DTensors the function of sharded_loss.py."""
    number = reduction_number("cross_entropy", reduction)
    function = autograd.distributed.sharded_loss if autograd.is_sharded(logits) else _ops
    return function.cross_entropy(logits, target, weight, ignore_index, number, *options)


def float_cross_entropy(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """cross_entropy whose loss is float32 for half logits, too: nn.convert gives it to language models."""
    return cross_entropy(logits, target, None, ignore_index, reduction, 0.0, 0.0, None, True)


def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    *options: Any,
) -> Tensor:
    """The operator, for DTensors the function of sharded_loss.py."""
    number = reduction_number("linear_cross_entropy", reduction)
    given = {"x": x, "linear_weight": linear_weight, "target": target}
    for name, tensor in (given if linear_bias is None else given | {"linear_bias": linear_bias}).items():
        checks.check_tensor("linear_cross_entropy", name, tensor)
    needs = tuple(_may_need_grad(t) for t in (x, linear_weight, linear_bias))
    function = autograd.distributed.sharded_loss if autograd.is_sharded(x) else _ops
    return function.linear_cross_entropy(x, linear_weight, target, linear_bias, weight, number, *options, *needs)


def float_linear_cross_entropy(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *options: Any
) -> Tensor:
    """linear_cross_entropy whose loss is float32 for half inputs, too: nn.convert gives it to language models."""
    ignore_index, reduction, softcap = options
    others = None, reduction, ignore_index, 0.0, 0.0, softcap, True
    return linear_cross_entropy(x, linear_weight, target, linear_bias, *others)


def _may_need_grad(x: Tensor | None) -> bool:
    """Whether forward must compute the gradient of this argument. A recorded graph may be trained later, and inside
    torch.func's transforms requires_grad says nothing; there the answer is yes."""
    is_unknown = is_recorded() or torch._C._are_functorch_transforms_active()
    return x is not None and (is_unknown or x.requires_grad)


# ---- fakes and derivatives ----


def _save(ctx: Any, tensors: Sequence[Tensor | None], statistics: Sequence[Tensor]) -> None:
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)  # else autograd would allocate zeros as gradients of the statistics


def cross_entropy_fake(
    logits: Tensor, target: Tensor, weight: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, reduction, *_, float_loss = options
    check_cross_entropy("cross_entropy", logits, target, weight, *options[:-1])
    acc = loss_type(logits)
    loss = logits.new_empty([] if reduction else target.shape, dtype=acc if float_loss else logits.dtype)
    lse = logits.new_empty((*target.shape, 2), dtype=acc)
    return loss, lse, logits.new_empty([1 if reduction else 0], dtype=acc)


def cross_entropy_backward_fake(
    grad_out: Tensor, logits: Tensor, target: Tensor, lse: Tensor, total: Tensor, weight: Tensor | None, *options: Any
) -> Tensor:
    op = "cross_entropy_backward"
    _, reduction, *_ = options
    check_cross_entropy(op, logits, target, weight, *options)
    check_loss_grad(op, "grad_out", grad_out, [] if reduction else target.shape, logits)
    check_statistic(op, "lse", lse, (*target.shape, 2), loss_type(logits), logits)
    check_statistic(op, "total", total, [1 if reduction else 0], loss_type(logits), logits)
    return logits.new_empty(logits.shape)


def cross_entropy_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.options, _ = inputs
    refuse_weight_gradient("cross_entropy", ctx.needs_input_grad[2])
    _, lse, total = output
    _save(ctx, [logits, target, weight, lse, total], [lse, total])


def cross_entropy_backward(ctx: Any, grad_out: Tensor | None, *_: None) -> Gradients:
    if grad_out is None:
        return {}
    logits, target, weight, lse, total = ctx.saved_tensors
    return {"logits": _ops.cross_entropy_backward(grad_out, logits, target, lse, total, weight, *ctx.options)}


def _check_scalar(op: str, name: str, x: Tensor, like: Tensor) -> None:
    dtype = loss_type(like)
    message = f"expected {name} to be one number of type {str(dtype).removeprefix('torch.')}"
    checks.check(op, x.dtype == dtype, message)
    checks.check(op, x.numel() == 1, message)


def cross_entropy_chunk_fake(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, *others: Any
) -> Tensor:
    op, (*options, scale) = "cross_entropy_chunk", others
    check_loss(op, logits, target, class_dim(logits), weight, *options)
    checks.check_device(op, "scale", scale, "logits", logits)
    is_matrix = logits.is_contiguous() and logits.dim() == 2
    checks.check(op, is_matrix, f"expected logits to be a contiguous matrix, but got shape {list(logits.shape)}")
    _check_scalar(op, "scale", scale, logits)
    return logits.new_empty(target.shape, dtype=loss_type(logits))


def cross_entropy_scale_fake(x: Tensor, factor: Tensor) -> Tensor:
    op = "cross_entropy_scale"
    checks.check_dtype(op, "x", x)
    checks.check_device(op, "factor", factor, "x", x)
    _check_scalar(op, "factor", factor, x)
    return torch.empty_like(x)


def token_log_probs_fake(logits: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    check_tokens("token_log_probs", logits, target, temperature)
    shapes = target.shape, target.shape, (*target.shape, 2)
    log_probs, entropy, lse = (logits.new_empty(shape, dtype=loss_type(logits)) for shape in shapes)
    return log_probs, entropy, lse


def token_log_probs_backward_fake(
    grad_log_probs: Tensor, grad_entropy: Tensor, logits: Tensor, target: Tensor, *saved: Any
) -> Tensor:
    op = "token_log_probs_backward"
    lse, entropy, temperature = saved
    check_tokens(op, logits, target, temperature)
    check_loss_grad(op, "grad_log_probs", grad_log_probs, target.shape, logits)
    check_loss_grad(op, "grad_entropy", grad_entropy, target.shape, logits)
    checks.check_same(op, "grad_entropy", grad_entropy, "grad_log_probs", grad_log_probs)
    check_statistic(op, "lse", lse, (*target.shape, 2), loss_type(logits), logits)
    check_statistic(op, "entropy", entropy, target.shape, loss_type(logits), logits)
    return logits.new_empty(logits.shape)


def token_log_probs_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, ctx.temperature = inputs
    _, entropy, lse = output
    _save(ctx, [logits, target, lse, entropy.detach()], [lse])


def token_log_probs_backward(
    ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: None
) -> Gradients:
    if grad_log_probs is None and grad_entropy is None:
        return {}
    logits, target, lse, entropy = ctx.saved_tensors
    of_log_probs = torch.zeros_like(entropy) if grad_log_probs is None else grad_log_probs
    of_entropy = torch.zeros_like(entropy) if grad_entropy is None else grad_entropy
    saved = logits, target, lse, entropy, ctx.temperature
    return {"logits": _ops.token_log_probs_backward(of_log_probs, of_entropy, *saved)}


def linear_cross_entropy_fake(
    x: Tensor, linear_weight: Tensor, target: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options, float_loss, needs = args[:7], args[7], args[8:]
    _, _, reduction, *_ = options
    check_linear("linear_cross_entropy", x, linear_weight, target, *options)
    loss = x.new_empty([] if reduction else target.shape, dtype=loss_type(x) if float_loss else x.dtype)
    is_made = linear_loss.makes_gradients(x.dtype, reduction)
    return loss, *linear_loss.empty_gradients(x, linear_weight, needs if is_made else (False, False, False))


def linear_cross_entropy_backward_fake(grad_out: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_linear_backward(grad_out, *args)
    return linear_loss.empty_gradients(args[0], args[1], args[13:])


def linear_cross_entropy_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    refuse_weight_gradient("linear_cross_entropy", ctx.needs_input_grad[4])
    ctx.options, ctx.needs = inputs[5:10], inputs[11:]  # inputs[10] is float_loss
    _save(ctx, [*inputs[:5], *output[1:]], output[1:])


def linear_cross_entropy_backward(ctx: Any, grad_out: Tensor | None, *_: None) -> Gradients:
    if grad_out is None:
        return {}
    grads = _ops.linear_cross_entropy_backward(grad_out, *ctx.saved_tensors, *ctx.options, *ctx.needs)
    names = ("x", "linear_weight", "linear_bias")
    return {name: grad for name, grad, need in zip(names, grads, ctx.needs, strict=True) if need}

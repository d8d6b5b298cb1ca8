"""Implements cross_entropy and token_log_probs, and helpers that linear_loss.py shares.

In addition to its results a loss operator returns statistics that only backward reads. The statistics have no gradient.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _ops
from ..registration import autograd, checks
from ..registration.autograd import Gradients
from .common import wide


class LossOptions(NamedTuple):
    """Options of cross_entropy and linear_cross_entropy, in the order of the operators' schemas."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None

    def around(self, reduction: int) -> tuple[int, int, float, float, float | None]:
        """Returns the options with the reduction after ignore_index, where cross_entropy's schema has it."""
        return self.ignore_index, reduction, *self[1:]


def cross_entropy(
    input: Tensor,
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

    With z = logits or, with softcap, ``softcap * tanh(logits / softcap)``, with C classes, s = label_smoothing and a
    row's target t::

        lse  = log(sum_c exp(z_c))
        loss = weight_t * ((1 - s) * (lse - z_t) + z_loss * lse^2) + s / C * sum_c weight_c * (lse - z_c)

    Args:
        input: called ``logits``; shape (C,), (N, C) or (N, C, d1, ...). Rows of unit stride are read without a copy.
        target: int64, shape (), (N,) or (N, d1, ...): the class of each row. Class probabilities are an error.
        weight: shape (C,), of ``logits``' dtype or, for half logits, float32: a weight for each class; None: ones.
        ignore_index: rows with this target add nothing to the loss. Their gradient is 0, also where the row has NaN
            (torch's is NaN there).
        reduction: "mean", the sum of the losses over the sum of the targets' weights; "sum"; or "none".
        label_smoothing: between 0 and 1.
        z_loss: the factor of lse^2, a term that keeps sum_c exp(z_c) near 1.
        softcap: the bound of the absolute values of the logits; None: no bound.

    Returns:
        The loss, of shape () or, with "none", of ``target``'s shape; of ``logits``' dtype, under autocast float32. The
        mean over no row is NaN, as in PyTorch.

    Raises:
        RuntimeError: an argument has another shape, dtype or device; an option is out of range; ``weight`` requires
            grad; or, on the CPU, a target is not a class. On CUDA, where this check would have to wait for the device,
            the loss and the gradient of such a row are NaN.

    Differentiable in ``logits``, once. Forward reads the logits once and keeps a log-sum-exp for each row; backward
    reads the logits and writes their gradient once. The terms of a row are added in float32 (float64: float64), and the
    rows' losses in float64, in a fixed order. Batch-invariant for rows of equal alignment; in shape (N, C, d1, ...)
    this holds for any N. Sources: torch.nn.functional.cross_entropy; z_loss: Chowdhery et al. 2022, arXiv:2204.02311;
    softcap: Gemma Team 2024, arXiv:2408.00118.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss=z_loss, softcap=softcap)
    return call_cross_entropy(input, target, weight, reduction, options, False)


def call_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, options: LossOptions, float_loss: bool
) -> Tensor:
    """Calls the operator or, for DTensors, the function of sharded_loss.py. With float_loss the loss is float32 even
    for half logits, which nn.convert needs for language models."""
    number = reduction_number("cross_entropy", reduction)
    if autograd.is_sharded(logits):
        sharded = autograd.distributed.sharded_loss.cross_entropy
        return sharded(logits, target, weight, number, options, float_loss)
    return _ops.cross_entropy(logits, target, weight, *options.around(number), float_loss)


def token_log_probs(logits: Tensor, target: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The log-probability of each row's target, and the entropy of each row's distribution.

    With ``log_p = log_softmax(logits / temperature)`` these are ``log_p[target]`` and ``-sum(exp(log_p) * log_p)``. A
    class of probability 0 adds 0. Reinforcement learning on language models computes both for every token.

    Args:
        logits: shape (..., C). Rows of unit stride are read without a copy.
        target: int64, shape (...): the class of each row.
        temperature: a positive number.

    Returns:
        The log-probabilities and the entropies, both of ``target``'s shape and float32 (float64 for float64 logits),
        because a ratio of two probabilities needs these digits.

    Raises:
        RuntimeError: an argument has another shape, dtype or device; ``temperature`` is not positive; or, on the CPU, a
            target is not a class. On CUDA such a row's results and gradient are NaN, as for cross_entropy.

    Differentiable in ``logits`` through both results, once. Forward reads the logits once; backward reads them once and
    writes their gradient once. Deterministic, and batch-invariant at equal alignment. Source: torch.log_softmax.
    """
    return _ops.token_log_probs(logits, target, temperature)


# ---- checks ----


def reduction_number(op: str, reduction: str) -> int:
    """Converts the reduction to the number that the operators take, which is ATen's number for it."""
    if reduction not in ("none", "mean", "sum"):
        checks.fail(op, f"expected reduction to be 'none', 'mean' or 'sum', but got {reduction!r}")
    return ("none", "mean", "sum").index(reduction)


def check_reduction(op: str, reduction: int) -> None:
    expected = f"expected reduction to be 0 (none), 1 (mean) or 2 (sum), but got {reduction}"
    checks.check(op, 0 <= reduction <= 2, expected)


def check_loss(
    op: str, logits: Tensor, target: Tensor, class_dim: int, weight: Tensor | None, options: LossOptions
) -> None:
    """Makes the checks of check_inputs in csrc/loss/loss_shim.cpp, except for the check of the targets' values."""
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
    label_smoothing, z_loss, softcap = options.label_smoothing, options.z_loss, options.softcap
    expected = f"expected label_smoothing to be between 0 and 1, but got {label_smoothing:g}"
    checks.check(op, 0 <= label_smoothing <= 1, expected)
    checks.check(op, -math.inf < z_loss < math.inf, f"expected z_loss to be finite, but got {z_loss:g}")
    if softcap is not None:
        limits = torch.finfo(loss_type(logits))
        expected = f"expected softcap to be None or a positive normal number of {limits.dtype}, but got {softcap:g}"
        checks.check(op, limits.tiny <= softcap <= limits.max, expected)


def check_targets(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Fails if a target on the CPU is not a class. On a GPU this check would wait for the device, and is left out."""
    if target.device.type == "cpu":
        wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
        expected = f"expected target in [0, {classes - 1}] or ignore_index"
        checks.check(op, wrong.numel() == 0, f"{expected}, but got {wrong[0] if wrong.numel() else None}")


def check_cross_entropy(
    op: str, logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, options: LossOptions
) -> None:
    check_reduction(op, reduction)
    check_loss(op, logits, target, class_dim(logits), weight, options)


def class_dim(logits: Tensor) -> int:
    return min(1, logits.dim() - 1)


def loss_type(logits: Tensor) -> torch.dtype:
    """Returns the dtype of the statistics and of the losses' arithmetic."""
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
    checks.check_same_or_float32(op, name, grad, "logits", logits)
    expected = f"expected {name} of shape {list(shape)}, that of the result"
    checks.check_sizes(op, grad.shape, shape, f"{expected}, but got {list(grad.shape)}")


def check_tokens(op: str, logits: Tensor, target: Tensor, temperature: float) -> None:
    check_loss(op, logits, target, -1, None, LossOptions())
    checks.check(op, temperature > 0, f"expected temperature to be positive, but got {temperature:g}")


# ---- fakes and derivatives ----


def save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)  # otherwise autograd would allocate zeros as gradients of the statistics


def cross_entropy_fake(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *options, float_loss = others
    check_cross_entropy("cross_entropy", logits, target, weight, reduction, LossOptions(ignore_index, *options))
    acc = loss_type(logits)
    loss = logits.new_empty([] if reduction else target.shape, dtype=acc if float_loss else logits.dtype)
    lse = logits.new_empty((*target.shape, 2), dtype=acc)
    return loss, lse, logits.new_empty([1 if reduction else 0], dtype=acc)


def cross_entropy_backward_fake(
    grad_out: Tensor, logits: Tensor, target: Tensor, lse: Tensor, total: Tensor, weight: Tensor | None, *args: Any
) -> Tensor:
    op, (ignore_index, reduction, *options) = "cross_entropy_backward", args
    check_cross_entropy(op, logits, target, weight, reduction, LossOptions(ignore_index, *options))
    check_loss_grad(op, "grad_out", grad_out, [] if reduction else target.shape, logits)
    check_statistic(op, "lse", lse, (*target.shape, 2), loss_type(logits), logits)
    check_statistic(op, "total", total, [1 if reduction else 0], loss_type(logits), logits)
    return logits.new_empty(logits.shape)


def cross_entropy_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, weight, *ctx.options, _ = inputs
    refuse_weight_gradient("cross_entropy", ctx.needs_input_grad[2])
    _, lse, total = output
    save(ctx, logits, target, weight, lse, total)


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


def cross_entropy_chunk_fake(logits: Tensor, target: Tensor, weight: Tensor | None, *others: Any) -> Tensor:
    op, (*options, scale) = "cross_entropy_chunk", others
    check_loss(op, logits, target, class_dim(logits), weight, LossOptions(*options))
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
    save(ctx, logits, target, lse, entropy.detach())


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


# ---- plain forms and autocast ----


def _nan_where(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns NaN where mask is true, else 1. This factor also makes a tangent NaN, which masked_fill would make 0."""
    return torch.where(mask, torch.nan, 1).to(dtype)


def unevaluated_lse(most: Tensor, log_sum: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns two numbers for each row, whose sum is most + log_sum. The operators save a row's log-sum-exp in this
    form (csrc/loss/loss.h). `most` and `log_sum` are float64."""
    lse = (most + log_sum).to(dtype)
    return torch.stack([lse, (log_sum - (lse - most)).to(dtype)], -1)


def _log_softmax(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log_softmax, the log-sum-exp, and the log-sum-exp as the two numbers that the operators save."""
    most = z.detach().amax(-1)
    d = z - most[..., None]
    log_sum = torch.logsumexp(d, -1)
    saved = unevaluated_lse(most.double(), log_sum.detach().double(), z.dtype)
    return d - log_sum[..., None], most + log_sum, saved


def _at(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index[..., None])[..., 0]


def cross_entropy_plain(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: int, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *given, float_loss = others
    options = LossOptions(ignore_index, *given)
    softcap, label_smoothing = options.softcap, options.label_smoothing
    z = wide(logits.movedim(class_dim(logits), -1))
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    w = z.new_ones(z.shape[-1]) if weight is None else wide(weight)
    is_ignored, index = target == ignore_index, target.clamp(0, z.shape[-1] - 1)
    is_outside = (index != target) & ~is_ignored  # on CUDA the loss is NaN there
    of_target = torch.where(is_ignored | is_outside, 0, w[index])
    log_p, lse, saved = _log_softmax(z)
    losses = of_target * (options.z_loss * lse * lse - (1 - label_smoothing) * _at(log_p, index))
    if label_smoothing > 0:
        losses = losses - label_smoothing / z.shape[-1] * (w * log_p).sum(-1)
    losses = torch.where(is_ignored, 0, losses) * _nan_where(is_outside, z.dtype)
    total = of_target.sum().reshape(1)
    dtype = losses.dtype if float_loss else logits.dtype
    if reduction == 0:
        return losses.to(dtype), saved, total.new_empty(0)
    loss = losses.sum() / total[0] if reduction == 1 else losses.sum()
    return loss.to(dtype), saved, total.detach()


def token_log_probs_plain(logits: Tensor, target: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    z = wide(logits) / temperature
    log_p, _, saved = _log_softmax(z)
    entropy = -torch.where(log_p == -torch.inf, 0, log_p.exp() * log_p).sum(-1)
    index = target.clamp(0, z.shape[-1] - 1)
    factor = _nan_where(index != target, z.dtype)  # on CUDA the results are NaN there
    return _at(log_p, index) * factor, entropy * factor, saved


def cross_entropy_autocast(device_type: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Asks for a float32 loss. The logits are not cast, because float32 logits would be twice as many bytes to read."""
    return *args[:-1], True

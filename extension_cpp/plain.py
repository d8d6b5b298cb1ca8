"""The operators in plain tensor operations, for forward-mode differentiation, which a kernel cannot do.

Each function takes an operator's arguments and returns its results. PyTorch can differentiate it in any mode and to any
order. register_autograd takes its results in place of the kernel's if an argument has a tangent. They differ from the
kernel's only by rounding.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import own_ops
from .losses import unevaluated_lse

Results = Callable[..., tuple[Tensor, ...]]


def muladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    return a * b + c


def muladd_backward(grad_out: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return grad_out * b, grad_out * a


def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


def relu_backward(grad_out: Tensor, y: Tensor) -> Tensor:
    return torch.where(y <= 0, 0, grad_out)


def scale_bias_relu(x: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    return torch.relu(x * scale + bias)


def scale_bias_relu_backward(
    grad_out: Tensor, x: Tensor, bias: Tensor, scale: float, needs_grad_x: bool, needs_grad_bias: bool
) -> tuple[Tensor, Tensor]:
    g = relu_backward(grad_out, scale_bias_relu(x, bias, scale))
    grad_bias = g.sum_to_size(bias.shape) if needs_grad_bias else bias.new_empty(0)
    return g * scale if needs_grad_x else x.new_empty(0), grad_bias


def mish(x: Tensor) -> Tensor:
    return torch.nn.functional.mish(x)


def mish_backward(grad_out: Tensor, x: Tensor) -> Tensor:
    t = torch.tanh(torch.nn.functional.softplus(x))
    return grad_out * (t + x * (1 - t * t) * torch.sigmoid(x))


def silu(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


def silu_backward(grad_out: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return grad_out * (s + x * s * (1 - s))


def gelu(x: Tensor, tanh: bool = False) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh" if tanh else "none")


def gelu_backward(grad_out: Tensor, x: Tensor, tanh: bool) -> Tensor:
    if tanh:
        c = 2 * math.sqrt(2 / math.pi)
        s = torch.sigmoid(c * (x + 0.044715 * x**3))
        return grad_out * (s + x * s * (1 - s) * c * (1 + 3 * 0.044715 * x * x))
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad_out * (torch.special.ndtr(x) + x * density)


def bias_gelu(x: Tensor, bias: Tensor, tanh: bool = False) -> Tensor:
    return gelu(x + bias, tanh)


def bias_gelu_backward(
    grad_out: Tensor, x: Tensor, bias: Tensor, tanh: bool, needs_grad_x: bool, needs_grad_bias: bool
) -> tuple[Tensor, Tensor]:
    g = gelu_backward(grad_out, x + bias, tanh)
    grad_bias = g.sum_to_size(bias.shape) if needs_grad_bias else bias.new_empty(0)
    return g if needs_grad_x else x.new_empty(0), grad_bias


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def swiglu_backward(grad_out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return silu_backward(grad_out * up, gate), grad_out * silu(gate)


def geglu(gate: Tensor, up: Tensor, tanh: bool = False) -> Tensor:
    return gelu(gate, tanh) * up


def geglu_backward(grad_out: Tensor, gate: Tensor, up: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return gelu_backward(grad_out * up, gate, tanh), grad_out * gelu(gate, tanh)


def reduce_sum(x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.sum(x, tuple(dim or ()), keepdim)


def dropout(x: Tensor, p: float, seed: Tensor) -> Tensor:
    factors = own_ops.dropout_no_grad(torch.ones_like(x.detach()), p, seed)
    return torch.where(factors == 0, 0, x * factors)


def _maybe_dropout(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    return x if seed is None or p == 0 else dropout(x, p, seed)


# ---- the norms: over the last dimensions, in float32 (float64: float64) ----


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def normalize(x: Tensor, dims: tuple[int, ...], rstd: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    """xhat and rstd as functions of x, for layer_norm if `centered`, else for rms_norm.

    The result rstd has the value of the argument rstd, which forward computed. The difference to x's variance, which
    is eps, is a constant.
    """
    d = x - x.mean(dims, keepdim=True) if centered else x
    variance = d.square().mean(dims, keepdim=True)
    rstd = (variance + (rstd.pow(-2) - variance).detach()).rsqrt()
    return d * rstd, rstd


def project(z: Tensor, xhat: Tensor, dims: tuple[int, ...], centered: bool) -> Tensor:
    """z - mean(z) - xhat * mean(xhat * z). If z is the gradient of xhat, rstd times this is the gradient of x."""
    return z - (z.mean(dims, keepdim=True) if centered else 0) - xhat * (xhat * z).mean(dims, keepdim=True)


def _dims(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dims, z = _dims(normalized_shape), wide(x)
    mean = z.mean(dims, keepdim=True)
    d = z - mean if centered else z
    rstd = (d.square().mean(dims, keepdim=True) + (torch.finfo(z.dtype).eps if eps is None else eps)).rsqrt()
    y = d * rstd
    y = y if weight is None else y * wide(weight)
    y = y if bias is None else y + wide(bias)
    return y.to(x.dtype), mean.detach(), rstd.detach()


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    return _norm(x, normalized_shape, weight, bias, eps, True)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    y, _, rstd = _norm(x, normalized_shape, weight, None, eps, False)
    return y, rstd


def _norm_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    like: Tensor,
    centered: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients of x, weight and bias; empty where not needed. Those of the parameters have the dtype of `like`."""
    dims, g = _dims(normalized_shape), wide(grad_out)
    xhat, rstd = normalize(wide(x), dims, rstd, centered)
    gw = g if weight is None else g * wide(weight)
    needs_x, *needs_weights = needs
    gradients = [(rstd * project(gw, xhat, dims, centered)).to(x.dtype) if needs_x else x.new_empty(0)]
    for term, needed in zip((g * xhat, g), needs_weights, strict=False):
        total = term.sum_to_size(tuple(normalized_shape)).to(like.dtype)
        gradients.append(total if needed else like.new_empty(0))
    return gradients


def layer_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *needs: bool,
) -> tuple[Tensor, ...]:
    like = next((w for w in (weight, bias) if w is not None), x)
    return tuple(_norm_backward(grad_out, x, normalized_shape, rstd, weight, like, True, needs))


def rms_norm_backward(
    grad_out: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor | None, *needs: bool
) -> tuple[Tensor, ...]:
    like = x if weight is None else weight
    return tuple(_norm_backward(grad_out, x, normalized_shape, rstd, weight, like, False, needs))


def _add_norm(norm: Results) -> Results:
    """The operator norm(residual + dropout(x)). Its arguments are those of the norm, with residual, p and seed."""

    def add_norm(x: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *of_norm, p, seed = args
        s = residual + _maybe_dropout(x, p, seed)
        y, *statistics = norm(s, *of_norm)
        return y, s, *statistics

    return add_norm


def _add_norm_backward(norm_backward: Results, saved: int) -> Results:
    """The backward operator of an add_norm. `saved` is the number of arguments of norm_backward between x and needs."""

    def add_norm_backward(grad_out: Tensor, grad_sum: Tensor | None, s: Tensor, *args: Any) -> tuple[Tensor, ...]:
        p, seed, needs_x, needs_residual, *needs = args[saved:]
        needs_sum = needs_x or needs_residual
        grad_s, *weights = norm_backward(grad_out, s, *args[:saved], needs_sum, *needs)
        if grad_sum is not None and needs_sum:
            grad_s = grad_s + grad_sum
        # Without dropout the gradient of x is empty, because the gradient of residual serves both.
        grad_x = _maybe_dropout(grad_s, p, seed) if needs_x and p > 0 else grad_s.new_empty(0)
        return grad_x, grad_s, *weights

    return add_norm_backward


add_layer_norm, add_layer_norm_backward = _add_norm(layer_norm), _add_norm_backward(layer_norm_backward, 5)
add_rms_norm, add_rms_norm_backward = _add_norm(rms_norm), _add_norm_backward(rms_norm_backward, 3)


def layer_norm_dropout(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *of_norm, p, seed = args
    y, *statistics = layer_norm(x, *of_norm)
    return _maybe_dropout(y, p, seed), *statistics


def layer_norm_dropout_backward(grad_out: Tensor, x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    saved, (p, seed, *needs) = args[:5], args[5:]
    return layer_norm_backward(_maybe_dropout(grad_out, p, seed), x, *saved, *needs)


# ---- scans: in float32 (float64: float64) ----


def cumsum(x: Tensor, dim: int, exclusive: bool = False, reverse: bool = False) -> Tensor:
    z = wide(x).reshape(x.shape or (1,))  # a 0-d tensor has no dimension to shift along
    z = z.flip(dim) if reverse else z
    y = torch.cumsum(z, dim)
    if exclusive:
        first = torch.zeros_like(y.narrow(dim, 0, min(y.shape[dim], 1)))
        y = torch.cat([first, y.narrow(dim, 0, max(y.shape[dim] - 1, 0))], dim)
    return (y.flip(dim) if reverse else y).reshape(x.shape).to(x.dtype)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    return torch.logcumsumexp(wide(x), dim).to(x.dtype)


def earlier(x: Tensor, first: Tensor | None, dim: int, reverse: bool) -> Tensor:
    """What was there one step earlier in the direction of the scan; `first` (None: 0) before the first step."""
    n = x.shape[dim] if x.dim() else 1
    if n == 0:
        return x
    if x.dim() == 0:
        return torch.zeros_like(x) if first is None else first
    start = torch.zeros_like(x.narrow(dim, 0, 1)) if first is None else first.unsqueeze(dim)
    return torch.cat([x.narrow(dim, 1, n - 1), start] if reverse else [start, x.narrow(dim, 0, n - 1)], dim)


def first_step(x: Tensor, dim: int, reverse: bool, like: Tensor) -> Tensor:
    """x at the first step in the direction of the scan; without a step zeros like `like`."""
    if x.dim() == 0:
        return x
    return x.select(dim, -1 if reverse else 0) if x.shape[dim] > 0 else torch.zeros_like(like)


def linear_recurrence(a: Tensor, b: Tensor, h0: Tensor | None = None, dim: int = -2, reverse: bool = False) -> Tensor:
    a, z, dim = wide(a).expand(b.shape), wide(b), dim % max(b.dim(), 1)
    if b.dim() == 0:
        return (z + a * (0 if h0 is None else wide(h0))).to(b.dtype)
    steps = list(zip(a.unbind(dim), z.unbind(dim), strict=True))
    h = torch.zeros_like(z.sum(dim)) if h0 is None else wide(h0)
    states = []
    for factor, term in reversed(steps) if reverse else steps:
        h = factor * h + term
        states.append(h)
    return torch.stack(states[::-1] if reverse else states, dim).to(b.dtype) if states else b.clone()


def linear_recurrence_backward(
    grad_h: Tensor, a: Tensor, h: Tensor, h0: Tensor | None, dim: int, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dim, factors = dim % max(h.dim(), 1), wide(a).expand(h.shape)
    u = linear_recurrence(earlier(factors, None, dim, not reverse), wide(grad_h), None, dim, not reverse)
    grad_a = u * earlier(wide(h), None if h0 is None else wide(h0), dim, reverse)
    grad_h0 = h.new_empty(0) if h0 is None else first_step(factors * u, dim, reverse, h0)
    return grad_a.to(h.dtype), u.to(h.dtype), grad_h0.to(h.dtype)


# ---- softmax and the losses: in float32 (float64: float64) ----


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x, dim)


def softmax_backward(grad_out: Tensor, y: Tensor, dim: int) -> Tensor:
    g, p = wide(grad_out), wide(y)
    return ((g - (g * p).sum(dim, keepdim=True)) * p).to(y.dtype)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    return torch.log_softmax(x, dim)


def log_softmax_backward(grad_out: Tensor, y: Tensor, dim: int) -> Tensor:
    g = wide(grad_out)
    return (g - wide(y).exp() * g.sum(dim, keepdim=True)).to(y.dtype)


def _nan_where(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """NaN, and 1 elsewhere. As a factor it makes the tangent NaN, too, which masked_fill would make 0."""
    return torch.where(mask, torch.nan, 1).to(dtype)


def _log_softmax(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax, the log-sum-exp, and what the operators save of it."""
    most = z.detach().amax(-1)
    d = z - most[..., None]
    log_sum = torch.logsumexp(d, -1)
    saved = unevaluated_lse(most.double(), log_sum.detach().double(), z.dtype)
    return d - log_sum[..., None], most + log_sum, saved


def _at(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-1, index[..., None])[..., 0]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    float_loss: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    z = wide(logits.movedim(min(1, logits.dim() - 1), -1))
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    w = z.new_ones(z.shape[-1]) if weight is None else wide(weight)
    is_ignored, index = target == ignore_index, target.clamp(0, z.shape[-1] - 1)
    is_outside = (index != target) & ~is_ignored  # on CUDA, where the loss is NaN
    of_target = torch.where(is_ignored | is_outside, 0, w[index])
    log_p, lse, saved = _log_softmax(z)
    losses = of_target * (z_loss * lse * lse - (1 - label_smoothing) * _at(log_p, index))
    if label_smoothing > 0:
        losses = losses - label_smoothing / z.shape[-1] * (w * log_p).sum(-1)
    losses = torch.where(is_ignored, 0, losses) * _nan_where(is_outside, z.dtype)
    total = of_target.sum().reshape(1)
    dtype = losses.dtype if float_loss else logits.dtype
    if reduction == 0:
        return losses.to(dtype), saved, total.new_empty(0)
    loss = losses.sum() / total[0] if reduction == 1 else losses.sum()
    return loss.to(dtype), saved, total.detach()


def token_log_probs(logits: Tensor, target: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    z = wide(logits) / temperature
    log_p, _, saved = _log_softmax(z)
    entropy = -torch.where(log_p == -torch.inf, 0, log_p.exp() * log_p).sum(-1)
    index = target.clamp(0, z.shape[-1] - 1)
    factor = _nan_where(index != target, z.dtype)  # on CUDA, where the results are NaN
    return _at(log_p, index) * factor, entropy * factor, saved


def linear_cross_entropy(
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
    *needs: bool,
) -> tuple[Tensor, ...]:
    logits = torch.nn.functional.linear(x, linear_weight, linear_bias)
    flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = cross_entropy(*flat, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, float_loss)[0]
    # The gradients that forward returns as results are constants here.
    constants = [t if t is None else t.detach() for t in (x, linear_weight, target, linear_bias, weight)]
    options = reduction, ignore_index, label_smoothing, z_loss, softcap, float_loss
    with torch.no_grad():
        _, *made = own_ops.linear_cross_entropy(*constants, *options, *needs)
    return loss.reshape([] if reduction else target.shape), *made


# ---- rotary_embedding: in float32 (float64: float64) ----


def _turned(x: Tensor, interleaved: bool) -> Tensor:
    """x with each pair (a, b) replaced by (-b, a)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1) if x.shape[-1] else (x, x)
    return torch.cat([-b, a], -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    rotated = cos.shape[-1]
    cos, sin = (wide(f if f.dim() < 3 else f[:, None] if x.dim() == 4 else f[0]) for f in (cos, sin))
    z = wide(x[..., :rotated])
    y = z * cos - _turned(z * sin, interleaved) if transposed else z * cos + _turned(z, interleaved) * sin
    return torch.cat([y.to(x.dtype), x[..., rotated:]], -1)


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    return _rotate(q, cos, sin, interleaved, False), _rotate(k, cos, sin, interleaved, False)


def rotary_embedding_backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return _rotate(grad_q, cos, sin, interleaved, True), _rotate(grad_k, cos, sin, interleaved, True)

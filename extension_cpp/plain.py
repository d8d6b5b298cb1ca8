"""The operators in plain tensor operations, for forward-mode differentiation, which a kernel cannot do.

Each function takes an operator's arguments and returns its results. PyTorch can differentiate it in any mode and to any
order. register_autograd takes its results in place of the kernel's if an argument has a tangent. They differ from the
kernel's only by rounding.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .functional.common import wide


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

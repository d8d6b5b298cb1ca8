"""Every op in plain PyTorch, with the same signature: what it means, and the truth of its tests (run in float64)."""

from collections.abc import Sequence

import torch
from torch import Tensor


def muladd(a: Tensor, b: Tensor, c: float) -> Tensor:
    return a * b + c


def scale_bias_relu(x: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    return torch.relu(x * scale + bias)


def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


def mish(x: Tensor) -> Tensor:
    return x * torch.tanh(torch.nn.functional.softplus(x))


def reduce_sum(x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return torch.sum(x, dim if dim is None or isinstance(dim, int) else tuple(dim), keepdim)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return torch.nn.functional.rms_norm(x, normalized_shape, weight, eps)

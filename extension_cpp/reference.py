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

"""index_sum before the port of docs/port.md: an autograd.Function that calls a pybind11 module."""

from typing import Any

import index_sum_c
import torch
from torch import Tensor


class IndexSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, n: int, scale: float) -> Tensor:
        ctx.save_for_backward(index)
        ctx.scale = scale
        return index_sum_c.forward(x, index, n, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return index_sum_c.backward(*grads, index, ctx.scale), None, None, None


def index_sum(x: Tensor, index: Tensor, n: int, scale: float = 1.0) -> Tensor:
    """Computes out[index[r]] += scale * x[r], where out has n rows."""
    return IndexSum.apply(x, index, n, scale)

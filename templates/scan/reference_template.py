"""Every op in plain PyTorch, with the same signature: what it means, and the truth of its tests (run in float64)."""

import torch
from torch import Tensor


def kernel_template(x: Tensor, decay: float) -> Tensor:
    """Of the loop y_k = decay * y_(k-1) + x_k the logarithmic form: after each turn an element holds the sum of twice
    as many steps."""
    y, offset = x.clone(), 1
    while offset < x.shape[-1]:
        y = y + decay**offset * torch.nn.functional.pad(y[..., :-offset], (offset, 0))
        offset *= 2
    return y

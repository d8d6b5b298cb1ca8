"""Every op in plain PyTorch, with the same signature: what it means, and the truth of its tests (run in float64)."""

from torch import Tensor


def kernel_template(x: Tensor) -> Tensor:
    return x.square().mean(-1)

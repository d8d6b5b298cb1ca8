"""Every op in plain PyTorch, with the same signature. It documents the op, and its tests compare with it in float64."""

from torch import Tensor


def kernel_template(x: Tensor, index: Tensor) -> Tensor:
    return x[index]

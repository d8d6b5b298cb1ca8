import torch
from torch import Tensor


def kernel_template(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, return_rstd: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = x * rstd if weight is None else x * rstd * weight
    return (y, rstd.detach()) if return_rstd else y

"""Modules over the ops, with the names and habits of torch.nn."""

import torch
from torch import Tensor

from extension_cpp import ops


class ScaleBiasReLU(torch.nn.Module):
    """``relu(x * scale + bias)`` with a learned bias over the last dimension.

    Args:
        features: size of the last dimension of the input.
        scale: a fixed factor.
        device, dtype: of the bias, as in torch.nn.

    Attributes:
        bias: shape (features,), zeros at first.

    Shape: (..., features) to the same.
    """

    def __init__(
        self,
        features: int,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.features = features
        self.scale = scale
        self.bias = torch.nn.Parameter(torch.empty(features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return ops.scale_bias_relu(x, self.bias, self.scale)

    def extra_repr(self) -> str:
        return f"features={self.features}, scale={self.scale}"


class ReLU(torch.nn.Module):
    """``max(x, 0)`` element by element; any shape."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(x)


class Mish(torch.nn.Module):
    """``x * tanh(softplus(x))`` element by element; any shape."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.mish(x)


class Dropout(torch.nn.Dropout):
    """torch.nn.Dropout over extension_cpp.dropout.

    With ``inplace=True`` the input is overwritten and returned, as by torch.nn.Dropout; that takes a copy more, and no
    less memory.
    """

    def forward(self, x: Tensor) -> Tensor:
        y = ops.dropout(x, self.p, self.training)
        return x.copy_(y) if self.inplace and y is not x else y


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm, arguments, parameters and state_dict included, over extension_cpp.layer_norm.

    The parameters may be float32 where the input is half; the result has the input's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm, arguments, parameters and state_dict included, over extension_cpp.rms_norm.

    The parameters may be float32 where the input is half; the result has the input's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.normalized_shape, self.weight, self.eps)

"""Modules over the ops, with the names and habits of torch.nn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from extension_cpp import ops
from extension_cpp.convert import Converted as Converted
from extension_cpp.convert import convert as convert


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

    The weight may be of any floating dtype, as torch.nn.RMSNorm's; the result has the input's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor | None = self.weight
        if weight is not None and weight.dtype != x.dtype:
            weight = weight.to(torch.float64 if x.dtype is torch.float64 else torch.float32)
        return ops.rms_norm(x, self.normalized_shape, weight, self.eps)


def _probability(p: float) -> float:
    """p, refused as torch.nn.Dropout refuses it."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return p


class AddLayerNorm(torch.nn.LayerNorm):
    """``s = residual + dropout(x, p)``; returns ``(layer_norm(s), s)``, over extension_cpp.add_layer_norm.

    torch.nn.LayerNorm's arguments, parameters and state_dict, and:

    Args:
        p: the probability that an element of ``x`` is dropped in training.

    Shape: ``x`` and ``residual`` (..., *normalized_shape) to two of the same.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        p: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)  # type: ignore[arg-type]  # torch's stub
        self.p = _probability(p)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # two inputs
        return ops.add_layer_norm(
            x, residual, self.normalized_shape, self.weight, self.bias, self.eps, self.p, self.training
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class AddRMSNorm(torch.nn.RMSNorm):
    """``s = residual + dropout(x, p)``; returns ``(rms_norm(s), s)``, over extension_cpp.add_rms_norm.

    torch.nn.RMSNorm's arguments, parameters and state_dict, and:

    Args:
        p: the probability that an element of ``x`` is dropped in training.

    Shape: ``x`` and ``residual`` (..., *normalized_shape) to two of the same.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        p: float = 0.0,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)  # type: ignore[arg-type]  # torch's stub
        self.p = _probability(p)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # two inputs
        return ops.add_rms_norm(x, residual, self.normalized_shape, self.weight, self.eps, self.p, self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"

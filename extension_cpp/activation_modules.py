"""The modules of extension_cpp.nn that compute activations and gates."""

import torch
from torch import Tensor

from . import ops
from .module_parts import NotScriptable, takes


class ScaleBiasReLU(NotScriptable, torch.nn.Module):
    """Computes ``relu(x * scale + bias)``, with a learned bias over the last dimension.

    Args:
        features: size of the last dimension of the input.
        scale: a fixed factor.
        device, dtype: device and dtype of the bias, as in torch.nn.

    Attributes:
        bias: shape (features,), zeros at first.

    Shape: the input and the result are (..., features).
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


class ReLU(NotScriptable, torch.nn.ReLU):
    """torch.nn.ReLU, computed by extension_cpp.relu: ``max(x, 0)``. Any shape.

    ``inplace=True`` copies the result into the input and returns the input. It saves no memory.
    """

    def forward(self, input: Tensor) -> Tensor:
        y = ops.relu(input)
        return input.copy_(y) if self.inplace else y


class Mish(NotScriptable, torch.nn.Mish):
    """torch.nn.Mish, computed by extension_cpp.mish: ``x * tanh(softplus(x))``. Any shape.

    ``inplace=True`` copies the result into the input and returns the input. It saves no memory, and makes a second copy
    because backward needs the input's values.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.inplace:
            return input.copy_(ops.mish(input.clone()))  # backward needs the input
        return ops.mish(input)


class SiLU(NotScriptable, torch.nn.SiLU):
    """torch.nn.SiLU, computed by extension_cpp.silu: ``x * sigmoid(x)``. Any shape.

    ``inplace=True`` copies the result into the input and returns the input. It saves no memory, and makes a second copy
    because backward needs the input's values.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not takes(input):
            return super().forward(input)
        if self.inplace:
            return input.copy_(ops.silu(input.clone()))  # backward needs the input
        return ops.silu(input)


class GELU(NotScriptable, torch.nn.GELU):
    """torch.nn.GELU, including ``approximate``, computed by extension_cpp.gelu. Any shape."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, self.approximate) if takes(input) else super().forward(input)


class SwiGLU(NotScriptable, torch.nn.Module):
    """Computes ``silu(gate) * up`` for the halves of one tensor along its last dimension. The gate is the first half,
    as in Llama's packed gate_up_proj. (In torch.nn.GLU the gate is the second half.)

    The halves are read without a copy.

    Shape: the input is (..., 2 * features), the result (..., features).
    """

    def forward(self, input: Tensor) -> Tensor:
        return ops.swiglu(*input.chunk(2, -1))


class GeGLU(NotScriptable, torch.nn.Module):
    """Computes ``gelu(gate, approximate) * up`` for the halves of one tensor along its last dimension, the gate first.

    The halves are read without a copy.

    Args:
        approximate: "none" or "tanh", as for torch.nn.GELU.

    Shape: the input is (..., 2 * features), the result (..., features).
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        gate, up = input.chunk(2, -1)
        return ops.geglu(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"

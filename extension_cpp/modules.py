"""The modules of extension_cpp.nn, which call the ops and behave like those of torch.nn."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .module_parts import NotScriptable, takes
from .registration import checks

# docs/ops.md has this order.
from .activation_modules import ScaleBiasReLU, ReLU, Mish, SiLU, GELU, SwiGLU, GeGLU  # isort: skip

__all__ = [
    "GELU",
    "AddLayerNorm",
    "AddRMSNorm",
    "CrossEntropyLoss",
    "Dropout",
    "GeGLU",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LogSoftmax",
    "MinGRU",
    "Mish",
    "RMSNorm",
    "ReLU",
    "ScaleBiasReLU",
    "SiLU",
    "Softmax",
    "SwiGLU",
]


class Dropout(NotScriptable, torch.nn.Dropout):
    """torch.nn.Dropout, computed by extension_cpp.dropout. Any shape.

    ``inplace=True`` copies the result into the input and returns the input. It saves no memory.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not takes(input):
            return super().forward(input)
        y = ops.dropout(input, self.p, self.training)
        return input.copy_(y) if self.inplace and y is not input else y


class LayerNorm(NotScriptable, torch.nn.LayerNorm):
    """torch.nn.LayerNorm, computed by extension_cpp.layer_norm. Arguments, parameters and state_dict are torch.nn's.

    The parameters may be float32 if the input is half; the result has the input's dtype.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not takes(input, self.weight):
            return super().forward(input)
        return ops.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(NotScriptable, torch.nn.RMSNorm):
    """torch.nn.RMSNorm, computed by extension_cpp.rms_norm. Arguments, parameters and state_dict are torch.nn's.

    The weight may have any floating-point dtype, as in torch.nn.RMSNorm; the result has the input's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not takes(x, self.weight):
            return super().forward(x)
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor has no dtype
def rms_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """Calls the op with a weight of any dtype. The op itself takes a weight of x's dtype or, for half x, float32."""
    if weight is not None and weight.dtype != x.dtype:
        weight = weight.to(torch.promote_types(x.dtype, torch.float32))
    return ops.rms_norm(x, normalized_shape, weight, eps)


class AddLayerNorm(NotScriptable, torch.nn.LayerNorm):
    """Returns ``(layer_norm(s), s)`` for ``s = residual + dropout(x, p)``, computed by extension_cpp.add_layer_norm.

    It has torch.nn.LayerNorm's arguments, parameters and state_dict, and one more argument:

    Args:
        p: the probability that an element of ``x`` is dropped in training.

    Shape: ``x``, ``residual`` and both results are (..., *normalized_shape).
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
        self.p = torch.nn.Dropout(p).p  # raises an error if p is not a probability

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # two inputs
        return ops.add_layer_norm(
            x, residual, self.normalized_shape, self.weight, self.bias, self.eps, self.p, self.training
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class AddRMSNorm(NotScriptable, torch.nn.RMSNorm):
    """Returns ``(rms_norm(s), s)`` for ``s = residual + dropout(x, p)``, computed by extension_cpp.add_rms_norm.

    It has torch.nn.RMSNorm's arguments, parameters and state_dict, and one more argument:

    Args:
        p: the probability that an element of ``x`` is dropped in training.

    Shape: ``x``, ``residual`` and both results are (..., *normalized_shape).
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
        self.p = torch.nn.Dropout(p).p  # raises an error if p is not a probability

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # two inputs
        return ops.add_rms_norm(x, residual, self.normalized_shape, self.weight, self.eps, self.p, self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class Softmax(NotScriptable, torch.nn.Softmax):
    """torch.nn.Softmax, computed by extension_cpp.softmax, along the last dimension by default.

    The op takes no nested tensors; for them the module calls torch.softmax.
    """

    dim: int

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        return _along_dim("softmax", input, self.dim)


class LogSoftmax(NotScriptable, torch.nn.LogSoftmax):
    """torch.nn.LogSoftmax, computed by extension_cpp.log_softmax, along the last dimension by default.

    The op takes no nested tensors; for them the module calls torch.log_softmax.
    """

    dim: int

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim)

    def forward(self, input: Tensor) -> Tensor:
        return _along_dim("log_softmax", input, self.dim)


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor is never nested
def _along_dim(function: str, x: Tensor, dim: int) -> Tensor:
    return getattr(ops if takes(x) and not x.is_nested else torch, function)(x, dim)


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor has no shape
def _check_steps(input: Tensor, features: int) -> None:
    if input.dim() < 2 or input.size(-1) != features:
        checks.fail("MinGRU", f"expected input of shape (..., T, {features}), but got {list(input.shape)}")


class MinGRU(NotScriptable, torch.nn.Module):
    """A gated recurrent layer that computes all steps in one call of extension_cpp.linear_recurrence.

    ``h[t] = (1 - z[t]) * h[t - 1] + z[t] * c[t]``, where the gate ``z = sigmoid(gate)`` and the candidates ``c`` are
    functions of the input alone: ``gate, c = projection(input).chunk(2, -1)``.

    Args:
        input_size: size of the last dimension of the input.
        hidden_size: the number of states.
        bias: whether the projection has a bias.
        reverse: whether the layer runs from the last step to the first.
        device, dtype: device and dtype of the projection, as in torch.nn.

    Attributes:
        projection: a torch.nn.Linear(input_size, 2 * hidden_size) with its initialization.

    Shape: input is (..., T, input_size), and h0 is (..., hidden_size), or None for zeros. The results are the states,
    (..., T, hidden_size), and the last state, (..., hidden_size), which can be h0 of the next call. Source: Feng et al.
    2024, arXiv:2410.01201.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        reverse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.reverse = input_size, hidden_size, reverse
        self.projection = torch.nn.Linear(input_size, 2 * hidden_size, bias, device, dtype)

    def reset_parameters(self) -> None:
        self.projection.reset_parameters()

    def forward(self, input: Tensor, h0: Tensor | None = None) -> tuple[Tensor, Tensor]:
        _check_steps(input, self.input_size)
        gate, candidate = self.projection(input).chunk(2, -1)
        # sigmoid(-gate) is 1 - z. Where 1 - z is small, the subtraction would cancel the digits that sigmoid keeps.
        keep, new = torch.sigmoid(-gate), torch.sigmoid(gate) * candidate
        h = ops.linear_recurrence(keep, new, h0, reverse=self.reverse)
        return h, h.select(-2, 0 if self.reverse else -1)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, reverse={self.reverse}"


class CrossEntropyLoss(NotScriptable, torch.nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss, computed by extension_cpp.cross_entropy. The state_dict is torch.nn's.

    The op takes no class probabilities as target; for them the module computes the loss as torch.nn.CrossEntropyLoss
    does. With z_loss or softcap, class probabilities are an error.

    Args:
        weight, ignore_index, reduction, label_smoothing: as for torch.nn.CrossEntropyLoss.
        z_loss, softcap: as for extension_cpp.cross_entropy.
    """

    # z_loss and softcap are class attributes, because convert changes the class of a torch.nn.CrossEntropyLoss to this
    # one, and such a module does not have them as its own attributes.
    z_loss: float = 0.0
    softcap: float | None = None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__(weight, None, ignore_index, None, reduction, label_smoothing)
        self.z_loss = z_loss
        self.softcap = softcap

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        options = {name: getattr(self, name) for name in ("weight", "ignore_index", "reduction", "label_smoothing")}
        return _cross_entropy(input, target, options, self.z_loss, self.softcap)

    def extra_repr(self) -> str:
        return f"z_loss={self.z_loss}, softcap={self.softcap}" if self.extends_torch() else ""

    def extends_torch(self) -> bool:
        """Returns whether this module uses z_loss or softcap, which torch.nn.CrossEntropyLoss does not have."""
        return self.z_loss != 0 or self.softcap is not None


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor has no dtype
def _cross_entropy(
    input: Tensor, target: Tensor, options: dict[str, Any], z_loss: float, softcap: float | None
) -> Tensor:
    # A target that is not int64 goes to torch's function: it has class probabilities, or torch raises an error.
    is_taken = target.dtype is torch.int64 and takes(input) and 0 <= options["label_smoothing"] <= 1
    has_classes = input.shape[:2][-1:] != (0,)
    if not (is_taken and has_classes) and not z_loss and softcap is None:
        return torch.nn.functional.cross_entropy(input, target, **options)
    return ops.cross_entropy(input, target, **options, z_loss=z_loss, softcap=softcap)


class LinearCrossEntropyLoss(NotScriptable, torch.nn.Module):
    """A linear layer and the cross-entropy of its logits, computed together by extension_cpp.linear_cross_entropy.

    It computes what torch.nn.LinearCrossEntropyLoss (PyTorch 2.13) computes for one dimension of classes. At most 1 GiB
    of logits is in memory at once.

    Args:
        in_features: size of the last dimension of the input.
        num_classes: the number of classes.
        bias: whether the linear layer has a bias.
        device, dtype: device and dtype of the linear layer, as in torch.nn.
        reduction, weight, ignore_index, label_smoothing, z_loss, softcap: as for extension_cpp.cross_entropy.

    Attributes:
        linear: a torch.nn.Linear(in_features, num_classes) with its initialization; ``linear(input)`` are the logits.
        weight: the buffer with the classes' weights, or None.

    Shape: input is (..., in_features) and target (...). The loss is (), or (...) with ``reduction="none"``.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(in_features, num_classes, bias, device, dtype)
        self.register_buffer("weight", weight)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return ops.linear_cross_entropy(
            input, self.linear.weight, target, self.linear.bias, self.weight, **self._options()
        )

    def _options(self) -> dict[str, Any]:
        names = ("reduction", "ignore_index", "label_smoothing", "z_loss", "softcap")
        return {name: getattr(self, name) for name in names}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._options().items())

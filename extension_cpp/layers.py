"""Provides the ops as layers for Hugging Face's `kernels`, which replaces a module's forward by a layer's forward.

Each class has the forward of the module that it replaces, reads that module's attributes, and has neither a constructor
nor state, as `kernels` requires. docs/hub.md says how a model gets the layers, and their names in transformers.
"""

import torch
from torch import Tensor, nn

from . import modules, ops


class _Layer(nn.Module):
    """Has the flags that `kernels` reads, and the attributes of the replaced modules that the layers read."""

    can_torch_compile = True
    has_backward = True
    weight: Tensor
    bias: Tensor | None
    eps: float
    variance_epsilon: float
    normalized_shape: tuple[int, ...]
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module


class RMSNorm(_Layer):
    """Replaces LlamaRMSNorm, and rounds where it does: the norm to the input's dtype, then its product with the weight.

    rms_norm computes the norm, and PyTorch the product. Only the statistic of a row may differ from the original's. It
    is rounded to float32 once, while the original rounds its sum, its mean and its root. FusedRMSNorm is faster.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        normalized = ops.rms_norm(hidden_states, self.weight.shape, None, self.variance_epsilon)
        return self.weight * normalized.to(hidden_states.dtype)  # under autocast on CUDA it is float32


class FusedRMSNorm(_Layer):
    """Replaces LlamaRMSNorm by one kernel, which multiplies by the weight in float32 and rounds the product once."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = modules.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
        return y.to(hidden_states.dtype)  # under autocast on CUDA it is float32


class GemmaRMSNorm(_Layer):
    """Replaces GemmaRMSNorm, Gemma2RMSNorm and Gemma3RMSNorm: the norm times 1 + weight, rounded once from float32."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return modules.rms_norm(x, weight.shape, weight, self.eps).to(x.dtype)  # float32 under autocast on CUDA


class LayerNorm(_Layer):
    """Replaces torch.nn.LayerNorm."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class SiLU(_Layer):
    """Replaces SiLUActivation and torch.nn.SiLU. It ignores `inplace` and returns a new tensor."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.silu(input)


class GeLU(_Layer):
    """Replaces GELUActivation, the exact GELU."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input)


class GeluTanh(_Layer):
    """Replaces GELUTanh and NewGELUActivation, which approximate GELU by tanh."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, "tanh")


class SwiGLUMLP(_Layer):
    """Replaces the MLP of Llama, Qwen, Mistral and others whose activation is SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


class GeGLUMLP(_Layer):
    """Replaces the MLP of Gemma and others whose activation approximates GELU by tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ops.geglu(self.gate_proj(x), self.up_proj(x), "tanh"))


class RotaryPosEmb(_Layer):
    """Replaces apply_rotary_pos_emb of Llama and others. q and k have shape (batch, heads, tokens, columns)."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim == 1:
            return ops.rotary_embedding(q, k, cos, sin)
        q, k = ops.rotary_embedding(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

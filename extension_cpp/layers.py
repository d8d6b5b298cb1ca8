"""Provides the ops as layers for Hugging Face's `kernels`, which replaces a module's forward by a layer's forward.

Each class has the forward of the module that it replaces, reads that module's attributes, and has neither a constructor
nor state, as `kernels` requires. docs/hub.md says how a model gets the layers, and which names transformers gives them.
"""

import torch
from torch import Tensor, nn

from . import modules, ops


class _Layer(nn.Module):
    """Declares the flags that `kernels` reads, and the attributes that the layers read from the replaced modules."""

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
    """Replaces LlamaRMSNorm, and rounds to the input's dtype where LlamaRMSNorm does: before and after the weight.

    rms_norm computes the norm, and PyTorch multiplies it by the weight. Only a row's reciprocal root mean square may
    differ from LlamaRMSNorm's: rms_norm rounds it to float32 once, while LlamaRMSNorm rounds the sum, the mean and the
    root. FusedRMSNorm is faster, because it is a single kernel.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        normalized = ops.rms_norm(hidden_states, self.weight.shape, None, self.variance_epsilon)
        return self.weight * normalized.to(hidden_states.dtype)  # rms_norm returns float32 under autocast on CUDA


class FusedRMSNorm(_Layer):
    """Replaces LlamaRMSNorm by one kernel, which multiplies by the weight in float32 and rounds the product once."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        y = modules.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
        return y.to(hidden_states.dtype)  # rms_norm returns float32 under autocast on CUDA


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
    """Replaces SiLUActivation and torch.nn.SiLU. The layer ignores `inplace` and returns a new tensor."""

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

"""Compares our layers for Hugging Face's `kernels`, which need not be installed, with the classes that they replace."""

from types import MethodType

import pytest
import torch
from torch import Tensor, nn

import extension_cpp
from extension_cpp import layers

transformers = pytest.importorskip("transformers")
from transformers import activations  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm  # noqa: E402
from transformers.models.llama import modeling_llama as llama  # noqa: E402

HALF = (torch.bfloat16, torch.float16)
MLP = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4}


def with_layer(module: nn.Module, layer: type[nn.Module]) -> nn.Module:
    """Replaces a module's forward by that of our layer, as `kernels.kernelize` does."""
    module.forward = MethodType(layer.forward, module)
    return module


def norm(dtype: torch.dtype, device: str, width: int = 192) -> nn.Module:
    module = llama.LlamaRMSNorm(width, eps=1e-5).to(device, dtype)
    with torch.no_grad():
        module.weight.normal_()
    return module


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_rms_norm_rounds_where_the_class_does(dtype, device) -> None:
    """RMSNorm of layers.py rounds intermediate results where LlamaRMSNorm does. Results differ only by the statistic
    rstd of each row, which our layer rounds once and LlamaRMSNorm three times."""
    torch.manual_seed(0)
    x = torch.randn(2048, 192, device=device).to(dtype)
    module = norm(dtype, device)
    stock, y = module(x), layers.RMSNorm.forward(module, x)
    _, rstd = torch.ops.extension_cpp.rms_norm(x, (192,), None, 1e-5)
    assert torch.equal(y, module.weight * (x.float() * rstd).to(dtype))
    assert ((y - stock).abs() <= 4 * torch.finfo(dtype).eps * stock.abs()).all()
    if dtype in HALF:
        assert (y != stock).float().mean() < 5e-4
        assert (layers.FusedRMSNorm.forward(module, x) != stock).float().mean() > 0.1


def test_rms_norm_keeps_what_the_class_does_to_dtypes(device) -> None:
    x = torch.randn(3, 64, device=device).bfloat16()
    module = norm(torch.float32, device, 64)
    assert layers.RMSNorm.forward(module, x).dtype is module(x).dtype is torch.float32
    assert layers.FusedRMSNorm.forward(module, x).dtype is torch.bfloat16


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    grad_out = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(grad_out.to(y.device, y.dtype))
    made = [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]
    module.zero_grad()
    return made


CASES = [
    (layers.RMSNorm, lambda: llama.LlamaRMSNorm(64)),
    (layers.FusedRMSNorm, lambda: llama.LlamaRMSNorm(64)),
    (layers.GemmaRMSNorm, lambda: Gemma3RMSNorm(64)),
    (layers.LayerNorm, lambda: nn.LayerNorm(64)),
    (layers.LayerNorm, lambda: nn.LayerNorm((3, 64), elementwise_affine=False)),
    (layers.SiLU, activations.SiLUActivation),
    (layers.GeLU, activations.GELUActivation),
    (layers.GeluTanh, activations.GELUTanh),
    (layers.GeluTanh, activations.NewGELUActivation),
    (layers.SwiGLUMLP, lambda: llama.LlamaMLP(transformers.LlamaConfig(**MLP))),
    (layers.GeGLUMLP, lambda: Gemma3MLP(transformers.Gemma3TextConfig(**MLP))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer, make", CASES, ids=[f"{layer.__name__}{i}" for i, (layer, _) in enumerate(CASES)])
def test_layer_beside_the_class(layer, make, dtype, device) -> None:
    torch.manual_seed(0)
    module = make().to(device, dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(5, 3, 64, device=device).to(dtype)
    stock = gradients(module, x)
    exact = gradients(module.double(), x.double())
    ours = gradients(with_layer(module.to(dtype), layer), x)
    eps = torch.finfo(dtype).eps
    for a, b, e in zip(ours, stock, exact, strict=True):
        assert a.dtype is dtype and a.shape == b.shape
        error, allowed = (a.double() - e).abs().max(), 2 * (b.double() - e).abs().max() + 4 * eps * e.abs().max()
        assert error <= allowed, (error, allowed)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rotary_pos_emb(unsqueeze_dim, device) -> None:
    q, k = (torch.randn(2, heads, 7, 16, device=device) for heads in (4, 2))
    cos, sin = (torch.randn(1, 7, 16, device=device) for _ in range(2))
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    ours = layers.RotaryPosEmb().forward(q, k, cos, sin, unsqueeze_dim)
    torch.testing.assert_close(ours, llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim))


def test_layers_are_what_kernels_accepts() -> None:
    """The layers have no constructor, and add no names to those of nn.Module except for the two flags that Hugging
    Face's package `kernels` reads."""
    own = layers._Layer.__subclasses__()
    assert len(own) == 10 and {layer.__module__ for layer in own} == {layers.__name__}
    for layer in own:
        assert issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
        assert set(dir(layer)) - set(dir(nn.Module)) == {"can_torch_compile", "has_backward"}
        assert layer.can_torch_compile and layer.has_backward
    assert extension_cpp.layers is layers

"""nn.convert: whole models from transformers beside themselves unconverted, and every way in which a module is left."""

import copy
import io
import os
import pickle
import sys
from collections.abc import Callable

os.environ["HF_HUB_OFFLINE"] = "1"  # every model here is made from its configuration

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.utils.parametrizations import weight_norm
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.sam2.modeling_sam2 import Sam2LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import extension_cpp
from extension_cpp.nn import convert

HALF = [torch.bfloat16, torch.float16]
DTYPES = [torch.float64, torch.float32, *HALF]

# ---- whole models ----

LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
BERT = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"vocab_size": 61, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
OPT |= {"num_attention_heads": 4, "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0}
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"decoder_start_token_id": 0}

# The class, its configuration, the norms in it, and what computes them.
MODELS = {
    "llama": ("LlamaForCausalLM", LLAMA, 5, "rms_norm"),
    "qwen2": ("Qwen2ForCausalLM", LLAMA, 5, "rms_norm"),
    "mistral": ("MistralForCausalLM", LLAMA, 5, "rms_norm"),
    "gemma": ("GemmaForCausalLM", LLAMA, 5, "rms_norm with 1 + weight"),
    "t5": ("T5ForConditionalGeneration", T5, 12, "rms_norm"),
    "gpt2": ("GPT2LMHeadModel", GPT2, 5, "layer_norm"),
    "opt": ("OPTForCausalLM", OPT, 5, "layer_norm"),
    "bert": ("BertForMaskedLM", BERT, 6, "layer_norm"),
}


def make(name: str, dtype: torch.dtype, device: str = "cpu") -> torch.nn.Module:
    """In training mode, with norms whose weights are no ones."""
    class_name, options, *_ = MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**options, use_cache=False))
    for module in model.modules():
        if "Norm" in type(module).__name__:
            for parameter in module.parameters(recurse=False):
                torch.nn.init.normal_(parameter, 0.8, 0.3)
    return model.to(device, dtype).train()


def loss_and_gradients(model: Callable[..., object], parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    device = next(iter(parameters.values())).device
    tokens = torch.randint(1, 61, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return {"loss": loss.detach()} | dict(zip(parameters, gradients, strict=True))


def check_same(got: dict[str, Tensor], want: dict[str, Tensor], eps: float) -> None:
    """A norm's forward and backward are some 16 roundings, and a model here has 12 norms at most. What a layer before
    a norm got wrong, the norm does not enlarge relative to its row, so the roundings add up: 16 * 12 of them, half an
    eps each, relative to the largest gradient: the small ones are differences of such (a key's bias gets zero)."""
    assert got.keys() == want.keys()
    largest = max(gradient.abs().max().item() for name, gradient in want.items() if name != "loss")
    for name, exact in want.items():
        assert got[name].dtype == exact.dtype
        scale = abs(exact.item()) if name == "loss" else largest
        error, bound = (got[name] - exact).abs().max().item(), 16 * 12 / 2 * eps * scale
        assert error <= bound, f"{name}: {error:.1e} > {bound:.1e}"


# The RMSNorm classes compute in float32 in every model.
PRECISIONS = [("float64", name) for name in MODELS] + [("float32", name) for name in MODELS]


@pytest.mark.parametrize("dtype, name", PRECISIONS)
def test_models(name: str, dtype: str, device: str) -> None:
    """Loss, gradients and state_dict against the unconverted model."""
    stock = make(name, getattr(torch, dtype), device)
    model = copy.deepcopy(stock)
    changed, left = convert(model)
    *_, count, function = MODELS[name]
    assert list(changed.values()) == [function] * count and not left
    want = loss_and_gradients(stock, dict(stock.named_parameters()))
    got = loss_and_gradients(model, dict(model.named_parameters()))
    exact = dtype == "float64" and function == "layer_norm"
    check_same(got, want, torch.finfo(torch.float64 if exact else torch.float32).eps)
    assert any(not torch.equal(got[name], want[name]) for name in want), "not one bit differs: is it converted?"
    for (name_a, a), (name_b, b) in zip(model.state_dict().items(), stock.state_dict().items(), strict=True):
        assert name_a == name_b and torch.equal(a, b)
    assert repr(model) == repr(stock)


@pytest.mark.parametrize("name", MODELS)
def test_models_compiled(name: str, device: str) -> None:
    stock = make(name, torch.float32, device)
    want = loss_and_gradients(stock, dict(stock.named_parameters()))
    convert(stock)
    torch.compiler.reset()
    compiled = torch.compile(stock, fullgraph=True)
    check_same(loss_and_gradients(compiled, dict(stock.named_parameters())), want, torch.finfo(torch.float32).eps)

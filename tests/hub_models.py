"""Compares transformers' models whose layers are replaced by those of this package with the unchanged models.

    python -m tests.hub_models VARIANT DEVICE      prints its results as JSON, for test_hub.py

VARIANT is the folder of a build of the package for the Hugging Face hub, which provides the layers.

This is a program, because transformers reads USE_HUB_KERNELS once, at import.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "1"}

import torch
import transformers
from kernels import (
    LocalLayerRepository,
    Mode,
    get_local_kernel,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import nn
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import extension_cpp

COMMON = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = COMMON | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "attn_implementation": "eager"}
GPT2 = COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_implementation": "eager"}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", DECODER),
    "qwen3": ("Qwen3", DECODER),
    "gemma3": ("Gemma3Text", DECODER | {"sliding_window": 8}),
    "gpt2": ("GPT2", GPT2),
}
# Maps Hugging Face's names of kernel layers to classes of layers.py. name_layers sets the names of the last line.
LAYERS = {"RMSNorm": "RMSNorm", "SiLU": "SiLU", "GeLU": "GeLU", "GeluTanh": "GeluTanh", "NewGELU": "GeluTanh"}
LAYERS |= {"rotary_pos_emb": "RotaryPosEmb"}
LAYERS |= {name: name for name in ("LayerNorm", "GemmaRMSNorm", "SwiGLUMLP", "GeGLUMLP")}


def name_layers() -> None:
    """Gives kernel layer names to the classes that have no such name in transformers."""
    for cls, name in (
        (nn.LayerNorm, "LayerNorm"),
        (gemma3.Gemma3RMSNorm, "GemmaRMSNorm"),
        (gemma3.Gemma3MLP, "GeGLUMLP"),
        (llama.LlamaMLP, "SwiGLUMLP"),
        (qwen3.Qwen3MLP, "SwiGLUMLP"),
    ):
        replace_kernel_forward_from_hub(cls, name)


def make(name: str, dtype: torch.dtype, device: str) -> nn.Module:
    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config" if kind != "Gemma3Text" else "Gemma3TextConfig")(**options)
    model_class = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(kind, f"{kind}ForCausalLM")
    model = getattr(transformers, model_class)(config).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():  # norm weights of 1 would hide a wrong use of the weights
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(device)


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 61, (2, 17), generator=torch.Generator().manual_seed(1)).to(model.device)
    model.zero_grad()
    result = model(input_ids=ids, labels=ids, use_cache=False)
    result.loss.backward()
    return result.logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def replaced(model: nn.Module, namespace: str) -> dict[str, int]:
    """Returns, for each layer in the module `namespace`, how many modules of the model have its forward method."""
    counted: dict[str, int] = {}
    for module in model.modules():
        for each in (module, *getattr(module, "_kernel_funcs", {}).values()):
            function = getattr(vars(each).get("forward"), "__func__", None)
            if function is not None and function.__module__.startswith(namespace):
                name = function.__qualname__.split(".")[0]
                counted[name] = counted.get(name, 0) + 1
    return counted


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30)).item()


def with_layers(name: str, dtype: torch.dtype, device: str, variant: Path) -> nn.Module:
    mapping = {asked: {device: LocalLayerRepository(variant, layer_name=ours)} for asked, ours in LAYERS.items()}
    model = make(name, dtype, device)
    with use_kernel_mapping(mapping, inherit_mapping=False):
        return kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=device)


def main() -> None:
    variant, device = Path(sys.argv[1]), sys.argv[2]
    cases = [(name, dtype, device) for name in MODELS for dtype in (torch.float32, torch.bfloat16)]
    # The stock models run before the first kernelize, which replaces functions such as apply_rotary_pos_emb for all.
    stock = {case: step(make(*case)) for case in cases}
    # The same models in float64, whose results are the exact ones. Their parameters were rounded to the dtype before.
    exact = {case: step(make(*case).double()) for case in cases}

    kernel = get_local_kernel(variant)
    name_layers()
    x = torch.randn(3, 32, device=device)
    found: dict[str, Any] = {
        "namespaces": [kernel._namespace.NAMESPACE, extension_cpp._namespace.NAMESPACE],
        "results": [package.rms_norm(x, (32,)).tolist() for package in (kernel, extension_cpp)],
        "models": {},
    }
    for case in cases:
        model = with_layers(*case, variant)
        (logits, grads), (exact_logits, exact_grads) = step(model), exact[case]
        result: dict[str, Any] = {"replaced": replaced(model, kernel.__name__)}
        result["logits"] = [error(each, exact_logits) for each in (logits, stock[case][0])]
        result["grads"] = [max(error(of[n], exact_grads[n]) for n in of) for of in (grads, stock[case][1])]
        if case[:2] in (("llama", torch.float32), ("gpt2", torch.float32)):
            model.compile(backend="aot_eager")
            again, grads_again = step(model)
            result["compiled"] = max(error(again, logits), *(error(grads_again[n], grads[n]) for n in grads))
        found["models"][f"{case[0]} {case[1]}".replace("torch.", "")] = result
    print(json.dumps(found))


if __name__ == "__main__":
    main()

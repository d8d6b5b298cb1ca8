"""Tests torch.func on converted models: per-sample gradients, as for influence functions and differential privacy."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from extension_cpp.nn import convert
from tests.convert_modules import MLP, WIDTH, Block, Packed

CLASSES, BATCH, TOKENS = 11, 3, 6

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


class Classifier(torch.nn.Module):
    """A model with all that convert replaces: residual additions with norms, a gated product, a softmax and a loss."""

    def __init__(self, mlp: type) -> None:
        super().__init__()
        self.block, self.mlp, self.head = Block(), mlp(), torch.nn.Linear(WIDTH, CLASSES)
        self.softmax, self.loss = torch.nn.Softmax(-1), torch.nn.CrossEntropyLoss()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.mlp(self.block(x))
        return self.loss(self.head(x * self.softmax(x)), target)


def llama() -> torch.nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=CLASSES, num_key_value_heads=1, use_cache=False, **sizes)
    config._attn_implementation = "eager"
    return transformers.LlamaForCausalLM(config)


def inputs(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator)
    return x.to(device), torch.randint(CLASSES, (BATCH, TOKENS), generator=generator).to(device)


def of_llama(model: Any, parameters: dict[str, Tensor], x: Tensor, ids: Tensor) -> Tensor:
    ids = ids[None]
    return torch.func.functional_call(model, parameters, kwargs={"input_ids": ids, "labels": ids}).loss


def of_classifier(model: Any, parameters: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    return torch.func.functional_call(model, parameters, (x, target))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., Tensor], dict[str, Any]]] = {
    "MLP": (lambda: Classifier(MLP), of_classifier, {}),
    "Packed": (lambda: Classifier(Packed), of_classifier, {}),
    "Llama": (llama, of_llama, {}),
    "Llama with loss='linear'": (llama, of_llama, {"loss": "linear"}),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
def test_per_sample_gradients_of_a_converted_model(name: str, device: str) -> None:
    """vmap of grad of a converted model equals a backward per sample, of the converted and the unconverted model."""
    make, loss, options = MODELS[name]
    torch.manual_seed(0)
    stock = make().to(device)
    model = copy.deepcopy(stock)
    assert len(convert(model, **options).changed) >= 4
    parameters = {key: value.detach() for key, value in model.named_parameters()}
    x, target = inputs(device)

    def of_sample(parameters: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        return loss(model, parameters, x, target)

    found = torch.func.vmap(torch.func.grad(of_sample), (None, 0, 0))(parameters, x, target)
    assert found.keys() == parameters.keys()
    for number in range(BATCH):
        for each in (model, stock):
            leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
            value = loss(each, leaves, x[number], target[number])
            alone = torch.autograd.grad(value, list(leaves.values()))
            for key, gradient in zip(leaves, alone, strict=True):
                # Five matrix products with sums of up to 24 terms follow each other, and vmap adds in another order:
                # 120 roundings of half an eps of the largest element.
                atol = 60 * torch.finfo(torch.float32).eps * max(gradient.abs().max().item(), 0.1)
                torch.testing.assert_close(
                    found[key][number], gradient, rtol=0, atol=atol, msg=lambda m, k=key: f"{k}: {m}"
                )

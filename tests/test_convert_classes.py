"""Tests that code which finds layers by their class finds converted and unconverted layers after convert."""

import abc
import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from extension_cpp import nn
from extension_cpp.convert import formulas
from extension_cpp.nn import convert
from tests import convert_modules
from tests.test_convert import OwnNorm, check_same, loss_and_gradients, make

NAME = "LlamaDecoderLayer"


def by_hand(model: torch.nn.Module) -> type:
    """Returns the class of the first module whose class is named NAME, as accelerate and peft look for a class."""
    return next(type(module) for module in model.modules() if type(module).__name__ == NAME)


def by_accelerate(model: torch.nn.Module) -> type:
    dataclasses = pytest.importorskip("accelerate.utils.dataclasses", reason="accelerate is not installed")
    return dataclasses.get_module_class_from_name(model, NAME)


def by_peft(model: torch.nn.Module) -> type:
    """Returns the class named NAME that peft puts into its FSDP wrapping policy for the model."""
    other = pytest.importorskip("peft.utils.other", reason="peft is not installed")
    _, policy = other.fsdp_auto_wrap_policy(model).keywords["policies"]
    return next(kind for kind in policy.keywords["transformer_layer_cls"] if kind.__name__ == NAME)


def transformer_policy(kind: type, model: torch.nn.Module) -> list[torch.nn.Module]:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={kind})
    return [module for module in model.modules() if policy(module, recurse=False, nonwrapped_numel=0)]


def module_policy(kind: type, model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(ModuleWrapPolicy({kind})._run_policy(model, set(), {}))


def checkpointing(kind: type, model: torch.nn.Module) -> list[torch.nn.Module]:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    return [module._checkpoint_wrapped_module for module in model.modules() if isinstance(module, CheckpointWrapper)]


@pytest.mark.parametrize("wrap", [transformer_policy, module_policy, checkpointing])
@pytest.mark.parametrize("find", [by_hand, by_accelerate, by_peft])
@pytest.mark.parametrize("skip", [(), "model.layers.0*", "model.layers.1*"], ids=["none", "first", "last"])
def test_layers_are_found_by_their_class(skip: Any, find: Callable[..., type], wrap: Callable[..., list[Any]]) -> None:
    model = make("llama", torch.float32)
    convert(model, skip=skip)
    layers = list(model.model.layers)
    assert len({type(layer) for layer in layers}) == (2 if skip else 1)
    found = wrap(find(model), model)
    assert len(found) == len(layers) and set(found) == set(layers)


def test_a_model_with_layers_left_alone() -> None:
    """A model with one unconverted layer has the right gradients, and can be copied, saved, compiled and reverted."""
    stock = make("llama", torch.float32)
    want = loss_and_gradients(stock, dict(stock.named_parameters()))
    model = copy.deepcopy(stock)
    convert(model, skip="model.layers.1*")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert [type(a) for a in twin.modules()] == [type(b) for b in model.modules()]
        check_same(loss_and_gradients(twin, dict(twin.named_parameters())), want, torch.finfo(torch.float32).eps)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    check_same(loss_and_gradients(compiled, dict(model.named_parameters())), want, torch.finfo(torch.float32).eps)
    nn.revert(model)
    assert [type(a) for a in model.modules()] == [type(b) for b in stock.modules()]


KINDS: dict[str, Callable[[], torch.nn.Module]] = {
    "norm": lambda: LlamaRMSNorm(64),
    "rewritten": convert_modules.MLP,
    "linear loss": lambda: make("llama", torch.float32),
}


@pytest.mark.parametrize("name", KINDS)
def test_instances_and_subclasses(name: str) -> None:
    stock = KINDS[name]()
    module = copy.deepcopy(stock)
    convert(module, loss="linear")
    kind, original = type(module), type(stock)
    lower, top = type("Lower", (original,), {}), type("Top", (kind,), {"original": original})
    assert kind is not original and isinstance(kind, formulas.Generated)
    assert isinstance(stock, kind) and issubclass(original, kind) and issubclass(lower, kind) and issubclass(top, kind)
    assert isinstance(module, original) and isinstance(module, kind) and issubclass(kind, original)
    assert not isinstance(torch.nn.Linear(2, 2), kind) and not issubclass(torch.nn.Module, kind)
    assert not issubclass(original, top) and not isinstance(module, top) and issubclass(type("A", (top,), {}), top)
    assert not isinstance(stock, formulas.FormulaModule)


class Counting(type):
    """A metaclass that a user may define."""

    made = 0

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.made += 1
        return super().__call__(*args, **kwargs)


class CountedNorm(OwnNorm, metaclass=Counting):
    pass


class AbstractNorm(OwnNorm, abc.ABC):
    pass


class AbstractMLP(convert_modules.MLP, abc.ABC):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("kind", [CountedNorm, AbstractNorm, AbstractMLP])
def test_classes_with_a_metaclass_of_their_own(kind: Any) -> None:
    stock = kind()
    module = copy.deepcopy(stock)
    assert convert(module).changed[""] in ("rms_norm", "swiglu")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module) is not kind
    assert isinstance(stock, type(module)) and isinstance(module, kind) and isinstance(type(module), type(kind))
    for other in (torch.nn.Linear(2, 2), 3, None):
        assert not isinstance(other, kind) and not isinstance(other, type(module))
    nn.revert(module)
    assert type(module) is kind


def test_compiled_code_may_ask_for_the_class() -> None:
    layers = torch.nn.ModuleList([LlamaRMSNorm(8), LlamaRMSNorm(8), torch.nn.Linear(8, 8)])
    convert(layers, skip="1")
    kind = type(layers[0])

    @torch.compile(backend="eager", fullgraph=True)
    def count(x: Tensor) -> Tensor:
        return x + sum(isinstance(layer, kind) and issubclass(type(layer), kind) for layer in layers)

    assert count(torch.zeros(2)).tolist() == [2, 2]

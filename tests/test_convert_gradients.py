"""Tests gradients of converted modules if only one tensor requires grad, and the names that `only` and `skip` take."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import activations

from extension_cpp import nn
from extension_cpp.convert.forwards import GatedLinear
from extension_cpp.nn import convert
from tests import convert_modules as modules
from tests.convert_modules import WIDTH
from tests.test_convert_parts import TANH


def with_gelu(make: type, approximate: str) -> torch.nn.Module:
    module = make()
    module.act = torch.nn.GELU(approximate)
    return module


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(modules.MLP, modules.UpFirst, modules.Packed, modules.Named, modules.NamedTwice, modules.FunctionalTanh),
        *(modules.Broadcast, modules.Block, modules.DropoutFirst, modules.DropoutInside, modules.DropoutKept),
        *(modules.PostNorm, modules.SumsInOneStatement, modules.BroadcastSum, modules.Attention),
    )
}
MODULES |= {
    "gelu": lambda: with_gelu(modules.MLP, "none"),
    "gelu with approximate='tanh'": lambda: with_gelu(modules.Packed, "tanh"),
    "LayerNorm": lambda: torch.nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: torch.nn.RMSNorm(WIDTH),
    "Softmax": lambda: torch.nn.Softmax(-1),
    "SiLU": torch.nn.SiLU,
    "CrossEntropyLoss": torch.nn.CrossEntropyLoss,
}


def inputs_of(name: str, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, WIDTH, generator=generator)
    if name == "Attention":
        others = [torch.randn(2, 5, WIDTH, generator=generator) for _ in range(2)]  # cos and sin
    else:
        others = [torch.tensor([[1, 2, 3, 4, 0]] * 2)] if name == "CrossEntropyLoss" else []
    if name == "CrossEntropyLoss":  # torch.nn.CrossEntropyLoss takes the classes along dimension 1
        x = x.transpose(1, 2)
    return [each.to(device) for each in (x, *others)]


def gradient(module: torch.nn.Module, inputs: list[Tensor], needed: int) -> Tensor | None:
    """Returns the gradient of input or parameter number `needed`, which alone requires grad, or None if it has none."""
    leaves = [x.detach().clone() if x.is_floating_point() else x for x in inputs]
    tensors = [*(x for x in leaves if x.is_floating_point()), *module.parameters()]
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i == needed)
    y = module(*leaves)
    if not y.requires_grad:
        return None
    weights = torch.linspace(0.5, 1.5, y.numel(), device=y.device).reshape(y.shape)
    return torch.autograd.grad((y * weights).sum(), tensors[needed], allow_unused=True)[0]


@pytest.mark.parametrize("name", MODULES)
def test_one_tensor_requires_grad(name: str, device: str) -> None:
    """A converted module gives the right gradient if a single tensor requires grad, which may be cos or sin."""
    torch.manual_seed(0)
    stock = MODULES[name]().to(device)
    ours = copy.deepcopy(stock)
    assert convert(ours).changed
    inputs = inputs_of(name, device)
    count = sum(x.is_floating_point() for x in inputs) + len(list(stock.parameters()))
    found = 0
    for needed in range(count):
        got, want = gradient(ours, inputs, needed), gradient(stock, inputs, needed)
        assert (got is None) == (want is None), f"tensor {needed}"
        if want is not None:
            found += 1
            # Up to three matrix products with sums of 16 or 10 terms follow each other, and add in another order than
            # PyTorch. The bound is assert_close's default of 1.3e-6 (11 eps), but relative to the largest element.
            torch.testing.assert_close(got, want, rtol=0, atol=1.3e-6 * max(1.0, want.abs().max().item()))
    assert found > 0


@pytest.mark.parametrize("function", ["silu", "gelu", TANH])
def test_every_subset_of_the_inputs_of_a_gated_linear(function: str, device: str) -> None:
    """GatedLinear, linear(act(gate) * up, weight, bias), has right gradients for any subset of its inputs."""
    shapes = [(3, 6), (3, 6), (4, 6), (4,)]
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]
    activation: Any = torch.nn.SiLU() if function == "silu" else torch.nn.GELU("tanh" if function == TANH else "none")

    def plain(gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor, _: str) -> Tensor:
        return torch.nn.functional.linear(activation(gate) * up, weight, bias)

    for needed in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in range(1, 5)):
        found = []
        for call in (GatedLinear.apply, plain):
            leaves = [x.clone().requires_grad_(i in needed) for i, x in enumerate(tensors)]
            found.append(torch.autograd.grad(call(*leaves, function).sin().sum(), [leaves[i] for i in needed]))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("option", ["only", "skip"])
@pytest.mark.parametrize("kind", [activations.NewGELUActivation, activations.GELUTanh, modules.FunctionalTanh])
def test_the_name_of_a_function_holds_for_its_tanh_form(kind: type, option: str) -> None:
    """In convert's options `only` and `skip`, "gelu" and "geglu" also name the functions with approximate="tanh"."""
    word = "geglu" if kind is modules.FunctionalTanh else "gelu"
    for given, is_named in ((word, True), ("silu", False)):
        model = torch.nn.ModuleDict({"part": kind()})
        changed = convert(model, **{option: [given]}).changed
        assert ("part" in changed) == (is_named == (option == "only")), (given, changed)


@pytest.mark.parametrize("p, training", [(0.0, True), (0.5, False)])
def test_dropout_in_place_that_drops_nothing_leaves_a_leaf_alone(p: float, training: bool, device: str) -> None:
    """An in-place dropout that drops nothing does not write into its input. Autograd would reject it for a leaf."""
    for kind in (nn.Dropout, torch.nn.Dropout):
        x = torch.randn(3, 4, device=device, requires_grad=True)
        y = kind(p, inplace=True).train(training)(x)
        assert y is x and x._version == 0
        y.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))

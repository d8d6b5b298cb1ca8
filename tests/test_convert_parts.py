"""Tests nn.convert on activations and on modules whose forward it rewrites: gated MLPs, residual blocks and rotary."""

import copy
import functools
import importlib
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import activations
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import extension_cpp
from extension_cpp import nn
from extension_cpp.convert import forwards, rotary_forms, sources
from extension_cpp.convert.activations import KNOWN, Known
from extension_cpp.convert.formulas import Unfit
from extension_cpp.nn import convert
from tests import convert_modules
from tests.convert_modules import WIDTH
from tests.test_convert import ReferenceDropout, autocast

HALF = [torch.bfloat16, torch.float16]
EPS = torch.finfo(torch.float32).eps
TANH = "gelu with approximate='tanh'"
SOMETHING_ELSE = "^computes something else than rotary_embedding$"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which each call of one of the ops' functions adds its name."""
    found: list[str] = []
    for name in ("silu", "gelu", "swiglu", "geglu", "add_layer_norm", "add_rms_norm", "dropout", "rotary_embedding"):

        def call(*args: Any, name: str, function: Any, **kwargs: Any) -> Any:
            found.append(name)
            return function(*args, **kwargs)

        function = getattr(extension_cpp.ops, name)
        monkeypatch.setattr(extension_cpp.ops, name, functools.partial(call, name=name, function=function))
    return found


def results(module: torch.nn.Module, *inputs: Any) -> list[Tensor]:
    """Calls the module. Returns its result, and the gradients of the first input and of the parameters."""
    x = inputs[0].detach().clone().requires_grad_()
    torch.manual_seed(5)
    y = module(x, *inputs[1:])
    leaves = [x, *module.parameters()]
    weights = torch.linspace(0.5, 1.5, y.numel(), device=y.device).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True)]


def check_same(got: list[Tensor], want: list[Tensor]) -> None:
    """Asserts that results and gradients are equal up to rounding. Four matrix products with sums of 16 products follow
    each other, and add in another order. These are 64 roundings of half an eps of the largest element each."""
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype is b.dtype and (a - b).abs().max() <= 32 * EPS * max(b.abs().max(), 1)


# ---- activations ----

ACTIVATIONS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "torch silu": (torch.nn.SiLU, "silu"),
    "torch gelu": (torch.nn.GELU, "gelu"),
    "torch gelu tanh": (lambda: torch.nn.GELU("tanh"), "gelu"),  # GELU's forward reads self.approximate
    "silu": (activations.SiLUActivation, "silu"),
    "gelu": (activations.GELUActivation, "gelu"),
    "gelu_python": (lambda: activations.GELUActivation(use_gelu_python=True), "gelu"),
    "gelu_new": (activations.NewGELUActivation, TANH),
    "gelu_fast": (activations.FastGELUActivation, TANH),
    "gelu_accurate": (activations.AccurateGELUActivation, TANH),
    "gelu_pytorch_tanh": (activations.GELUTanh, TANH),
    "gelu_python_tanh": (lambda: activations.GELUTanh(use_gelu_tanh_python=True), TANH),
    "a subclass of silu": (type("OwnSiLU", (torch.nn.SiLU,), {}), "silu"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, calls: list[str], device: str) -> None:
    make, function = ACTIVATIONS[name]
    stock = make()
    module = copy.deepcopy(stock)
    assert convert(module) == ({"": function}, {}) and convert(module) == ({}, {})
    assert isinstance(module, type(stock)) and repr(module) == repr(stock) and vars(module).keys() == vars(stock).keys()
    x = torch.linspace(-12, 12, 120, device=device).reshape(2, 5, 12)
    check_same(results(module, x), results(stock, x))
    (argument,) = inspect.signature(stock.forward).parameters
    assert torch.equal(module(**{argument: x}), module(x)) and set(calls) == {function[:4]}
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))) if "subclass" not in name else ():
        assert type(twin) is type(module) and torch.equal(twin(x), module(x))
    assert nn.revert(module) == ({"": type(stock).__name__}, {}) and type(module) is type(stock)
    assert torch.equal(module(x), stock(x))


@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "no autocast"])
@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_dtypes_of_activations(name: str, fake_device: str, enabled: bool) -> None:
    """A converted activation returns the original's dtype, with and without autocast. With CUDA's autocast, gelu_new
    returns float32, because autocast computes powers in float32. With FakeTensors the test needs no GPU."""
    stock = ACTIVATIONS[name][0]()
    module = copy.deepcopy(stock)
    convert(module)
    for dtype in (torch.float64, torch.float32, *HALF):
        with FakeTensorMode(), autocast(fake_device, enabled):
            x = torch.empty(2, 3, dtype=dtype, device=fake_device)
            assert module(x).dtype is stock(x).dtype, dtype


class HalfGELU(torch.nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y if input.dtype not in HALF else y * 1.25


class DetachedGELU(torch.nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).detach() + (input - input.detach())


class CutGELU(torch.nn.GELU):
    """Returns a result that requires grad, but through which the input gets no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.detach().requires_grad_())


class TrainingSiLU(torch.nn.SiLU):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 if self.training else 2)


class SiLUOfFewDimensions(torch.nn.SiLU):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 if input.dim() <= self.most else 2)


LEFT: dict[str, list[Callable[[], torch.nn.Module]]] = {
    "it computes none of silu, gelu, gelu with": [
        activations.QuickGELUActivation,
        lambda: activations.ClippedGELUActivation(-10, 10),
        TrainingSiLU,
        *(functools.partial(SiLUOfFewDimensions, most) for most in (1, 2, 3)),
    ],
    "it works in place, which the op could only copy": [lambda: torch.nn.SiLU(inplace=True)],
    "it computes gelu, but in torch.bfloat16 it is further": [HalfGELU],
    "it computes gelu, but its gradients are others": [DetachedGELU, CutGELU],
}


@pytest.mark.parametrize("reason", LEFT)
def test_activations_that_are_left(reason: str) -> None:
    for make in LEFT[reason]:
        model = torch.nn.Sequential(make())
        kind = type(model[0])
        changed, left = convert(model)
        assert not changed and type(model[0]) is kind and left["0"].startswith(f"{kind.__name__}: {reason}")


def test_other_activations_are_not_named() -> None:
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh(), activations.MishActivation(), torch.nn.Hardswish())
    assert convert(model) == ({}, {})


# ---- gated products ----

GATED = {
    "MLP": ["swiglu"],
    "UpFirst": ["swiglu"],
    "Packed": ["swiglu"],
    "Named": ["swiglu"],
    "NamedTwice": ["silu"],
    "Functional": ["swiglu"],
    "FunctionalTanh": ["geglu"],
    "FunctionalOther": [],
    "Broadcast": ["silu"],
    "Decorated": ["swiglu"],
}


@pytest.mark.parametrize("name", GATED)
def test_gated_products(name: str, calls: list[str], device: str) -> None:
    stock = getattr(convert_modules, name)().to(device)
    module = copy.deepcopy(stock)
    changed, left = convert(module)
    function = changed.get("")
    rewritten = name not in ("NamedTwice", "FunctionalOther")
    assert not left and (function is not None) == rewritten and (function or "swiglu").startswith(("swiglu", "geglu"))
    x = torch.randn(3, WIDTH, device=device)
    check_same(results(module, x), results(stock, x))
    # Backward may call a function again to recompute the product, so that repeated names are removed.
    assert list(dict.fromkeys(each for each in calls if each != "dropout")) == GATED[name]
    assert inspect.signature(module.forward) == inspect.signature(stock.forward)
    assert module.forward.__doc__ == stock.forward.__doc__


def test_activations_stay_before_what_may_change_their_input(calls: list[str]) -> None:
    stock = convert_modules.InPlaceBeforeProduct()
    module = copy.deepcopy(stock)
    assert convert(module).changed.keys() == {"act", "drop"}
    x = torch.randn(3, WIDTH)
    with torch.no_grad():  # autograd would raise an error for InPlaceBeforeProduct
        torch.testing.assert_close(module(x), stock(x))
    assert calls == ["silu"]


def test_decorators_stay(device: str) -> None:
    module = convert_modules.Decorated()
    convert(module)
    x = torch.randn(3, WIDTH)
    assert torch.equal(module(x, scale=4.0), 2 * module(x)) and module.calls == 4
    assert "gated" in str(inspect.unwrap(module.forward).__code__.co_names), "it leads to the original"


WAYS: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda module: module.register_forward_hook(lambda *_: _[-1] * 2),
    "a hook before": lambda module: module.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a forward of its own": lambda module: vars(module).update(forward=lambda x: x * 3),
    "another class": lambda module: setattr(module, "__class__", type("OnTop", (type(module),), {"mark": 1})),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_put_on_an_activation_counts(way: str, calls: list[str]) -> None:
    stock = convert_modules.MLP()
    module = copy.deepcopy(stock)
    convert(module)
    for each in (stock, module):
        WAYS[way](each.act)
    x = torch.randn(3, WIDTH)
    check_same(results(module, x), results(stock, x))
    assert "swiglu" not in calls


def test_what_stands_in_for_a_child_counts(calls: list[str]) -> None:
    """A converted MLP calls its current linear layers and activation, also if they were replaced after convert."""
    stock = convert_modules.MLP()
    module = copy.deepcopy(stock)
    convert(module)
    for each in (stock, module):
        each.gate = torch.nn.Sequential(each.gate, torch.nn.Tanh())
    x = torch.randn(3, WIDTH)
    check_same(results(module, x), results(stock, x))
    assert set(calls) == {"swiglu"}
    for each in (stock, module):
        each.act = torch.nn.Tanh()
    calls.clear()
    check_same(results(module, x), results(stock, x))
    assert not calls


class Rectified(convert_modules.MLP):
    """An MLP with two activations: a module of an unknown class that computes relu, and functional.relu."""

    def __init__(self) -> None:
        super().__init__()
        self.act = type("Rectifier", (torch.nn.Module,), {"forward": lambda self, x: torch.relu(x)})()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)) + torch.nn.functional.relu(x) * self.up(x)


def test_one_more_activation_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new activation needs only an entry in KNOWN. The test adds relu, with a gated op that exists only here."""
    ops, called = extension_cpp.ops, []
    monkeypatch.setitem(KNOWN, "relu", Known("relu", "reglu", nn.ReLU, {}))

    def reglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        called.append("reglu")
        return ops.relu(gate) * up

    def backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad * up * (gate > 0), grad * ops.relu(gate)

    monkeypatch.setattr(ops, "reglu", reglu, raising=False)
    monkeypatch.setattr(extension_cpp._ops, "reglu_backward", backward, raising=False)
    stock = Rectified()
    module = copy.deepcopy(stock)
    assert convert(module) == ({"": "reglu", "act": "relu", "drop": "dropout"}, {})
    x = torch.randn(3, WIDTH)
    check_same(results(module, x), results(stock, x))
    assert called == ["reglu"] * 3  # two in forward, and one in backward, which recomputes the linear layer's input


def saved_by(module: torch.nn.Module, x: Tensor) -> set[int]:
    """Calls the module, and returns the addresses of the tensors that autograd saves for backward."""
    addresses = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: addresses.add(each.data_ptr()) or each.detach(), id):
        y = module(x)
    del y
    return addresses


@pytest.fixture
def made_again(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the activation of each call of GatedLinear, whose backward recomputes the gated product."""
    found: list[str] = []
    apply = forwards.GatedLinear.apply
    monkeypatch.setattr(forwards.GatedLinear, "apply", lambda *args: found.append(args[-1]) or apply(*args))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu", TANH])
def test_gated_product_is_made_again(act: str, dtype: torch.dtype, device: str, made_again: list[str]) -> None:
    """An MLP that recomputes the gated product in backward has the bits of one that saves it, and saves one tensor
    less."""
    module = convert_modules.MLP().to(device, dtype)
    module.act = torch.nn.SiLU() if act == "silu" else torch.nn.GELU("tanh" if act == TANH else "none")
    module.down = torch.nn.Linear(WIDTH, WIDTH, bias=act == "silu", device=device, dtype=dtype)
    convert(module)
    kept = copy.deepcopy(module)
    kept.down.register_forward_pre_hook(lambda *_: None)  # because of the hook, the product is saved and not recomputed
    x = torch.randn(2, 3, WIDTH, device=device, dtype=dtype)
    for got, want in zip(results(module, x), results(kept, x), strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)
    assert made_again == [act]
    assert len(saved_by(kept, x)) - len(saved_by(module, x)) == 1


def test_second_order_of_a_product_made_again(device: str, made_again: list[str]) -> None:
    for make in (convert_modules.MLP, convert_modules.Functional, convert_modules.FunctionalTanh):
        stock = make().to(device, torch.float64)
        module = copy.deepcopy(stock)
        convert(module)
        leaves = (torch.randn(3, WIDTH, dtype=torch.float64, device=device, requires_grad=True), *module.parameters())
        found = []
        for each in (module, stock):
            leaves = (leaves[0], *each.parameters())
            grads = torch.autograd.grad(each(leaves[0]).square().sum(), leaves, create_graph=True)
            found.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert len(made_again) == 3


def test_product_made_again_under_checkpoint(device: str, made_again: list[str]) -> None:
    module = convert_modules.MLP().to(device)
    convert(module)
    x = torch.randn(3, WIDTH, device=device)
    plain = results(module, x)
    for reentrant in (True, False):
        again = functools.partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=reentrant)
        leaf = x.clone().requires_grad_()
        y = again(leaf)
        weights = torch.linspace(0.5, 1.5, y.numel(), device=device).reshape(y.shape)
        (y * weights).sum().backward()
        got = [y.detach(), leaf.grad, *(each.grad for each in module.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))
        module.zero_grad()
    # A reentrant checkpoint first runs the module without gradients, and then GatedLinear is not called.
    assert len(made_again) == 1 + 2 + 1


def _patch(name: str) -> Callable[[Any, pytest.MonkeyPatch], Any]:
    original = torch.nn.functional.linear
    return lambda _, monkeypatch: monkeypatch.setattr(name, lambda *args: original(*args) * 2)


KEPT: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    **{way: lambda linear, _, put=put: put(linear) for way, put in WAYS.items()},
    "a frozen weight": lambda linear, _: linear.weight.requires_grad_(False),
    "a function patched": _patch("torch.nn.functional.linear"),
    "a tensor subclass": lambda linear, _: vars(linear)["_parameters"].update(
        weight=torch.nn.Parameter(linear.weight.detach().as_subclass(type("Own", (Tensor,), {})))
    ),
}


@pytest.mark.parametrize("way", KEPT)
def test_where_a_linear_layer_keeps_its_product(
    way: str, made_again: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = convert_modules.MLP()
    module = copy.deepcopy(stock)
    convert(module)
    x = torch.randn(3, WIDTH)
    KEPT[way](stock.down, monkeypatch)
    KEPT[way](module.down, monkeypatch)
    y = module(x)
    torch.testing.assert_close(*(each.as_subclass(Tensor) for each in (y, stock(x))), rtol=0, atol=64 * EPS)
    assert y.requires_grad and not made_again


def test_where_nothing_is_made_again(made_again: list[str]) -> None:
    """The gated product is not recomputed without gradients, under autocast, in captured graphs and in torch.func."""
    stock = convert_modules.MLP()
    module = copy.deepcopy(stock)
    convert(module)
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype is torch.bfloat16
        gated = copy.deepcopy(module)
        gated.gate, gated.up = torch.nn.Identity(), torch.nn.Identity()  # returns float32
        gated(x).float().sum().backward()
    check_same(results(torch.compile(module, backend="aot_eager"), x), results(stock, x))
    torch.export.export(module, (x,))
    torch.jit.trace(module, (x,))
    parameters = dict(module.named_parameters())
    loss = lambda parameters, x: torch.func.functional_call(module, parameters, (x,)).sum()  # noqa: E731
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x[:, None])
    assert grads["down.weight"].shape == (3, WIDTH, WIDTH)
    assert not made_again


# ---- residual additions ----

BLOCKS = {
    "Block": "add_rms_norm",
    "DropoutFirst": "add_rms_norm",
    "DropoutInside": "add_rms_norm",
    "DropoutFunction": "add_rms_norm",
    "DropoutKept": "add_rms_norm",
    "DropoutTwice": "add_rms_norm",
    "PostNorm": "add_rms_norm",
    "DropoutElsewhere": "add_rms_norm",
    "Branched": "add_rms_norm",
    "BranchedOnSum": None,
    "InPlaceBetween": None,
    "BroadcastSum": "add_layer_norm",
}


class Dropouts(torch.nn.Module):
    """Wraps an unconverted block, so that its dropouts draw the same masks as extension_cpp.dropout."""

    def __init__(self, block: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.block = block
        self.block.drop.__class__ = ReferenceDropout
        self.patch = monkeypatch

    def forward(self, *args: Any) -> Tensor:
        with self.patch.context() as patch:
            reference = lambda x, p, training: extension_cpp.reference.dropout(x, p, training)  # noqa: E731
            patch.setattr(torch.nn.functional, "dropout", reference)
            return self.block(*args)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("name", BLOCKS)
def test_residual_additions(
    name: str, p: float, calls: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = getattr(convert_modules, name)(p).to(device)
    module = copy.deepcopy(stock)
    changed, left = convert(module)
    assert changed.get("") == BLOCKS[name] and not left
    x, other = torch.randn(3, 5, WIDTH, device=device), torch.randn(3, 5, WIDTH, device=device)
    for inputs in [(x,), (x, other)] if name == "Branched" else [(x,)]:
        for training in (True, False):
            calls.clear()
            got = results(module.train(training), *inputs)
            fused = [each for each in calls if each.startswith("add")]
            assert fused == [BLOCKS[name]] * (BLOCKS[name] is not None and name != "BroadcastSum")
            alone = name in ("DropoutKept", "DropoutTwice", "DropoutElsewhere") or len(inputs) == 2
            assert ("dropout" in calls) == (alone or (name == "BroadcastSum" and p > 0 and training))
            check_same(got, results(Dropouts(copy.deepcopy(stock), monkeypatch).train(training), *inputs))


class SumAndNorm(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        s = x + y
        return self.norm(s), s


@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "no autocast"])
@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_dtypes_of_sums_and_norms(kind: Any, fake_device: str, enabled: bool) -> None:
    """A fused addition and norm returns the original's dtypes, with and without autocast. With CUDA's autocast, only
    the norm is float32. With FakeTensors the test needs no GPU."""
    stock = SumAndNorm(kind(WIDTH, elementwise_affine=False))
    module = copy.deepcopy(stock)
    assert "" in convert(module).changed
    for dtype in (torch.float64, torch.float32, *HALF):
        with FakeTensorMode(), autocast(fake_device, enabled):
            x = torch.empty(3, WIDTH, dtype=dtype, device=fake_device)
            assert [each.dtype for each in module(x, x)] == [each.dtype for each in stock(x, x)], dtype


@pytest.mark.parametrize("way", WAYS)
def test_what_is_put_on_a_norm_counts(way: str, calls: list[str]) -> None:
    stock = convert_modules.Block()
    module = copy.deepcopy(stock)
    convert(module)
    for each in (stock, module):
        WAYS[way](each.norm2)
    x = torch.randn(3, WIDTH)
    check_same(results(module, x), results(stock, x))
    assert not calls


def test_what_is_put_on_a_dropout_counts(calls: list[str]) -> None:
    stock = convert_modules.DropoutFirst(0.0)
    module = copy.deepcopy(stock)
    convert(module)
    for each in (stock, module):
        each.drop.register_forward_hook(lambda *_: _[-1] * 2)
    x = torch.randn(3, WIDTH)
    check_same(results(module, x), results(stock, x))
    assert calls == ["dropout", "add_rms_norm"]


def test_all_sums_of_a_statement_are_added_in_norms(calls: list[str]) -> None:
    stock = convert_modules.SumsInOneStatement(0.0)
    module = copy.deepcopy(stock)
    assert convert(module).changed[""] == "add_rms_norm"
    x = torch.randn(3, WIDTH)
    check_same(results(module, x), results(stock, x))
    assert calls == ["add_rms_norm"] * 3


class Scaled(torch.nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


def test_what_stands_in_for_a_dropout_gets_its_keywords(calls: list[str]) -> None:
    stock = convert_modules.DropoutWithKeyword()
    module = copy.deepcopy(stock)
    convert(module)
    stock.drop, module.drop = Scaled(), Scaled()
    x = torch.randn(3, WIDTH)
    check_same(results(module, x), results(stock, x))
    assert calls == ["add_rms_norm"]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", ["Block", "PostNorm", "MLP"])
def test_dtypes_under_autocast(name: str, dtype: torch.dtype) -> None:
    """Under autocast, with bfloat16 from linear layers, a converted block returns the original's dtype and values."""
    stock = getattr(convert_modules, name)().to(dtype)
    module = copy.deepcopy(stock)
    convert(module)
    x = torch.randn(3, WIDTH, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = module(x), stock(x)
    assert got.dtype is want.dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.05)  # a few eps of bfloat16


def test_dtypes_that_differ() -> None:
    """A converted module computes float32 tensors where the original does, even if its input has a half type. Llama's
    norm with a float32 weight returns float32, and so does gelu_new with CUDA's autocast."""
    stock = convert_modules.PostNorm().bfloat16()
    stock.norm2 = LlamaRMSNorm(WIDTH)
    module = copy.deepcopy(stock)
    assert convert(module).changed[""] == "add_rms_norm"
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
    assert module(x).dtype is stock(x).dtype is torch.float32
    torch.testing.assert_close(module(x), stock(x), rtol=0.02, atol=0.02)  # a few eps of bfloat16
    stock = convert_modules.MLP()
    stock.act = activations.NewGELUActivation()
    module = copy.deepcopy(stock)
    assert convert(module).changed[""] == "geglu with approximate='tanh'"
    seen = []
    for each in (stock, module):
        each.down.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        with FakeTensorMode(allow_non_fake_inputs=True), autocast("cuda", True):
            parameters = {key: torch.empty(p.shape, device="cuda") for key, p in each.named_parameters()}
            torch.func.functional_call(each, parameters, (torch.empty(3, WIDTH, device="cuda"),))
    assert seen == [torch.float32, torch.float32]


# ---- rotary embedding ----

ROTARIES = {
    "llama": "batch, heads, tokens",
    "gpt_neox": "batch, heads, tokens; partial",
    "glm": "batch, heads, tokens; interleaved, repeats, partial",
    "cohere": "batch, heads, tokens; interleaved, float",
    "olmo2": "batch, heads, tokens; float",
    "modernbert": "batch, heads, tokens; float",
    "phi3": "batch, heads, tokens; partial",
}


def modeling(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_functions(name: str, calls: list[str], device: str) -> None:
    """convert recognises the layout of each model's rotary function, and the op gives the function's results."""
    function = modeling(name).apply_rotary_pos_emb
    rotary = rotary_forms.recognise(function, {})
    assert isinstance(rotary, rotary_forms.Rotary)
    words = {"interleaved": rotary.interleaved, "repeats": rotary.repeats, "partial": rotary.is_partial}
    words["float"] = rotary.takes_float
    found = ", ".join(word for word, has in words.items() if has)
    assert f"{rotary.layouts[0]}; {found}".rstrip("; ") == ROTARIES[name]
    for batch, dtype, tables, rotated in (
        (2, torch.float32, torch.float32, 8),
        (1, torch.float32, torch.float32, 4 if rotary.is_partial else 8),
        (2, torch.bfloat16, torch.bfloat16, 8),
        (1, torch.float16, torch.float32 if rotary.takes_float else torch.float16, 8),
    ):
        q, k = (torch.randn(2, heads, 5, 8, device=device, dtype=dtype) for heads in (4, 2))
        cos, sin = (torch.randn(batch, 5, rotated, device=device, dtype=tables) for _ in range(2))
        calls.clear()
        got, want = rotary_forms.rotate(function, rotary, q, k, cos, sin), function(q, k, cos, sin)
        assert calls == ["rotary_embedding"]
        # The function rounds three times, and the op once. Together these are 2 eps of each of two terms of at most 16.
        for a, b in zip(got, want, strict=True):
            assert a.dtype is b.dtype and (a - b).abs().max() <= 4 * torch.finfo(dtype).eps * 16


def test_the_layout_comes_from_the_call(calls: list[str]) -> None:
    function = modeling("llama").apply_rotary_pos_emb
    found = rotary_forms.recognise(function, {"unsqueeze_dim": 2})
    assert isinstance(found, rotary_forms.Rotary) and found.layouts == ("batch, tokens, heads",)
    q, k, cos, sin = (torch.randn(shape) for shape in ((2, 5, 4, 8), (2, 5, 2, 8), (1, 5, 8), (1, 5, 8)))
    got = rotary_forms.rotate(function, found, q, k, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(got, function(q, k, cos, sin, unsqueeze_dim=2))
    assert calls == ["rotary_embedding"]
    found = rotary_forms.recognise(modeling("qwen2_vl").apply_rotary_pos_emb_vision, {})
    assert isinstance(found, rotary_forms.Rotary) and found.layouts == ("batch, tokens, heads", "tokens, heads")
    q, k, cos, sin = (torch.randn(shape) for shape in ((5, 4, 8), (5, 2, 8), (5, 8), (5, 8)))
    calls.clear()
    got = rotary_forms.rotate(modeling("qwen2_vl").apply_rotary_pos_emb_vision, found, q, k, cos, sin)
    assert calls == ["rotary_embedding"]
    torch.testing.assert_close(got, modeling("qwen2_vl").apply_rotary_pos_emb_vision(q, k, cos, sin))


def test_rotary_functions_that_are_left() -> None:
    for name, function in (("deepseek_v3", "rotary_pos_emb_interleave"), ("qwen2_vl", "multimodal_rotary_pos_emb")):
        with pytest.raises(Unfit, match=SOMETHING_ELSE):
            rotary_forms.recognise(getattr(modeling(name), f"apply_{function}"), {})
    model = torch.nn.Sequential(convert_modules.DetachedAttention())
    reason = "DetachedAttention: its half_rotary computes rotary_embedding, but its gradients are others"
    assert convert(model) == ({}, {"0": reason})


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_rotary_functions_are_held_to_their_bound(share: float) -> None:
    """convert accepts a rotary function with an error of up to 4 eps of the largest x times the largest cos or sin."""

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        q_max, k_max, cos_max, sin_max = (each.abs().max().item() for each in (q, k, cos, sin))
        error = share * 4 * torch.finfo(q.dtype).eps * max(q_max, k_max) * max(cos_max, sin_max)
        exact = extension_cpp.reference.rotary_embedding(*(each.double() for each in (q, k, cos, sin)))
        # Only elements below 1 get the error, because rounding to q's dtype adds little to them.
        return tuple((y + error * (y.abs() < 1)).to(q.dtype) for y in exact)

    if share < 1:
        assert isinstance(rotary_forms.recognise(function, {}), rotary_forms.Rotary)
    else:
        with pytest.raises(Unfit, match=SOMETHING_ELSE):
            rotary_forms.recognise(function, {})


def attention_inputs(dtype: torch.dtype = torch.float32, tables: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(2, 5, WIDTH, dtype=dtype), *(torch.randn(1, 5, WIDTH, dtype=tables) for _ in range(2))]


def test_only_the_module_itself_calls_the_op(calls: list[str]) -> None:
    stock = convert_modules.Attention()
    module = copy.deepcopy(stock)
    before = vars(convert_modules).copy()
    assert convert(module) == ({"": "rotary_embedding"}, {})
    assert vars(convert_modules) == before
    inputs = attention_inputs()
    want = results(stock, *inputs)
    assert not calls
    check_same(results(module, *inputs), want)
    assert calls == ["rotary_embedding"]


def test_rotary_inputs_that_the_op_does_not_take(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For inputs that the op does not take, a converted forward calls the rotary function that the source file's global
    name has at that time, even if the name was assigned another function after convert."""
    stock = convert_modules.Attention()
    module = copy.deepcopy(stock)
    convert(module)
    x, cos, sin = attention_inputs()
    for tables in ((cos.double(), sin.double()), (cos.clone().requires_grad_(), sin), (cos[:, :1], sin[:, :1])):
        check_same([module(x, *tables).detach()], [stock(x, *tables).detach()])
    monkeypatch.setattr(convert_modules, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * 2, k * 3))
    check_same(results(module, x, cos, sin), results(stock, x, cos, sin))
    assert not calls


@pytest.mark.parametrize("name, count", [("OneByOne", 2), ("ByAttribute", 1)])
def test_one_tensor_at_a_time(name: str, count: int, calls: list[str]) -> None:
    """A rotary function of one tensor is replaced. If a forward calls it with two layouts, each call has its own."""
    stock = getattr(convert_modules, name)()
    module = copy.deepcopy(stock)
    assert convert(module) == ({"": "rotary_embedding"}, {})
    for inputs in (attention_inputs(), [each.repeat(1, 2, 1) for each in attention_inputs()]):
        calls.clear()
        check_same(results(module, *inputs), results(stock, *inputs))
        assert calls == ["rotary_embedding"] * count
    x, cos, sin = attention_inputs()
    calls.clear()
    check_same(results(module, x, cos.double(), sin.double()), results(stock, x, cos.double(), sin.double()))
    assert not calls
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    check_same(results(compiled, x, cos, sin), results(stock, x, cos, sin))
    assert torch.equal(pickle.loads(pickle.dumps(module))(x, cos, sin), module(x, cos, sin))


def test_one_function_in_two_layouts(calls: list[str]) -> None:
    """If tokens and heads are equally many, the rotary function's arguments decide which dimension has the heads."""
    stock = convert_modules.OneByOne()
    module = copy.deepcopy(stock)
    convert(module)
    inputs = [torch.randn(2, tokens, WIDTH) for tokens in (4, 4, 4)]
    check_same(results(module, *inputs), results(stock, *inputs))
    inputs = [torch.randn(2, tokens, WIDTH) for tokens in (2, 2, 2)]
    check_same(results(module, *inputs), results(stock, *inputs))


OTHER_CALLS = {
    "SinAndCos": "its rotary_of_sin_and_cos computes something else than rotary_embedding",
    "Frequencies": "its rotary_of_complex computes something else than rotary_embedding",
    "ByKeyword": "its rotary_of_one is called with other arguments than q, k, cos, sin or x, cos, sin",
    "Unpacked": "its rotary_of_one is called with other arguments than q, k, cos, sin or x, cos, sin",
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_rotary_calls_are_named(name: str) -> None:
    model = torch.nn.Sequential(getattr(convert_modules, name)())
    model[0](*attention_inputs())  # runs unconverted
    assert convert(model) == ({}, {"0": f"{name}: {OTHER_CALLS[name]}"})
    assert convert(model, skip="rotary_embedding") == ({}, {})


def test_names_that_are_not_rotary() -> None:
    module = convert_modules.NoRope()
    module(*attention_inputs())
    assert convert(module) == ({}, {})


@pytest.mark.parametrize("name, is_one", [("gemma3n", True), ("gemma4", True), ("gptj", False), ("deepseek_v4", False)])
def test_rotary_functions_of_one_tensor(name: str, is_one: bool) -> None:
    function = modeling(name).apply_rotary_pos_emb
    if is_one:
        assert isinstance(forwards.rotary_of(function, (("unsqueeze_dim", 2),), 3), rotary_forms.Rotary)
    else:
        with pytest.raises(Unfit, match=SOMETHING_ELSE):
            forwards.rotary_of(function, (), 3)


# ---- Modules that convert leaves unchanged ----


def test_modules_that_are_left() -> None:
    """convert rewrites no forward of a final class, without source, with a closure, or with an unknown decorator."""
    for module, reason in (
        (convert_modules.OddlyDecorated(), "it could call swiglu, but its forward has a decorator of an unknown form"),
        (convert_modules.FinalMLP(), "it could call swiglu, but its class cannot be subclassed (FinalMLP is final)"),
    ):
        kind = type(module)
        assert convert(module).left == {"": f"{kind.__name__}: {reason}"} and type(module) is kind
    factor = 2.0

    class Closure(convert_modules.MLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.gate(x)) * self.up(x)) * factor

    generated: dict[str, Any] = {}
    exec("def forward(self, x):\n    return self.down(self.act(self.gate(x)) * self.up(x))", generated)
    sourceless = type("Sourceless", (convert_modules.MLP,), {"forward": generated["forward"]})
    for module in (Closure(), sourceless()):
        assert convert(module).changed.keys() == {"act", "drop"}


@pytest.fixture
def no_sites() -> Iterator[None]:
    sources.sites_of.cache_clear()
    yield
    sources.sites_of.cache_clear()


@pytest.mark.usefixtures("no_sites")
def test_source_that_is_not_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """convert rewrites no forward whose file was edited after its import, as the source differs from what runs."""
    lines = inspect.getsource(convert_modules.Packed.forward).replace("chunks[1]", "chunks[0]").splitlines(True)
    monkeypatch.setattr(inspect, "getsourcelines", lambda code: (lines, code.co_firstlineno))
    module = convert_modules.Packed()
    assert convert(module).changed.keys() == {"act", "drop"}


OTHER_IMPORTS = """
import torch
try:
    import no_such_module
except ImportError:
    import torch.nn.functional as functions

class Gated(torch.nn.Sequential):
    def forward(self, gate, up):
        return functions.silu(gate) * up
"""


def test_a_module_imported_for_want_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """convert rewrites calls through a name imported in `except ImportError`, which have other bytecode."""
    (tmp_path / "other_imports.py").write_text(OTHER_IMPORTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_imports", raising=False)
    module = importlib.import_module("other_imports").Gated(torch.nn.Identity())
    assert convert(module) == ({"": "swiglu"}, {})


def test_pickles_say_why_they_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    module = convert_modules.MLP()
    convert(module)
    saved = pickle.dumps(module)

    def refuse(original: type, sites: Any) -> type:
        raise Unfit("its source is not there")

    monkeypatch.setattr(forwards, "rewritten_class", refuse)
    with pytest.raises(RuntimeError, match="a converted MLP cannot be loaded here, since its source is not there"):
        pickle.loads(saved)


def test_a_class_on_top_survives_copies_and_revert() -> None:
    module = convert_modules.MLP()
    convert(module)
    top = type("OnTop", (type(module),), {"__module__": __name__})
    module.__class__ = globals()["OnTop"] = top
    x = torch.randn(3, WIDTH)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is top and torch.equal(twin(x), module(x))
    reason = "OnTop: a class was put on top of the converted one; take it off first"
    assert nn.revert(module).left == {"": reason}


def test_errors_point_to_the_source() -> None:
    """A traceback through a rewritten forward shows the file and line numbers of the original forward."""
    module = convert_modules.MLP()
    convert(module)
    with pytest.raises(RuntimeError) as raised:
        module(torch.randn(3, WIDTH + 1))
    files = {str(entry.path): entry.lineno + 1 for entry in raised.traceback}
    first = inspect.getsourcelines(convert_modules.MLP.forward)[1]
    assert files[convert_modules.__file__] == first + 1

"""Tests that nn.convert gives the same result in every PyTorch mode of its caller, such as no_grad or autocast."""

import contextlib
import importlib.util
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import NewGELUActivation
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from extension_cpp.convert import formulas, forwards
from extension_cpp.nn import convert
from tests import convert_modules
from tests.test_convert import make


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Functions(TorchFunctionMode):
    """A mode in which a call of any of PyTorch's functions fails."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is called in the mode")


class Operators(TorchDispatchMode):
    """A mode in which a call of any operator fails."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is called in the mode")


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "FakeTensorMode": FakeTensorMode,
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "functions": Functions,
    "operators": Operators,
}


def state(name: str) -> dict[str, Any]:
    """Returns the settings that modes change, without the default device in "functions", where asking for it fails."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device() if name != "functions" else None,
        "deterministic": torch.get_deterministic_debug_mode(),
        "functions": torch._C._len_torch_function_stack(),
        "operators": torch._C._len_torch_dispatch_stack(),
        "autocast": [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda")],
    }


def fresh_modules() -> Any:
    """Executes convert_modules.py again. Returns a module of classes and functions that convert has not seen yet."""
    spec = importlib.util.spec_from_file_location("fresh_convert_modules", convert_modules.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(source: types.ModuleType) -> torch.nn.Module:
    """Makes a model with every kind of module that convert runs on test inputs. convert changes all of them but number
    5, DetachedAttention."""
    norms = [CohereLayerNorm, GemmaRMSNorm, LlamaRMSNorm]
    parts = [source.Attention(), source.DetachedAttention(), source.MLP(), source.Block(), source.Functional()]
    model = torch.nn.Sequential(*(norm(64) for norm in norms), NewGELUActivation(), *parts)
    model[6].act, model[7].norm2 = NewGELUActivation(), GemmaRMSNorm(16)
    return model


def rules(model: torch.nn.Module) -> list[Any]:
    """Returns what the generated classes store about their computation, such as formulas and rotary functions."""
    kinds = [type(module) for module in model.modules()]
    found = [getattr(kind, name, None) for kind in kinds for name in ("formula", "sites")]
    return found + [rotary for kind in kinds for *_, rotary in getattr(kind, "rotaries", ())]


@pytest.mark.parametrize("name", MODES)
def test_modes_decide_nothing(name: str) -> None:
    """In each mode, convert gives the same result as without a mode, and the mode is still enabled afterwards. What
    convert caches in the mode does not change a later call without a mode."""
    plain = model_of(fresh_modules())
    expected = convert(plain)
    assert len(expected.changed) == 15 and list(expected.left) == ["5"]
    source = fresh_modules()
    models = [model_of(source), model_of(source)]
    with MODES[name]():
        before = state(name)
        found = convert(models[0])
        assert state(name) == before
    assert found == expected and rules(models[0]) == rules(plain)
    assert convert(models[1]) == expected and rules(models[1]) == rules(plain)


class StateNorm(LlamaRMSNorm):
    """A norm that records, at each call of its forward, which modes are enabled."""

    seen: ClassVar[list[Any]] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.seen.append(state("plain"))
        return super().forward(hidden_states)


@pytest.mark.parametrize("name", MODES)
def test_probes_run_outside_of_modes(name: str) -> None:
    StateNorm.seen.clear()
    convert(StateNorm(64))
    expected = [*StateNorm.seen]
    StateNorm.seen.clear()
    norm = StateNorm(64)
    with MODES[name]():
        convert(norm)
    assert StateNorm.seen == expected and len(expected) > 50


@pytest.mark.parametrize("name", MODES)
def test_modes_decide_nothing_about_the_linear_loss(name: str) -> None:
    models = [make("gemma", torch.float32) for _ in range(2)]
    expected = convert(models[0], loss="linear")
    with MODES[name]():
        assert convert(models[1], loss="linear") == expected
    assert "linear_cross_entropy" in expected.changed.values()


def test_a_model_of_fake_tensors_is_changed() -> None:
    """convert changes a model of FakeTensors, which then runs on FakeTensors, because the ops have fakes."""
    with FakeTensorMode():
        model = torch.nn.Sequential(torch.nn.LayerNorm(64), LlamaRMSNorm(64))
        assert convert(model) == ({"0": "layer_norm", "1": "rms_norm"}, {})
        assert model(torch.empty(2, 64)).shape == (2, 64)


def test_pickles_are_loaded_in_any_mode() -> None:
    """A pickled converted module can be loaded in any mode, even if its rotary function was not examined before."""
    made = fresh_modules().Attention
    sites = frozenset({forwards.Site("rotary", "apply_rotary_pos_emb")})
    with torch.inference_mode(), FakeTensorMode():
        module = formulas.blank(forwards.rewritten_class, made, sites)
    assert len(type(module).rotaries) == 1


def test_no_failure_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rotary function raises an exception, convert does not cache that. Its next call runs the function again."""
    source = fresh_modules()
    right = source.torch.cat

    def failing(*args: Any, **kwargs: Any) -> Tensor:
        raise OSError("no space left on the device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", failing)
        assert convert(torch.nn.Sequential(source.Attention())).left.keys() == {"0"}
    assert torch.cat is right and convert(torch.nn.Sequential(source.Attention())).changed == {"0": "rotary_embedding"}
    source = fresh_modules()
    with monkeypatch.context() as patch:
        patch.setattr("inspect.getsourcelines", failing)
        assert "0" not in convert(torch.nn.Sequential(source.MLP())).changed
    assert convert(torch.nn.Sequential(source.MLP())).changed["0"] == "swiglu"

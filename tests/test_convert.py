"""Tests nn.convert on whole models from transformers, which it compares with unconverted models, and on norms. Tests
every reason for which convert leaves a module unchanged."""

import contextlib
import copy
import functools
import inspect
import io
import itertools
import os
import pickle
import sys
from collections.abc import Callable, Iterator

os.environ["HF_HUB_OFFLINE"] = "1"  # the models are made from configurations and need no downloads

import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.parametrizations import weight_norm
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.sam2.modeling_sam2 import Sam2LayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import extension_cpp
from extension_cpp import nn
from extension_cpp.nn import convert
from tests.battery import profiled

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

OWN_LOSS = ("t5", "bert")  # models whose own code computes the loss
# For each model: its class, its configuration, the number of its norms, and the op that computes them.
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


OWN = "its forward does not call loss_function, but computes the loss itself"


def make(name: str, dtype: torch.dtype, device: str = "cpu") -> torch.nn.Module:
    """Makes the model in training mode, with random norm weights, so that an ignored weight is noticed."""
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
    """Asserts that loss and gradients differ from the wanted ones by rounding errors only.

    Forward and backward of a norm have about 16 roundings, and a model has at most 12 norms. A norm does not enlarge
    the relative error of its row, so that the bound is the sum of 16 * 12 roundings of half an eps each. The bound of
    gradients is relative to the largest gradient, because small gradients are differences of large terms. The exact
    gradient of the bias of attention keys, for example, is 0.
    """
    assert got.keys() == want.keys()
    largest = max(gradient.abs().max().item() for name, gradient in want.items() if name != "loss")
    for name, exact in want.items():
        assert got[name].dtype == exact.dtype
        scale = abs(exact.item()) if name == "loss" else largest
        error, bound = (got[name] - exact).abs().max().item(), 16 * 12 / 2 * eps * scale
        assert error <= bound, f"{name}: {error:.1e} > {bound:.1e}"


PRECISIONS = [("float64", name) for name in MODELS] + [("float32", name) for name in MODELS]


@pytest.mark.parametrize("dtype, name", PRECISIONS)
def test_models(name: str, dtype: str, device: str) -> None:
    """A converted model has the unconverted model's loss and gradients, up to rounding, and its state_dict."""
    stock = make(name, getattr(torch, dtype), device)
    model = copy.deepcopy(stock)
    changed, left = convert(model)
    *_, count, function = MODELS[name]
    loss = [] if name in OWN_LOSS else ["cross_entropy"]
    assert [each for each in changed.values() if each in ("cross_entropy", function)] == loss + [function] * count
    assert list(left.values()) == [f"T5ForConditionalGeneration: {OWN}"] * (name == "t5")
    assert not any(type(module) is torch.nn.Dropout for module in model.modules())
    want = loss_and_gradients(stock, dict(stock.named_parameters()))
    got = loss_and_gradients(model, dict(model.named_parameters()))
    # The models' RMSNorm classes and transformers' loss compute in float32, even in a float64 model.
    exact = dtype == "float64" and name == "bert"
    check_same(got, want, torch.finfo(torch.float64 if exact else torch.float32).eps)
    assert any(not torch.equal(got[name], want[name]) for name in want), "not one bit differs: is it converted?"
    for (name_a, a), (name_b, b) in zip(model.state_dict().items(), stock.state_dict().items(), strict=True):
        assert name_a == name_b and torch.equal(a, b)
    assert repr(model) == repr(stock)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_compiled(name: str, device: str) -> None:
    """A converted model compiled by Inductor has the loss and gradients of the uncompiled, unconverted model. Without
    --slow, only test_convert_loss.py and test_convert_models.py test graphs of converted models."""
    stock = make(name, torch.float32, device)
    want = loss_and_gradients(stock, dict(stock.named_parameters()))
    convert(stock)
    torch.compiler.reset()
    # transformers' code for GPT-2 and OPT breaks the graph: it logs a warning, or reads the attention mask's values.
    compiled = torch.compile(stock, fullgraph=name not in ("gpt2", "opt"))
    check_same(loss_and_gradients(compiled, dict(stock.named_parameters())), want, torch.finfo(torch.float32).eps)


class ReferenceDropout(torch.nn.Dropout):
    """Computes dropout in plain PyTorch, with the same masks as extension_cpp.dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return extension_cpp.reference.dropout(x, self.p, self.training)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_models_with_dropout(name: str, device: str) -> None:
    """A converted model with dropout has the loss and gradients of the unconverted model with the same masks."""
    stock = make(name, torch.float64, device)
    dropouts = [module for module in stock.modules() if type(module) is torch.nn.Dropout]
    for module in dropouts:
        module.p = 0.1
    model = copy.deepcopy(stock)
    changed, left = convert(model)
    assert list(changed.values()).count("dropout") == len(dropouts) > 0 and not left
    for module in dropouts:
        module.__class__ = ReferenceDropout
    results = []
    for each in (model, stock):
        torch.manual_seed(5)
        results.append(loss_and_gradients(each, dict(each.named_parameters())))
    check_same(*results, torch.finfo(torch.float64 if name in OWN_LOSS else torch.float32).eps)
    torch.manual_seed(6)
    others = loss_and_gradients(model, dict(model.named_parameters()))
    assert not torch.equal(others["loss"], results[0]["loss"]), "another seed, the same masks?"


@pytest.mark.parametrize("name", MODELS)
def test_models_in_bfloat16(name: str, device: str) -> None:
    """A converted bfloat16 model is as near to the float64 model as the unconverted bfloat16 model, because the ops'
    norms round no more often. The compared error of all gradients together sums many small roundings, and varies
    little."""
    models = {"exact": make(name, torch.bfloat16, device).double(), "stock": make(name, torch.bfloat16, device)}
    models["converted"] = copy.deepcopy(models["stock"])
    assert convert(models["converted"]).changed
    found = {who: loss_and_gradients(each, dict(each.named_parameters())) for who, each in models.items()}
    errors = {
        who: sum((each[part].double() - exact).square().sum().item() for part, exact in found["exact"].items()) ** 0.5
        for who, each in found.items()
    }
    assert all(each.dtype == torch.bfloat16 for part, each in found["converted"].items() if part != "loss")
    # The two models round at different places. Their errors' ratio was 0.66 to 1.38 for several random weights.
    assert 0 < errors["converted"] <= 1.5 * errors["stock"], errors


# ---- single norms ----

NORMS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: LlamaRMSNorm(64),
    "gemma": lambda: GemmaRMSNorm(64),
    "t5": lambda: T5LayerNorm(64),
    "cohere": lambda: CohereLayerNorm(64),
    "nemotron": lambda: NemotronLayerNorm1P(64),
    "sam2": lambda: Sam2LayerNorm(64),
    "torch layer": lambda: torch.nn.LayerNorm(64),
    "torch layer without bias": lambda: torch.nn.LayerNorm(64, bias=False),
    "torch layer without weight": lambda: torch.nn.LayerNorm((4, 64), elementwise_affine=False),
    "torch rms": lambda: torch.nn.RMSNorm((4, 64)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_in_every_dtype(name: str, device: str) -> None:
    """A converted norm returns the dtype of the original and, up to rounding, its values, for every pair of dtypes of
    input and parameters that the original takes. In half types, the original rounds up to three times (1.5 eps), and
    the op once (0.5 eps). In other dtypes the bound is 16 eps, as in convert's own comparison of a norm with the op."""
    for dtype in DTYPES:
        stock = NORMS[name]().to(device, dtype)
        for parameter in stock.parameters():
            torch.nn.init.normal_(parameter, 0.8, 0.3)
        ours = copy.deepcopy(stock)
        assert convert(ours).changed
        for x_dtype in DTYPES:
            x = torch.randn(5, 4, 64, device=device, dtype=x_dtype)
            try:
                want = stock(x)
            except RuntimeError:
                continue
            got = ours(x)
            assert got.dtype == want.dtype, (x_dtype, dtype)
            coarsest = max((x_dtype, dtype, torch.float32), key=lambda each: torch.finfo(each).eps)
            factor = 2 if coarsest in HALF else 16
            bound = factor * torch.finfo(coarsest).eps * want.double().abs().max()
            assert (got.double() - want.double()).abs().max() <= bound, (x_dtype, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_llama_differs_by_its_second_rounding_alone(dtype: torch.dtype, device: str) -> None:
    """Llama's norm rounds the normalized x and its product with the weight, and the op only the product. Their results
    differ by up to 1.5 eps, or more where float32's error decides a rounding. Gemma's norm, too, rounds only the
    product."""
    x = torch.randn(256, 64, device=device, dtype=dtype)
    for norm, bound in ((LlamaRMSNorm(64), 1.5), (GemmaRMSNorm(64), 1.0)):
        torch.nn.init.normal_(norm.weight)
        stock = norm.to(device, dtype)
        ours = copy.deepcopy(stock)
        convert(ours)
        want, got = stock(x).double(), ours(x).double()
        eps = torch.finfo(dtype).eps * 1.01
        assert ((got - want).abs() <= bound * eps * got.abs() + torch.finfo(dtype).tiny).all()
        if bound == 1.0:
            assert (got != want).double().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("original", [transformers.activations.NewGELUActivation(), LlamaRMSNorm(64)], ids=type)
def test_what_has_the_results_dtype_is_not_cast(original: torch.nn.Module, dtype: torch.dtype, device: str) -> None:
    """Converted norms and activations do not cast a tensor that has the result's dtype, as a cast costs host time."""
    module = copy.deepcopy(original).to(device, dtype)
    convert(module)
    x = torch.randn(2, 64, device=device, dtype=dtype, requires_grad=True)
    names, _ = profiled(lambda: module(x), device)
    assert any(name.startswith("extension_cpp::") for name in names)
    assert not {"aten::to", "aten::_to_copy"} & names


def test_it_stays_the_same_object_with_its_class_hooks_and_state() -> None:
    norm = LlamaRMSNorm(64, eps=1e-3).eval()
    norm.weight.requires_grad_(False)
    weight, seen = norm.weight, []
    norm.register_forward_hook(lambda *_: seen.append("forward"))
    norm.register_forward_pre_hook(lambda *_: seen.append("before"))
    norm.register_full_backward_hook(lambda *_: seen.append("backward"))
    norm.register_state_dict_post_hook(lambda *_: seen.append("state_dict"))
    assert convert(norm).changed == {"": "rms_norm"} and not seen
    assert isinstance(norm, LlamaRMSNorm) and type(norm).__name__ == "LlamaRMSNorm"
    assert norm.weight is weight and not weight.requires_grad and not norm.training
    x = torch.randn(3, 64, requires_grad=True)
    norm(x).sum().backward()
    norm.state_dict()
    assert seen == ["before", "forward", "backward", "state_dict"]
    assert torch.equal(norm(x), extension_cpp.rms_norm(x, (64,), weight, 1e-3))
    norm.variance_epsilon = 10.0
    assert torch.equal(norm(x), extension_cpp.rms_norm(x, (64,), weight, 10.0))


def test_shared_modules_and_parameters_stay_shared() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.LayerNorm(8)
            self.again = self.first
            self.tied = torch.nn.LayerNorm(8)
            self.tied.weight = self.first.weight
            self.hidden = [self.first]

    model = Model()
    assert convert(model) == ({"first": "layer_norm", "tied": "layer_norm"}, {})
    assert model.again is model.first is model.hidden[0] and model.tied.weight is model.first.weight
    assert type(model.again) is type(model.tied) is extension_cpp.nn.LayerNorm
    assert convert(model) == ({}, {})


@pytest.mark.parametrize("name", NORMS)
def test_copies_and_pickles(name: str) -> None:
    norm = NORMS[name]()
    stock = copy.deepcopy(norm)
    convert(norm)
    x = torch.randn(3, 4, 64)
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), torch.load(file, weights_only=False)):
        assert type(twin) is type(norm) and torch.equal(twin(x), norm(x)) and repr(twin) == repr(stock)
        stock.load_state_dict(twin.state_dict())
        assert convert(twin) == ({}, {})


def test_on_meta_then_loaded() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(LlamaRMSNorm(64), torch.nn.LayerNorm(64))
        assert len(convert(model).changed) == 2
        assert model(torch.empty(2, 64)).shape == (2, 64)
    model.load_state_dict({name: torch.ones(64) for name in ("0.weight", "1.weight", "1.bias")}, assign=True)
    assert model(torch.randn(2, 64)).device.type == "cpu"


def test_what_was_compiled_before_is_compiled_again(device: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).to(device)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=keep)
    x = torch.randn(2, 8, device=device)
    compiled(x)
    assert convert(compiled).changed == {"_orig_mod.1": "layer_norm"}
    compiled(x)
    assert len(graphs) == 2 and "extension_cpp" in graphs[1].code and "extension_cpp" not in graphs[0].code


def test_draws_no_random_numbers() -> None:
    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = 0.5

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand_like(x)

    state = torch.get_rng_state()
    convert(torch.nn.Sequential(Noise(), LlamaRMSNorm(8)))
    assert torch.equal(state, torch.get_rng_state())


# ---- Modules that convert leaves unchanged ----


class OwnNorm(torch.nn.Module):
    """A norm that convert replaces by rms_norm. Each subclass changes it in one respect."""

    def __init__(self, eps: float = 1e-3) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (64,), self.weight, self.eps)


class LayerNormSubclass(torch.nn.LayerNorm):
    pass


class OwnLayerNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (64,), self.weight, None, self.eps)


class EpsOutsideNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class OtherAxisNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, -2)).transpose(0, -2) if x.dim() < 4 else super().forward(x.flip(-1))


class GroupedNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x.unflatten(-1, (2, 32)), (32,), None, self.eps).flatten(-2) * self.weight


class GatedNorm(OwnNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


class HalfNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        total = x[..., 0].square()
        for i in range(1, 64):
            total = total + x[..., i].square()  # rounds the sum to x's dtype after each addition
        return x * (total / 64 + self.eps).rsqrt().unsqueeze(-1) * self.weight


class OddDtypeNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class ConstantEpsNorm(OwnNorm):
    def __init__(self) -> None:
        super().__init__()
        del self.eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (64,), self.weight, 1e-3)


class TrainingNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if self.training else 2)


class EvaluationNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.training else 1)


class GainNorm(OwnNorm):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class BiasNorm(OwnNorm):
    """Adds a number that is an attribute of the class."""

    shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class UnusedEpsNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (64,), self.weight, 1e-3)


class DetachedStatisticsNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.detach().square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


class DetachedWeightNorm(OwnNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (64,), self.weight.detach(), self.eps)


class TensorNorm(OwnNorm):
    def __init__(self) -> None:
        super().__init__()
        self.gains = [torch.ones(64)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gains[0]


class FinalNorm(OwnNorm):
    def __init_subclass__(cls) -> None:
        raise TypeError("FinalNorm is final")


class Sealed(type):
    def __init_subclass__(cls, **keywords: object) -> None:
        raise TypeError("Sealed is final")


class SealedNorm(OwnNorm, metaclass=Sealed):
    """Its metaclass cannot be joined with that of convert's classes."""


def sharded() -> torch.nn.Module:
    norm = LlamaRMSNorm(64)
    norm.weight = torch.nn.Parameter(torch.empty(0))
    return norm


def replaced_forward() -> torch.nn.Module:
    norm = LlamaRMSNorm(64)
    norm.forward = lambda x: x
    return norm


LEFT = {
    "it computes neither layer_norm nor rms_norm over the last dimension": [
        EpsOutsideNorm,
        OtherAxisNorm,
        GroupedNorm,
        lambda: Sam2LayerNorm(64, data_format="channels_first"),
        lambda: torch.nn.GroupNorm(4, 64),
    ],
    "its forward takes (x: ": [GatedNorm],
    "further from it than roundings explain": [lambda: HalfNorm(eps=1e-6)],
    "results of dtypes that follow no known rule": [OddDtypeNorm],
    "none of its attributes is a number that could be eps": [ConstantEpsNorm],
    "it has buffers": [lambda: torch.nn.BatchNorm1d(64)],
    "its forward was replaced on the instance": [replaced_forward],
    "it is parametrized": [lambda: weight_norm(torch.nn.LayerNorm(64))],
    "its weight is torch.float8_e4m3fn, not float64": [
        lambda: LlamaRMSNorm(64).to(torch.float8_e4m3fn),
        lambda: torch.nn.CrossEntropyLoss(torch.ones(2)).to(torch.float8_e4m3fn),
    ],
    "it works in place": [lambda: torch.nn.Dropout(0.5, inplace=True)],
    "a subclass of torch.nn.Dropout": [type("OwnDropout", (torch.nn.Dropout,), {})],
    "a subclass of torch.nn.Softmax, and what it computes": [type("OwnSoftmax", (torch.nn.Softmax,), {})],
    "a subclass of torch.nn.CrossEntropyLoss": [type("OwnLoss", (torch.nn.CrossEntropyLoss,), {})],
    "its dim is None": [torch.nn.Softmax, torch.nn.LogSoftmax],
    "its rows are too short to tell": [lambda: LlamaRMSNorm(1)],
    "it computes rms_norm in training only": [TrainingNorm],
    "it computes rms_norm in evaluation only": [EvaluationNorm],
    "what it does with its gain is something else": [GainNorm],
    "what it does with its shift is something else": [BiasNorm],
    "what it does with its eps is something else": [UnusedEpsNorm],
    "its gradients are others": [DetachedStatisticsNorm, DetachedWeightNorm],
    "its gains is a tensor and neither a parameter nor a buffer": [TensorNorm],
    "its class cannot be subclassed (FinalNorm is final)": [FinalNorm],
    "its class cannot be subclassed (Sealed is final)": [SealedNorm],
    "its parameters are empty, as sharding leaves them": [sharded],
}


@pytest.mark.parametrize("reason", LEFT)
def test_left_and_why(reason: str) -> None:
    for make_norm, training in itertools.product(LEFT[reason], (True, False)):
        model = torch.nn.Sequential(make_norm(), torch.nn.Linear(64, 64)).train(training)
        kind = type(model[0])
        changed, left = convert(model)
        assert not changed and list(left) == ["0"] and type(model[0]) is kind
        assert left["0"].startswith(f"{kind.__name__}: ") and reason in left["0"]


def test_modules_are_probed_with_parameters() -> None:
    """A norm may ask what its weight is, and an attribute `inplace` of another module may be anything."""

    class Asking(OwnNorm):
        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.weight, torch.nn.Parameter)
            return super().forward(x) if self.weight.requires_grad and self.weight.is_leaf else x

    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inplace", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return x

    assert list(convert(torch.nn.Sequential(Asking(), Other())).changed) == ["0"]


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit does not support Python 3.14")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_left() -> None:
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.LayerNorm(8)))
    reason = (
        "LayerNorm: it is TorchScript, which cannot call the ops' functions; convert the model and export or trace it"
    )
    assert convert(scripted) == ({}, {"0": reason})


def test_a_known_formula_is_found_under_any_name() -> None:
    class Gain(OwnNorm):
        pass

    model = torch.nn.Sequential(Gain(), torch.nn.Softplus(), torch.nn.PReLU(64))
    assert convert(model) == ({"0": "rms_norm"}, {})


def test_dropout(device: str) -> None:
    """A converted Dropout has the mask of extension_cpp.dropout for the same seed, and is the identity in
    evaluation."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.25), extension_cpp.nn.AddLayerNorm(64))
    assert convert(model) == ({"0": "dropout"}, {})
    x = torch.ones(100, 64, device=device)
    torch.manual_seed(0)
    got = model[0](x)
    torch.manual_seed(0)
    assert torch.equal(got, extension_cpp.dropout(x, 0.25)) and {0.0} < set(got.unique().tolist())
    assert torch.equal(model.eval()[0](x), x)


SOFTMAXES = {"softmax": torch.nn.Softmax, "log_softmax": torch.nn.LogSoftmax}


@pytest.mark.parametrize("dim", [-1, 0, 2])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes(name: str, dim: int, device: str) -> None:
    """A converted softmax gives the op's bits and runs its hooks. Copies stay converted. revert restores the class."""
    module, seen = SOFTMAXES[name](dim=dim), []
    stock = copy.deepcopy(module)
    module.register_forward_hook(lambda *_: seen.append(1))
    module.forward = module.forward
    model = torch.nn.Sequential(module)
    assert convert(model) == ({"0": name}, {}) and convert(model) == ({}, {})
    x = torch.randn(3, 4, 5, device=device)
    assert torch.equal(module(x), getattr(extension_cpp, name)(x, dim)) and seen == [1]
    for twin in (copy.deepcopy(stock), pickle.loads(pickle.dumps(stock))):
        convert(twin)
        for again in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
            assert type(again) is type(module) and again.dim == dim and repr(again) == repr(stock)
    assert nn.revert(model) == ({"0": type(stock).__name__}, {}) and type(module) is type(stock)


@pytest.mark.parametrize("weighted", [True, False])
def test_cross_entropy_losses(weighted: bool, device: str) -> None:
    """A converted loss gives the op's bits for targets of class indices, and PyTorch's for targets of probabilities."""
    weight = torch.rand(8, device=device) if weighted else None
    module = torch.nn.CrossEntropyLoss(weight, ignore_index=3, label_smoothing=0.1)
    stock = copy.deepcopy(module)
    assert convert(module) == ({"": "cross_entropy"}, {}) and convert(module) == ({}, {})
    assert repr(module) == repr(stock) and vars(module).keys() == vars(stock).keys()
    assert module.state_dict().keys() == stock.state_dict().keys()
    logits, target = torch.randn(16, 8, device=device), torch.randint(0, 8, (16,), device=device)
    want = extension_cpp.cross_entropy(logits, target, weight, 3, label_smoothing=0.1)
    module.ignore_index = stock.ignore_index = -100  # for probabilities, torch allows no other value
    probabilities = torch.rand(16, 8, device=device)
    assert torch.equal(module(logits, probabilities), stock(logits, probabilities))
    module.ignore_index = 3
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(logits, target), want)
    assert nn.revert(module) == ({"": "CrossEntropyLoss"}, {}) and type(module) is torch.nn.CrossEntropyLoss
    more = nn.CrossEntropyLoss(z_loss=1e-4)
    reason = "CrossEntropyLoss: torch.nn.CrossEntropyLoss has no z_loss and no softcap"
    assert nn.revert(more) == ({}, {"": reason}) and type(more) is nn.CrossEntropyLoss


CHOICES: list[tuple[dict[str, object], set[str]]] = [
    ({}, {"norm", "blocks.0.norm", "blocks.0", "blocks.0.act", "blocks.0.drop"}),
    ({"only": "layer_norm"}, {"norm", "blocks.0.norm"}),
    ({"only": ["layer_norm", "add_layer_norm"]}, {"norm", "blocks.0.norm", "blocks.0"}),
    ({"only": ["add_layer_norm"]}, set()),  # the addition cannot be fused with a norm that is not converted
    ({"only": ["blocks.*"]}, {"blocks.0.norm", "blocks.0", "blocks.0.act", "blocks.0.drop"}),
    ({"skip": "dropout"}, {"norm", "blocks.0.norm", "blocks.0", "blocks.0.act"}),
    ({"skip": ["norm", "gelu"]}, {"blocks.0.norm", "blocks.0", "blocks.0.drop"}),
    ({"skip": ["*.norm"]}, {"norm", "blocks.0.act", "blocks.0.drop"}),
    ({"only": ["gelu", "dropout"], "skip": ["*.drop"]}, {"blocks.0.act"}),
]


class ChosenBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.drop = torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Dropout(0.5)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        residual = residual + self.drop(x)
        return self.act(self.norm(residual))


class ChosenModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = torch.nn.ModuleList([ChosenBlock()]), torch.nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks[0](x, x))


@pytest.mark.parametrize("options, names", CHOICES, ids=[str(options) for options, _ in CHOICES])
def test_only_and_skip(options: dict[str, object], names: set[str]) -> None:
    """Modules that `only` or `skip` excludes are not changed or reported. A dry run only reports the changes."""
    model = ChosenModel()
    classes = {name: type(module) for name, module in model.named_modules()}
    planned = convert(model, dry_run=True, **options)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert convert(model, **options) == planned and planned.changed.keys() == names and not planned.left
    assert {name for name, module in model.named_modules() if type(module) is not classes[name]} == names


def test_skip_takes_a_function_for_no_module() -> None:
    """In `skip`, "layer_norm" means the function, not a module of this name. `left` contains no skipped module."""
    model = torch.nn.Sequential()
    model.layer_norm, model.drop = torch.nn.RMSNorm(8), torch.nn.Dropout(0.5, inplace=True)
    assert convert(model, dry_run=True).left.keys() == {"drop"}
    assert convert(model, skip=["layer_norm", "drop"]) == ({"layer_norm": "rms_norm"}, {})


class FunctionalDropoutBlock(ChosenBlock):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        residual = residual + torch.nn.functional.dropout(x, p=0.5, training=self.training)
        return self.act(self.norm(residual))


@pytest.mark.parametrize("block", [ChosenBlock, FunctionalDropoutBlock])
def test_without_dropout_the_masks_are_those_of_torch(block: type) -> None:
    model, x = ChosenModel(), torch.randn(4, 64)
    model.blocks[0] = block()
    torch.manual_seed(1)
    expected = model(x)
    assert convert(model, skip="dropout").changed["blocks.0"] == "add_layer_norm"
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("argument", ["only", "skip"])
def test_only_and_skip_refuse_slips(argument: str) -> None:
    with pytest.raises(ValueError, match=rf"expected {argument} to hold functions .* but 'layernorm' is neither"):
        convert(ChosenModel(), **{argument: ["layer_norm", "layernorm"]})


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"extension_cpp.nn.convert: expected model to be a torch.nn.Module, but got"):
        convert([torch.nn.LayerNorm(8)])  # type: ignore[arg-type]  # that is the mistake


# ---- autocast ----


@contextlib.contextmanager
def autocast(device: str, enabled: bool) -> Iterator[None]:
    """Enables or disables autocast for a device, which may be one that this machine does not have."""
    before = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, enabled)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before)


AUTOCAST_NORMS = NORMS | {
    "a subclass of torch layer": lambda: LayerNormSubclass(64),
    "own layer": OwnLayerNorm,
    "own rms": OwnNorm,
}


@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "no autocast"])
@pytest.mark.parametrize("fake_device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", AUTOCAST_NORMS)
def test_dtypes_under_autocast(name: str, fake_device: str, enabled: bool) -> None:
    """A converted norm returns the original's dtype, with and without autocast. With FakeTensors this needs no GPU."""
    stock = AUTOCAST_NORMS[name]()
    ours = copy.deepcopy(stock)
    assert convert(ours).changed
    compared, mode = 0, FakeTensorMode()
    halves = HALF if enabled else HALF[:1]  # autocast's dtype has no effect while autocast is disabled
    for dtype, half in itertools.product(DTYPES, halves):
        parameters = {key: parameter.to(dtype) for key, parameter in stock.named_parameters()}
        for x_dtype in DTYPES:
            with mode, autocast(fake_device, enabled):
                torch.set_autocast_dtype(fake_device, half)
                given = {key: torch.empty(p.shape, dtype=dtype, device=fake_device) for key, p in parameters.items()}
                x = torch.empty(5, 4, 64, dtype=x_dtype, device=fake_device)
                try:
                    want = torch.func.functional_call(stock, given, (x,)).dtype
                except RuntimeError:
                    continue
                casts = enabled and fake_device == "cuda" and torch.float64 not in (dtype, x_dtype)
                if not casts and not takes(name, dtype, x_dtype):
                    continue
                assert torch.func.functional_call(ours, given, (x,)).dtype == want, (x_dtype, dtype, half)
                compared += 1
    assert compared >= 4 * len(halves)


@functools.cache
def takes(name: str, dtype: torch.dtype, x_dtype: torch.dtype) -> bool:
    """Returns whether the unconverted norm takes these dtypes on the CPU. PyTorch's fakes accept more dtypes."""
    with torch.utils._python_dispatch._disable_current_modes():
        try:
            AUTOCAST_NORMS[name]().to(dtype)(torch.zeros(5, 4, 64, dtype=x_dtype))
        except RuntimeError:
            return False
    return True


# ---- Graphs: tracers and exporters capture converted modules ----


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit does not support Python 3.14")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
def test_a_llama_is_traced(gradients: bool) -> None:
    """torch.jit.trace traces a converted Llama and checks the traced model, which has the right gradients."""

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make("llama", torch.float32).eval()

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens).logits

    model = Logits()
    convert(model)
    tokens = torch.randint(1, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(model, (tokens,))
    want = torch.autograd.grad(model(tokens).sin().sum(), [*model.parameters()])
    got = torch.autograd.grad(traced(tokens).sin().sum(), [*model.parameters()])
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours, exact)


CAPTURES = {
    "symbolic_trace": lambda model, x: torch.fx.symbolic_trace(model),
    "make_fx": lambda model, x: make_fx(model)(x),
    "torch.export": lambda model, x: torch.export.export(model, (x,)).module(),
    "jit.trace": lambda model, x: torch.jit.trace(model, (x,)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_captured(name: str, capture: str) -> None:
    """A norm that is captured under no_grad, alone and in a model, becomes a graph that has the right gradients."""
    if capture == "jit.trace" and sys.version_info >= (3, 14):
        pytest.skip("torch.jit does not support Python 3.14")
    norm = NORMS[name]()
    convert(norm)
    x = torch.randn(5, 4, 64)
    for model in (norm, torch.nn.Sequential(torch.nn.Linear(64, 64), norm)):
        with torch.no_grad():
            captured = CAPTURES[capture](model, x)
        leaf, again = (x.clone().requires_grad_() for _ in range(2))
        captured(leaf).sin().sum().backward()
        model(again).sin().sum().backward()
        torch.testing.assert_close(leaf.grad, again.grad, rtol=0, atol=0)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit does not support Python 3.14")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NORMS)
def test_scripting_gets_a_sentence_that_is_true(name: str) -> None:
    model = torch.nn.Sequential(NORMS[name]())
    convert(model)
    with pytest.raises(RuntimeError, match=r"torch.jit.script cannot compile .*, whose forward is Python code that"):
        torch.jit.script(model)
    if name.startswith("torch layer"):  # torch.jit.script compiles only these two of the original norms
        nn.revert(model)
        torch.jit.script(model)


# ---- operations on converted modules, and revert ----


@pytest.mark.parametrize("name", NORMS)
def test_revert(name: str) -> None:
    norm = NORMS[name]()
    stock = copy.deepcopy(norm)
    kind, state = type(norm), vars(norm).keys()
    model = torch.nn.Sequential(norm, torch.nn.Dropout(0.5), extension_cpp.nn.AddLayerNorm(64))
    convert(model)
    assert nn.revert(model) == ({"0": kind.__name__, "1": "Dropout"}, {})
    assert model[0] is norm and type(norm) is kind and vars(norm).keys() == state
    assert type(model[1]) is torch.nn.Dropout and type(model[2]) is extension_cpp.nn.AddLayerNorm
    x = torch.randn(5, 4, 64)
    assert torch.equal(norm(x), stock(x))
    assert nn.revert(model) == ({}, {}) and len(convert(model).changed) == 2


def test_revert_takes_modules() -> None:
    with pytest.raises(TypeError, match=r"extension_cpp.nn.revert: expected model to be a torch.nn.Module, but got"):
        nn.revert([torch.nn.LayerNorm(8)])  # type: ignore[arg-type]  # that is the mistake


@pytest.mark.parametrize("name", NORMS)
def test_called_by_name(name: str) -> None:
    norm = NORMS[name]()
    (argument,) = inspect.signature(norm.forward).parameters
    convert(norm)
    x = torch.randn(5, 4, 64)
    assert torch.equal(norm(**{argument: x}), norm(x))
    dropout = torch.nn.Dropout(0.0)
    convert(dropout)
    assert torch.equal(dropout(input=x), x)


@pytest.mark.parametrize("name", NORMS)
def test_a_forward_of_its_own_is_not_replaced(name: str) -> None:
    """convert also changes a norm that stores its class's forward in the instance, as accelerate leaves it behind."""
    norm = NORMS[name]()
    norm.forward = norm.forward
    assert convert(norm).changed
    x = torch.randn(5, 4, 64, requires_grad=True)
    assert type(norm(x).grad_fn).__name__ != type(NORMS[name]()(x).grad_fn).__name__, "the old forward still runs"


def test_a_class_on_top_survives_copies_and_pickles() -> None:
    norm = LlamaRMSNorm(64)
    convert(norm)
    top = type("OnTop", (type(norm),), {"__module__": __name__, "mark": 1})
    norm.__class__ = globals()["OnTop"] = top
    x = torch.randn(5, 64)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert type(twin) is top and torch.equal(twin(x), norm(x))
    reason = "OnTop: a class was put on top of the converted one; take it off first"
    assert nn.revert(norm) == ({}, {"": reason})


def test_all_are_decided_before_one_is_changed() -> None:
    """If a module raises an exception while convert examines it, convert has not changed any module of the model."""

    class Hostile(OwnNorm):
        @property
        def forward(self) -> object:  # type: ignore[override]  # raises on access
            raise ZeroDivisionError

    model = torch.nn.Sequential(torch.nn.LayerNorm(64), Hostile())
    with pytest.raises(ZeroDivisionError):
        convert(model)
    assert type(model[0]) is torch.nn.LayerNorm


def test_equal_norms_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one call, convert compares norms of the same class, attributes and shapes with the op only once."""
    seen: list[int] = []
    forward = LlamaRMSNorm.forward

    def counted(self: LlamaRMSNorm, hidden_states: Tensor) -> Tensor:
        seen.append(1)
        return forward(self, hidden_states)

    monkeypatch.setattr(LlamaRMSNorm, "forward", counted)
    convert(torch.nn.Sequential(LlamaRMSNorm(64)))
    once = len(seen)
    convert(torch.nn.Sequential(*(LlamaRMSNorm(64) for _ in range(4))))
    assert len(seen) == 2 * once
    convert(torch.nn.Sequential(LlamaRMSNorm(64), LlamaRMSNorm(64, eps=1e-3), LlamaRMSNorm(32)))
    assert len(seen) == 5 * once

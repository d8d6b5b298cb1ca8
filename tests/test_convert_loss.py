"""Tests nn.convert on causal language models with each of its two losses. loss="logits" means cross_entropy of the
logits. loss="linear" means linear_cross_entropy of the hidden states, which never holds all logits at once."""

import copy
import inspect
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # the models are made from configurations and need no downloads

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.utils.parametrizations import weight_norm
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.utils.generic import can_return_tuple

from extension_cpp import nn
from extension_cpp.convert import model_loss
from extension_cpp.nn import convert
from tests.test_convert import GPT2, LLAMA, T5, check_same

# The class and the configuration of each model. With "bias", `make` adds a bias to the model's output layer.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama with a bias": ("LlamaForCausalLM", LLAMA | {"bias": True}),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", LLAMA | {"final_logit_softcapping": 0.7}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "granite": ("GraniteForCausalLM", LLAMA | {"logits_scaling": 0.3}),
}
LOSSES = {"logits": "cross_entropy", "linear": "linear_cross_entropy"}
TIED = ("qwen3", "gemma3", "gpt2")


def make(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **others: Any) -> Any:
    """Makes a model in training mode. Its logits are so large that a softcap or a scale changes the loss noticeably."""
    class_name, options = MODELS[name]
    options = options | others
    has_bias = options.pop("bias", False)
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**options, use_cache=False))
    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) == (name in TIED)
    torch.nn.init.normal_(head.weight, std=0.3)
    if has_bias:
        head.bias = torch.nn.Parameter(torch.randn(head.out_features))
    return model.to(device, dtype).train()


def make_inputs(model: Any) -> dict[str, Any]:
    """Returns random tokens, and labels of which about 30 % have the ignored value -100."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 61, (2, 16), generator=generator)
    labels = tokens.masked_fill(torch.rand(2, 16, generator=generator) < 0.3, -100)
    return {"input_ids": tokens.to(model.device), "labels": labels.to(model.device)}


def loss_and_gradients(model: Any, inputs: dict[str, Any], run: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    loss = (model if run is None else run)(**inputs).loss
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return {"loss": loss.detach()} | dict(zip(parameters, gradients, strict=True))


# check_same allows 192 roundings of half an eps for the norms. The output layer and the loss add at most 192 more: a
# logit sums 32 products, the loss sums 61 classes, and a gradient sums 32 rows or 61 classes. Eps is therefore doubled.
EPS = 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("items", [None, 7, "tensor"], ids=["mean", "7 items", "items in a tensor"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_loss_gradients_and_state(name: str, loss: str, items: Any, device: str) -> None:
    """A converted model has the same loss and gradients as the original, up to rounding, and the same state_dict. This
    holds for a loss that is a mean, and for a sum divided by num_items_in_batch. Some labels are ignored."""
    stock = make(name, device=device)
    model = copy.deepcopy(stock)
    changed, left = convert(model, loss=loss)
    assert changed[""] == LOSSES[loss] and not left
    assert changed.get("lm_head") == (LOSSES[loss] if loss == "linear" else None)
    inputs = make_inputs(stock)
    if items is not None:
        inputs["num_items_in_batch"] = torch.tensor(9, device=device) if items == "tensor" else items
    check_same(loss_and_gradients(model, inputs), loss_and_gradients(stock, inputs), EPS)
    output = model(**inputs)
    assert ("logits" in output, output.logits is not None) == ((loss == "logits",) * 2)
    assert items is not None or type(output.loss.grad_fn).__name__ == f"{LOSSES[loss]}Backward"
    assert model.lm_head.weight is model.get_input_embeddings().weight or name not in TIED
    for (name_a, a), (name_b, b) in zip(model.state_dict().items(), stock.state_dict().items(), strict=True):
        assert name_a == name_b and torch.equal(a, b)
    assert repr(model) == repr(stock) and inspect.signature(model.forward) == inspect.signature(stock.forward)


# Without --slow, no loss of logits is compiled here, because test_convert_models.py compiles models with this loss.
COMPILED = [("gemma3", "linear"), pytest.param("gemma3", "logits", marks=pytest.mark.slow)]
COMPILED += [pytest.param(name, loss, marks=pytest.mark.slow) for name in ("gpt2", "llama", "qwen3") for loss in LOSSES]


@pytest.mark.parametrize("name, loss", COMPILED)
def test_compiled_as_one_graph(name: str, loss: str, device: str) -> None:
    """torch.compile captures a converted model as one graph, which gives the right loss and gradients."""
    stock = make(name, device=device, num_hidden_layers=1)
    inputs = make_inputs(stock)
    want = loss_and_gradients(stock, inputs)
    convert(stock, loss=loss)
    torch.compiler.reset()
    compiled = torch.compile(stock, fullgraph=True, backend="aot_eager")
    check_same(loss_and_gradients(stock, inputs, compiled), want, EPS)
    assert (compiled(**inputs).logits is None) == (loss == "linear")
    del inputs["labels"]
    assert compiled(**inputs).logits.shape == (2, 16, 61), "the output layer still keeps its input"


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_compiled_by_inductor(loss: str, device: str) -> None:
    """A converted model compiled by Inductor has the right loss and gradients. The test above, which runs also without
    --slow, only captures the graph, and tests/battery/test_graphs.py compiles every op with Inductor."""
    stock = make("gemma3", device=device, num_hidden_layers=1)
    inputs = make_inputs(stock)
    want = loss_and_gradients(stock, inputs)
    convert(stock, loss=loss)
    torch.compiler.reset()
    check_same(loss_and_gradients(stock, inputs, torch.compile(stock, fullgraph=True)), want, EPS)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_in_bfloat16(name: str, loss: str, device: str) -> None:
    """A converted bfloat16 model has a float32 loss. It is as near to the float64 model as the unconverted one."""
    models = {"exact": make(name, torch.bfloat16, device).double(), "stock": make(name, torch.bfloat16, device)}
    models["converted"] = copy.deepcopy(models["stock"])
    convert(models["converted"], loss=loss)
    inputs = make_inputs(models["stock"])
    found = {who: loss_and_gradients(each, inputs) for who, each in models.items()}
    assert all(each["loss"].dtype is torch.float32 for each in found.values())
    errors = {
        who: sum((each[part].double() - exact).square().sum().item() for part, exact in found["exact"].items()) ** 0.5
        for who, each in found.items()
    }
    # The two models round at different places. Their errors' ratio was 0.66 to 1.38 for several random weights.
    assert 0 < errors["converted"] <= 1.5 * errors["stock"], errors


@pytest.mark.parametrize("loss", LOSSES)
def test_float64_and_autocast_give_the_loss_the_dtype_it_had(loss: str, device: str) -> None:
    """A converted model's loss has the same dtype as the original's, in float64 and under autocast. Under autocast the
    logits are bfloat16 with errors of half an eps, which a gradient sums over the rows."""
    stock = make("llama", torch.float64, device)
    inputs = make_inputs(stock)
    for dtype, enabled in ((torch.float64, False), (torch.float32, True)):
        stock = stock.to(dtype)
        model = copy.deepcopy(stock)
        convert(model, loss=loss)
        with torch.autocast(device, torch.bfloat16, enabled=enabled):
            want, got = loss_and_gradients(stock, inputs), loss_and_gradients(model, inputs)
        assert got["loss"].dtype is want["loss"].dtype is torch.float32
        bound = torch.finfo(torch.bfloat16).eps if enabled else torch.finfo(torch.float32).eps
        assert abs(got["loss"] - want["loss"]) <= bound * want["loss"]
        head = "lm_head.weight"
        assert (got[head] - want[head]).abs().max() <= 4 * bound * want[head].abs().max()


def test_without_labels_there_are_logits() -> None:
    stock = make("gemma3").eval()
    model = copy.deepcopy(stock)
    convert(model, loss="linear")
    tokens = make_inputs(stock)["input_ids"]
    torch.testing.assert_close(model(tokens).logits, stock(tokens).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(tokens, **options), stock.generate(tokens, **options))


SHIFTED = torch.randint(1, 61, (2, 16), generator=torch.Generator().manual_seed(2))
CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "labels by position": lambda model, x: model(x["input_ids"], None, None, None, None, x["labels"]),
    "shift_labels": lambda model, x: model(**x, shift_labels=SHIFTED.to(model.device)),
    "ignore_index": lambda model, x: model(x["input_ids"], labels=x["input_ids"], ignore_index=7),
    "logits_to_keep": lambda model, x: model(x["input_ids"], labels=x["labels"][:, -5:], logits_to_keep=5),
    "inputs_embeds": lambda model, x: model(
        inputs_embeds=model.get_input_embeddings()(x["input_ids"]), labels=x["labels"]
    ),
    "hidden states": lambda model, x: model(**x, output_hidden_states=True),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("call", CALLS)
def test_ways_to_call(call: str, loss: str, device: str) -> None:
    stock = make("llama", device=device)
    model = copy.deepcopy(stock)
    convert(model, loss=loss)
    inputs = make_inputs(stock)
    inputs["input_ids"][0, 3] = 7
    got, want = CALLS[call](model, inputs), CALLS[call](stock, inputs)
    torch.testing.assert_close(got.loss, want.loss)
    assert type(got) is type(want) and (got.logits is None) == (loss == "linear")
    assert (got.hidden_states is None) == (want.hidden_states is None)


@pytest.mark.parametrize("configured", [True, False])
def test_tuples_hold_logits(configured: bool) -> None:
    """With return_dict=False, a model with the linear loss still returns logits, which take a place in the tuple."""
    stock = forward_with(lambda logits: logits, lambda logits: None)
    if configured:
        stock.config.return_dict = False
    model = copy.deepcopy(stock)
    convert(model, loss="linear")
    inputs = make_inputs(stock)
    options = inputs if configured else inputs | {"return_dict": False}
    got, want = model(**options), stock(**options)
    assert type(got) is tuple and len(got) == len(want) == 2
    torch.testing.assert_close(got, want)
    assert model(**inputs, return_dict=True).logits is None


def test_a_forward_that_names_return_dict() -> None:
    """A Mamba2 gets the linear loss. Its forward has return_dict, reads the output layer's dtype, and casts the
    logits."""
    options = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8}
    stock = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(vocab_size=61, num_hidden_layers=1, **options))
    model = copy.deepcopy(stock)
    assert convert(model, loss="linear").changed[""] == "linear_cross_entropy"
    inputs = make_inputs(stock)
    arguments = list(inspect.signature(stock.forward).parameters)
    positions = [inputs.get(name, False if name == "return_dict" else None) for name in arguments[:6]]
    assert arguments[5] == "return_dict"
    torch.testing.assert_close(model(*positions)[:2], stock(*positions)[:2])
    got = model(**inputs)
    torch.testing.assert_close(got.loss, stock(**inputs).loss)
    assert got.logits is None


def test_gradient_checkpointing(device: str) -> None:
    stock = make("llama", device=device)
    model = copy.deepcopy(stock)
    convert(model, loss="linear")
    inputs = make_inputs(stock)
    for use_reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        output = model(**inputs)
        assert output.logits is None
        model.zero_grad()
        output.loss.backward()
        got = {name: parameter.grad for name, parameter in model.named_parameters()}
        check_same({"loss": output.loss.detach()} | got, loss_and_gradients(stock, inputs), EPS)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_copies_pickles_and_saves(name: str, loss: str, tmp_path: Path) -> None:
    stock = make(name)
    model = copy.deepcopy(stock)
    convert(model, loss=loss)
    inputs = make_inputs(stock)
    want = model(**inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model) and str(type(twin)) == str(type(stock))
        assert (twin.lm_head.weight is twin.get_input_embeddings().weight) == (name in TIED)
        got = twin(**inputs)
        assert torch.equal(got.loss, want.loss) and (got.logits is None) == (loss == "linear")
        assert convert(twin, loss=loss) == ({}, {})
        assert nn.revert(twin).changed[""] == type(stock).__name__
    if name != "llama with a bias":
        model.save_pretrained(tmp_path)
        again = type(stock).from_pretrained(tmp_path).train()
        torch.testing.assert_close(again(**inputs).loss, want.loss)
        assert again.config.architectures == [type(stock).__name__]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_revert(name: str, loss: str) -> None:
    stock = make(name)
    model = copy.deepcopy(stock)
    inputs = make_inputs(stock)
    convert(model, loss=loss)
    model(**inputs)
    changed, left = nn.revert(model)
    assert changed[""] == type(stock).__name__ and not left
    assert changed.get("lm_head") == ("Linear" if loss == "linear" else None)
    for a, b in ((model, stock), (model.lm_head, stock.lm_head)):
        assert type(a) is type(b) and vars(a).keys() == vars(b).keys()
    assert model.loss_function is ForCausalLMLoss
    got, want = model(**inputs), stock(**inputs)
    assert torch.equal(got.loss, want.loss) and torch.equal(got.logits, want.logits)
    assert nn.revert(model) == ({}, {})


def test_a_loss_that_was_set_comes_back() -> None:
    class Odd(transformers.LlamaForCausalLM):
        pass

    Odd.__name__ = "OddForMaskedLM"
    model = Odd(transformers.LlamaConfig(**LLAMA))
    assert model.loss_function is ForMaskedLMLoss and "" not in convert(model).changed
    model.loss_function = ForCausalLMLoss
    assert convert(model).changed[""] == "cross_entropy"
    nn.revert(model)
    assert model.loss_function is ForCausalLMLoss


def test_the_linear_loss_may_come_later() -> None:
    model = make("llama")
    assert convert(model).changed[""] == "cross_entropy" and convert(model) == ({}, {})
    linear = {"": "linear_cross_entropy", "lm_head": "linear_cross_entropy"}
    assert convert(model, loss="linear") == (linear, {}) and convert(model) == convert(model, loss="linear") == ({}, {})
    with pytest.raises(ValueError, match="expected loss to be 'logits' or 'linear', but got 'fused'"):
        convert(model, loss="fused")


def test_inside_another_module() -> None:
    model = torch.nn.ModuleDict({"policy": make("llama"), "other": torch.nn.Linear(2, 2)})
    changed, _ = convert(model, loss="linear")
    assert changed["policy"] == changed["policy.lm_head"] == "linear_cross_entropy" and "policy.model" not in changed


def test_an_error_in_forward_leaves_no_trace() -> None:
    model = make("llama")
    convert(model, loss="linear")
    inputs = make_inputs(model)
    with pytest.raises(RuntimeError, match="expected target in"):
        model(inputs["input_ids"], labels=inputs["input_ids"] + 100)
    assert model(inputs["input_ids"]).logits.shape == (2, 16, 61) and model(**inputs).logits is None


# ---- layers added to a converted model ----


class LoRA(torch.nn.Module):
    """Takes the place of a linear layer in a model and calls this layer, as peft's LoRA layers do."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.weight, self.bias = base_layer.weight, base_layer.bias
        self.a, self.b = torch.nn.Linear(32, 4, bias=False), torch.nn.Linear(4, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.b(self.a(x))


def put_lora(model: Any) -> None:
    torch.manual_seed(3)
    model.lm_head = LoRA(model.lm_head)


def put_hook(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)


def put_forward(model: Any) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x) * 2


def put_loss_function(model: Any) -> None:
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()


def put_larger_vocabulary(model: Any) -> None:
    torch.manual_seed(3)
    model.resize_token_embeddings(70, mean_resizing=False)


PUT = [put_lora, put_hook, put_forward, put_loss_function, put_larger_vocabulary]


@pytest.mark.parametrize("put", PUT, ids=lambda put: put.__name__)
def test_what_is_put_on_the_output_layer_counts(put: Callable[[Any], None]) -> None:
    stock = make("llama")
    model = copy.deepcopy(stock)
    convert(model, loss="linear")
    for each in (model, stock):
        put(each)
    inputs = make_inputs(stock)
    got, want = model(**inputs), stock(**inputs)
    torch.testing.assert_close(got.loss, want.loss)
    torch.testing.assert_close(got.logits, want.logits)


# ---- Models whose loss convert leaves unchanged or does not make linear ----


class OwnLoss(transformers.LlamaForCausalLM):
    @property
    def loss_function(self) -> Any:
        return ForCausalLMLoss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.loss_function is not None
        return super().forward(*args, **kwargs)


def forward_with(change: Callable[[Tensor], Tensor], penalty: Callable[[Tensor], Any] = lambda logits: 0.0) -> Any:
    """Makes a Llama whose forward applies `change` to its logits and adds `penalty` of the logits to its loss."""

    class Changed(transformers.LlamaForCausalLM):
        @can_return_tuple
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            logits = change(self.lm_head(self.model(input_ids, return_dict=True).last_hidden_state))
            loss = None if labels is None else self.loss_function(logits, labels, self.vocab_size, **kwargs)
            more = penalty(logits)
            loss = loss if loss is None or more is None else loss + more
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    return Changed(transformers.LlamaConfig(**LLAMA, use_cache=False))


def masked(logits: Tensor) -> Tensor:
    logits[..., 5] = -1e4
    return logits


def changed_llama(change: Callable[[Any], Any]) -> Any:
    model = make("llama")
    change(model)
    return model


def granite_with_bias() -> Any:
    model = make("granite")
    model.lm_head.bias = torch.nn.Parameter(torch.randn(61))
    return model


UNKNOWN = "what its forward does with the logits is not known"
LEFT: dict[str, list[Callable[[], Any]]] = {
    "its lm_head is a LoRA, not a plain torch.nn.Linear": [lambda: changed_llama(put_lora)],
    "its lm_head is a ParametrizedLinear, not a plain": [lambda: changed_llama(lambda x: weight_norm(x.lm_head))],
    "its lm_head has hooks": [lambda: changed_llama(put_hook)],
    "its lm_head has a forward of its own": [lambda: changed_llama(put_forward)],
    "of its lm_head: its weight is torch.float8": [lambda: changed_llama(lambda x: x.lm_head.to(torch.float8_e4m3fn))],
    "its forward was replaced on the instance": [lambda: changed_llama(lambda x: vars(x).update(forward=x.forward))],
    "it scales the logits, and its lm_head has a bias": [granite_with_bias],
    UNKNOWN: [
        lambda: forward_with(torch.sin),
        lambda: forward_with(masked),
        lambda: forward_with(lambda logits: logits - 1),
        lambda: forward_with(lambda logits: logits, lambda logits: logits.logsumexp(-1).square().mean()),
    ],
}


@pytest.mark.parametrize("reason", LEFT)
def test_left_with_the_loss_of_its_logits(reason: str) -> None:
    """If a model's loss cannot be linear, it becomes cross_entropy of the logits, and `left` has the reason."""
    for make_model in LEFT[reason]:
        stock, model = make_model(), make_model()
        model.load_state_dict(stock.state_dict())
        changed, left = convert(model, loss="linear")
        assert changed[""] == "cross_entropy" and "lm_head" not in changed
        assert left[""].startswith(f"{type(model).__name__}: its loss cannot be linear: {reason}")
        if "float8" not in reason:
            inputs = make_inputs(stock)
            got, want = model(**inputs), stock(**inputs)
            torch.testing.assert_close(got.loss, want.loss)
            torch.testing.assert_close(got.logits, want.logits)
        assert nn.revert(model).changed[""] == type(model).__name__


def test_a_model_that_returns_a_plain_dict_is_left() -> None:
    """Who gets a dict may read its logits, which the linear loss would leave out."""

    class ReturnsDict(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids, return_dict=True).last_hidden_state)
            return {"loss": self.loss_function(logits, labels, self.vocab_size), "logits": logits}

    left = convert(ReturnsDict(transformers.LlamaConfig(**LLAMA, use_cache=False)), loss="linear").left
    assert left[""] == f"ReturnsDict: its loss cannot be linear: {UNKNOWN}"


def test_the_loss_ignores_what_it_does_not_know() -> None:
    """transformers passes a model's further keywords on to its loss, whatever their names."""
    model = make("llama")
    convert(model, loss="logits")
    logits, labels = torch.randn(1, 3, 61), torch.tensor([[1, 2, 3]])
    loss = model.loss_function(logits=logits, labels=labels, vocab_size=61, device="x", compute=0)
    torch.testing.assert_close(loss, ForCausalLMLoss(logits, labels, 61))


def test_the_same_forward_is_followed() -> None:
    """convert gives the linear loss to models with the forward of those in LEFT[UNKNOWN], if this forward does not
    change the logits or only caps them. The models in LEFT[UNKNOWN] are therefore left only for their changes."""
    plain = forward_with(lambda logits: logits, lambda logits: None)
    assert convert(plain, loss="linear").changed[""] == "linear_cross_entropy"
    capped = forward_with(lambda logits: 3 * torch.tanh(2 * logits / 3), lambda logits: None)
    convert(capped, loss="linear")
    assert type(capped).plan[-2:] == pytest.approx((2.0, 3.0))


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_that_are_left(loss: str) -> None:
    own = OwnLoss(transformers.LlamaConfig(**LLAMA))
    changed, left = convert(own, loss=loss)
    assert "" not in changed and left == {"": "OwnLoss: its class has a loss_function of its own"}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5))
    reason = "T5ForConditionalGeneration: its forward does not call loss_function, but computes the loss itself"
    assert convert(t5, loss=loss).left == {"": reason}
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA))
    changed, left = convert(classifier, loss=loss)
    assert not left and "cross_entropy" not in changed.values()
    set_by_hand = make("llama")
    set_by_hand.loss_function = ForMaskedLMLoss
    assert "" not in convert(set_by_hand, loss=loss).changed and set_by_hand.loss_function is ForMaskedLMLoss


def test_a_class_on_top_of_the_linear_one_is_left_by_revert() -> None:
    model = make("llama")
    convert(model, loss="linear")
    model.__class__ = type("OnTop", (type(model),), {})
    changed, left = nn.revert(model)
    assert left == {"": "OnTop: a class was put on top of the converted one; take it off first"}
    assert isinstance(model, model_loss.LinearLossModel) and "" not in changed
    inputs = make_inputs(model)
    assert model(**inputs).logits is not None, "the output layer was reverted, so it makes logits"

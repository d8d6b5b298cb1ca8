"""Runs python -m benchmarks.models on small models, and tests its output and its error messages."""

import contextlib
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import models

CONVERTED = ("stock", "converted", "linear loss")
CAUSAL = ("llama-3.2-1b", "gpt2-medium")


def test_figures_of_small_models(tmp_path: Path, device: str, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "figures" / "models.json"
    options = ["--small", "--host", "--rounds", "9", "--json", str(path), "--contender", *CONVERTED]
    models.main(["--device", device, *options])
    found = json.loads(path.read_text())
    assert {"device", "torch", "versions", "python", "rounds", "seed"} <= found["machine"].keys()
    measured = [(row["model"], row["way"]) for row in found["rows"]]
    assert measured == [(model, way) for model in models.SHAPES for way in CONVERTED[: 3 if model in CAUSAL else 2]]
    for row in found["rows"]:
        assert row["converted_modules"] >= 10 and 0 < row["gradient_error"] < 0.05
        for time in (row["seconds"], row["host_seconds"]):
            assert 0 < time["low"] <= time["median"] <= time["high"]
        assert device == "cpu" or row["peak_bytes"] > 0 < row["kernel_seconds"]
    printed = capsys.readouterr().out.replace("\n", "")
    assert f"The figures are in {path}." in printed and "ms of the host" in printed
    assert ("ms of kernels" in printed) == (device == "cuda")


@pytest.mark.parametrize("name", models.SHAPES)
def test_the_model_of_the_host_has_all_layers(name: str) -> None:
    config, whole = models.OF_HOST[name].config, models.SHAPES[name].config
    layers = "n_layer" if "n_layer" in whole else "num_hidden_layers"
    assert config[layers] == whole[layers] > models.SMALL[name].config[layers] == 2
    stock, inputs = models.make(models.OF_HOST[name], "cpu")
    assert max(parameter.numel() for parameter in stock.parameters()) < 1e5
    assert max(each.numel() for each in inputs.values()) <= 3 * 32 * 32
    if name == "vit-large":
        for shape in (models.SHAPES[name], models.OF_HOST[name]):
            assert shape.tokens == (shape.config["image_size"] // shape.config["patch_size"]) ** 2 + 1


@pytest.mark.parametrize("name", models.SHAPES)
def test_only_biases_of_keys_have_no_gradient(name: str) -> None:
    """In float64, only the biases of attention keys have zero gradients. All other gradients are judged."""
    stock, inputs = models.make(models.SMALL[name], "cpu")
    judged = models.exact_gradients(stock, inputs)
    stock.double().eval()
    stock(**{key: each.double() if each.is_floating_point() else each for key, each in inputs.items()}).loss.backward()
    sizes = {key: each.grad.norm().item() for key, each in stock.named_parameters() if each.grad is not None}
    absent = sizes.keys() - judged.keys()
    assert len(absent) == (0 if name in CAUSAL else 2) and judged.keys() <= sizes.keys()
    assert all((sizes[key] < 1e-14) == (key in absent) for key in sizes)
    untrained = {key for key, each in stock.named_parameters() if each.grad is None}
    assert not untrained


def test_the_time_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """kernel_seconds adds up times of GPU kernels, without host events and annotations, which contain kernels."""
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    rows = [(cuda, 3.0, False), (cuda, 4.0, False), (cuda, 50.0, True), (cpu, 600.0, False)]
    keys = ("device_type", "self_device_time_total", "is_user_annotation")
    events = [types.SimpleNamespace(**dict(zip(keys, row, strict=True))) for row in rows]

    class Profile(contextlib.nullcontext):
        def __init__(self, activities: Any) -> None:
            super().__init__(types.SimpleNamespace(events=lambda: events))

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps: list[int] = []
    assert models.kernel_seconds(lambda: steps.append(1)) == pytest.approx(7e-6) and len(steps) == models.PROFILED


def test_contenders_share_their_weights(device: str) -> None:
    """All timed models share their weights. Only those named "no mask" call attention with is_causal and no mask."""
    stock, inputs = models.make(models.SMALL["llama-3.2-1b"], device)
    names = [name for name in models.CONTENDERS if not name.startswith("liger")]
    contenders, changed = models.contenders_of(stock, inputs, names)
    assert list(contenders) == names
    for name, contender in contenders.items():
        attention = contender.model.config._attn_implementation
        assert attention == ("sdpa_without_mask" if name.endswith("no mask") else "sdpa")
    assert changed["model.layers.0.mlp"] == "swiglu" and type(stock.model.layers[0].mlp).__mro__[1] is torch.nn.Module
    for contender in contenders.values():
        model = getattr(contender.forward, "_orig_mod", contender.forward)
        assert all(a is b for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_what_liger_replaces_is_there_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that Liger replaces in transformers, here by an imitation, are replaced only while its model runs."""
    stock, inputs = models.make(models.SMALL["llama-3.2-1b"], "cpu")
    module = sys.modules[type(stock).__module__]
    rotate, seen = module.apply_rotary_pos_emb, []

    def other(*args: Any) -> Any:
        seen.append(1)
        return rotate(*args)

    def apply(model: Any) -> None:
        module.apply_rotary_pos_emb = other
        model.mark = 1

    liger = types.SimpleNamespace(apply_liger_kernel_to_llama=apply)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    contenders, _ = models.contenders_of(stock, inputs, ("stock", "converted", "liger"))
    assert list(contenders) == ["stock", "converted", "liger"] and module.apply_rotary_pos_emb is rotate
    losses = {}
    for name, contender in contenders.items():
        seen.clear()
        losses[name] = contender.loss().item()
        assert len(seen) == (2 if name == "liger" else 0), "a call for each layer"
    assert losses["liger"] == losses["stock"] and module.apply_rotary_pos_emb is rotate
    assert contenders["liger"].forward.mark == 1 and not hasattr(stock, "mark")


def test_a_liger_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def apply(model: Any) -> None:
        model.forward = lambda **_: 1 / 0

    liger = types.SimpleNamespace(apply_liger_kernel_to_llama=apply)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    options = types.SimpleNamespace(device="cpu", contender=("stock", "liger"), rounds=9)
    figures, _ = models.measure(models.SMALL["llama-3.2-1b"], None, options)
    assert list(figures) == ["stock"]
    assert "liger is left out: it fails here: division by zero" in capsys.readouterr().err


def attention_calls(model: Any) -> list[tuple[Any, Any]]:
    """Compiles the model, and returns `attn_mask` and `is_causal` of each attention call in its graphs."""
    seen: list[tuple[Any, Any]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        calls = (node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target))
        seen.extend((kwargs["attn_mask"], kwargs["is_causal"]) for kwargs in calls)
        return graph

    tokens = torch.zeros(1, 8, dtype=torch.long)
    torch.compile(model, backend=backend)(input_ids=tokens, labels=tokens)
    return seen


def test_without_a_mask() -> None:
    stock, _ = models.make(models.SMALL["llama-3.2-1b"], "cpu")
    assert all(mask is not None and not causal for mask, causal in attention_calls(stock))
    assert attention_calls(models.without_mask(stock)) == [(None, True)] * 2


# Functions by which a wrong model changes one parameter's gradient. None stands for constant logits.
PLANTED: dict[str, Callable[[torch.Tensor], torch.Tensor | None] | None] = {
    "constant logits": None,
    "zeros": torch.zeros_like,
    "the sign": torch.neg,
    "x 1.05": lambda grad: 1.05 * grad,
    "x 0.95": lambda grad: 0.95 * grad,
    "missing": lambda grad: None,
}


WRONG = {
    "transformer.h.1.ln_2.bias": "gpt2-medium",
    "transformer.wte.weight": "gpt2-medium",
    "bert.encoder.layer.0.attention.self.query.bias": "bert-large",
    "vit.embeddings.cls_token": "vit-large",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("planted", PLANTED)
def test_another_model_is_refused(planted: str, name: str) -> None:
    """A model with a wrong gradient is reported, even if its first loss is within 5 % of the right loss."""
    stock, inputs = models.make(models.SMALL[WRONG[name]], "cpu")
    weight, change, losses = dict(stock.named_parameters())[name], PLANTED[planted], []

    class Wrong(models.Contender):
        def loss(self) -> torch.Tensor:
            losses.append(super().loss())
            if change:
                weight.grad = change(weight.grad)
            return losses[-1]

    contenders, _ = models.contenders_of(stock, inputs, ("stock", "converted"))
    other = contenders["converted"]
    contenders["converted"] = Wrong(**vars(other))
    if change is None:
        head = other.model.classifier if name.startswith("vit") else other.model.get_output_embeddings()
        head.forward = lambda x: 0.0 * head.weight[:, 0] + 0.0 * x[..., :1]
    with pytest.raises(SystemExit, match=rf"{type(stock).__name__}, converted: the gradient of .*: not the same model"):
        models.judge(stock, inputs, contenders)
    assert abs(losses[0] - contenders["stock"].loss()) < 0.05 * losses[0]


@pytest.mark.parametrize("options", [["--rounds", "8"], ["--model", "other"], ["--rounds", "x"]])
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        models.main(options)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1

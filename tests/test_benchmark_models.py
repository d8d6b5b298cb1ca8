"""python -m benchmarks.models on small models: what it writes, and one sentence per error."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import models

CONVERTED = ("stock", "converted", "linear loss")


def test_figures_of_small_models(tmp_path: Path, device: str, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "figures" / "models.json"
    options = ["--small", "--no-compile", "--rounds", "9", "--json", str(path), "--profile", "converted"]
    models.main(["--device", device, *options])
    results = json.loads(path.read_text())
    assert {"device", "torch", "versions", "python", "commit", "rounds", "seed"} <= results["machine"].keys()
    assert [row["model"] for row in results["rows"]] == list(models.SHAPES)
    for row in results["rows"]:
        assert row["converted_modules"] >= 10 and tuple(row["figures"])[:3] == CONVERTED
        for figures in row["figures"].values():
            assert 0 < figures["seconds"]["low"] <= figures["seconds"]["median"] <= figures["seconds"]["high"]
            assert device == "cpu" or figures["peak_bytes"] > 0
        profile = (path.parent / f"profile-{row['model']}-converted.txt").read_text()
        assert "extension_cpp::" in profile or device == "cuda"
    assert f"The figures are in {path}." in capsys.readouterr().out.replace("\n", "")


def test_contenders_share_their_weights(device: str) -> None:
    stock, tokens = models.make(models.SMALL["llama-3.2-1b"], device)
    contenders, changed = models.contenders_of(stock, tokens, CONVERTED, ("", models.COMPILED))
    assert list(contenders) == [*CONVERTED, *(name + models.COMPILED for name in CONVERTED)]
    assert changed["model.layers.0.mlp"] == "swiglu" and type(stock.model.layers[0].mlp).__mro__[1] is torch.nn.Module
    for contender in contenders.values():
        model = getattr(contender.forward, "_orig_mod", contender.forward)
        assert all(a is b for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_what_liger_replaces_is_there_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Liger changes a global function and the given model, as Liger does."""
    stock, tokens = models.make(models.SMALL["llama-3.2-1b"], "cpu")
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
    contenders, _ = models.contenders_of(stock, tokens, ("stock", "converted", "liger"), ("",))
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
    figures, _ = models.measure(models.SMALL["llama-3.2-1b"], "cpu", ("stock", "liger"), ("",), 9, {})
    assert list(figures) == ["stock"]
    assert "liger is left out, as it fails here: division by zero" in capsys.readouterr().err


def test_another_model_is_noticed() -> None:
    with pytest.raises(SystemExit, match=r"llama: the first loss is 4.0 stock and 4.2 converted"):
        models.check("llama", {"stock": {"first_loss": 4.0}, "converted": {"first_loss": 4.2}})
    with pytest.raises(SystemExit, match="not the same model"):
        models.check("llama", {"stock": {"first_loss": 4.0}, "converted": {"first_loss": float("nan")}})


@pytest.mark.parametrize("options", [["--rounds", "8"], ["--model", "other"], ["--rounds", "x"], ["--profile", "x"]])
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        models.main(options)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1

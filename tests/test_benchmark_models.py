"""python -m benchmarks.models on small models: what it writes, and one sentence an error."""

import json
from pathlib import Path

import pytest

from benchmarks import models


def test_figures_of_small_models(tmp_path: Path, device: str, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "figures" / "models.json"
    models.main(["--device", device, "--small", "--no-compile", "--rounds", "9", "--json", str(path)])
    results = json.loads(path.read_text())
    assert {"device", "torch", "versions", "python", "commit", "rounds", "seed"} <= results["machine"].keys()
    assert [row["model"] for row in results["rows"]] == list(models.SHAPES)
    for row in results["rows"]:
        assert row["mode"] == "eager" and row["converted_modules"] >= 5
        for figures in (row["figures"]["stock"], row["figures"]["converted"]):
            assert 0 < figures["seconds"]["low"] <= figures["seconds"]["median"] <= figures["seconds"]["high"]
            assert device == "cpu" or figures["peak_bytes"] > 0
    assert f"The figures are in {path}." in capsys.readouterr().out.replace("\n", "")


def test_another_model_is_noticed() -> None:
    with pytest.raises(SystemExit, match=r"llama: the first loss is 4.0 as it is and 4.2 converted"):
        models.check("llama", {"stock": {"first_loss": 4.0}, "converted": {"first_loss": 4.2}})
    with pytest.raises(SystemExit, match="not the same model"):
        models.check("llama", {"stock": {"first_loss": 4.0}, "converted": {"first_loss": float("nan")}})


@pytest.mark.parametrize("options", [["--rounds", "8"], ["--model", "other"], ["--rounds", "x"]])
def test_wrong_options(options: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        models.main(options)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1

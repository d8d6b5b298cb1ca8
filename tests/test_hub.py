"""Tests the copy of the package that scripts/hub.py builds for Hugging Face's `kernels`. Tests its files, its use in
the same process as the package, and models with its layers.

Most of these tests run only with --slow, because compiling the C++ shims for the copy's namespace takes more than a
minute of processor time. test_layers.py compares the layers with those of the models without --slow."""

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from extension_cpp import LIBRARY
from extension_cpp.command import info
from scripts import hub
from tests.forked import python

for _module in ("kernels", "kernel_abi_check"):
    if importlib.util.find_spec(_module) is None:
        pytest.skip(f"{_module} is not installed", allow_module_level=True)

ROOT = hub.ROOT
NAMESPACE = "_extension_cpp_test"  # always the same, so that later runs need not compile the shims again
DECODER_LAYERS = {"RotaryPosEmb": 2, "SwiGLUMLP": 2, "SiLU": 2}
REPLACED = {
    "llama": DECODER_LAYERS | {"RMSNorm": 5},
    "qwen3": DECODER_LAYERS | {"RMSNorm": 9},  # among them q_norm and k_norm of both layers
    "gemma3": {"RotaryPosEmb": 2, "GemmaRMSNorm": 13, "GeGLUMLP": 2, "GeluTanh": 2},
    "gpt2": {"LayerNorm": 5, "GeluTanh": 2},
}
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def variant(tmp_path_factory) -> Path:
    """Builds a variant, the copy for this machine, and returns its folder. Only the C++ shims are compiled again."""
    build = info.read_build()
    assert build is not None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLIBC")}
    environment |= {"USE_CUDA": "0" if build.cuda is None else "1", "DEBUG": str(int(build.debug))}
    environment |= {"TORCH_CUDA_ARCH_LIST": ";".join(build.architectures)}
    folder = tmp_path_factory.mktemp("hub") / "build"
    code = "import sys, pathlib; from scripts import hub; print(hub.lay_out(pathlib.Path(sys.argv[1]), sys.argv[2]))"
    command = [sys.executable, "-c", code, str(folder), NAMESPACE]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return Path(made.stdout.splitlines()[-1])


@functools.cache
def models(variant: Path, device: str) -> dict:
    """Runs tests/hub_models.py and returns its results."""
    command = [sys.executable, "-m", "tests.hub_models", str(variant), device]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_variant_has_the_modules_that_its_modules_import(tmp_path):
    """Every module of a variant can be imported beside the library alone. A variant leaves out most commands."""
    for path in hub.python_files():
        copy = tmp_path / "variant" / path.relative_to(hub.PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    shutil.copy(LIBRARY, tmp_path / "variant")
    files = (path.relative_to(tmp_path).with_suffix("") for path in (tmp_path / "variant").rglob("*.py"))
    names = sorted(".".join(file.parts) for file in files if file.name != "__init__")
    run = python("-c", "".join(f"import {name}\n" for name in ["variant", *names]), cwd=tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
def test_kernels_takes_the_variant_where_it_fits(variant) -> None:
    from kernels.variants import parse_variant

    parsed = parse_variant(variant.name)
    build = info.read_build()
    assert build is not None
    device = "cpu" if build.cuda is None else "cu" + build.cuda.replace(".", "")
    assert (str(parsed.framework.version), parsed.arch.backend.variant_str) == ("2.10", device)
    assert (parsed.arch.platform, parsed.arch.os) == (os.uname().machine, "linux")
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["id"] == NAMESPACE
    assert metadata["backend"].get("archs", []) == list(build.architectures)


@pytest.mark.slow
def test_the_copy_names_the_package_nowhere(variant) -> None:
    """The copy's files do not import the package or name its operators, which would use the installed package."""
    imports, operators = r"^\s*(from|import) extension_cpp\b", r"torch\.ops\.extension_cpp(?!\.\*)"
    registered = r"\bregister\w*\(\s*f?\"extension_cpp::"
    for path in variant.rglob("*.py"):
        found = re.search(f"{imports}|{operators}|{registered}", path.read_text(), re.MULTILINE)
        assert found is None, f"{path.name}: {found[0]}"
    for path in hub.build_library.CSRC.rglob("*"):
        assert path.is_dir() or not re.search(r"STABLE_TORCH_LIBRARY\w*\(extension_cpp\b", path.read_text()), path
    assert {path.name for path in variant.rglob("command/*.py")} == set(hub.OF_COMMAND)


@pytest.mark.slow
def test_library_uses_no_symbol_of_python(variant) -> None:
    assert [fault for fault in hub.faults(variant / "libextension_cpp.so") if "Manylinux" not in fault] == []


def test_namespace_follows_the_sources(monkeypatch, tmp_path) -> None:
    csrc = tmp_path / "extension_cpp" / "csrc"
    csrc.mkdir(parents=True)
    files = [tmp_path / "build_library.py", tmp_path / "extension_cpp" / "ops.py", csrc / "a.c"]
    for path in files:
        path.write_text("")
    monkeypatch.setattr(hub, "ROOT", tmp_path)
    monkeypatch.setattr(hub, "PACKAGE", tmp_path / "extension_cpp")
    monkeypatch.setattr(hub.build_library, "CSRC", csrc)
    names = [hub.namespace_for("cpu"), hub.namespace_for("cpu")]
    for path in files:
        path.write_text("x")
        names.append(hub.namespace_for("cpu"))
    assert all(re.fullmatch("_extension_cpp_cpu_[0-9a-f]{10}", name) for name in names)
    assert len(set(names)) == 4


@pytest.mark.slow
def test_two_copies_in_one_process(variant, device) -> None:
    found = models(variant, device)
    assert found["namespaces"] == [NAMESPACE, "extension_cpp"]
    assert found["results"][0] == found["results"][1]


COPIED = """
from tests.hub_models import make, replaced, torch

model = make("llama", torch.float32, "cpu")
{}
model(torch.arange(8)[None])
print(sorted(replaced(model, vars(model.model.norm)["forward"].__func__.__module__.split(".")[0]).items()))
"""


@pytest.mark.slow
def test_the_snippet_of_the_document_runs_as_it_is_copied(variant) -> None:
    code = (ROOT / "docs" / "hub.md").read_text().split("## Load")[1].split("```python no-run\n")[1].split("```")[0]
    code, count = re.subn(r'"/path/to/the/checkout/build/[\w-]+"', repr(str(variant)), code)
    assert count == 1
    run = subprocess.run([sys.executable, "-c", COPIED.format(code)], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "[('RMSNorm', 5), ('RotaryPosEmb', 2), ('SiLU', 2)]\n", run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REPLACED)
def test_models_with_the_layers(name, dtype, variant, device) -> None:
    found = models(variant, device)["models"][f"{name} {dtype}"]
    assert found["replaced"] == REPLACED[name]
    for part in ("logits", "grads"):
        ours, stock = found[part]
        assert 0 < ours <= 2 * stock + 4 * torch.finfo(getattr(torch, dtype)).eps, (part, ours, stock)
    assert found.get("compiled", 0.0) <= 1e-6

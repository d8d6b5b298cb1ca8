"""Tests the commands of python -m extension_cpp: `demo` with a few training steps, and `info`, which also says whether
a build fits the machine. Tests their error messages. test_scaffold.py tests `new` and `new-package`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import extension_cpp
from extension_cpp import __main__ as command
from extension_cpp.command import demo, demo_model, demo_table, info
from extension_cpp.command.info import Build, Gpu, Machine
from tests.forked import python

PACKAGE = Path(extension_cpp.__file__).parent
OPERATORS = sorted(set(extension_cpp.__all__) - {"nn", "reference"})


def run(*words, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, **options)


# Tests of demo


# A program that runs the demo with small tensors, a model of one block, and torch.compile without code generation.
SMALL_DEMO = """
import functools
import sys
import torch
torch.compile = functools.partial(torch.compile, backend="eager")
sys.path.insert(0, sys.argv[1])
from extension_cpp import __main__
from extension_cpp.command import demo, demo_table
demo.LAYERS = 1
demo_table.ROWS_TIMED, demo_table.SECONDS_A_ROW = {"cpu": 64}, 0
sys.exit(__main__.main(["demo", "--device", "cpu", "--steps", "50"]))
"""


def test_demo(tmp_path):
    done = python("-c", SMALL_DEMO, PACKAGE.parent, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for name in (spec.name for spec in demo_table.specs()):
        (row,) = [line.split() for line in lines if line.startswith(f"{name} ") and line.count(" / ") == 3]
        ours, eager = float(row[1]), 0.0 if row[3] == "-" else float(row[3])
        assert ours <= max(2 * eager, 8 * torch.finfo(torch.float32).eps), row
    assert max(map(len, lines)) <= 80
    converted = "3 x rms_norm, 1 x cross_entropy, 2 x add_rms_norm, 1 x swiglu, 1 x rotary_embedding; 0 modules left"
    assert f"extension_cpp.nn.convert(model): {converted}" in " ".join(done.stdout.split())
    assert "The losses agree over the first 50 steps" in done.stdout
    picture = tmp_path / "out" / "demo_loss.png"
    assert "The loss curves: out/demo_loss.png" in lines
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000
    assert "Traceback" not in done.stderr  # it may contain warnings of torch, for example about the Python version


def trained(losses: list[float]) -> demo_model.Training:
    alphabet, text = demo.read_text()
    run = demo.training(text, len(alphabet), "cpu", len(losses))
    run.losses, run.seconds = losses, [1.0] * len(losses)
    return run


@pytest.mark.parametrize(
    "step, difference, status",
    [(49, 9e-4, 0), (49, 1.1e-3, 1), (0, -1.1e-3, 1), (3, float("nan"), 1), (50, 0.5, 0)],
)
def test_demo_fails_where_the_losses_part(monkeypatch, tmp_path, capsys, step, difference, status):
    ours = [4.0] * 60
    ours[step] += difference
    runs = iter([trained(ours), trained([4.0] * 60)])
    monkeypatch.setattr(demo, "training", lambda *_: next(runs))
    monkeypatch.setattr(demo_model, "train", lambda *_: None)
    monkeypatch.setattr(demo.demo_table, "show", lambda *_: None)
    monkeypatch.setattr(demo, "compile_both", lambda *_: None)
    monkeypatch.setattr(demo_model, "generate", lambda *_, temperature: "text")
    monkeypatch.setattr(demo, "draw", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    assert command.main(["demo", "--device", "cpu"]) == status
    assert ("DO NOT agree" in capsys.readouterr().out) == bool(status)


def test_demo_shows_every_function():
    shown = [spec.name for spec in demo_table.specs()]
    assert len(shown) > 20 and sorted(shown) == OPERATORS


# Tests of info


def test_info(capsys):
    assert command.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Do they fit?\n  ") and "Operators" not in printed
    assert f"extension_cpp  {extension_cpp.__version__}\n" in printed and torch.__version__ in printed
    assert info.ask_library("cpu_level") in printed
    assert command.main(["info", "--schemas"]) == 0
    with_schemas = capsys.readouterr().out
    schemas = info.schemas()
    assert with_schemas.startswith(printed) and all(f"  {schema}\n" in with_schemas for schema in schemas)
    defaults = re.findall(r"float\?? \w+=([^,)]+)", " ".join(schemas))
    assert {"1e-05", "0.0"} <= {*defaults} and all(repr(eval(default)) == default for default in defaults)
    for name in OPERATORS:
        assert [schema for schema in schemas if schema.startswith(f"extension_cpp::{name}(")] != []


# The source of an imitation of torch. It has only the attributes that the package reads to check torch's version.
NO_MORE_THAN_A_VERSION = """
__version__ = "{}+cpu"
class version: cuda = None
class cuda: is_available = staticmethod(lambda: False)
"""
NEW_TORCH, OLD_TORCH = map(NO_MORE_THAN_A_VERSION.format, ("2.11.0", "2.5.1"))


@pytest.mark.parametrize(
    "missing, torch_text, sentence",
    [
        (["*.so"], NEW_TORCH, "extension_cpp is not built"),
        ([], OLD_TORCH, "extension_cpp needs torch >= 2.10, and torch 2.5.1+cpu is installed"),
        ([], "raise ImportError('no such thing')", "extension_cpp needs torch >= 2.10"),
    ],
    ids=["no library", "old torch", "no torch"],
)
def test_commands_where_the_package_cannot_be_loaded(tmp_path, missing, torch_text, sentence):
    """If the package's library is missing, or torch is missing or too old, `info` and `demo` report it in a sentence,
    and an import of the package raises ImportError. The test runs a copy of the package with an imitation of torch."""
    ignore = shutil.ignore_patterns("csrc", "__pycache__", *missing)
    shutil.copytree(PACKAGE, tmp_path / "extension_cpp", ignore=ignore)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch_text)
    told = run("-m", "extension_cpp", "info", cwd=tmp_path)
    assert told.returncode == 1 and told.stderr == ""
    assert sentence in told.stdout and "Python  " in told.stdout
    assert ("cpu=" in told.stdout or "baseline" in told.stdout) == (not missing)  # read from the library's file
    refused = run("-m", "extension_cpp", "demo", cwd=tmp_path)
    assert refused.returncode == 1 and refused.stdout == ""
    assert refused.stderr.startswith(f"error: {sentence}") and refused.stderr.count("\n") == 1
    # Imports other than by `python -m extension_cpp` raise ImportError, also in another module that is run by -m.
    (tmp_path / "train.py").write_text("import extension_cpp\n")
    for words in (["-c", "import extension_cpp"], ["-m", "train", "extension_cpp"]):
        imported = run(*words, cwd=tmp_path)
        assert imported.returncode == 1 and "ImportError" in imported.stderr and sentence in imported.stderr


def test_closed_pipe():
    """A closed pipe, as `| head` leaves it, causes no traceback, not even at exit. All commands share this code."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "extension_cpp", "info"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=PACKAGE.parent)
    os.close(writer)
    assert done.returncode in (1, 141) and done.stderr == ""  # rich exits with 1 when the pipe is closed


def test_facts_from_files(tmp_path):
    (tmp_path / "facts").write_text("first: 1\nsecond: 2 3\n")
    assert info._search(r"^second: (.+)$", str(tmp_path / "facts"))[1] == "2 3"
    assert info._search(r"^third", str(tmp_path / "facts")) is None and info._search("", str(tmp_path / "none")) is None


# Tests whether a build fits a machine


def build(cuda: str | None = "13.0", *architectures: str) -> Build:
    return Build(cuda, architectures or ("9.0+PTX",), ("baseline", "v3", "v4"), False)


def machine(*capabilities: tuple[int, int], **changes) -> Machine:
    facts = {"torch": "2.11.0", "torch_cuda": "13.0", "driver": "580.65.06", "driver_cuda": "13.0"} | changes
    return Machine(**facts, gpus=tuple(Gpu(f"GPU{major}{minor}", (major, minor)) for major, minor in capabilities))


@pytest.mark.parametrize(
    "build, machine, expected",
    [
        (build(), machine(driver=None, driver_cuda=None, torch_cuda=None), []),
        (build(None), machine(), []),
        (build(), machine((9, 0)), []),
        (build(), machine((10, 0)), []),
        (build("13.0", "7.5", "8.0"), machine((8, 6)), []),
        (build(), machine((9, 0), driver="580.0"), []),
        (build("12.8", "8.0"), machine((8, 0), driver="525.60.13", driver_cuda="12.0", torch_cuda="12.8"), []),
        (build(), machine((9, 0), driver=None, driver_cuda=None), []),
        (build(), machine((8, 6)), ["does not cover GPU86", 'TORCH_CUDA_ARCH_LIST="8.6" make build']),
        (build("13.0", "8.6"), machine((8, 0)), ["does not cover GPU80", 'TORCH_CUDA_ARCH_LIST="8.0" make build']),
        (build("13.0", "9.0"), machine((10, 0)), ["does not cover GPU100", 'LIST="10.0" make build']),
        (build("13.0", "9.0"), machine((9, 0), (12, 0)), ["does not cover GPU120", 'LIST="9.0;12.0" make build']),
        (build("13.2", "9.0+PTX"), machine((10, 0)), ["PTX a driver for CUDA 13.0 cannot compile for GPU100"]),
        (build("13.2", "9.0+PTX"), machine((9, 0)), []),
        (build("13.9", "9.0+PTX"), machine((10, 0), driver_cuda="13.10"), []),
        (build("13.10", "9.0+PTX"), machine((10, 0), driver_cuda="13.9"), ["PTX a driver for CUDA 13.9 cannot"]),
        (build("13.0", "8.0"), machine((8, 9)), []),
        (build("13.0", "8.0"), machine((9, 0)), ["does not cover GPU90"]),
        (build("13.0", "9.0a"), machine((9, 0)), []),
        (build("13.0", "10.0a"), machine((10, 3)), ["does not cover GPU103"]),
        (build("13.0", "9.0a+PTX"), machine((10, 0)), ["does not cover GPU100"]),
        (build("13.0", "10.0f"), machine((10, 3)), []),
        (build("13.0", "10.0f+PTX"), machine((12, 0)), ["does not cover GPU120"]),
        (build(), machine((9, 0), driver="570.86.10", driver_cuda="12.8"), ["driver is 570.86.10", "needs 580 or"]),
        (build(), machine((7, 0)), ["GPU70 (compute capability 7.0) is older than 7.5"]),
        (build(None), machine((9, 0)), ["no CUDA kernels", "(GPU90)", 'USE_CUDA=1 TORCH_CUDA_ARCH_LIST="9.0" make']),
        (build(None), machine((7, 0)), ["older than 7.5"]),
        (build(), machine((9, 0), torch_cuda=None), ["torch 2.11.0 was built without CUDA"]),
        (build(), machine((9, 0), torch=None, torch_cuda=None), []),
        (build(), machine((9, 0), torch_sees_gpus=False), ["torch does not see", "CUDA_VISIBLE_DEVICES"]),
    ],
)
def test_fit(build, machine, expected):
    found = info.misfits(build, machine)
    assert len(found) == min(1, len(expected)), found
    assert all(words in found[0] for words in expected), found
    # A CPU build on a machine without a GPU is no misfit, but info.cuda_problem still reports that no op runs on a GPU.
    assert (info.cuda_problem(build, machine) is None) == (not expected and bool(machine.gpus))


def test_parse_build():
    text = "cuda=13.0 architectures=7.5,9.0+PTX cpu=baseline,v3,v4 debug=0"
    assert info.parse_build(text) == Build("13.0", ("7.5", "9.0+PTX"), ("baseline", "v3", "v4"), False)
    assert info.parse_build("cuda=none architectures=none cpu=baseline debug=1") == Build(None, (), ("baseline",), True)
    assert info.read_build() == info.search_build()
    assert extension_cpp._tag(text) == "+cu130" and extension_cpp._tag("cuda=none architectures=none") == "+cpu"


def test_plan(capsys):
    """`info --plan` prints the kernel that csrc/rows/plan.h picks for a norm. For forward, it is a row kernel with one
    CTA or, for a wide row, a cluster of 16 CTAs per row. For backward of a small tensor, it is the split kernel."""

    def plan(*words: str) -> dict[str, str]:
        assert command.main(["info", "--plan", *words]) == 0
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.startswith(f"{words[0]}, {'backward' if '--backward' in words else 'forward'}, ")
        numbers = dict(map(str.strip, line.rsplit(maxsplit=1)) for line in lines if line.startswith("  "))
        return {name: numbers[name] for name in ("kernel", "cluster")}

    assert plan("rms_norm", "bfloat16", "4096x5120") == {"kernel": "row", "cluster": "1"}
    assert plan("layer_norm", "float32", "512x131072") == {"kernel": "row", "cluster": "16"}
    assert plan("layer_norm", "bfloat16", "32x512", "--backward", "--weights", "float32")["kernel"] == "split"
    assert command.main(["info", "--plan", "rms_nrom", "bfloat16", "2x3"]) == 1
    assert re.fullmatch(r"error: expected OP .* but got 'rms_nrom'\n", capsys.readouterr().err)


# Tests of error messages


def test_a_wrong_command_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        command.main(["inof"])
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1
    assert all(name in printed for name in ("demo", "info", "new", "remove", "new-package"))


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["demo", "--steps", "0"], "argument --steps: expected a whole number of at least 1, but got '0'"),
        ([], "expected one of the commands demo, info, new, remove, new-package"),
    ],
)
def test_usage_errors(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == ""
    assert printed.err.startswith(f"error: {sentence}") and printed.err.count("\n") == 1


def refused(capsys, *arguments) -> str:
    assert command.main(["demo", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def test_what_the_demo_needs(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "needs a C++ compiler, and '/nowhere/c++' was not found" in refused(capsys)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "the demo needs matplotlib, not installed here:" in refused(capsys)


@pytest.mark.parametrize(
    "built, there, sentence",
    [
        (build(), machine(), "--device cuda: This machine has no NVIDIA GPU, or no driver for it."),
        (build(), machine((8, 6)), "--device cuda: This library was built for 9.0+PTX, which does not cover GPU86"),
        (build(), machine((9, 0)), None),
    ],
)
def test_device_of_the_demo(monkeypatch, capsys, built, there, sentence):
    monkeypatch.setattr(info, "read_build", lambda: built)
    monkeypatch.setattr(info, "read_machine", lambda: there)
    if sentence is None:
        assert demo.choose_device(None) == demo.choose_device("cuda") == ("cuda", "")
        return
    assert sentence in refused(capsys, "--device", "cuda")
    device, remark = demo.choose_device(None)
    assert device == "cpu" and bool(remark) == bool(there.gpus)

"""Runs every program in examples/, at least on the CPU, and checks its output."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import extension_cpp
from examples import recurrent_text
from tests.forked import python

ROOT = Path(__file__).resolve().parent.parent


def run(*words: object, **variables: object) -> str:
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    result = python(*words, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_basic_usage() -> None:
    told = run("-m", "examples.basic_usage")
    assert "x.grad   (1024, 2048)\nbias.grad (2048,)" in told
    first, last = re.search(r"loss +([\d.]+) at first, ([\d.]+) after", told).groups()
    assert float(last) < 0.1 * float(first)
    assert len(re.findall(r"^ +\d+ us  ", told, re.MULTILINE)) == 2


def recurrent(folder: Path, *words: object) -> int:
    return recurrent_text.main(["--device", "cpu", "--no-compile", "--out", str(folder), *map(str, words)])


@pytest.fixture
def small_recurrent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sizes = {"width": 32, "layers": 2, "context": 48, "batch": 4, "learning_rate": 1e-2}
    monkeypatch.setitem(recurrent_text.SIZES, "cpu", sizes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small for more threads
    yield
    torch.set_num_threads(threads)


def test_recurrent_text(small_recurrent: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses of recurrent_text's three recurrences differ by float32 rounding: 1e-5 nats per byte in 12 steps."""
    assert recurrent(tmp_path, "--recurrence", "ours", "loop", "torch", "--steps", 12) == 0
    assert len(re.findall(r"^(ours|loop|torch) +loss .* [\d.]+ ms a step", capsys.readouterr().out, re.MULTILINE)) == 3
    header, *rows = (tmp_path / "curves.csv").read_text().splitlines()
    assert header == "step,ours,loop,torch,ms_ours,ms_loop,ms_torch" and len(rows) == 12
    columns = zip(*(map(float, row.split(",")) for row in rows), strict=True)
    losses = dict(zip(header.split(","), map(list, columns), strict=True))
    assert losses["ours"][-1] < 0.95 * losses["ours"][0]
    assert losses["loop"] == pytest.approx(losses["ours"], rel=0, abs=1e-5)
    assert losses["torch"] == pytest.approx(losses["ours"], rel=0, abs=1e-5)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert recurrent(tmp_path, "--steps", 2) == 0
    assert (tmp_path / "curves.csv").read_text().startswith("step,ours,ms_ours\n1,")


def test_states_of_recurrent_text_begin_with_memories_of_many_lengths() -> None:
    """In a new model of recurrent_text, the first state of a layer keeps 1/2 of its content at each step, and the last
    state keeps 64/65. The states between them keep increasing fractions."""
    bias, _ = recurrent_text.Mixer("ours", 8).gru.projection.bias.chunk(2)
    kept = 1 - torch.sigmoid(bias)
    assert [kept[0].item(), kept[-1].item()] == pytest.approx([1 / 2, 64 / 65]) and kept.diff().min() > 0


@pytest.mark.parametrize("name", ["loop", "torch"])
def test_recurrent_text_gradients(name: str, device: str) -> None:
    a, b, grad = torch.randn(3, 2, 9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    a.requires_grad_()
    b.requires_grad_()
    expected = extension_cpp.linear_recurrence(a, b)
    with torch.compiler.set_stance("force_eager" if device == "cpu" else "default"):  # compiling takes long
        h = recurrent_text.RECURRENCES[name](a, b)
        gradients = torch.autograd.grad(h, (a, b), grad)
    torch.testing.assert_close(h, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (a, b), grad))


def test_recurrent_text_without_the_scan_of_torch(
    small_recurrent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("not on this device\nand a stack")

    monkeypatch.setattr(recurrent_text, "scan", refuse)
    assert recurrent(tmp_path, "--recurrence", "ours", "torch", "--steps", 1) == 1
    assert capsys.readouterr().err == (
        f"error: --recurrence torch: the associative_scan of PyTorch {torch.__version__} does not run here "
        "(NotImplementedError: not on this device); choose ours and loop\n"
    )
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs examples.accessor.compare once for all tests and returns its output folder."""
    folder = tmp_path_factory.mktemp("accessor")
    words = ["--device", "cpu", "--mib", 1, "--seconds", 0.01, "--json", folder / "cpu.json"]
    told = run("-m", "examples.accessor.compare", *words, TORCH_EXTENSIONS_DIR=folder)
    assert "percent of copy" in told
    return folder


@pytest.mark.slow  # compiling against ATen takes half a minute; the template `accessor` is also tested without --slow
def test_accessor_comparison(compared: Path) -> None:
    rows = json.loads((compared / "cpu.json").read_text())["rows"]
    assert len(rows) == 4
    assert all(set(row) == {"ours", "accessor", "eager", "copy"} and min(row.values()) > 0 for row in rows.values())


@pytest.mark.slow
def test_accessor_is_right(compared: Path) -> None:
    told = run("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "examples/accessor", TORCH_EXTENSIONS_DIR=compared)
    assert re.search(r"\(256, 1024\) y: largest error \S+", told)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so that neither has a reason to refuse")
def test_accessor_benchmark_says_what_it_lacks() -> None:
    result = python("examples/accessor/benchmark.py", cwd=ROOT)
    assert result.returncode == 1 and result.stderr.startswith("error: CUDA events need a GPU")


@pytest.mark.slow
def test_accessor_benchmark(compared: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("CUDA events need a GPU")
    assert re.search(r" ms a call$", run("examples/accessor/benchmark.py", TORCH_EXTENSIONS_DIR=compared), re.MULTILINE)


# Replacements that make the notebook faster without --slow. Inductor is left out, because test_graphs.py compiles every
# op by Inductor, and timings are short, because the test does not read them.
SHORTER = {"compile(network, fullgraph=True": 'compile(network, backend="aot_eager", fullgraph=True'}
SHORTER |= {"min_run_time=0.5": "min_run_time=0.05"}


def test_walkthrough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """The notebook examples/walkthrough.ipynb runs from start to end, as in Jupyter, and its cells check their results.
    With DEBUG=1, the notebook's op is compiled without optimisation, which is faster."""
    pytest.importorskip("ipykernel", reason="ipykernel, of requirements.txt, is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient, of requirements.txt, is not installed")
    import nbformat

    path = ROOT / "examples" / "walkthrough.ipynb"
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert json.loads(path.read_text())["nbformat_minor"] == 5
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells), "clear its outputs"
    for long, short in SHORTER.items() if not pytestconfig.getoption("--slow") else ():
        (cell,) = [cell for cell in cells if long in cell.source]
        cell.source = cell.source.replace(long, short)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("DEBUG", "1")
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    told = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "extension_cpp::softsign(Tensor x) -> Tensor" in told and told.count("largest error") == 4
    assert "expected x to be float64, float32, bfloat16 or float16, but got int32" in told
    assert len(re.findall(r"^ +\d+ us  ", told, re.MULTILINE)) == 3

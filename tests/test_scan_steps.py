"""Tests the kernels of examples/scan_steps: they compile, and are right on GPUs and, by tests/c/cuda_on_cpu, on
CPUs."""

import subprocess
from pathlib import Path

import pytest
import torch

import build_library
from benchmarks.table import scan_steps
from examples.scan_steps import measure, steps

ROOT = Path(build_library.__file__).parent
DETERMINISTIC = [step for step in steps.STEPS if step != "look_back"]
each_step = pytest.mark.parametrize("step", steps.STEPS)


def compiled_for_cpu(source: Path, folder: Path) -> steps.Scans:
    library = folder / f"lib{source.stem}.so"
    command = [*build_library.compiler("CXX", "c++", "g++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror"]
    command += ["-Wno-unknown-pragmas", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'tests/c/cuda_on_cpu'}"]
    command += ["-U_FORTIFY_SOURCE"]  # the fortified longjmp aborts when the stack changes
    subprocess.run([*command, "-x", "c++", source, "-o", library], check=True)
    return steps.Scans(library)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> steps.Scans:
    """Compiles the kernels with CTAs of 64 threads and tiles of 256 elements, so that scans of 1,100 tiles are fast."""
    folder = tmp_path_factory.mktemp("on_cpu")
    for name, old, new in (
        ("first_steps.cuh", "THREADS = 256", "THREADS = 64"),
        ("scan_steps.cu", "VECTORS = 4", "VECTORS = 1"),
    ):
        text = steps.SOURCE.with_name(name).read_text()
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, new))
    return compiled_for_cpu(folder / "scan_steps.cu", folder)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> steps.Scans:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUDA_ARCH_LIST", "native")
        library = steps.build(tmp_path_factory.mktemp("on_gpu"))
    if library is None:
        pytest.skip("there is no nvcc")
    return steps.Scans(library)


def is_right(scans: steps.Scans, step: str, shape: tuple[int, int], device: str) -> bool:
    """Checks sums of whole numbers, which are exact: a missing or repeated element changes the result."""
    whole = torch.randint(-9, 10, shape, device=device).float()
    y = measure.poisoned(lambda x: scans(step, x), whole)
    return torch.equal(y.double(), whole.cumsum(1, dtype=torch.float64))


# Shapes (rows, length). Lengths are below, at and above the 32 elements of a warp and the 256 elements of a tile of
# `on_cpu`. Rows of an odd length are not aligned to 16 bytes, and 70 rows are more than the CTAs that run at once.
SHAPES = [(0, 5), (3, 0), (1, 1), (3, 31), (5, 32), (70, 33), (4, 255), (4, 256), (3, 257), (3, 1020), (2, 9003)]


@each_step
def test_right(step: str, on_cpu: steps.Scans) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        assert is_right(on_cpu, step, shape, "cpu"), shape


def test_every_level_of_the_tree(on_cpu: steps.Scans) -> None:
    """Sums of more than 1,024 tiles, for which the step fixed_tree needs all levels of its tree, are right."""
    torch.manual_seed(0)
    assert is_right(on_cpu, "fixed_tree", (1, 256 * 1070 + 3), "cpu")


def test_right_as_it_is(tmp_path: Path) -> None:
    """Three kernels with tiles of 4096 elements, as on a GPU, give exact sums of whole numbers when compiled for the
    CPU."""
    scans = compiled_for_cpu(steps.SOURCE, tmp_path)
    torch.manual_seed(0)
    for shape in ((2, 4096 + 4), (1, 4096 * 2 + 1)):
        for step in ("block_carry", "look_back", "fixed_tree"):
            assert is_right(scans, step, shape, "cpu"), (step, shape)


@pytest.mark.parametrize("step", DETERMINISTIC)
def test_same_bits_in_every_run(step: str, on_cpu: steps.Scans) -> None:
    x = torch.randn(1, 256 * 40, generator=torch.Generator().manual_seed(0))
    assert measure.results_of_five(lambda x: on_cpu(step, x), x) == 1


@each_step
def test_numbers_that_are_not_finite_spread_forward_only(step: str, on_cpu: steps.Scans) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 100, 300, 1023):
            x = torch.ones(2, 1024)
            x[0, place] = bad
            assert torch.equal(on_cpu(step, x).nan_to_num(7e30), x.cumsum(1).nan_to_num(7e30)), (bad, place)


def test_measured(on_cpu: steps.Scans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every contender is measured in every shape, and the table lists all. A slow contender is called only once."""
    calls = measure.contenders(on_cpu)
    rows = [row for shape in ((6, 32), (1, 300)) for row in measure.measure(calls, torch.randn(shape), 9)]
    assert [*calls] == [*steps.STEPS, "torch.cumsum", "extension_cpp.cumsum"]
    assert [row["step"] for row in rows] == ["copy", *calls] * 2
    assert all(row["seconds"]["low"] > 0 for row in rows) and all(row["results_of_5"] == 1 for row in rows[1:3])
    head, (copy, walk, *others) = scan_steps(rows)
    assert head == ["", "6 x 32", "1 x 300", "largest error", "results of 5 calls"] and len(others) == len(calls) - 1
    assert copy[1].endswith(", 100 %") and copy[3:] == ["", ""]
    assert walk[0] == "walk" and walk[3].endswith(" eps") and walk[4] == "1"
    monkeypatch.setattr(measure, "SLOW", 0.0)
    slow = measure.measure({"walk": calls["walk"]}, torch.randn(1, 640), 9)[1]
    assert len(set(slow["seconds"].values())) == 1 and "results_of_5" not in slow


def test_a_wrong_step_is_not_timed(on_cpu: steps.Scans) -> None:
    calls = measure.contenders(on_cpu)
    for wrong, sentence in (
        (lambda x: calls["walk"](x) * 1.5, r"wrong of \(3, 64\) is wrong: the largest error is"),
        (lambda x: calls["walk"](x) + 1e-6, r"wrong of \(3, 64\) is wrong for whole numbers"),
        (lambda x: torch.where(torch.arange(64) < 63, calls["walk"](x), torch.nan), "the largest error is nan eps"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            measure.measure({"wrong": wrong}, torch.randn(3, 64), 9)


def test_bad_input(on_cpu: steps.Scans) -> None:
    with pytest.raises(RuntimeError, match=r"walk: expected x to be float32, \(rows, n\) and contiguous, but got"):
        on_cpu("walk", torch.ones(2, 3).t())


def test_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels also compile without a GPU."""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    library = steps.build(tmp_path)
    if library is None:
        pytest.skip("there is no nvcc")
    steps.Scans(library)


@each_step
def test_right_on_a_gpu(step: str, on_gpu: steps.Scans) -> None:
    torch.manual_seed(0)
    shapes = [*SHAPES, (70_000, 33), (3, 4096 * 1100 + 4), (2, 4096 * 40 + 1)]
    for shape in shapes:
        assert is_right(on_gpu, step, shape, "cuda"), shape
    if step in DETERMINISTIC:
        x = torch.randn(1, 4096 * 1500, device="cuda")
        assert measure.results_of_five(lambda x: on_gpu(step, x), x) == 1


def test_a_step_follows_the_stream(on_gpu: steps.Scans) -> None:
    x = torch.ones(64, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        z = x.clone()
        y = on_gpu("fixed_tree", z)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(y[:, -1], torch.full((64,), 4096.0, device="cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so that nothing is refused")
def test_measuring_says_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure.main([])
    assert "torch sees no GPU here" in capsys.readouterr().err

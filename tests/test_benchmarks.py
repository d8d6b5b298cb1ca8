"""Runs `python -m benchmarks` on tiny tensors. Tests the results file, runs that add to an existing file, the results
that an interrupted run keeps, the command `compare`, and error messages."""

import contextlib
import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import extension_cpp
from benchmarks import __main__ as command
from benchmarks import (
    compare,
    host,
    norm_plans,
    peers,
    plot,
    results,
    run,
)
from benchmarks.table import WAYS, table
from extension_cpp.command import info
from extension_cpp.registration import calls
from tests.opspec import Sample, as_tuple, leaves

TINY = ["--plain-malloc", "--no-compile", "--mib", "1", "--rounds", "9", "--dtype", "float32", "--width", "1025"]


@pytest.fixture
def bench(tmp_path: Path, device: str):
    """Returns a function that runs the benchmarks and returns the results file, to which each run adds."""
    path = tmp_path / "deep" / "figures.json"

    def call(*words: str) -> dict:
        threads = torch.get_num_threads()
        try:
            assert command.main(["--device", device, *TINY, "--json", str(path), *words]) in (0, 130)
        finally:
            torch.set_num_threads(threads)
        return json.loads(path.read_text())

    call.path = path
    return call


def test_a_row_has_its_figures(bench, device) -> None:
    found = bench("--op", "rms_norm", "--pass", "backward")
    about = {"device", "threads", "torch", "python", "mib", "plain_malloc", "rounds", "seed", "versions"}
    assert about <= found["machine"].keys()
    (row,) = found["rows"]
    assert (row["op"], row["pass"], row["dtype"], row["rows"], row["cols"]) == (
        "rms_norm",
        "backward",
        "float32",
        255,
        1025,
    )
    assert {"copy", "ours", "eager"} <= row["seconds"].keys()
    for other, _ in results.OTHERS:
        assert (other in row) == (device == "cuda")
    for seconds in row["seconds"].values():
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"]
    copied, floor = 2 * 255 * 1025 * 4, 3 * 255 * 1025 * 4
    share = floor / row["seconds"]["ours"]["median"] / (copied / row["seconds"]["copy"]["median"])
    assert row["percent_of_copy"]["ours"] == pytest.approx(100 * share, rel=1e-5)  # the file has six significant digits
    assert row["run"] == 1 and row["of"] == ["rms_norm"] and row["commit"] == results.commit()


def test_weights_of_a_type_of_their_own(bench, monkeypatch) -> None:
    """The dtype "bfloat16+float32" means bfloat16 tensors and float32 weights. relu has no weights and gets no row."""
    seen = set()

    def layer_norm(x, normalized_shape, weight, bias):
        seen.add((x.dtype, weight.dtype, bias.dtype))
        return extension_cpp.layer_norm(x, normalized_shape, weight, bias)

    norms = [replace(spec, function=layer_norm) if spec.name == "layer_norm" else spec for spec in run.timed_specs()]
    monkeypatch.setattr(run, "timed_specs", lambda: norms)
    (row,) = bench("--op", "layer_norm", "relu", "--dtype", "bfloat16+float32", "--pass", "forward")["rows"]
    assert (row["op"], row["dtype"], row["floor_bytes"]) == ("layer_norm", "bfloat16+float32", 2 * 2 * 511 * 1025)
    assert seen == {(torch.bfloat16, torch.float32, torch.float32)} and "failed" not in row


def test_eager_takes_them_in_float32_on_a_gpu() -> None:
    """On a GPU, PyTorch's layer_norm is timed on float32 tensors if x and weight differ in dtype, which it rejects."""
    (spec,) = [spec for spec in run.timed_specs() if spec.name == "layer_norm"]
    case = run.Case(spec, "bfloat16+float32", 2, 3, step="forward", threads=None, sizes="large")

    def function(x, weight, p, *, residual):
        assert {x.dtype, weight.dtype, residual.dtype} == {torch.float32} and p == 0.5
        return x * weight + residual, x

    x, weight = torch.tensor([1.0, 3.0]).bfloat16(), torch.tensor([1 + 2**-20, 1 / 3])
    y, same = case.eager(function)(x, weight, 0.5, residual=x)
    torch.testing.assert_close(y, (x * weight + x).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(same, x, rtol=0, atol=0)
    assert replace(case, threads=1).eager(function) is function
    assert replace(case, dtype="bfloat16").eager(function) is function


def test_a_run_continues_the_file(bench, monkeypatch, capsys) -> None:
    first = bench("--op", "relu", "--pass", "forward")
    both = bench("--op", "relu", "--pass", "forward", "backward")
    assert [row["pass"] for row in both["rows"]] == ["forward", "backward"]
    assert both["rows"][0] == first["rows"][0]
    measured = []
    measure = run.measure
    monkeypatch.setattr(run, "measure", lambda case, *rest: measured.append(case) or measure(case, *rest))
    assert bench("--op", "relu") == both and not measured
    again = bench("--op", "relu", "--pass", "forward", "--again")
    assert len(measured) == 1 and len(again["rows"]) == 2 and again["rows"][1] == both["rows"][1]
    assert "2 rows were there before" in capsys.readouterr().out


def test_a_run_without_a_file_writes_a_new_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for op in ("relu", "mish"):
        assert command.main(["--device", "cpu", *TINY, "--op", op, "--pass", "forward"]) == 0
    (row,) = json.loads((tmp_path / "out" / "bench-cpu.json").read_text())["rows"]
    assert row["op"] == "mish" and row["run"] == 1


def test_stopping_keeps_what_was_measured(bench, monkeypatch, capsys) -> None:
    measure = run.measure

    def stop_at_backward(case, *rest):
        if case.step == "backward":
            raise KeyboardInterrupt
        return measure(case, *rest)

    monkeypatch.setattr(run, "measure", stop_at_backward)
    assert [row["pass"] for row in bench("--op", "relu")["rows"]] == ["forward"]
    assert "Stopped: 1 of 2 were measured" in capsys.readouterr().out


def test_a_seed_chooses_the_inputs(bench, monkeypatch) -> None:
    make_sample = run.make_sample
    made: list[Sample] = []
    monkeypatch.setattr(run, "make_sample", lambda *words: made.append(make_sample(*words)) or made[-1])
    inputs = []
    for seed in ("0", "1", "1"):
        bench.path.unlink(missing_ok=True)
        made.clear()
        bench("--op", "relu", "--pass", "forward", "--seed", seed)
        inputs.append(made[0].args[0])
    assert torch.equal(inputs[1], inputs[2]) and not torch.equal(inputs[0], inputs[1])


def test_a_file_of_other_settings_is_refused(bench) -> None:
    bench("--op", "relu", "--pass", "forward")
    before = bench.path.read_text()
    with pytest.raises(SystemExit, match=r"error: .* was measured with seed 0, and this run has 1: give another file"):
        bench("--op", "relu", "--seed", "1")
    assert bench.path.read_text() == before


def test_small_sizes(bench, monkeypatch, device) -> None:
    monkeypatch.setattr(run, "SMALL", ((32, 512), (128, 1024)))
    rows = bench("--op", "mish", "--pass", "forward", "--sizes", "small")["rows"]
    assert [(row["rows"], row["cols"]) for row in rows] == [*run.SMALL]
    text = table(bench.path)
    tables = 1 if device == "cpu" else len(results.OTHERS)
    assert text.count("Small tensors, microseconds") == text.count("| 128 x 1024 |") == tables


def test_what_is_compiled_has_the_threads_of_its_row(bench, monkeypatch, device) -> None:
    """Functions are compiled with their row's number of threads, which is a part of Inductor's code and cache key. A
    file has the rows of one number of threads."""
    if device == "cuda":
        pytest.skip("threads are the CPU's")
    prepare, seen = run.prepare, []

    def spy(case, *others):
        seen.append((case.threads, torch.get_num_threads(), torch._inductor.config.cpp.threads))
        return prepare(case, *others)

    monkeypatch.setattr(run, "prepare", spy)
    for threads in ("1", "2"):
        bench.path.unlink(missing_ok=True)
        found = bench("--op", "mish", "--pass", "forward", "--threads", threads)
        assert found["machine"]["threads"] == found["rows"][0]["threads"] == int(threads)
    assert seen == [(1, 1, 1), (2, 2, 2)]
    with pytest.raises(SystemExit, match="was measured with threads 2, and this run has 1: give another file"):
        bench("--op", "mish", "--pass", "forward", "--threads", "1")


def test_widths_of_one_op(bench) -> None:
    rows = bench("--op", "relu:64", "cumsum:32", "cumsum:96", "rms_norm", "--pass", "forward")["rows"]
    assert [(row["op"], row["cols"]) for row in rows] == [
        ("cumsum", 32),
        ("cumsum", 96),
        ("relu", 64),
        ("rms_norm", 1025),
    ]


def test_a_slow_contender_is_timed_once(bench, monkeypatch) -> None:
    monkeypatch.setattr(run, "SLOW", 0.0)
    (row,) = bench("--op", "relu", "--pass", "forward")["rows"]
    assert {name for name, time in row["seconds"].items() if time["low"] == time["high"]} == {"ours", "eager"}


def test_a_large_tensor_and_a_small_one_are_two(bench, monkeypatch) -> None:
    monkeypatch.setattr(run, "SMALL", ((256, 1024),))
    rows = bench("--op", "relu", "--pass", "forward", "--width", "1024", "--sizes", "large", "small")["rows"]
    assert [(row["sizes"], row["rows"], row["cols"]) for row in rows] == [("large", 256, 1024), ("small", 256, 1024)]


def test_peers_that_are_wrong_or_raise(bench, monkeypatch, capsys) -> None:
    def raises(*_):
        raise ValueError("not on this machine")

    def nearly(x, shape, weight, eps):
        return torch.nn.functional.rms_norm(x, shape, weight, eps) * (1 + 1e-4)

    def unwritten(x, shape, weight, eps):
        y = torch.nn.functional.rms_norm(x, shape, weight, eps).clone()
        y[-1, -1] = torch.nan
        return y

    strange = {"liger": nearly, "quack": raises, "apex": unwritten}
    monkeypatch.setitem(peers.PEERS, "rms_norm", strange)
    monkeypatch.setattr(peers, "versions", lambda device: dict.fromkeys(strange, "1.0"))
    (row,) = bench("--op", "rms_norm", "--pass", "forward")["rows"]
    assert row["failed"]["liger"].startswith("wrong, output 0 has a distance of 0.0001, of at most")
    assert row["failed"]["quack"] == "ValueError: not on this machine"
    assert row["failed"]["apex"].startswith("wrong, output 0 has a distance of nan")
    assert set(row["seconds"]) == {"copy", "ours", "eager"} == {"copy", *row["percent_of_copy"]}
    assert "rms_norm forward float32 255 x 1025: quack: ValueError: not on this machine" in capsys.readouterr().out
    assert "| raised | wrong | wrong |" in table(bench.path)


class OverwritingGate(torch.autograd.Function):
    """Computes silu(gate) * up. backward writes the gradients over gate and up, as Liger's does."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate) * up

    @staticmethod
    def backward(ctx, grad_out):
        gate, up = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        with torch.enable_grad():
            grads = torch.autograd.grad(torch.nn.functional.silu(gate) * up, (gate, up), grad_out)
        for x, grad in zip((gate, up), grads, strict=True):
            x.data.copy_(grad)
        return gate.detach(), up.detach()


def test_a_peer_that_overwrites_its_inputs_disturbs_no_other(bench, monkeypatch) -> None:
    """A peer's backward writes over its inputs. All contenders, the peer included, are right and have a time."""
    monkeypatch.setitem(peers.PEERS, "swiglu", {"liger": OverwritingGate.apply})
    monkeypatch.setattr(peers, "versions", lambda device: {"liger": "1.0"})
    (row,) = bench("--op", "swiglu", "--pass", "backward")["rows"]
    assert "failed" not in row
    assert set(row["seconds"]) == {"copy", "ours", "eager", "liger"}


@pytest.mark.parametrize("name", ["dropout", "add_layer_norm", "add_rms_norm", "layer_norm_dropout"])
def test_who_draws_masks_is_judged_without_dropout(name, bench, monkeypatch) -> None:
    """An implementation that draws its own mask is judged without dropout, so that an error of 1 % is detected."""
    (row,) = bench("--op", name, "--pass", "forward")["rows"]
    assert "eager" in row["seconds"] and "failed" not in row
    contenders = run.contenders

    def wrong_ones(case, options):
        found = contenders(case, options)
        return found | {"eager": lambda *args: tuple(1.01 * output for output in as_tuple(found["eager"](*args)))}

    monkeypatch.setattr(run, "contenders", wrong_ones)
    (row,) = bench("--op", name, "--pass", "backward")["rows"][1:]
    assert row["failed"]["eager"].startswith("wrong, ") and "ours" in row["seconds"]


def test_compare(bench, tmp_path, device, capsys) -> None:
    found = bench("--op", "relu", "rms_norm", "--pass", "forward")
    other = copy.deepcopy(found)
    for row, place, factor in zip(other["rows"], ("high", "low"), (3.0, 0.3), strict=True):
        time = factor * row["seconds"]["eager"][place]
        row["seconds"]["eager"] = {"low": 0.9 * time, "median": time, "high": 1.1 * time}
    results.write(tmp_path / "other.json", other)
    capsys.readouterr()
    assert command.main(["compare", str(bench.path), str(tmp_path / "other.json")]) == 0
    printed = capsys.readouterr().out
    keys = ("seconds", *(key for key, _ in results.OTHERS))  # keys of a row that hold timings
    times = sum(len(row.get(key, {})) for row in found["rows"] for key in keys)
    assert times >= 2 * 3  # 2 rows times 3 contenders, and more if other libraries are installed
    assert f"Of {times} times 1 are slower, 1 faster, and {times - 2} within the spread." in printed
    assert command.main(["compare", str(bench.path), str(bench.path)]) == 0
    assert f"Of {times} times 0 are slower, 0 faster, and {times} within the spread." in capsys.readouterr().out


def test_host(tmp_path, device, monkeypatch, capsys) -> None:
    monkeypatch.setattr(host, "CALLS", 2)
    path, threads = tmp_path / "deep" / "host-made.json", torch.get_num_threads()
    kernels = []
    registered_plainly = host.registered_plainly
    monkeypatch.setattr(host, "registered_plainly", lambda op: kernels.append(node()) or registered_plainly(op))

    def node() -> str:
        x = torch.ones(2, 2, device=device, requires_grad=True)
        return type(torch.ops.extension_cpp.layer_norm(x, (2,))[0].grad_fn).__name__

    try:
        assert command.main(["host", "--device", device, "--rounds", "9", "--json", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(path.read_text())
    assert {"device", "torch", "python", "shape", "calls", "rounds", "versions"} <= found["machine"].keys()
    measured = [(row["pass"], row["way"]) for row in found["rows"]]
    assert measured == [(name, way) for name, (_, out) in host.PASSES.items() for way in WAYS if way not in out]
    for row in found["rows"]:
        assert 0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
    printed = capsys.readouterr().out
    for word in (*host.PASSES, *WAYS, str(path)):
        assert word in printed
    low, time, high = (1e6 * found["rows"][0]["seconds"][figure] for figure in ("low", "median", "high"))
    assert f"{time:.1f} ({low:.1f} to {high:.1f})" in printed
    assert f"| native | torch.nn.functional.layer_norm | {time:.1f} |" in table(path)
    # The package's own autograd registration is active before each measurement of PyTorch's, and at the end.
    assert kernels == ["layer_normBackward"] * 3 * 11 and node() == "layer_normBackward"
    with registered_plainly("layer_norm"):
        assert node() == "GeneratedBackwardFor_extension_cpp_layer_norm_defaultBackward"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "shim"])  # the shim computes nothing
def test_the_ways_of_host_do_the_same(way, device) -> None:
    forward, both = host.layer_norms(device)
    with host.registered_plainly("layer_norm") if way == "register_autograd" else contextlib.nullcontext():
        output, gradients = forward[way](), both[way]()
    torch.testing.assert_close(output[0] if way == "kernel" else output, forward["native"]())
    torch.testing.assert_close(list(gradients), list(both["native"]()))


@pytest.mark.parametrize("spec", host.timed_specs().values(), ids=str)
def test_the_plain_registration_of_host_is_pytorchs_for_both_operators(spec, device, monkeypatch) -> None:
    """Under registered_plainly, PyTorch's register_autograd is active for an op and its backward. Results and gradients
    have the same bits as with the package's registration, which is active again afterwards."""
    seen, requires_grad = list[str](), calls._requires_grad
    monkeypatch.setattr(calls, "_requires_grad", lambda name, args: seen.append(name) or requires_grad(name, args))

    sample = host.sample_of(spec, device)
    function, both = host.passes(spec, sample).values()

    def once() -> tuple[list[str], list[torch.Tensor]]:
        """Runs the op, and returns the names of its autograd nodes, and its outputs and gradients."""
        outputs = [y for y in as_tuple(function()) if y.requires_grad]
        grads = both()
        nodes = {type(y.grad_fn).__name__ for y in outputs if "View" not in type(y.grad_fn).__name__}
        if spec.second_order:
            ones = [torch.ones_like(y) for y in outputs]
            again = torch.autograd.grad(outputs, leaves(sample), ones, create_graph=True)
            nodes |= {type(x.grad_fn).__name__ for x in again if x.grad_fn is not None}
        return sorted(nodes), [y.detach() for y in (*outputs, *grads)]

    nodes, found = once()
    assert f"{calls.NAMESPACE}::{spec.name}" in seen
    seen.clear()
    with host.registered_plainly(spec.name):
        plain_nodes, plain = once()
    own_uses = {"muladd", "dropout", "cumsum", "linear_recurrence", "rotary_embedding"}  # in their own derivatives
    assert spec.name in own_uses or f"{calls.NAMESPACE}::{spec.name}" not in seen
    assert once()[0] == nodes and all("extension_cpp" not in node for node in nodes)
    assert f"GeneratedBackwardFor_extension_cpp_{spec.name}_defaultBackward" in plain_nodes
    if f"{spec.name}_backwardBackward" in nodes:
        assert f"GeneratedBackwardFor_extension_cpp_{spec.name}_backward_defaultBackward" in plain_nodes
    torch.testing.assert_close(plain, found, rtol=0, atol=0)


def test_host_of_ops(tmp_path, device, monkeypatch, capsys) -> None:
    monkeypatch.setattr(host, "CALLS", 2)
    path, threads, seen = tmp_path / "host-made.json", torch.get_num_threads(), []
    registered_plainly = host.registered_plainly
    monkeypatch.setattr(host, "registered_plainly", lambda op: seen.append(op) or registered_plainly(op))
    try:
        words = ["--device", device, "--rounds", "9", "--json", str(path), "--op", "mish", "add_rms_norm"]
        assert command.main(["host", *words]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(path.read_text())["rows"]
    assert seen == ["mish"] * 2 * 11 + ["add_rms_norm"] * 2 * 11
    measured = [(row["op"], row["pass"], row["way"]) for row in found]
    ways, steps = ("function", host.PLAIN), ("forward, grad", "forward and backward")
    assert measured == [(op, step, way) for op in ("mish", "add_rms_norm") for step in steps for way in ways]
    forward, both = (f"{1e6 * row['seconds']['median']:.1f}" for row in found[:3:2])
    assert f"| mish | function | {forward} | {both} |" in table(path)
    assert "forward and backward" in capsys.readouterr().out


def made_up() -> dict:
    """Returns invented results: "large" ones of two widths, and a "small" one."""
    rows = []
    for sizes, height, width in (("large", 1024, 768), ("large", 1024, 1025), ("small", 32, 512)):
        for step in ("forward", "backward"):
            row = {"op": "rms_norm", "pass": step, "dtype": "float32", "rows": height, "cols": width}
            seconds = {name: {"low": 0.9e-6, "median": 1e-6, "high": 2e-6} for name in ("copy", "ours", "liger")}
            row |= {"run": 1, "commit": "123456789abc", "of": ["rms_norm"], "kernel": None}
            row |= {"threads": 2, "sizes": sizes, "copy_gb_s": 10.0, "seconds": seconds}
            rows.append(row | {"percent_of_copy": {"ours": 90.0, "liger": 80.0}, "failed": {"quack": "wrong <&>"}})
    flat = rows[0] | {"op": "mish"}
    about = {"device": "A <machine>", "threads": 2, "torch": "2", "mib": 1, "versions": {"apex": None}}
    return {"machine": about, "rows": [*rows, flat]}


def test_pictures(tmp_path, capsys) -> None:
    path = tmp_path / "made.json"
    results.write(path, made_up())
    assert command.main(["plot", str(path), "--out", str(tmp_path / "plots")]) == 0
    for kind in ("widths", "roofline"):
        stem = tmp_path / "plots" / f"made-{kind}-float32"
        text = stem.with_suffix(".svg").read_text()
        for word in ("A &lt;machine&gt;, float32", "ours", "liger", "copy", "rms_norm"):
            assert word in text, (kind, word)
        assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    shown = ["roofline of the ops named below, each at its best width", "bandwidth of copy", "rms_norm backward"]
    shown += ["billions of arithmetic operations a second", "operations for each byte that the op must move"]
    assert [words for words in shown if words not in text] == []
    assert len(capsys.readouterr().out.splitlines()) == 2
    first, second = ([plot.svg(figure) for _, figure in plot.pictures(path)] for _ in range(2))
    assert first == second
    assert [name for name, _ in plot.pictures(path, ["mish"])] == ["made-roofline-float32"]


def test_kernels_alone_and_calls_with_the_host_are_shown(tmp_path, capsys) -> None:
    row = made_up()["rows"][0] | {"sizes": "small"}
    for key, median in (("kernel_seconds", 7e-6), ("call_seconds", 9e-6)):
        row[key] = {"copy": row["seconds"]["copy"], "ours": {"low": 1e-6, "median": median, "high": 8e-5}}
    run.show(Console(width=200), made_up(), [row])
    printed = capsys.readouterr().out
    results.write(tmp_path / "made.json", made_up() | {"rows": [row]})
    text = table(tmp_path / "made.json")
    slower = copy.deepcopy(row)
    slower["call_seconds"]["ours"] = {"low": 1e-4, "median": 2e-4, "high": 3e-4}
    found = compare.changes(*(made_up() | {"rows": [each]} for each in (row, slower)))
    (name,) = (name for _, name, *times in found if compare.is_beyond(*times))
    assert name == "ours, call_seconds"
    for (_, title), figure in zip(results.OTHERS, ("7.0", "9.0"), strict=True):
        assert title in printed and f" {figure}" in printed
        assert f"Small tensors, microseconds, {title}:" in text and f"| {figure} |" in text


@pytest.mark.parametrize("name", ["h200-norms", "cpu"])
def test_tables_fit_into_80_columns(name: str, capsys) -> None:
    """The tables that a run prints fit into a terminal of 80 columns, with no cell truncated or wrapped."""
    found = results.read(results.ROOT / "benchmarks" / "results" / f"{name}.json")
    run.show(Console(width=80), found, found["rows"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if re.match(r"(forward|backward) +\d+ x \d+ ", line)]
    assert len(rows) >= len(found["rows"]) and max(map(len, rows)) <= 80
    assert all(re.search(r" ([\d.]+|wrong|raised)$", line) for line in rows) and "\u2026" not in "".join(lines)


def test_points_lie_inside_their_axes() -> None:
    """The plots of forward and backward have the same axis limits, and all points of both plots lie within them."""
    for name in ("h200-norms", "h200", "h200-scans", "cpu"):
        for title, figure in plot.pictures(results.ROOT / "benchmarks" / "results" / f"{name}.json"):
            for axes in (each for each in figure.axes if each.lines):
                low, high = axes.get_ylim()
                values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
                assert low <= values.min() and values.max() <= high, (title, axes.get_title())


def test_the_copy_of_small_tensors_moves_the_floors_bytes(bench) -> None:
    """For small tensors, the op is compared with a copy that moves as many bytes as the op must read and write. For
    large tensors the copy is that of one tensor (test_a_row_has_its_figures)."""
    found = bench("--op", "muladd", "--pass", "backward", "--sizes", "small")
    for row in found["rows"]:
        assert row["floor_bytes"] == 5 * row["rows"] * row["cols"] * 4
        share = row["seconds"]["copy"]["median"] / row["seconds"]["ours"]["median"]
        assert row["percent_of_copy"]["ours"] == pytest.approx(100 * share, rel=1e-5)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--rounds", "8"], "at least 9"),
        (["--op", "other"], "invalid choice: 'other'"),
        (["--device", "cpu", "--plans"], "argument --plans: of a GPU's kernels, and the device is cpu"),
        (["compare", "a.json"], "the following arguments are required: after"),
    ],
)
def test_wrong_options(words, message, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(words)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "text, message", [("", "cannot be read"), ("[]", "is not a results file"), (None, "cannot be read")]
)
def test_a_file_that_is_none(tmp_path, text, message) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=rf"^error: .*{message}"):
        command.main(["compare", str(path), str(path)])


def test_shapes_of_the_norms(monkeypatch) -> None:
    """--plans times each kernel shape that fits a width, with only this shape allowed in its calls, forward and
    backward. Between the calls all shapes are allowed."""
    call_of, picked = run.call_of, []

    def noted(case, *others):
        call = call_of(case, *others)
        return lambda: picked.append(norm_plans.shape_of(case)) or call()

    monkeypatch.setattr(run, "call_of", noted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ["--plans", "--op", "layer_norm", "mish", "--dtype", "bfloat16", "--width", "1024", "4096", "--mib", "40"]
    options = run.parse(words)
    cases = list(run.cases(options))
    assert [(case.spec.name, case.cols) for case in cases] == [
        ("layer_norm", cols) for cols in (1024, 1024, 4096, 4096)
    ]
    options.device = "cpu"
    for case, names in ((cases[0], {"row"}), (cases[3], {"persistent", "pipeline"})):
        before = norm_plans.shape_of(case)
        picked.clear()
        calls, judge = run.prepare(case, options)
        shapes = [int(name.removeprefix("plan ")) for name in calls if name not in ("copy", "ours")]
        assert not judge.wrong and picked == [before, *shapes] and before in shapes and len(shapes) > 2
        for name, call in calls.items():
            call()
            assert name in ("copy", "ours") or name == f"plan {picked[-1]}"
        kernels_of = set()
        for shape in shapes:
            with norm_plans.allowed(shape):
                kernels_of.add(
                    info.norm_plan("layer_norm", "bfloat16", case.rows, case.cols, case.step == "backward")["kernel"]
                )
        assert kernels_of == names and norm_plans.shape_of(case) == before


COMMANDS = dict(re.findall(r"(?m)^\| `([\w-]+\.\w+)` \| (.*) \|$", (results.PUBLISHED / "README.md").read_text()))
MEASURED = {name: re.findall(r"`python -m benchmarks (--[^`]*)`", text) for name, text in COMMANDS.items()}


@pytest.mark.parametrize("name", [name for name, commands in MEASURED.items() if commands])
def test_the_commands_of_a_file_give_its_rows(name) -> None:
    found, asked = results.read(results.PUBLISHED / name), []
    for words in MEASURED[name]:
        options = run.parse(words.split())
        assert [options.mib, options.rounds] == [found["machine"][key] for key in ("mib", "rounds")]
        options.device = "cpu" if name.startswith("cpu") else "cuda"
        asked += [case.head() for case in run.cases(options)]
    heads = [{key: row[key] for key in asked[0] if key in row} for row in found["rows"]]
    assert sorted(heads, key=str) == sorted(asked, key=str)


def test_what_is_published_has_a_commit(monkeypatch, tmp_path, capsys) -> None:
    """Results measured with uncommitted changes cannot be written to the published files. A published row counts as
    older if the code of its op's kernels changes, but not if a comment or another op changes."""
    monkeypatch.setattr(results, "commit", lambda: "123456789abc-dirty")
    assert results.run("cpu")("relu")["kernel"] is None
    with pytest.raises(SystemExit):
        command.main([*TINY, "--json", str(results.PUBLISHED / "new.json")])
    assert "this tree has changes" in capsys.readouterr().err
    monkeypatch.setattr(results, "commit", lambda: "123456789abc")
    row = results.run("cpu", [{"run": 3}])("relu")
    assert row["run"] == 4 and not results.is_older(row, "cpu") and results.is_older(row, "cuda")
    sources = results.sources()
    for file, text, change in (
        ("relu/relu_cpu.c", "// more words\n", False),
        ("relu/relu_cpu.c", '#include "more.h"\n', False),
        ("relu/relu_cuda.cu", "int more;", False),
        ("mish/mish_cpu.c", "int more;", False),
        ("relu/relu_cpu.c", "int more;", True),
    ):
        changed = sources | {file: sources[file] + text}
        assert (results.digest_of(changed, ["relu"], "cpu") != row["kernel"]) == change
    for op, file, change in (
        ("softmax", "rows/plan.h", True),
        ("softmax", "rows/cpu_sum_exp.h", False),
        ("softmax", "norm/norm_plan.h", False),
        ("swiglu", "activation/activation_math.cuh", True),
        ("swiglu", "common/cuda/pointwise.cuh", False),
    ):
        changed = sources | {file: sources.get(file, "") + "int more;"}
        before = results.digest_of(sources, [op], "cuda")
        assert (results.digest_of(changed, [op], "cuda") != before) == change


@pytest.mark.parametrize("dtype", peers.C_NAMES)
@pytest.mark.parametrize("dim", [0, -1])
def test_the_loop_in_c_is_a_recurrence(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 70, 130, generator=generator).to(dtype)
    with torch.no_grad():
        exact = extension_cpp.reference.linear_recurrence(a.double(), b.double(), dim=dim)
        error = (peers.c_loop(a, b, dim) - exact).abs().max()
    # Each of the 130 steps rounds a product and a sum to float32. The factors, which are below 1, do not magnify these
    # errors. The result is then rounded to the dtype.
    assert error <= (torch.finfo(dtype).eps / 2 + 2 * 130 * torch.finfo(torch.float32).eps) * exact.abs().max()

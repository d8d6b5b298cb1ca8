"""Tests that the benchmarks' judges accept right results of the timed implementations, and report wrong results."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import gradients, linear_loss, processes, run
from benchmarks.judging import Judge
from benchmarks.table import table
from benchmarks.timing import take_turns
from examples import train_text
from tests.opspec import as_tuple


def planted(judge: Judge, result: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    """Yields names and wrong results. One is all zeros. Every other wrong result has an error in one tensor, in the
    last 32 elements of the last row, or of the last column if the op works along columns."""
    yield "zeros", tuple(map(torch.zeros_like, result))
    for number, x in enumerate(result):
        wrong = x.detach().clone()
        last = wrong if judge.is_sum(wrong) else wrong.select(judge.dim, -1)
        last.copy_(torch.cat([last.flatten()[:-32], last.flatten()[-32:] + x.abs().max()]).view_as(last))
        yield f"last tile of {number}", (*result[:number], wrong, *result[number + 1 :])


@pytest.mark.parametrize("spec", run.timed_specs(), ids=str)
def test_every_op_is_judged(spec, device) -> None:
    """For every op, the judge accepts right results. It reports planted errors, and the results of an earlier call if
    they are returned again. The tensors are bfloat16 and have 1025 columns, and more rows than the judge checks."""
    for backward in (False, True) if spec.bench.backward else (False,):
        torch.manual_seed(0)
        case = run.Case(spec, "bfloat16", 100, 1025, "backward" if backward else "forward", 1, "large")
        eager = spec.reference if spec.positional else spec.bench.stock or spec.reference
        judge = Judge(spec, *(run.make_sample(case, device) for _ in range(2)), seed=0, eager=eager)
        call = run.call_of(case, judge, "ours", spec.function)
        before = as_tuple(call())
        judge.renew()
        right = as_tuple(call())
        of_eager = as_tuple(run.call_of(case, judge, "eager", eager)())
        results = {"kept": before} | dict(planted(judge, right))
        for name, result in {"ours": right, "eager": of_eager, **results}.items():
            judge.outputs[name] = judge.outputs.get(name, judge.outputs.get("ours"))
            judge.judge(name, result)
        # PyTorch's bfloat16 gradient of logcumsumexp on a GPU has errors of up to 40 % of the row's largest element.
        is_wrong = (spec.name, device, backward) == ("logcumsumexp", "cuda", True)
        assert list(judge.wrong) == ["eager"] * is_wrong + list(results)
        place = next((i for i, x in enumerate(right) if x.is_floating_point()), None)
        nearly = (
            right[place or 0].detach().clone()
        )  # one element of the last row or column has a relative error of 4 eps
        last = nearly if judge.is_sum(nearly) else nearly.select(judge.dim, -1)
        factors = torch.ones_like(last.flatten(), dtype=torch.float64)
        factors[last.flatten().abs().argmax()] += 4 * torch.finfo(torch.bfloat16).eps
        last.copy_(last * factors.view(last.shape))
        # An error of 4 eps cannot be planted in integers. Gradients that backward computes from rounded results may
        # have it.
        is_seen = place is not None and not (backward and spec.saves_results)
        off = [(*right[:place], nearly, *right[place + 1 :])] if is_seen else []
        for result in (*results.values(), *off):
            judge.wrong.clear()
            judge.judge("ours", result)
            assert judge.wrong


def test_steps_on_several_processes(tmp_path: Path, monkeypatch, capsys) -> None:
    """The benchmark of training on several processes writes a row for each number of processes, and ends with an error
    if the processes do not exchange gradients. All runs in this process; test_sharding.py tests several processes."""
    sizes = {"width": 32, "layers": 1, "heads": 2, "context": 32, "batch": 4, "accumulate": 1, "learning_rate": 2e-3}
    monkeypatch.setitem(processes.SIZES, "cpu", sizes)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    asked, batch = [], train_text.Training.batch

    def start(function, arguments, count, start_method) -> None:
        asked.append((count, *arguments[1:3]))
        if arguments[2] == "fsdp":  # imitates two processes that do not exchange gradients
            shares = functools.partialmethod(lambda *those: [each[::2] for each in batch(*those)])
            monkeypatch.setattr(train_text.Training, "batch", shares)
        processes.process(0, arguments[0], arguments[1], None, *arguments[3:])

    monkeypatch.setattr(torch.multiprocessing, "start_processes", start)
    path = tmp_path / "processes-cpu.json"
    with pytest.raises(SystemExit, match=r"error: fsdp 2, ours: the gradient of .* has a distance of"):
        processes.main(["--device", "cpu", "--rounds", "9", "--json", str(path)])
    assert asked == [(1, "cpu", None), (2, "cpu", "ddp"), (2, "cpu", "fsdp")]
    rows = json.loads(path.read_text())["rows"]
    assert [(row["place"], row["ops"]) for row in rows] == [
        (p, o) for p in ("alone 1", "ddp 2") for o in train_text.OPS
    ]
    for row in rows:
        assert len(row["seconds"]) == 9 and row["losses"][-1] < row["losses"][0] and row["gradient_error"] < 0.02
    alone, two = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table(path).splitlines()[-2:])
    assert alone[0] == "alone 1" and alone[2::2] == ["1.00", "1.00"] and two[0] == "ddp 2" and len(two) == len(alone)


def test_a_way_of_the_linear_loss_that_is_wrong_is_refused(monkeypatch) -> None:
    """The judge of the linear losses reports each implementation with a wrong loss or gradient, even if only one row of
    a gradient is wrong. It judges what the last timed call returned."""
    torch.manual_seed(0)
    x, weight, target = torch.randn(20, 8), torch.randn(30, 8) * 8**-0.5, torch.arange(20)
    x, weight = (each.bfloat16().requires_grad_() for each in (x, weight))
    right = functools.partial(linear_loss.train, linear_loss.eager, x, weight, target)

    def changed(place: int, change) -> None:
        def call() -> tuple:
            result = list(right())
            result[place] = change(result[place].clone())
            return tuple(result)

        return call

    ways = {
        "loss": changed(0, lambda loss: 1.05 * loss),
        "zeros": changed(1, torch.zeros_like),
        "last line": changed(1, lambda grad: torch.cat([grad[:-1], 1.05 * grad[-1:]])),
        "factor": changed(2, lambda grad: grad * 1.05),
        "exchanged": changed(2, lambda grad: grad.index_select(0, torch.arange(30).roll(1))),
        "kept": functools.cache(right),
    }
    judge = linear_loss.Judge(x, weight, target)
    take_turns({"eager": right, "ours": right, **ways}, "cpu", 9, judge=judge)
    with pytest.raises(SystemExit) as stopped:
        judge.stop_if_wrong()
    told = str(stopped.value)
    assert [name for name in ways if f"{name}: the gradient of" in told] == list(ways) and "ours:" not in told


def test_gradients_have_a_distance_and_a_scale() -> None:
    """A gradient's distance is the norm of its error, and its scale the error along the exact gradient. Beside a stock
    model with an error of 10 %, a factor of 1.05 exceeds only the scale's bound, and noise only the distance's."""
    exact, *noise = torch.randn(3, 10000, generator=torch.Generator().manual_seed(0))
    beside = gradients.errors({"w": exact + 0.1 * noise[0]}, {"w": exact})
    assert gradients.wrong(beside, beside) is None

    def wrong(gradient: torch.Tensor | None) -> str | None:
        return gradients.wrong(gradients.errors({"w": gradient}, {"w": exact}), beside)

    assert wrong(exact + 0.1 * noise[1]) is None
    assert "a scale of 0.05" in str(wrong(1.05 * exact)) and "a distance of 0.29" in str(wrong(exact + 0.3 * noise[1]))
    assert "a distance of 1," in str(wrong(None)) and "a distance of inf" in str(wrong(exact[:-1]))
    far = gradients.errors({"w": -exact}, {"w": exact})
    assert "off, of at most" in str(gradients.wrong(far, far))

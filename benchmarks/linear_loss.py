"""Times linear_cross_entropy, forward and backward, beside its three matrix products alone and other implementations.

Every implementation must compute the three products: the logits, and the gradients of the input and of the weight. Peak
memory does not include the inputs and the gradients of a call. The loss and every row of both gradients of the last
timed call are compared with float64. A wrong result ends the program.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import extension_cpp
from benchmarks import gradients, peers, results, table
from benchmarks.timing import BenchmarkParser, Call, take_turns

# SHAPES has rows, features and classes: the head of Llama 3.2 1B, and for the CPU a head whose calls take only seconds.
ROWS = 512  # rows whose float64 logits are in memory at a time
SHAPES = {"cuda": (8192, 2048, 128256), "cpu": (512, 512, 8192)}


def products(x: Tensor, weight: Tensor, target: Tensor) -> None:
    """Computes the three products of forward and backward. The logits stand in for their gradient."""
    with torch.no_grad():
        logits = x @ weight.t()
        logits @ weight
        logits.t() @ x


def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def train(loss: Callable[..., Tensor], x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    value = loss(x, weight, target)
    return value.detach(), *torch.autograd.grad(value, (x, weight))


def exact(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Any, ...]:
    """Returns the loss and its gradients in float64, computed for some rows at a time."""
    x, weight = (each.detach().double().requires_grad_() for each in (x, weight))
    total = torch.zeros_like(x[0, 0])
    for rows in torch.arange(len(x), device=x.device).split(ROWS):
        loss = eager(x[rows], weight, target[rows]) * (len(rows) / len(x))
        loss.backward()
        total += loss.detach()
    return total, x.grad, weight.grad


class Judge:
    """Compares the results of every implementation with float64. The errors allowed depend on eager PyTorch's."""

    def __init__(self, x: Tensor, weight: Tensor, target: Tensor) -> None:
        self.inputs, self.others = (x, weight), (x.detach().flip(0), weight.detach().flip(0))
        self.exact = exact(*self.others, target)
        self.errors: dict[str, dict[str, gradients.Error]] = {}

    def renew(self) -> None:
        for tensor, other in zip(self.inputs, self.others, strict=True):
            tensor.data.copy_(other)

    def judge(self, name: str, result: Any) -> None:
        if name != "products":
            pairs = zip(("loss", "x", "weight"), result, self.exact, strict=True)
            self.errors[name] = {what: gradients.error(got, exact, by_lines=True) for what, got, exact in pairs}

    def stop_if_wrong(self) -> None:
        wrong = {name: gradients.wrong(each, self.errors["eager"]) for name, each in self.errors.items()}
        if found := [f"{name}: {words}" for name, words in wrong.items() if words]:
            sys.exit(f"error: {'; '.join(found)}")


def ways(device: str) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Tensor]] = {
        "ours": extension_cpp.linear_cross_entropy,
        "eager": eager,
        # Computes the loss from float32 logits, as transformers does.
        "eager, float32": lambda x, weight, target: F.cross_entropy(F.linear(x, weight).float(), target),
        "compile": torch.compile(eager, dynamic=False),
    }
    if peers.versions(device).get("liger"):
        of_liger = partial(peers.liger, "fused_linear_cross_entropy", "FusedLinearCrossEntropy")
        found["liger"] = lambda *inputs: of_liger(*inputs)[0]
    return {"products": products} | {name: partial(train, loss) for name, loss in found.items()}


def extra_bytes(call: Call, grad_bytes: int) -> int:
    """Returns the peak memory of a call in bytes, without the memory before the call and without the gradients."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before - grad_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    options = BenchmarkParser("benchmarks linear_loss", __doc__, "out/linear-loss-DEVICE.json", 21).parse(arguments)
    rows, features, classes = SHAPES[options.device]
    generator = torch.Generator(options.device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=options.device)
    x = draw(rows, features).bfloat16().requires_grad_()
    weight = (draw(classes, features) * features**-0.5).bfloat16().requires_grad_()
    target = torch.randint(classes, (rows,), generator=generator, device=options.device)
    calls: dict[str, Call] = {name: partial(way, x, weight, target) for name, way in ways(options.device).items()}
    judge = Judge(x, weight, target)
    times = take_turns(calls, options.device, options.rounds, judge=judge)
    judge.stop_if_wrong()
    origin = results.run(options.device)("linear_cross_entropy")
    found: list[results.Row] = [{"way": name} | origin | {"seconds": time} for name, time in times.items()]
    for row in found if options.device == "cuda" else ():
        row["extra_bytes"] = extra_bytes(calls[row["way"]], 0 if row["way"] == "products" else x.nbytes + weight.nbytes)
    about = results.about(options.device, {"liger": peers.versions(options.device).get("liger")}, rounds=options.rounds)
    shape = {"rows": rows, "features": features, "classes": classes, "dtype": "bfloat16"}
    table.finish(options.path, {"machine": about, "shape": shape, "rows": found}, table.linear_loss)
    return 0

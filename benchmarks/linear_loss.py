"""Times linear_cross_entropy, forward and backward, beside its three matrix products alone and beside other ways.

Every way must compute the products: the logits, and the gradients of the input and of the weight. Peak memory does not
include the inputs and the gradients of a call.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import extension_cpp
from benchmarks import peers
from benchmarks.results import commit, machine, versions
from benchmarks.timing import check_options, take_turns
from extension_cpp.__main__ import Parser, positive

# Rows, features and classes: the head of Llama 3.2 1B, and for the CPU a head that takes seconds.
SHAPES = {"cuda": (8192, 2048, 128256), "cpu": (512, 512, 8192)}


def products(x: Tensor, weight: Tensor, target: Tensor) -> None:
    """The three products. The logits stand for their gradient, which takes the same time."""
    with torch.no_grad():
        logits = x @ weight.t()
        logits @ weight
        logits.t() @ x


def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), target)


def eager_float32(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The loss as transformers computes it."""
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight).float(), target)


def liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]
    return loss


def train(loss: Callable[..., Tensor], x: Tensor, weight: Tensor, target: Tensor) -> None:
    torch.autograd.grad(loss(x, weight, target), (x, weight))


def ways(device: str) -> dict[str, Callable[..., None]]:
    found: dict[str, Callable[..., Tensor]] = {"ours": extension_cpp.linear_cross_entropy, "eager": eager}
    found |= {"eager, float32": eager_float32, "compile": torch.compile(eager)}
    if device == "cuda" and peers.versions("cuda")["liger"]:
        found["liger"] = liger
    return {"products": products} | {name: functools.partial(train, loss) for name, loss in found.items()}


def extra_bytes(call: Callable[[], object], gradients: int) -> int:
    """The bytes at the peak, without those before the call and without the gradients."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated() - before - gradients


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks linear_loss", description=__doc__.replace("\n", " "))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=positive, default=21, help="timed calls of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: out/linear-loss-DEVICE.json)")
    options = parser.parse_args(arguments)
    check_options(parser, options)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    rows, features, classes = SHAPES[options.device]
    generator = torch.Generator(options.device).manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device=options.device)
    x = draw(rows, features).bfloat16().requires_grad_()
    weight = (draw(classes, features) * features**-0.5).bfloat16().requires_grad_()
    target = torch.randint(classes, (rows,), generator=generator, device=options.device)
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(way, x, weight, target) for name, way in ways(options.device).items()
    }
    times = take_turns(calls, options.device, options.rounds)
    figures: dict[str, dict[str, Any]] = {name: {"seconds": asdict(time)} for name, time in times.items()}
    table = Table("", "ms", "10 to 90 %", "x products", "GB beyond", title=f"{rows} x {features} x {classes}, bfloat16")
    for name, time in times.items():
        ratio = time.median / times["products"].median
        memory = ""
        if options.device == "cuda":
            gradients = 0 if name == "products" else x.nbytes + weight.nbytes
            figures[name]["extra_bytes"] = extra_bytes(calls[name], gradients)
            memory = f"{figures[name]['extra_bytes'] / 1e9:.2f}"
        spread = f"{1e3 * time.low:.2f} to {1e3 * time.high:.2f}"
        table.add_row(name, f"{1e3 * time.median:.2f}", spread, f"{ratio:.3f}", memory)
    about = machine(options.device) | {"rounds": options.rounds, "commit": commit()}
    about |= {"versions": versions() | {"liger": peers.versions(options.device).get("liger")}}
    path = options.json or Path("out") / f"linear-loss-{options.device}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = {"rows": rows, "features": features, "classes": classes, "dtype": "bfloat16"}
    path.write_text(json.dumps({"machine": about, "shape": shape, "figures": figures}, indent=1))
    Console(width=None if sys.stdout.isatty() else 130).print(table, f"The figures are in {path}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times the training step of examples/train_text.py on one process, and on several that share a batch of equal size.

On GPUs each process has one GPU, and the model has 870 million parameters, enough to keep a GPU busy. A step is that of
the example: compiled, under bfloat16 autocast, some forwards and backwards, one exchange of gradients, AdamW.

The first step's loss and gradients are compared with plain PyTorch in float32 on one process. A wrong one ends the
program.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import distributed
from torch.distributed.tensor import DTensor

from benchmarks import gradients, results, table
from benchmarks.timing import BenchmarkParser
from examples import train_text
from extension_cpp.__main__ import positive

LARGE = {"width": 2048, "layers": 16, "heads": 16, "context": 1024, "batch": 32, "accumulate": 8, "learning_rate": 1e-4}
SIZES: dict[str, dict[str, Any]] = {"cuda": LARGE, "cpu": train_text.SMALL}
WARM_UP = 3


def exact(text: train_text.Text, settings: train_text.Settings) -> dict[str, torch.Tensor]:
    """Returns the float32 loss and gradients of the first step, computed for one sequence at a time to save memory."""
    training = train_text.Training("torch", text, settings, compiled=False)
    total = torch.zeros((), device=settings.device)
    for part in range(settings.accumulate):
        for sequence in zip(*(each.split(1) for each in training.batch(text.training, part)), strict=True):
            loss = training.model(*sequence) / (settings.accumulate * settings.batch)
            loss.backward()
            total += loss.detach()
    return {"loss": total} | {name: x.grad for name, x in training.model.named_parameters() if x.grad is not None}


def errors(training: train_text.Training, truth: dict[str, torch.Tensor]) -> dict[str, gradients.Error]:
    """Returns the errors of the first step's loss and gradients, and clears the gradients."""
    loss = torch.tensor(training.mean(training.backward(0)), device=training.settings.device)
    grads = {name: each.grad for name, each in training.model.named_parameters()}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    training.optimizer.zero_grad()
    return gradients.errors({"loss": loss} | whole, truth)


def process(rank: int, processes: int, device: str, parallel: str | None, rounds: int, folder: Path) -> None:
    """Trains with each of the example's OPS. The first process writes the seconds and the loss of each step, and the
    errors of the first gradients, to the folder."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    if parallel:
        store = f"file://{folder}/rendezvous"
        distributed.init_process_group("nccl" if device == "cuda" else "gloo", store, rank=rank, world_size=processes)
    text = train_text.Text.of(train_text.read_text(None), SIZES[device]["context"])
    settings = train_text.Settings(device, WARM_UP + rounds, text.digest, **SIZES[device])
    path, found = folder / "exact.pt", {}
    if not path.exists():  # the single process, which comes first, writes the file
        torch.save(exact(text, settings), path)
    for ops in train_text.OPS:  # one after the other, because two models of this size do not fit on a GPU
        training = train_text.Training(ops, text, settings, compiled=True, parallel=parallel)
        first = errors(training, torch.load(path, map_location=device))
        for _ in range(WARM_UP + rounds):
            training.step()
        found[ops] = {"seconds": training.seconds[WARM_UP:], "losses": training.losses, "errors": first}
        del training
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()
    if rank == 0:
        torch.save(found, folder / "found.pt")
    if parallel:
        distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = BenchmarkParser("benchmarks processes", __doc__, "out/processes-DEVICE.json", 9, "steps")
    parser.add_argument("--processes", type=positive, default=2, help="beside one (default: %(default)s)")
    kinds = ["ddp", "fsdp"]
    parser.add_argument("--parallel", choices=kinds, nargs="+", default=kinds, help="(default: both)")
    options = parser.parse(arguments)
    origin = results.run(options.device)("add_layer_norm", "rotary_embedding", "swiglu", "linear_cross_entropy")
    rows: list[results.Row] = []
    about = results.about(options.device, rounds=options.rounds)
    found = {"machine": about, "sizes": SIZES[options.device], "rows": rows}
    beside: dict[str, gradients.Error] = {}  # the errors of the first run
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for parallel, count in ((None, 1), *((kind, options.processes) for kind in options.parallel)):
            (folder / "rendezvous").unlink(missing_ok=True)
            given = count, options.device, parallel, options.rounds, folder
            torch.multiprocessing.start_processes(process, given, count, start_method="spawn")
            for ops, figures in torch.load(folder / "found.pt", weights_only=False).items():
                place, first = f"{parallel or 'alone'} {count}", figures.pop("errors")
                beside = beside or first
                if wrong := gradients.wrong(first, beside):
                    sys.exit(f"error: {place}, {ops}: {wrong}")
                error = {"gradient_error": max(each.distance for each in first.values())}
                rows.append({"place": place, "ops": ops} | origin | figures | error)
            results.write(options.path, found)  # keeps these figures if a later run fails
    table.finish(options.path, found, table.processes)
    return 0

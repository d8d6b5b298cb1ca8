"""Trains a small GPT on text, byte by byte: python examples/train_text.py --help

The model is a pre-norm transformer under bfloat16 autocast and torch.compile, with gradient accumulation. It is written
with torch.nn (--ops torch). With --ops ours, nn.convert and the linear loss give it this package's norms, rotary
embedding, gates and loss. Initial weights and data are the same, so that the two loss curves differ only by rounding.

The batches of a step depend only on the step's number, and the checkpoint is replaced in one move. So a run may be
killed at any moment: started again, it continues from the last checkpoint and ends as if it had not been killed.

Several processes share each batch if torchrun starts them (torchrun --nproc-per-node 2 examples/train_text.py
--parallel fsdp). The checkpoint holds whole tensors, so that a run may continue with another number of processes, or
with one process and without torchrun.
"""

import argparse
import contextlib
import hashlib
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no installation

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

try:
    import extension_cpp
except ImportError as error:
    sys.exit(f"error: {error}")
from extension_cpp.__main__ import Parser, missing_for, positive

if missing := missing_for("this example"):
    sys.exit(f"error: {missing}")
from rich.console import Console

from extension_cpp.command import demo, demo_model
from extension_cpp.command.demo_model import WEIGHT_DECAY, Attention, LanguageModel
from extension_cpp.command.errors import CannotMake, require

CHECKPOINT_EVERY = 25  # steps; the validation loss is computed at the same steps
WRITTEN = 400  # bytes that the model writes at the end
VALIDATION_SHARE, VALIDATION_BATCHES = 0.1, 4
OPS = ("ours", "torch")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # for a checkpoint, which the first process gathers


@dataclass(frozen=True)
class Settings:
    """The settings that a run must share with the checkpoint from which it continues, and with a run beside which its
    curves are drawn."""

    device: str
    steps: int
    text: str  # its digest
    width: int
    layers: int
    context: int
    batch: int  # sequences per forward
    learning_rate: float  # learning rate after the warm-up
    heads: int = 0  # of the attention
    accumulate: int = 1  # forwards per step


SMALL = {"width": 128, "layers": 4, "heads": 4, "context": 128, "batch": 8, "accumulate": 2, "learning_rate": 2e-3}
LARGE = {"width": 512, "layers": 8, "heads": 8, "context": 512, "batch": 32, "accumulate": 2, "learning_rate": 1e-3}
SIZES: dict[str, dict[str, Any]] = {"cpu": SMALL, "cuda": LARGE}


# ---- the text ----


def read_text(path: Path | None) -> str:
    if path is None:
        return demo_model.help_text()
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise CannotMake(f"--text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CannotMake(f"--text {path}: byte {error.start} is not UTF-8, so this is no text file") from error
    require("\0" not in text, f"--text {path}: it has a zero byte, so this is no text file")
    require(text.strip(), f"--text {path}: the file is empty")
    return text


@dataclass
class Text:
    """A text as indices into the bytes that occur in it, whose end is kept for validation."""

    alphabet: Tensor
    training: Tensor
    validation: Tensor
    digest: str

    @staticmethod
    def of(text: str, context: int) -> "Text":
        data = text.encode()
        alphabet, indices = demo_model.indices(text)
        kept, least = int(len(data) * VALIDATION_SHARE), math.ceil((context + 1) / VALIDATION_SHARE)
        why = f"a tenth is kept for validation, in sequences of {context} bytes"
        require(kept > context, f"the text has {len(data)} bytes, and at least {least} are needed: {why}")
        return Text(alphabet, indices[:-kept], indices[-kept:], hashlib.sha256(data).hexdigest()[:16])


def batch(text: Tensor, settings: Settings, seed: int) -> tuple[Tensor, Tensor]:
    return demo_model.sequences(text, settings.batch, settings.context, seed, settings.device)


# ---- training ----


def language_model(ops: str, vocabulary: int, settings: Settings) -> LanguageModel:
    mixer = partial(Attention, settings.width, settings.heads, settings.context, bias=True)
    model = LanguageModel(vocabulary, settings.width, settings.layers, mixer, bias=True)
    if ops == "ours":
        extension_cpp.nn.convert(model)
        model.linear_loss = True
    return model.to(settings.device)


class Training(demo_model.Training):
    """Trains one model, and saves and loads its checkpoint."""

    def __init__(
        self,
        ops: str,
        text: Text,
        settings: Settings,
        compiled: bool,
        parallel: str | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        """`parallel` says how the processes of the group share the work ("ddp" or "fsdp"); None: this process trains
        alone. `graphs` says whether CUDA graphs run the compiled model."""
        torch.manual_seed(0)
        self.text, self.settings, self.parallel = text, settings, parallel
        self.rank, self.processes = (distributed.get_rank(), distributed.get_world_size()) if parallel else (0, 1)
        lacks = f"{self.processes} processes cannot share the {settings.batch} sequences of a batch evenly"
        require(settings.batch % self.processes == 0, lacks)
        self.model = language_model(ops, len(text.alphabet), settings)
        self.loss: Any = self.parallelize(compiled) if parallel else self.model
        if compiled and not parallel:
            self.loss = torch.compile(self.model, fullgraph=True, mode="reduce-overhead" if graphs else None)
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() != 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        draw = partial(self.batch, text.training)
        super().__init__(self.model, draw, settings.learning_rate, settings.steps, parameters=groups)
        self.keeps_gradients = graphs
        for parameter in self.model.parameters() if graphs else ():
            parameter.grad = torch.zeros_like(parameter)
        self.validation: dict[int, float] = {}  # by step

    def parallelize(self, compiled: bool) -> nn.Module:
        """Returns a model whose backward averages the gradients over the processes."""
        if compiled:  # compiles block by block, so that a block's communication overlaps another's computation
            for block in self.model.blocks:
                block.forward = torch.compile(block.forward, fullgraph=True)
        if self.parallel == "ddp":
            return DistributedDataParallel(self.model, broadcast_buffers=False)
        mesh = init_device_mesh(self.settings.device, (self.processes,))
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh)
        return self.model

    def batch(self, text: Tensor, seed: int) -> list[Tensor]:  # this process's share
        return [tokens[self.rank :: self.processes] for tokens in batch(text, self.settings, seed)]

    def mean(self, loss: Tensor) -> float:
        """Returns the mean over the processes, whose shares of a batch are equal."""
        if self.parallel:
            distributed.all_reduce(loss)
        return loss.item() / self.processes

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.settings.device, torch.bfloat16)

    def backward(self, number: int) -> Tensor:
        """Computes the gradients of a step, and returns the mean loss of this process's sequences."""
        accumulate = self.settings.accumulate
        total = torch.zeros((), device=self.settings.device)
        for part in range(accumulate):
            is_last = part == accumulate - 1  # whose backward averages the gradients over the processes
            if self.parallel == "ddp":
                self.loss.require_backward_grad_sync = is_last
            elif self.parallel == "fsdp":
                self.loss.set_requires_gradient_sync(is_last)
            if self.keeps_gradients:
                torch.compiler.cudagraph_mark_step_begin()
            with self.autocast():
                loss = self.loss(*self.draw(number * accumulate + part))
            (loss / accumulate).backward()
            total += loss.detach() / accumulate
        return total

    def validate(self) -> None:
        with torch.no_grad(), self.autocast():
            batches = [self.batch(self.text.validation, part) for part in range(VALIDATION_BATCHES)]
            losses = [self.mean(self.loss(*each)) for each in batches]
        self.validation[len(self.losses)] = sum(losses) / len(losses)

    def save(self, path: Path) -> None:
        """Writes the checkpoint, then replaces the earlier one in one move. Only the first process writes."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        if self.rank > 0:
            return
        state = {"settings": asdict(self.settings), "losses": self.losses, "validation": self.validation}
        state |= {"model": model, "optimizer": optimizer}
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def resume(self, path: Path) -> None:
        state = read_checkpoint(path)
        ours = asdict(self.settings)
        other = " and ".join(name for name in ours if state["settings"].get(name) != ours[name])
        require(not other, f"{path} was trained with another {other}: add --restart, or name another --out")
        fits = state["model"].keys() == self.model.state_dict().keys()
        require(fits, f"{path} has the parameters of another version's model: add --restart")
        self.losses, self.validation = state["losses"], state["validation"]
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states, options=WHOLE)


def read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if {"settings", "losses", "validation", "model", "optimizer"} <= state.keys():
            return state
    except Exception as error:  # raised by pickle, zip or the file system
        raise CannotMake(f"{path} cannot be read ({error.__class__.__name__}): add --restart to begin anew") from error
    raise CannotMake(f"{path} is not a checkpoint of this program: name another --out")


# ---- showing ----


def draw(folder: Path, settings: Settings) -> Path:
    """Draws the curves of every run in the folder that has these settings."""
    states = {}
    for ops in OPS:
        with contextlib.suppress(CannotMake):  # the other run has no readable checkpoint
            state = read_checkpoint(folder / f"{ops}.pt")
            if state["settings"] == asdict(settings):
                states[ops] = state
    losses = {f"{ops}, training": state["losses"] for ops, state in states.items()}
    title, alone = "A small GPT on text, bfloat16 autocast", "run the other --ops, too"
    with demo_model.loss_picture(folder / "loss.png", losses, title, alone) as axes:
        for (ops, state), line in zip(states.items(), [*axes["losses"].lines], strict=True):
            look = {"marker": "o" if ops == "ours" else "x", "linestyle": "", "color": line.get_color()}
            axes["losses"].plot(*zip(*state["validation"].items(), strict=True), label=f"{ops}, validation", **look)
    return folder / "loss.png"


# ---- the command ----


def add_options(parser: argparse.ArgumentParser, steps: int, out: str, holds: str) -> None:
    """Adds the options that this example shares with recurrent_text.py. `holds` names the files in the --out folder."""
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: that of Python's help())")
    parser.add_argument("--steps", type=positive, default=steps, help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU and this build allow it")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=Path(out), help=f"for {holds} (default: %(default)s)"
    )


def prepare(options: argparse.Namespace, sizes: dict[str, Any]) -> tuple[Text, Settings, str]:
    """Returns the text, the settings of the run, and a remark on the device. Makes the folder for the output."""
    device, remark = demo.choose_device(options.device)
    text = Text.of(read_text(options.text), sizes[device]["context"])
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotMake(f"--out {options.out}: {error.strerror}") from error
    return text, Settings(device, options.steps, text.digest, **sizes[device]), remark


def run(options: argparse.Namespace, console: Console) -> None:
    parallel = options.parallel if distributed.is_torchelastic_launched() else None
    if not options.no_compile:
        demo.check_compiler("training", "; or add --no-compile")
    text, settings, remark = prepare(options, SIZES)
    device = settings.device
    if parallel:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    checkpoint = options.out / f"{options.ops}.pt"
    has_graphs = device == "cuda" and not options.no_compile and not parallel
    require(has_graphs or not options.graphs, "--graphs needs a GPU, torch.compile and a single process")
    training = Training(options.ops, text, settings, not options.no_compile, parallel, graphs=options.graphs)
    if options.restart and training.rank == 0:
        checkpoint.unlink(missing_ok=True)  # if this run saves nothing, the next must not resume from the old file
    if parallel:
        distributed.barrier()
    if checkpoint.exists():
        training.resume(checkpoint)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    console.print(
        f"{len(text.training)} bytes of text, {parameters / 1e6:.1f} million parameters, --ops {options.ops}, on "
        f"{demo.describe(device)}{f', {training.processes} processes ({parallel})' if parallel else ''}. {remark}",
    )
    if training.losses:
        console.print(f"Going on from step {len(training.losses)} of {checkpoint}.", soft_wrap=True)

    def keep() -> None:
        if len(training.losses) % CHECKPOINT_EVERY == 0 or len(training.losses) == options.steps:
            training.validate()
            training.save(checkpoint)

    demo_model.train([training], console, keep)
    if training.seconds:
        console.print(f"{1e3 * training.step_seconds():.1f} ms a step, the median")
    for step, loss in training.validation.items():
        console.print(f"step {step:5}  training {training.losses[step - 1]:.4f}  validation {loss:.4f}")
    if training.rank > 0:
        return
    model = language_model(options.ops, len(text.alphabet), settings)  # neither compiled nor in parts
    model.load_state_dict(read_checkpoint(checkpoint)["model"])
    newline = text.alphabet.tolist().index(ord("\n")) if ord("\n") in text.alphabet else 0
    with training.autocast():
        written = demo_model.generate(model, text.alphabet, [newline], WRITTEN, settings.context, temperature=0.7)
    console.rule("what the model writes")
    console.print(written[1:], markup=False)
    console.rule()
    console.print(f"The loss curves: {draw(options.out, settings)}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python examples/train_text.py", description=__doc__.split("\n\n", 1)[1])
    parser.add_argument("--ops", choices=OPS, default="ours", help="whose functions (default: ours)")
    under = "under torchrun: each process has the whole model (ddp, the default), or a part of each tensor (fsdp)"
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help=under)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    graphs = "CUDA graphs run the compiled model (torch.compile's mode reduce-overhead), which takes the host less time"
    parser.add_argument("--graphs", action="store_true", help=graphs)
    parser.add_argument("--restart", action="store_true", help="begin anew where there is a checkpoint")
    add_options(parser, 300, "out/train_text", "OPS.pt, the checkpoint, and loss.png, with the curves of both OPS")
    options = parser.parse_args(arguments)
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        run(options, Console(quiet=not is_first, highlight=False))
    except CannotMake as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        without = ", without --restart," if options.restart else ""
        told = f"Stopped; the same command{without} goes on from the last checkpoint."
        if not (options.out / f"{options.ops}.pt").exists():
            told = f"Stopped before the first checkpoint, of step {CHECKPOINT_EVERY}."
        if is_first:
            print(told, file=sys.stderr)
        return 130
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

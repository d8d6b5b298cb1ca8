"""Trains a small GPT on text, byte by byte: python examples/train_text.py --help

The model is a pre-norm transformer under bfloat16 autocast and torch.compile, with gradient accumulation. Its norms,
rotary embedding, gates and loss are this package's (--ops ours) or plain PyTorch (--ops torch). Everything else is the
same, also the initial weights and the order of the data. So the two loss curves lie on each other.

The batches of a step depend only on the step's number, and the checkpoint is replaced in one move. So a run may be
killed at any moment: started again, it continues from the last checkpoint and ends as if it had not been killed.

Several processes share each batch if torchrun starts them (torchrun --nproc-per-node 2 examples/train_text.py
--parallel fsdp). The checkpoint holds whole tensors, so a run may continue with another number of processes, or with
one and without torchrun.
"""

import argparse
import hashlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no installation

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

try:
    import extension_cpp
except ImportError as error:
    sys.exit(f"error: {error}")
from extension_cpp.__main__ import Parser, missing_for, positive

if missing := missing_for("this example"):
    sys.exit(f"error: {missing}")
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from extension_cpp import demo

CHECKPOINT_EVERY = 25  # steps; the validation loss is computed at the same steps
WRITTEN = 400  # bytes that the model writes at the end
VALIDATION_SHARE, VALIDATION_BATCHES = 0.1, 4
WARMUP, WEIGHT_DECAY, CLIP = 20, 0.1, 1.0
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # of a checkpoint, which the first process gathers


@dataclass(frozen=True)
class RunSettings:
    """The settings that two runs must share if their curves are compared."""

    device: str
    steps: int
    text: str  # its digest
    width: int
    layers: int
    context: int
    batch: int  # sequences per forward
    learning_rate: float  # after the warm-up


@dataclass(frozen=True)
class Settings(RunSettings):
    """The settings that a run must share with the checkpoint from which it continues."""

    heads: int
    accumulate: int  # forwards per step


SMALL = {"width": 128, "layers": 4, "heads": 4, "context": 128, "batch": 8, "accumulate": 2, "learning_rate": 2e-3}
LARGE = {"width": 512, "layers": 8, "heads": 8, "context": 512, "batch": 32, "accumulate": 2, "learning_rate": 1e-3}
SIZES: dict[str, dict[str, Any]] = {"cpu": SMALL, "cuda": LARGE}


class CannotRun(Exception):
    """Says in one sentence why the training cannot run."""


# ---- the model ----


class AddLayerNorm(nn.LayerNorm):
    """extension_cpp.nn.AddLayerNorm in plain PyTorch. Adds a branch x to the residual stream and normalizes the sum s
    for the next branch; returns (layer_norm(s), s)."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # two inputs
        s = residual + x
        return super().forward(s), s


NORMS: dict[str, Callable[[int], nn.Module]] = {"ours": extension_cpp.nn.AddLayerNorm, "torch": AddLayerNorm}
# For rotary_embedding, swiglu and linear_cross_entropy. reference has them in plain PyTorch.
FUNCTIONS: dict[str, Any] = {"ours": extension_cpp, "torch": extension_cpp.reference}


class Block(nn.Module):
    """Causal attention, then a gated perceptron. Takes and returns a branch and the residual stream, each of shape
    (B, T, width)."""

    def __init__(self, ops: str, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.functions = heads, FUNCTIONS[ops]
        self.norm1, self.norm2 = NORMS[ops](width), NORMS[ops](width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate_up, self.down = nn.Linear(width, 6 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.norm1(x, residual)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        query, key = self.functions.rotary_embedding(query, key, cos, sin)
        x = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x, residual = self.norm2(self.out(x.transpose(1, 2).flatten(2)), residual)
        return self.down(self.functions.swiglu(*self.gate_up(x).chunk(2, dim=-1))), residual


def rotations(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles by which the pairs of a head are rotated, each of shape (tokens, width)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class GPT(nn.Module):
    """Predicts the next byte."""

    cos: Tensor
    sin: Tensor

    def __init__(self, ops: str, vocabulary: int, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.functions = FUNCTIONS[ops]
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(ops, width, settings.heads) for _ in range(settings.layers))
        self.norm = NORMS[ops](width)
        for name, factors in zip(("cos", "sin"), rotations(settings.context, width // settings.heads), strict=True):
            self.register_buffer(name, factors, persistent=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_the_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * settings.layers) ** 0.5 if into_the_stream else 0.02)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The input of the head, (B, T, width)."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.token(tokens)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual, cos, sin)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def forward(self, tokens: Tensor, following: Tensor | None = None) -> Tensor:
        """The logits or, given the bytes that follow, the mean cross-entropy in nats per byte."""
        x = self.hidden(tokens)
        result: Tensor = (
            self.head(x) if following is None else self.functions.linear_cross_entropy(x, self.head.weight, following)
        )
        return result


# ---- the text ----


def read_text(path: Path | None) -> str:
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[key] for key in sorted(topics))
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise CannotRun(f"--text {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CannotRun(f"--text {path}: byte {error.start} is not UTF-8, so this is no text file") from error
    if "\0" in text:
        raise CannotRun(f"--text {path}: it has a zero byte, so this is no text file")
    if not text.strip():
        raise CannotRun(f"--text {path}: the file is empty")
    return text


@dataclass
class Text:
    """A text as indices into the bytes that occur in it. Its end is kept for validation."""

    alphabet: Tensor
    training: Tensor
    validation: Tensor
    digest: str

    @staticmethod
    def of(text: str, context: int) -> "Text":
        data = text.encode()
        alphabet, indices = torch.unique(torch.frombuffer(bytearray(data), dtype=torch.uint8), return_inverse=True)
        kept = int(len(data) * VALIDATION_SHARE)
        if kept < context + 1:
            least = math.ceil((context + 1) / VALIDATION_SHARE)
            raise CannotRun(
                f"the text has {len(data)} bytes, and at least {least} are needed: a tenth is kept for validation, in "
                f"sequences of {context} bytes"
            )
        return Text(alphabet, indices[:-kept], indices[-kept:], hashlib.sha256(data).hexdigest()[:16])


def batch(text: Tensor, settings: RunSettings, seed: int) -> tuple[Tensor, Tensor]:
    """Sequences from random places, and the bytes that follow, each (B, T)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - settings.context, (settings.batch, 1), generator=generator)
    sequences = text[starts + torch.arange(settings.context + 1)].to(settings.device)
    return sequences[:, :-1], sequences[:, 1:]


# ---- training ----


class Training:
    """A model in training, and its checkpoint."""

    def __init__(self, ops: str, text: Text, settings: Settings, compiled: bool, parallel: str | None = None) -> None:
        """parallel: how the processes of the group share the work. None: this process trains alone."""
        torch.manual_seed(0)
        self.text, self.settings, self.parallel = text, settings, parallel
        self.rank, self.processes = (distributed.get_rank(), distributed.get_world_size()) if parallel else (0, 1)
        if settings.batch % self.processes:
            raise CannotRun(f"{self.processes} processes cannot share the {settings.batch} sequences of a batch evenly")
        self.model = GPT(ops, len(text.alphabet), settings).to(settings.device)
        self.loss: Any = self.parallelize(compiled) if parallel else self.model
        if compiled and not parallel:
            self.loss = torch.compile(self.model, fullgraph=True)
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() != 2]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []  # one for each step of this run
        self.validation: dict[int, float] = {}  # by step

    def parallelize(self, compiled: bool) -> nn.Module:
        """The model whose backward averages the gradients over the processes."""
        if compiled:  # block by block, so that one block's communication overlaps another's computation
            for block in self.model.blocks:
                block.forward = torch.compile(block.forward, fullgraph=True)
        if self.parallel == "ddp":
            return DistributedDataParallel(self.model, broadcast_buffers=False)
        mesh = init_device_mesh(self.settings.device, (self.processes,))
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh)
        return self.model

    def reduce_gradients(self, value: bool) -> None:
        """Sets whether the next backward communicates, which is needed once per step."""
        if self.parallel == "ddp":
            self.loss.require_backward_grad_sync = value
        elif self.parallel == "fsdp":
            self.loss.set_requires_gradient_sync(value)

    def batch(self, text: Tensor, seed: int) -> list[Tensor]:
        """This process's sequences of a batch."""
        return [tokens[self.rank :: self.processes] for tokens in batch(text, self.settings, seed)]

    def mean(self, loss: Tensor) -> float:
        """The mean over the processes, whose shares of a batch are equal."""
        if self.parallel:
            distributed.all_reduce(loss)
        return loss.item() / self.processes

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.settings.device, torch.bfloat16)

    def step(self) -> None:
        number, settings, began = len(self.losses), self.settings, time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * min((number + 1) / WARMUP, 1.0) * self.decay(number)
        loss = self.backward(number)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(self.mean(loss))  # waits for the GPU
        self.seconds.append(time.perf_counter() - began)

    def backward(self, number: int) -> Tensor:
        """Leaves the gradients of a step, and returns the mean loss of this process's sequences."""
        accumulate = self.settings.accumulate
        total = torch.zeros((), device=self.settings.device)
        for part in range(accumulate):
            self.reduce_gradients(part == accumulate - 1)
            with self.autocast():
                loss = self.loss(*self.batch(self.text.training, number * accumulate + part))
            (loss / accumulate).backward()
            total += loss.detach() / accumulate
        return total

    def decay(self, number: int) -> float:
        """A cosine from 1 to 0.1."""
        return 0.55 + 0.45 * math.cos(math.pi * number / self.settings.steps)

    def validate(self) -> None:
        with torch.no_grad(), self.autocast():
            batches = [self.batch(self.text.validation, part) for part in range(VALIDATION_BATCHES)]
            losses = [self.mean(self.loss(*each)) for each in batches]
        self.validation[len(self.losses)] = sum(losses) / len(losses)

    def save(self, path: Path) -> None:
        """Writes the checkpoint to the disk, then replaces the earlier one in one move. The first process does it."""
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
        other = [name for name in ours if state["settings"].get(name) != ours[name]]
        if other:
            raise CannotRun(
                f"{path} was trained with another {' and '.join(other)}: add --restart, or name another --out"
            )
        self.losses, self.validation = state["losses"], state["validation"]
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **states, options=WHOLE)

    def write(self, length: int) -> str:
        """Text that the model continues from a newline."""
        tokens = [self.text.alphabet.tolist().index(ord("\n")) if ord("\n") in self.text.alphabet else 0]
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad(), self.autocast():
            for _ in range(length):
                context = torch.tensor([tokens[-self.settings.context :]], device=self.settings.device)
                logits = self.model(context)[0, -1].float().cpu()
                tokens.append(int(torch.multinomial(torch.softmax(logits / 0.7, -1), 1, generator=generator)))
        return bytes(self.text.alphabet[tokens[1:]].tolist()).decode(errors="replace")


def read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if {"settings", "losses", "validation", "model", "optimizer"} <= state.keys():
            return state
    except Exception as error:  # from pickle, zip or the file system
        raise CannotRun(f"{path} cannot be read ({error.__class__.__name__}): add --restart to begin anew") from error
    raise CannotRun(f"{path} is not a checkpoint of this program: name another --out")


# ---- showing ----


def draw(folder: Path, settings: Settings) -> Path:
    """Draws the curves of every run in the folder that has these settings."""
    from matplotlib.figure import Figure  # unlike pyplot it needs no display

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    curves = {}
    looks: dict[str, dict[str, Any]] = {
        "ours": {"color": "#e69f00", "linewidth": 4},
        "torch": {"color": "black", "linestyle": "--"},
    }
    for ops, look in looks.items():
        try:
            state = read_checkpoint(folder / f"{ops}.pt")
        except CannotRun:  # the other run has none, or one that cannot be read
            continue
        if state["settings"] != asdict(settings):
            continue
        losses, validation = state["losses"], state["validation"]
        curves[ops] = losses
        top.plot(range(1, len(losses) + 1), losses, **look, label=f"{ops}, training")
        marker = "o" if ops == "ours" else "x"
        top.plot(*zip(*validation.items(), strict=True), marker, color=look["color"], label=f"{ops}, validation")
    if len(curves) == 2:
        gaps = [max(abs(a - b), 1e-7) for a, b in zip(*curves.values(), strict=False)]
        bottom.plot(range(1, len(gaps) + 1), gaps, color="#0072b2", linewidth=1)
    else:
        bottom.text(0.5, 0.5, "run the other --ops, too", transform=bottom.transAxes, ha="center")
    top.set(ylabel="loss (nats a byte)", title="A small GPT on text, bfloat16 autocast")
    bottom.set(yscale="log", xlabel="step", ylabel="difference of the two")
    top.legend()
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=120)
    return folder / "loss.png"


# ---- the command ----


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python examples/train_text.py", description=__doc__.split("\n\n", 1)[1])
    parser.add_argument("--ops", choices=NORMS, default="ours", help="whose functions (default: ours)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text (default: that of Python's help())")
    parser.add_argument("--steps", type=positive, default=300, help="(default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where a GPU and this build allow it")
    parser.add_argument(
        "--parallel",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="under torchrun: each process has the whole model (ddp, the default), or a part of each tensor (fsdp)",
    )
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--restart", action="store_true", help="begin anew where there is a checkpoint")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=Path("out/train_text"),
        help="for OPS.pt, the checkpoint, and loss.png, with the curves of both OPS (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def join(device: str) -> None:
    """Joins the process group that torchrun describes in the environment."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")


def run(options: argparse.Namespace, console: Console) -> None:
    device, remark = demo.choose_device(options.device)
    parallel = options.parallel if distributed.is_torchelastic_launched() else None
    if not options.no_compile:
        demo.check_compiler("training", "; or add --no-compile")
    sizes = SIZES[device]
    text = Text.of(read_text(options.text), sizes["context"])
    settings = Settings(device, options.steps, text.digest, **sizes)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotRun(f"--out {options.out}: {error.strerror}") from error
    if parallel:
        join(device)
    checkpoint = options.out / f"{options.ops}.pt"
    training = Training(options.ops, text, settings, not options.no_compile, parallel)
    if options.restart and training.rank == 0:
        checkpoint.unlink(missing_ok=True)  # else a run that is stopped before its first one would continue from it
    if parallel:
        distributed.barrier()
    if checkpoint.exists():
        training.resume(checkpoint)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    console.print(
        f"{len(text.training)} bytes of text, {parameters / 1e6:.1f} million parameters, --ops {options.ops}, on "
        f"{demo.describe(device)}{f', {training.processes} processes ({parallel})' if parallel else ''}. {remark}",
        highlight=False,
    )
    if training.losses:
        console.print(f"Going on from step {len(training.losses)} of {checkpoint}.", highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("compiling", total=options.steps, completed=len(training.losses))
        while len(training.losses) < options.steps:
            training.step()
            if len(training.losses) % CHECKPOINT_EVERY == 0 or len(training.losses) == options.steps:
                training.validate()
                training.save(checkpoint)
            progress.update(task, advance=1, description=f"loss {training.losses[-1]:.4f}")
    if training.seconds:
        console.print(f"{1e3 * statistics.median(training.seconds):.1f} ms a step, the median", highlight=False)
    for step, loss in training.validation.items():
        console.print(
            f"step {step:5}  training {training.losses[step - 1]:.4f}  validation {loss:.4f}", highlight=False
        )
    if training.rank > 0:
        return
    writer = Training(options.ops, text, settings, compiled=False)
    writer.model.load_state_dict(read_checkpoint(checkpoint)["model"])
    console.rule("what the model writes")
    console.print(writer.write(WRITTEN), markup=False, highlight=False)
    console.rule()
    console.print(f"The loss curves: {draw(options.out, settings)}", highlight=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        run(options, Console(quiet=not is_first))
    except (CannotRun, demo.CannotRun) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if not is_first:
            return 130
        if (options.out / f"{options.ops}.pt").exists():
            without = ", without --restart," if options.restart else ""
            print(f"Stopped; the same command{without} goes on from the last checkpoint.", file=sys.stderr)
        else:
            print(f"Stopped before the first checkpoint, of step {CHECKPOINT_EVERY}.", file=sys.stderr)
        return 130
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""python -m extension_cpp demo: every operator beside eager PyTorch, then a small language model that is converted.

The model reads bytes of the English text that ships with every Python, and is written with torch.nn alone. Two copies
with the same weights see the same batches: one as it is, the other after extension_cpp.nn.convert.
"""

import logging
import os
import re
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import extension_cpp

from . import demo_table, info

CHECKED_STEPS = 50
TOLERANCE = 1e-3
BATCH, CONTEXT = 16, 64
WIDTH, HEADS, LAYERS = 96, 4, 2
# The learning rate rises so slowly that two trainings whose weights differ by 1e-7 stay together for CHECKED_STEPS. A
# difference above TOLERANCE therefore points to an error in an operator.
LEARNING_RATE, WARMUP = 5e-3, 150


class CannotRun(Exception):
    """Says in one sentence why the demo cannot run here."""


# ---- the model ----


class Attention(nn.Module):
    """Causal attention. Input and output have the shape (B, T, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # query, key, value
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.mix(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Perceptron(nn.Module):
    """A gated perceptron with one hidden layer, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.activation = nn.SiLU()
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, then a perceptron. Each follows a norm, and its result is added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.perceptron_norm, self.perceptron = nn.RMSNorm(WIDTH), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.attention(self.attention_norm(x))
        x = residual + x
        residual = x
        x = self.perceptron(self.perceptron_norm(x))
        return residual + x


class LanguageModel(nn.Module):
    """Predicts the next byte: embeddings, blocks, logits. Returns the mean cross-entropy in nats per byte."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Parameter(torch.zeros(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.loss = nn.CrossEntropyLoss()
        nn.init.normal_(self.embedding.weight, std=0.5)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]  # (B, T, WIDTH)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        return self.loss(self.logits(tokens).flatten(0, 1), following.flatten())


def convert(model: LanguageModel, console: Console) -> None:
    """Calls nn.convert, and says what it changed for each function."""
    changed, left = extension_cpp.nn.convert(model)
    counted = Counter(function for functions in changed.values() for function in functions.split(", "))
    console.print(
        f"extension_cpp.nn.convert(model): {', '.join(f'{count} x {name}' for name, count in counted.items())}; "
        f"{len(left)} modules left as they were.",
        highlight=False,
    )


# ---- training ----


def read_text() -> tuple[Tensor, Tensor]:
    """The texts of Python's own `help()`, without tables and indentation: the bytes that occur, and the text as indices
    into them."""
    from pydoc_data.topics import topics

    lines = "\n".join(topics[key] for key in sorted(topics)).splitlines()
    text = "\n".join(re.sub(r"\s+", " ", line).strip() for line in lines if not line.lstrip().startswith(("|", "+")))
    return torch.unique(torch.tensor(list(text.encode()), dtype=torch.uint8), return_inverse=True)


@dataclass
class Run:
    """One model in training."""

    name: str
    model: LanguageModel
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)

    def step(self, batch: Tensor, learning_rate: float) -> None:
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self.model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if batch.is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - started)

    def steps_per_second(self) -> str:
        return f"{1 / statistics.median(self.seconds):.1f}"


def train(text: Tensor, vocabulary: int, device: str, steps: int, console: Console) -> tuple[Run, Run]:
    """Trains both models in turns, so that both meet the same state of the machine."""
    runs = []
    for name in ("converted", "as it is"):
        torch.manual_seed(0)
        runs.append(Run(name, LanguageModel(vocabulary).to(device)))
    convert(runs[0].model, console)
    generator = torch.Generator().manual_seed(0)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps)
        for step in range(steps):
            starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
            batch = text[starts + torch.arange(CONTEXT + 1)].to(device)
            rate = LEARNING_RATE * min((step + 1) / WARMUP, 1.0) * (1 - 0.9 * step / steps)
            for run in runs if step % 2 else runs[::-1]:
                run.step(batch, rate)
            losses = " / ".join(f"{run.losses[-1]:.4f}" for run in runs)
            progress.update(task, advance=1, description=f"loss {losses}")
    return runs[0], runs[1]


def generate(model: LanguageModel, alphabet: Tensor, prompt: bytes, length: int, temperature: float) -> str:
    """Continues the prompt byte by byte."""
    device = model.position.device
    index = {byte: i for i, byte in enumerate(alphabet.tolist())}
    tokens = [index[byte] for byte in prompt]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(length):
            logits = model.logits(torch.tensor([tokens[-CONTEXT:]], device=device))[0, -1].cpu()
            tokens.append(int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)))
    return bytes(alphabet[tokens].tolist()).decode(errors="replace")


# ---- showing ----


def largest_difference(ours: Run, stock: Run) -> float:
    """The largest difference in the first CHECKED_STEPS; NaN if a loss is NaN there."""
    pairs = torch.tensor([ours.losses, stock.losses], dtype=torch.float64)[:, :CHECKED_STEPS]
    return float((pairs[0] - pairs[1]).abs().max())


def show_losses(ours: Run, stock: Run, console: Console) -> None:
    steps = len(ours.losses)
    shown = sorted(
        {step for step in (1, 10, 25, CHECKED_STEPS, 100, 200, 500, 1000, 2000, 5000) if step < steps} | {steps}
    )
    losses = Table("step", ours.name, stock.name, "difference", title="Loss, nats a byte")
    for step in shown:
        a, b = ours.losses[step - 1], stock.losses[step - 1]
        losses.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    console.print(losses)
    console.print(
        f"Steps a second in eager PyTorch: {ours.steps_per_second()} {ours.name}, "
        f"{stock.steps_per_second()} {stock.name}.",
        highlight=False,
    )


def compile_both(ours: Run, stock: Run, text: Tensor, device: str, console: Console) -> None:
    """Compiles each model as one graph (fullgraph), which our operators do not break."""
    batch = text[torch.arange(BATCH)[:, None] * CONTEXT + torch.arange(CONTEXT + 1)].to(device)
    table = Table("under torch.compile", "first step", "steps a second", title="Compiled")
    with console.status("compiling"):
        # The compiler's start belongs to neither model, so another function is compiled first.
        torch.compile(lambda x: (x * x).sum())(torch.ones(8, device=device, requires_grad=True)).backward()
        for run in (ours, stock):
            compiled = torch.compile(run.model, fullgraph=True)
            seconds = []
            for _ in range(11):
                started = time.perf_counter()
                compiled(batch[:, :-1], batch[:, 1:]).backward()
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            table.add_row(run.name, f"{seconds[0]:.1f} s", f"{1 / statistics.median(seconds[1:]):.1f}")
    console.print(table)


def output_folder() -> Path:
    """The folder out/ in the current folder, or a temporary folder if out/ cannot be written."""
    folder = Path("out")
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="extension_cpp_"))


def draw(ours: Run, stock: Run, path: Path) -> None:
    from matplotlib.figure import Figure  # unlike pyplot it needs no display

    steps = range(1, len(ours.losses) + 1)
    marker = "." if len(steps) == 1 else None
    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    top.plot(
        steps, ours.losses, color="#e69f00", linewidth=4, marker=marker, label="converted to extension_cpp's operators"
    )
    top.plot(
        steps,
        stock.losses,
        color="black",
        linewidth=1,
        linestyle=(0, (5, 4)),
        marker=marker,
        label="as it is",
    )
    top.set(ylabel="loss (nats a byte)", title="A byte-level language model trained twice from the same seed, float32")
    top.legend()
    differences = [abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True)]
    bottom.plot(steps, [max(each, 1e-9) for each in differences], color="#0072b2", linewidth=1, marker=marker)
    bottom.hlines(
        TOLERANCE, 1, CHECKED_STEPS, color="#d55e00", label=f"limit over the first {CHECKED_STEPS} steps: {TOLERANCE:g}"
    )
    bottom.set(yscale="log", xlabel="step", ylabel="difference of the losses")
    bottom.legend()
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


# ---- the command ----


def choose_device(asked: str | None) -> tuple[str, str]:
    """The device to run on, and a remark on the choice or nothing."""
    if asked == "cpu":
        return "cpu", ""
    machine = info.read_machine()
    build = info.read_build()
    problem = info.cuda_problem(build, machine) if build else "the library does not say what it was built for"
    if problem and asked == "cuda":
        raise CannotRun(f"--device cuda: {problem}")
    return ("cpu", problem if machine.gpus else "") if problem else ("cuda", "")


def check_compiler(what: str = "the demo", instead: str = "") -> None:
    """torch.compile writes C++ on the CPU and a C module for Triton on the GPU; both include Python.h."""
    name = os.environ.get("CXX") or "g++"
    if shutil.which(name.split()[0]) is None:
        raise CannotRun(
            f"{what} uses torch.compile, which needs a C++ compiler, and '{name}' was not found: install one "
            f"(Debian: apt install g++) or set CXX{instead}."
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise CannotRun(
            f"{what} uses torch.compile, which needs Python's C headers, and this Python has none: install them "
            f"(Debian: apt install python3-dev){instead}."
        )


def describe(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads, instruction set {info.ask_library('cpu_level')}"


def run(asked_device: str | None, steps: int) -> int:
    """Runs the demo. Returns 1 if the losses differ in the first CHECKED_STEPS."""
    check_compiler()
    device, remark = choose_device(asked_device)
    # torch warns of a toolkit without a GPU, which is no error here.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    console = Console()
    console.print(
        f"extension_cpp {extension_cpp.__version__}, torch {torch.__version__}, {describe(device)}", highlight=False
    )
    if remark:
        console.print(remark, highlight=False)
    demo_table.show(device, console)

    alphabet, text = read_text()
    console.print(
        f"\nA language model of torch.nn, trained on {len(text)} bytes of Python's help texts, {steps} steps of "
        f"{BATCH} x {CONTEXT} bytes",
        highlight=False,
    )
    ours, stock = train(text, len(alphabet), device, steps, console)
    show_losses(ours, stock, console)
    compile_both(ours, stock, text, device, console)
    difference = largest_difference(ours, stock)
    held = difference <= TOLERANCE
    verdict = "[green]agree[/green]" if held else "[red]DO NOT agree[/red]"
    console.print(
        f"The losses {verdict} over the first {min(CHECKED_STEPS, steps)} steps: they differ by at most "
        f"{difference:.1e}, the limit is {TOLERANCE:g}.",
        highlight=False,
    )
    console.rule(f"what the converted model writes after 'The ', {steps} steps old")
    console.print(generate(ours.model, alphabet, b"The ", 400, temperature=0.6), markup=False, highlight=False)
    console.rule()
    console.print(
        "It is a very small model: look at the spaces, the lengths of the words and the common ones among them, and "
        "not at the sense. --steps 2000 makes most of its words English.",
        highlight=False,
    )
    path = output_folder() / "demo_loss.png"
    draw(ours, stock, path)
    console.print(f"The loss curves: {path}", highlight=False, soft_wrap=True)
    return 0 if held else 1

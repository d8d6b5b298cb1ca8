"""`demo` compares every operator with eager PyTorch, then trains a small converted language model.

The model reads bytes of the English text that comes with every Python, and uses torch.nn alone. Two equal copies of the
model train on the same batches. One of them is changed by nn.convert before.
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
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import extension_cpp

from . import demo_model, demo_table, info
from .demo_model import Attention, CannotRun, LanguageModel

CHECKED_STEPS = 50
TOLERANCE = 1e-3
BATCH, CONTEXT = 16, 64
WIDTH, HEADS, LAYERS = 96, 4, 2
# The learning rate rises so slowly that the losses of two models whose weights differ by 1e-7 stay within TOLERANCE of
# each other for CHECKED_STEPS. A larger difference therefore points to an error in an operator.
LEARNING_RATE, WARMUP = 5e-3, 150


# ---- training ----


def read_text() -> tuple[Tensor, Tensor]:
    """Returns two tensors: the bytes that occur in the text of Python's `help()` without its tables, and this text as
    indices into these bytes."""
    lines = demo_model.help_text().splitlines()
    return demo_model.indices(
        "\n".join(re.sub(r"\s+", " ", line).strip() for line in lines if not line.lstrip().startswith(("|", "+")))
    )


class Run(demo_model.Training):
    """Trains one of the two models, and keeps its losses and times."""

    def __init__(self, name: str, text: Tensor, vocabulary: int, device: str, steps: int) -> None:
        torch.manual_seed(0)
        self.name, self.text, self.device = name, text, device
        model = LanguageModel(vocabulary, WIDTH, LAYERS, partial(Attention, WIDTH, HEADS, CONTEXT)).to(device)
        super().__init__(model, model.parameters(), LEARNING_RATE, steps, WARMUP)

    def backward(self, number: int) -> Tensor:
        loss: Tensor = self.model(*demo_model.sequences(self.text, BATCH, CONTEXT, number, self.device))
        loss.backward()
        return loss

    def steps_per_second(self) -> str:
        return f"{1 / self.step_seconds():.1f}"


def train(text: Tensor, vocabulary: int, device: str, steps: int, console: Console) -> tuple[Run, Run]:
    """Trains both models in turns, step by step, so that the state of the machine affects their times equally."""
    ours, stock = (Run(name, text, vocabulary, device, steps) for name in ("converted", "as it is"))
    changed, left = extension_cpp.nn.convert(ours.model)
    counted = Counter(function for functions in changed.values() for function in functions.split(", "))
    console.print(
        f"extension_cpp.nn.convert(model): {', '.join(f'{count} x {name}' for name, count in counted.items())}; "
        f"{len(left)} modules left as they were."
    )
    with demo_model.progress(console) as progress:
        task = progress.add_task("training", total=steps)
        for step in range(steps):
            for run in (ours, stock) if step % 2 else (stock, ours):
                run.step()
            progress.update(task, advance=1, description=f"loss {ours.losses[-1]:.4f} / {stock.losses[-1]:.4f}")
    return ours, stock


def write(model: LanguageModel, alphabet: Tensor, prompt: bytes, length: int) -> str:
    """Continues the prompt byte by byte."""
    tokens = [alphabet.tolist().index(byte) for byte in prompt]
    written = demo_model.generate(model, tokens, length, CONTEXT, temperature=0.6)
    return bytes(alphabet[written].tolist()).decode(errors="replace")


# ---- showing ----


def largest_difference(ours: Run, stock: Run) -> float:
    """Returns the largest difference of the losses in the first CHECKED_STEPS steps, or NaN if one is NaN."""
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
    )


def compile_both(ours: Run, stock: Run, text: Tensor, device: str, console: Console) -> None:
    """Times both models under torch.compile. fullgraph=True raises an error if an operator breaks the graph."""
    batch = demo_model.sequences(text, BATCH, CONTEXT, 0, device)
    table = Table("under torch.compile", "first step", "steps a second", title="Compiled")
    with console.status("compiling"):
        # Another function is compiled first, so that the start of the compiler counts for neither model.
        torch.compile(lambda x: (x * x).sum())(torch.ones(8, device=device, requires_grad=True)).backward()
        for run in (ours, stock):
            compiled = torch.compile(run.model, fullgraph=True)
            seconds = []
            for _ in range(11):
                started = time.perf_counter()
                compiled(*batch).backward()
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            table.add_row(run.name, f"{seconds[0]:.1f} s", f"{1 / statistics.median(seconds[1:]):.1f}")
    console.print(table)


def output_folder() -> Path:
    """Returns the folder out/ in the current folder, or a temporary folder if out/ cannot be written."""
    folder = Path("out")
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="extension_cpp_"))


def draw(ours: Run, stock: Run, path: Path) -> None:
    from matplotlib.figure import Figure  # Figure, unlike pyplot, needs no display

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    losses = {"converted to extension_cpp's operators": ours.losses, "as it is": stock.losses}
    demo_model.draw_losses(top, bottom, losses, "A byte-level language model trained twice from the same seed, float32")
    bottom.hlines(
        TOLERANCE, 1, CHECKED_STEPS, color="#d55e00", label=f"limit over the first {CHECKED_STEPS} steps: {TOLERANCE:g}"
    )
    top.legend()
    bottom.legend()
    figure.savefig(path, dpi=120)


# ---- the command ----


def choose_device(asked: str | None) -> tuple[str, str]:
    """Returns the device on which the demo runs, and a remark to print about this choice, which may be empty."""
    if asked == "cpu":
        return "cpu", ""
    machine = info.read_machine()
    problem = info.cuda_problem(info.read_build(), machine)
    if problem and asked == "cuda":
        raise CannotRun(f"--device cuda: {problem}")
    return ("cpu", problem if machine.gpus else "") if problem else ("cuda", "")


def check_compiler(what: str = "the demo", instead: str = "") -> None:
    """Raises CannotRun if torch.compile would fail, because it needs a C++ compiler and the header Python.h."""
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
    """Runs the demo. Returns 1 if losses differ by more than TOLERANCE in the first CHECKED_STEPS steps, else 0."""
    check_compiler()
    device, remark = choose_device(asked_device)
    # torch would warn if a CUDA toolkit is installed without a GPU, which is no problem for the demo.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    console = Console(highlight=False)
    console.print(f"extension_cpp {extension_cpp.__version__}, torch {torch.__version__}, {describe(device)}")
    if remark:
        console.print(remark)
    demo_table.show(device, console)

    alphabet, text = read_text()
    console.print(
        f"\nA language model of torch.nn, trained on {len(text)} bytes of Python's help texts, {steps} steps of "
        f"{BATCH} x {CONTEXT} bytes",
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
    )
    console.rule(f"what the converted model writes after 'The ', {steps} steps old")
    console.print(write(ours.model, alphabet, b"The ", 400), markup=False)
    console.rule()
    console.print(
        "It is a very small model: look at the spaces, the lengths of the words and the common ones among them, and "
        "not at the sense. --steps 2000 makes most of its words English.",
    )
    path = output_folder() / "demo_loss.png"
    draw(ours, stock, path)
    console.print(f"The loss curves: {path}", soft_wrap=True)
    return 0 if held else 1

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
from .demo_model import Attention, LanguageModel, Training
from .errors import CannotMake, require

NAMES = ("converted", "as it is")
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


def training(text: Tensor, vocabulary: int, device: str, steps: int) -> Training:
    torch.manual_seed(0)
    mixer = partial(Attention, WIDTH, HEADS, CONTEXT, bias=False)
    model = LanguageModel(vocabulary, WIDTH, LAYERS, mixer, bias=False).to(device)
    draw = partial(demo_model.sequences, text, BATCH, CONTEXT, device=device)
    return Training(model, draw, LEARNING_RATE, steps, WARMUP)


# ---- showing ----


def show_losses(ours: Training, stock: Training, console: Console) -> None:
    steps = len(ours.losses)
    shown = {step for step in (1, 10, 25, CHECKED_STEPS, 100, 200, 500, 1000, 2000, 5000) if step < steps}
    losses = Table("step", *NAMES, "difference", title="Loss, nats a byte")
    for step in sorted(shown | {steps}):
        a, b = ours.losses[step - 1], stock.losses[step - 1]
        losses.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    console.print(losses)
    speeds = (f"{1 / run.step_seconds():.1f} {name}" for name, run in zip(NAMES, (ours, stock), strict=True))
    console.print(f"Steps a second in eager PyTorch: {', '.join(speeds)}.")


def compile_both(ours: Training, stock: Training, device: str, console: Console) -> None:
    """Times both models under torch.compile. fullgraph=True raises an error if an operator breaks the graph."""
    table = Table("under torch.compile", "first step", "steps a second", title="Compiled")
    with console.status("compiling"):
        # Another function is compiled first, so that the start of the compiler counts for neither model.
        torch.compile(lambda x: (x * x).sum())(torch.ones(8, device=device, requires_grad=True)).backward()
        for name, run in zip(NAMES, (ours, stock), strict=True):
            compiled, batch = torch.compile(run.model, fullgraph=True), run.draw(0)
            seconds = []
            for _ in range(11):
                started = time.perf_counter()
                compiled(*batch).backward()
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            table.add_row(name, f"{seconds[0]:.1f} s", f"{1 / statistics.median(seconds[1:]):.1f}")
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


def draw(ours: Training, stock: Training, path: Path) -> None:
    losses = {"converted to extension_cpp's operators": ours.losses, "as it is": stock.losses}
    title = "A byte-level language model trained twice from the same seed, float32"
    with demo_model.loss_picture(path, losses, title) as axes:
        limit = f"limit over the first {CHECKED_STEPS} steps: {TOLERANCE:g}"
        axes["gaps"].hlines(TOLERANCE, 1, CHECKED_STEPS, color="#d55e00", label=limit)
        axes["gaps"].legend()


# ---- the command ----


def choose_device(asked: str | None) -> tuple[str, str]:
    """Returns the device on which the demo runs, and a remark to print about this choice, which may be empty."""
    if asked == "cpu":
        return "cpu", ""
    machine = info.read_machine()
    problem = info.cuda_problem(info.read_build(), machine)
    require(not problem or asked is None, f"--device cuda: {problem}")
    return ("cpu", problem if machine.gpus else "") if problem else ("cuda", "")


def check_compiler(what: str = "the demo", instead: str = "") -> None:
    """Raises CannotMake if torch.compile would fail, because it needs a C++ compiler and the header Python.h."""
    name = os.environ.get("CXX") or "g++"
    if shutil.which(name.split()[0]) is None:
        lacks = f"a C++ compiler, and '{name}' was not found: install one (Debian: apt install g++) or set CXX"
    elif not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacks = "Python's C headers, and this Python has none: install them (Debian: apt install python3-dev)"
    else:
        return
    raise CannotMake(f"{what} uses torch.compile, which needs {lacks}{instead}.")


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
    ours, stock = (training(text, len(alphabet), device, steps) for _ in range(2))
    changed, left = extension_cpp.nn.convert(ours.model)
    counted = Counter(function for functions in changed.values() for function in functions.split(", "))
    console.print(
        f"extension_cpp.nn.convert(model): {', '.join(f'{count} x {name}' for name, count in counted.items())}; "
        f"{len(left)} modules left as they were."
    )
    demo_model.train((ours, stock), console)
    show_losses(ours, stock, console)
    compile_both(ours, stock, device, console)
    losses = torch.tensor([ours.losses, stock.losses], dtype=torch.float64)
    difference = float(losses.diff(dim=0)[:, :CHECKED_STEPS].abs().max())  # NaN if a loss is NaN
    held = difference <= TOLERANCE
    verdict = "[green]agree[/green]" if held else "[red]DO NOT agree[/red]"
    console.print(
        f"The losses {verdict} over the first {min(CHECKED_STEPS, steps)} steps: they differ by at most "
        f"{difference:.1e}, the limit is {TOLERANCE:g}.",
    )
    console.rule(f"what the converted model writes after 'The ', {steps} steps old")
    prompt = [alphabet.tolist().index(byte) for byte in b"The "]
    console.print(demo_model.generate(ours.model, alphabet, prompt, 400, CONTEXT, temperature=0.6), markup=False)
    console.rule()
    console.print(
        "It is a very small model: look at the spaces, the lengths of the words and the common ones among them, and "
        "not at the sense. --steps 2000 makes most of its words English.",
    )
    path = output_folder() / "demo_loss.png"
    draw(ours, stock, path)
    console.print(f"The loss curves: {path}", soft_wrap=True)
    return 0 if held else 1

"""Trains a small recurrent language model on text, byte by byte: python examples/recurrent_text.py --help

The model is a minGRU (Feng et al. 2024, Were RNNs All We Needed?, arXiv:2410.01201). Its gates depend on the input
alone, so that the state is a linear recurrence, h[t] = (1 - z[t]) * h[t - 1] + z[t] * candidate[t]. The model can run
with three recurrences: this package's (--recurrence ours), a Python loop over the steps (loop), or PyTorch's
associative_scan (torch). The three trainings start from equal weights and see the data in the same order, so that only
rounding separates their loss curves, and the times of a step can be compared.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no installation

import torch
from torch import Tensor, nn
from torch.nn import functional

# This import comes first, because it reports missing packages in one sentence.
from examples.train_text import Settings, Text, add_options, batch, prepare

# isort: split
from rich.console import Console

import extension_cpp
from extension_cpp.__main__ import Parser, dispatch, run_command
from extension_cpp.command import demo, demo_model
from extension_cpp.command.demo_model import LanguageModel, Training
from extension_cpp.command.errors import CannotMake

SMALL = {"width": 96, "layers": 2, "context": 256, "batch": 4, "learning_rate": 5e-3}
LARGE = {"width": 512, "layers": 4, "context": 1024, "batch": 32, "learning_rate": 1e-3}
SIZES: dict[str, dict[str, Any]] = {"cpu": SMALL, "cuda": LARGE}
LONGEST_MEMORY = 64  # after so many steps, a new layer's slowest state has forgotten 1 - 1/e of its content


# ---- three ways to compute the states of the recurrence from a and b, all of shape (B, T, width) ----


def loop(a: Tensor, b: Tensor) -> Tensor:
    """Computes h[t] = a[t] * h[t - 1] + b[t] step by step."""
    h, states = torch.zeros_like(b[:, 0]), []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):  # each a[:, t] would make a gradient of a's size
        h = torch.addcmul(b_t, a_t, h)
        states.append(h)
    return torch.stack(states, dim=1)


def compose(first: tuple[Tensor, Tensor], then: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combines two successive steps to one step h -> a * h + b."""
    return first[0] * then[0], then[0] * first[1] + then[1]


def scan(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    from torch._higher_order_ops import associative_scan  # PyTorch 2.11 has no public name for it

    # On a GPU with torch.compile this is one Triton kernel, and else log2(T) rounds of slices, products and sums.
    mode = "pointwise" if b.is_cuda else "generic"
    return associative_scan(compose, (a, b), dim=1, reverse=reverse, combine_mode=mode)[1]


# At a second shape, torch.compile without dynamic=False would try to compile one kernel for all shapes, and fail.
@torch.compile(fullgraph=True, dynamic=False)
def states_of(a: Tensor, b: Tensor) -> Tensor:
    return scan(a, b, reverse=False)


@torch.compile(fullgraph=True, dynamic=False)
def gradients_of(grad_h: Tensor, a: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the gradients of a and b by the recurrence in the other direction, with the factors one step later."""
    grad_b = scan(functional.pad(a[:, 1:], (0, 0, 0, 1)), grad_h, reverse=True)
    return grad_b * functional.pad(h[:, :-1], (0, 0, 1, 0)), grad_b


class AssociativeScan(torch.autograd.Function):
    """Runs PyTorch's associative_scan, and computes the gradients by a recurrence. PyTorch 2.11's own backward of
    "pointwise" makes T x T numbers for each of (B, width), and passes no gradient to a through the states."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        h: Tensor = states_of(a.detach(), b.detach())
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    def backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # one gradient
        return gradients_of(grad_h, *ctx.saved_tensors)


RECURRENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ours": extension_cpp.linear_recurrence,
    "loop": loop,
    "torch": AssociativeScan.apply,
}


def check_torch(settings: Settings) -> None:
    """Raises CannotMake if PyTorch's scan, a prototype, cannot run here. The training reuses the code compiled here."""
    try:
        shape = (settings.batch, settings.context, settings.width)
        a, b = (torch.rand(shape, device=settings.device, requires_grad=True) for _ in range(2))
        AssociativeScan.apply(a, b).backward(torch.ones_like(b))
    except Exception as error:  # raised by an import, Dynamo, Inductor or Triton
        reason = str(error).strip().partition("\n")[0]
        raise CannotMake(
            f"--recurrence torch: the associative_scan of PyTorch {torch.__version__} does not run here "
            f"({type(error).__name__}: {reason}); choose ours and loop"
        ) from error


# ---- the model ----


class Mixer(nn.Module):
    """Runs extension_cpp.nn.MinGRU, or its formula with another recurrence, and a linear layer. Input
    and output have the shape (B, T, width)."""

    def __init__(self, recurrence: str, width: int) -> None:
        super().__init__()
        self.recurrence = recurrence
        self.gru, self.out = extension_cpp.nn.MinGRU(width, width), nn.Linear(width, width, bias=False)
        with torch.no_grad():  # some states begin with a short memory, and others with a long one, by the biases of z
            self.gru.projection.bias.zero_()
            z, _ = self.gru.projection.bias.chunk(2)
            z.copy_(-torch.linspace(0, math.log(LONGEST_MEMORY), self.gru.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        if self.recurrence == "ours":
            states, _ = self.gru(x)
        else:
            gate, candidate = self.gru.projection(x).chunk(2, dim=-1)
            states = RECURRENCES[self.recurrence](torch.sigmoid(-gate), torch.sigmoid(gate) * candidate)
        return self.out(states)


def recurrent_training(recurrence: str, text: Text, settings: Settings) -> Training:
    """Makes the training of the language model with a minGRU instead of attention. All other layers use this package's
    ops. The model needs no position embedding, because the states depend on the position."""
    torch.manual_seed(0)
    mixer = partial(Mixer, recurrence, settings.width)
    model = LanguageModel(len(text.alphabet), settings.width, settings.layers, mixer, bias=False)
    extension_cpp.nn.convert(model)
    model.linear_loss = True
    draw = partial(batch, text.training, settings)
    return Training(model.to(settings.device), draw, settings.learning_rate, settings.steps)


# ---- showing ----


def tabulate(path: Path, trainings: dict[str, Training]) -> None:
    columns: dict[str, Iterable[object]] = {"step": range(1, len(next(iter(trainings.values())).losses) + 1)}
    columns |= {name: [f"{loss:.6f}" for loss in each.losses] for name, each in trainings.items()}
    columns |= {f"ms_{name}": [f"{1e3 * time:.2f}" for time in each.seconds] for name, each in trainings.items()}
    rows = (columns, *zip(*columns.values(), strict=True))
    path.write_text("".join(f"{','.join(map(str, row))}\n" for row in rows))


def draw(path: Path, trainings: dict[str, Training]) -> None:
    losses = {name: training.losses for name, training in trainings.items()}
    title, alone = "A small minGRU on text, float32", "name several for --recurrence"
    with demo_model.loss_picture(path, losses, title, alone, beside="times") as axes:
        times = [1e3 * training.step_seconds() for training in trainings.values()]
        bars = axes["times"].barh(list(trainings), times, color=[line.get_color() for line in axes["losses"].lines])
        axes["times"].bar_label(bars, fmt="%.1f", padding=3)
        axes["times"].margins(x=0.2)
        axes["times"].invert_yaxis()
        axes["times"].set(xlabel="ms a step, the median")


# ---- the command ----


def run(options: argparse.Namespace) -> None:
    console = Console(highlight=False)
    text, settings, remark = prepare(options, SIZES)
    device = settings.device
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 in the matrix products, for every recurrence
    console.print(f"{len(text.training)} bytes of text, on {demo.describe(device)}. {remark}")
    if "torch" in options.recurrence and not options.no_compile:
        demo.check_compiler("--recurrence torch", "; or add --no-compile")
    with torch.compiler.set_stance("force_eager" if options.no_compile else "default"):
        if "torch" in options.recurrence:
            check_torch(settings)
        trainings = {name: recurrent_training(name, text, settings) for name in dict.fromkeys(options.recurrence)}
        demo_model.train([*trainings.values()], console)
    for name, training in trainings.items():
        console.print(
            f"{name:5}  loss {training.losses[0]:.4f} at first, {training.losses[-1]:.4f} in the end  "
            f"{1e3 * training.step_seconds():.1f} ms a step, the median",
        )
    tabulate(options.out / "curves.csv", trainings)
    picture = options.out / "loss.png"
    draw(picture, trainings)
    console.print(f"The loss curves: {picture}", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python examples/recurrent_text.py", description=__doc__.split("\n\n", 1)[1])
    turns = "one or more, a step each in turns (default: ours)"
    parser.add_argument("--recurrence", choices=RECURRENCES, nargs="+", default=["ours"], help=turns)
    parser.add_argument("--no-compile", action="store_true", help="torch's associative_scan without torch.compile")
    add_options(parser, 200, "out/recurrent_text", "curves.csv, losses and times, and loss.png, their picture")
    parser.set_defaults(command=parser.prog, run=run)
    return dispatch(parser, arguments)


if __name__ == "__main__":
    run_command(main)

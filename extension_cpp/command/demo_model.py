"""The language model of the demo and of the examples, which reads bytes, with its training and the plot of its losses.

The model uses torch.nn alone, so that nn.convert can convert it.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import linear_cross_entropy

BETAS, CLIP, WARMUP, WEIGHT_DECAY = (0.9, 0.95), 1.0, 20, 0.1


# ---- the model ----


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates columns i and i + width / 2 of each head. query, key: (B, heads, T, width); cos, sin: (1, T, width)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)

    return rotate(query), rotate(key)


class Attention(nn.Module):
    """Causal attention with rotary position embedding. Input and output have the shape (B, T, width)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, context: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        frequencies = 10000.0 ** (-torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(context), frequencies).repeat(1, 2)[None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        query, key = apply_rotary(query, key, self.cos[:, :tokens], self.sin[:, :tokens])
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A block of a token mixer, such as attention, and a gated MLP. It takes and returns the last layer's result x and
    the residual stream, each of shape (B, T, width). Under autocast x is bfloat16 and the stream float32, so x is cast
    before the addition. nn.convert fuses an addition of two tensors of one dtype with the norm after it."""

    def __init__(self, width: int, mixer: nn.Module, norm: Callable[[int], nn.Module], bias: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mix = norm(width), norm(width), mixer
        self.gate_up, self.down = nn.Linear(width, 6 * width, bias), nn.Linear(3 * width, width, bias)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + x.to(residual.dtype)
        x = self.mix(self.norm1(residual))
        residual = residual + x.to(residual.dtype)
        x = self.norm2(residual)
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up), residual


class LanguageModel(nn.Module):
    """Predicts the next byte, with embeddings, blocks, a norm and an output layer. With `bias` the norms are LayerNorm,
    and the linear layers of the blocks have biases. Else the norms are RMSNorm."""

    linear_loss = False  # whether linear_cross_entropy computes the loss; nn.convert replaces only transformers' losses

    def __init__(self, vocabulary: int, width: int, layers: int, mixer: Callable[[], nn.Module], bias: bool) -> None:
        super().__init__()
        norm = nn.LayerNorm if bias else nn.RMSNorm
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, mixer(), norm, bias) for _ in range(layers))
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.loss = nn.CrossEntropyLoss()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_the_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if into_the_stream else 0.02)

    def forward(self, tokens: Tensor, following: Tensor | None = None) -> Tensor:
        """Returns the logits or, if the following bytes are given, the mean cross-entropy in nats per byte."""
        x = self.token(tokens)
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        residual = residual + x.to(residual.dtype)
        x = self.norm(residual)
        if following is None:
            return self.head(x)
        if self.linear_loss:
            return linear_cross_entropy(x, self.head.weight, following)
        return self.loss(self.head(x).flatten(0, 1), following.flatten())


# ---- text ----


def help_text() -> str:
    """Returns the text of Python's own `help()`, which comes with every Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[key] for key in sorted(topics))


def indices(text: str) -> tuple[Tensor, Tensor]:
    """Returns the bytes that occur in the text, and the text as indices into these bytes."""
    return torch.unique(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), return_inverse=True)


def sequences(text: Tensor, batch: int, context: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Draws sequences of the text from random positions. Returns them and the byte after each of their bytes, two
    tensors of shape (batch, context)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    drawn = text[starts + torch.arange(context + 1)].to(device)
    return drawn[:, :-1], drawn[:, 1:]


def generate(
    model: nn.Module, alphabet: Tensor, prompt: Sequence[int], length: int, context: int, temperature: float
) -> str:
    """Returns the prompt, which has indices into the alphabet, and `length` bytes that the model writes after it."""
    tokens, device = list(prompt), next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(length):
            logits = model(torch.tensor([tokens[-context:]], device=device))[0, -1].float().cpu()
            tokens.append(int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)))
    return bytes(alphabet[tokens].tolist()).decode(errors="replace")


# ---- training ----


class Training:
    """Trains a model with AdamW, and records the loss and the seconds of each step."""

    # Whether the gradients stay allocated, and each backward adds to them. Under CUDA graphs gradients that backward
    # allocates are in the graph's memory, which the next forward overwrites.
    keeps_gradients = False

    def __init__(
        self,
        model: LanguageModel,
        draw: Callable[[int], Sequence[Tensor]],
        learning_rate: float,
        steps: int,
        warmup: int = WARMUP,
        parameters: Any = None,
    ) -> None:
        """`draw` returns the sequences of a step, and the bytes after them. `parameters` are groups, as for an
        optimizer, of all parameters."""
        self.model, self.draw, self.learning_rate, self.steps, self.warmup = model, draw, learning_rate, steps, warmup
        parameters = parameters or model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
        self.losses: list[float] = []
        self.seconds: list[float] = []  # one for each step of this run

    def backward(self, number: int) -> Tensor:
        """Computes the gradients of the training step `number`, and returns the loss of this step."""
        loss: Tensor = self.model(*self.draw(number))
        loss.backward()
        return loss

    def mean(self, loss: Tensor) -> float:
        return loss.item()

    def step(self) -> None:
        number, began = len(self.losses), time.perf_counter()
        decay = 0.55 + 0.45 * math.cos(math.pi * number / self.steps)  # from 1 to 0.1
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min((number + 1) / self.warmup, 1.0) * decay
        loss = self.backward(number)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        self.losses.append(self.mean(loss))  # waits for the GPU
        self.seconds.append(time.perf_counter() - began)

    def step_seconds(self) -> float:
        return statistics.median(self.seconds)  # which the slower first steps hardly affect


def train(trainings: Sequence[Training], console: Any, then: Callable[[], object] = lambda: None) -> None:
    """Trains models in turns, step by step, so that the state of the machine affects their times equally. Calls `then`
    after each step."""
    from rich import progress

    done, steps = len(trainings[0].losses), trainings[0].steps
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    with progress.Progress(*columns, *times, console=console) as bar:
        task = bar.add_task("first step", total=steps, completed=done)
        for number in range(done, steps):
            for training in trainings[:: 1 if number % 2 else -1]:
                training.step()
            then()
            losses = " / ".join(f"{training.losses[-1]:.4f}" for training in trainings)
            bar.update(task, advance=1, description=f"loss {losses}")


# ---- showing ----


LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#e69f00", "linewidth": 4},
    {"color": "black", "linestyle": "--", "linewidth": 1},
    {"color": "#0072b2", "linestyle": ":", "linewidth": 2},
)


@contextlib.contextmanager
def loss_picture(
    path: Path, losses: dict[str, list[float]], title: str, alone: str = "", beside: str = "gaps"
) -> Iterator[dict[str, Any]]:
    """Draws each loss curve into the axes "losses", and its distance from the first curve into the axes "gaps". If
    there is only one curve, the text `alone` stands there. Yields the axes, also those of the name `beside` to the
    right of "gaps", and writes the picture at the end."""
    from matplotlib.figure import Figure  # Figure, unlike pyplot, needs no display

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplot_mosaic([["losses", "losses"], ["gaps", beside]], height_ratios=(2, 1))
    top, bottom = axes["losses"], axes["gaps"]
    bottom.sharex(top)
    first = next(iter(losses.values()), [])
    for look, (name, values) in zip(LOOKS, losses.items(), strict=False):
        marker = "." if len(values) == 1 else None
        top.plot(range(1, len(values) + 1), values, marker=marker, label=name, **look)
        if values is not first:
            gaps = [max(abs(a - b), 1e-9) for a, b in zip(values, first, strict=False)]
            color = "#0072b2" if len(losses) == 2 else look["color"]
            bottom.plot(range(1, len(gaps) + 1), gaps, color=color, linewidth=1, marker=marker)
    if len(losses) < 2:
        bottom.text(0.5, 0.5, alone, transform=bottom.transAxes, ha="center")
    top.set(xlabel="step", ylabel="loss (nats a byte)", title=title)
    bottom.set(yscale="log", xlabel="step", ylabel="difference of the losses")
    for each in (top, bottom):
        each.grid(alpha=0.3)
    yield axes
    top.legend()
    figure.savefig(path, dpi=120)

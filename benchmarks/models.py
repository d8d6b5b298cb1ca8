"""Times training steps of whole models from transformers, as they are and converted by nn.convert, in one run.

"linear loss" is converted with loss="linear", which computes the loss without logits.

A step is forward, backward and AdamW (fused), in bfloat16 with random weights and tokens, with the dropout of the
model's own configuration. The three take turns, eager first and then under torch.compile. Peak memory is that of one
step, its model, gradients and optimizer included.
"""

import argparse
import copy
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # every model is made from its configuration

import torch
import transformers
from rich.console import Console
from rich.table import Table

import extension_cpp
from benchmarks.results import commit, machine, versions, write
from benchmarks.timing import check_options, take_turns
from extension_cpp.__main__ import Parser, positive

# Two trainings from the same weights part by what bfloat16 rounds differently, and by their dropout masks.
LOSSES_AGREE = 0.02
SEED = 0  # of weights and tokens


@dataclass(frozen=True)
class Shape:
    model: str  # of transformers
    config: dict[str, Any]
    batch: int
    tokens: int


LLAMA: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
}
LLAMA |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True}
LLAMA |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5}
GPT2 = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024}

SHAPES = {
    "llama-3.2-1b": Shape("LlamaForCausalLM", LLAMA, 4, 2048),
    "gpt2-medium": Shape("GPT2LMHeadModel", GPT2, 16, 1024),
}
SMALL_LLAMA = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL_LLAMA |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300}
SMALL_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 300}
SMALL = {
    "llama-3.2-1b": Shape("LlamaForCausalLM", SMALL_LLAMA, 2, 32),
    "gpt2-medium": Shape("GPT2LMHeadModel", SMALL_GPT2, 2, 32),
}


class Contender:
    """A model in training, alone with its gradients and its optimizer."""

    def __init__(self, model: torch.nn.Module, tokens: torch.Tensor, compiled: bool) -> None:
        self.tokens = tokens
        self.forward: Callable[..., Any] = torch.compile(model) if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        loss = self.forward(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # so that every step has the same memory
        self.losses.append(loss.detach())


def make(shape: Shape, device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    model_class = getattr(transformers, shape.model)
    torch.manual_seed(SEED)
    config = model_class.config_class(**shape.config, use_cache=False)
    with torch.device(device):
        model = model_class(config).to(torch.bfloat16).train()
        return model, torch.randint(config.vocab_size, (shape.batch, shape.tokens))


def held(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def peak_bytes(contender: Contender, own: int) -> int:
    """Of one step: what is allocated beside the contender's own does not count."""
    torch.cuda.reset_peak_memory_stats()
    others = held("cuda") - own
    contender.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - others


def measure(shape: Shape, device: str, compiled: bool, rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """The row's figures by contender, and the functions that the converted model's modules call."""
    torch.compiler.reset()
    stock, tokens = make(shape, device)
    converted, linear = copy.deepcopy(stock), copy.deepcopy(stock)
    changed, _ = extension_cpp.nn.convert(converted)
    extension_cpp.nn.convert(linear, loss="linear")
    contenders, owned = {}, {}
    for name, model in (("stock", stock), ("converted", converted), ("linear loss", linear)):
        before = held(device)
        contenders[name] = Contender(model, tokens, compiled)
        contenders[name].step()  # allocates gradients and the optimizer's state
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        owned[name] = held(device) - before + weights
    times = take_turns({name: each.step for name, each in contenders.items()}, device, rounds)
    figures: dict[str, Any] = {}
    for name, contender in contenders.items():
        figures[name] = {"seconds": asdict(times[name]), "first_loss": contender.losses[0].item()}
        if device == "cuda":
            figures[name]["peak_bytes"] = peak_bytes(contender, owned[name])
    return figures, changed


def check(name: str, figures: dict[str, Any]) -> None:
    stock = figures["stock"]["first_loss"]
    for each, figure in figures.items():
        loss = figure["first_loss"]
        if not abs(loss - stock) <= LOSSES_AGREE * stock:
            sys.exit(f"error: {name}: the first loss is {stock} as it is and {loss} {each}: this is not the same model")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.models", description=__doc__.replace("\n", " "))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES), help="(default: all)")
    parser.add_argument("--rounds", type=positive, default=20, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="eager alone")
    parser.add_argument("--small", action="store_true", help="models of a few thousand parameters, to try it out")
    parser.add_argument("--json", type=Path, help="where to write the figures (default: out/models-DEVICE.json)")
    options = parser.parse_args(arguments)
    check_options(parser, options)
    return options


def show(console: Console, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    table = Table("model", "mode", "", "step ms", "10 to 90 %", "peak GiB", title=str(about))
    for row in rows:
        for name, figures in row["figures"].items():
            time = {key: f"{1e3 * value:.1f}" for key, value in figures["seconds"].items()}
            memory = f"{figures['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in figures else ""
            spread = f"{time['low']} to {time['high']}"
            table.add_row(row["model"], row["mode"], name, time["median"], spread, memory)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    transformers.logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else 130)
    about = machine(options.device) | {"rounds": options.rounds, "seed": SEED, "commit": commit()}
    about |= {"versions": versions() | {"transformers": transformers.__version__}}
    path = options.json or Path("out") / f"models-{options.device}.json"
    rows: list[dict[str, Any]] = []
    for name in options.model:
        shape = (SMALL if options.small else SHAPES)[name]
        for mode in ("eager",) if options.no_compile else ("eager", "compiled"):
            with console.status(f"{name}, {mode}"):
                figures, changed = measure(shape, options.device, mode == "compiled", options.rounds)
            check(name, figures)
            row = {"model": name, "mode": mode, "batch": shape.batch, "tokens": shape.tokens, "figures": figures}
            rows.append(row | {"converted_modules": len(changed), "config": shape.config})
            write(path, {"machine": about, "optimizer": "AdamW, fused", "rows": rows})
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    show(console, rows, about)
    console.print(f"The figures are in {path}.")


if __name__ == "__main__":
    main()

"""Times training steps of whole models from transformers in one run: stock, converted by nn.convert, patched by Liger.

"linear loss" is converted with loss="linear", which computes the loss without logits. "liger" takes part if
liger_kernel can be imported and knows the model. Each contender also runs under torch.compile.

A step is forward, backward and AdamW (fused), in bfloat16 with random weights and tokens, with the dropout of the
model's own configuration. All contenders take turns, eager and compiled ones side by side. They share one set of
weights, gradients and optimizer state, so that they fit on one GPU. The peak memory of a step includes this set.
"""

import argparse
import contextlib
import copy
import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
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

# With the same weights, losses differ by bfloat16 rounding and by dropout masks.
LOSSES_AGREE = 0.02
SEED = 0  # for weights and tokens


@dataclass(frozen=True)
class Shape:
    model: str  # its name in transformers
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


CONTENDERS = ("stock", "converted", "linear loss", "liger")
COMPILED = " compiled"


@dataclass
class Contender:
    """A way to run a model."""

    forward: Callable[..., Any]
    tokens: torch.Tensor
    optimizer: torch.optim.Optimizer  # its weights are shared by all contenders
    patches: dict[str, Any] = field(default_factory=dict)  # attributes of the model's module to replace while it runs
    module: Any = None

    def loss(self) -> torch.Tensor:
        """The loss with the present weights. Its backward leaves gradients."""
        with replaced(self.module, self.patches):
            loss = self.forward(input_ids=self.tokens, labels=self.tokens).loss
            loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.loss()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)  # so that every step uses the same memory


@contextlib.contextmanager
def replaced(module: Any, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def make(shape: Shape, device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    model_class = getattr(transformers, shape.model)
    torch.manual_seed(SEED)
    config = model_class.config_class(**shape.config, use_cache=False)
    with torch.device(device):
        model = model_class(config).to(torch.bfloat16).train()
        return model, torch.randint(config.vocab_size, (shape.batch, shape.tokens))


def twin(model: torch.nn.Module) -> Any:
    """A copy of the model that shares its parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def patched_by_liger(model: Any) -> tuple[Any, dict[str, Any]] | None:
    """A copy that Liger patched, and the attributes that it set in the model's module, which is as before afterwards.
    None if Liger does not know the model."""
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ImportError:
        return None
    apply = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}", None)
    if apply is None:
        return None
    module, patched = sys.modules[type(model).__module__], twin(model)
    before = vars(module).copy()
    apply(model=patched)
    patches = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    for name in patches:
        setattr(module, name, before[name])
    return patched, patches


def contenders_of(
    stock: Any, tokens: torch.Tensor, names: Sequence[str], modes: Sequence[str]
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that can run, and the functions that the converted model's modules call."""
    models: dict[str, tuple[Any, dict[str, Any]]] = {"stock": (stock, {})}
    converted, linear = twin(stock), twin(stock)
    changed, _ = extension_cpp.nn.convert(converted)
    extension_cpp.nn.convert(linear, loss="linear")
    models |= {"converted": (converted, {}), "linear loss": (linear, {})}
    if "liger" in names and (found := patched_by_liger(stock)) is not None:
        models["liger"] = found
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-4, fused=True)
    module = sys.modules[type(stock).__module__]
    contenders = {}
    for mode in modes:
        for name in names:
            if name in models:
                model, patches = models[name]
                forward = torch.compile(model) if mode else model
                contenders[name + mode] = Contender(forward, tokens, optimizer, patches, module)
    return contenders, changed


def measure(
    shape: Shape, device: str, names: Sequence[str], modes: Sequence[str], rounds: int, profiles: dict[str, Path]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The figures by contender, and the functions that the converted model's modules call."""
    torch.compiler.reset()
    stock, tokens = make(shape, device)
    contenders, changed = contenders_of(stock, tokens, names, modes)
    figures: dict[str, Any] = {}
    for name, contender in [*contenders.items()]:
        try:
            figures[name] = {"first_loss": contender.loss().item()}  # before the weights change
        except Exception as error:  # raised by a Liger that does not know this version of transformers
            if not name.startswith("liger"):
                raise
            print(f"{name} is left out, as it fails here: {error}", file=sys.stderr)
            del contenders[name]
        contender.optimizer.zero_grad(set_to_none=False)
    times = take_turns({name: each.step for name, each in contenders.items()}, device, rounds)
    for name, contender in contenders.items():
        figures[name]["seconds"] = asdict(times[name])
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            contender.step()
            torch.cuda.synchronize()
            figures[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
        if name in profiles:
            profile(contender, device, profiles[name])
    return figures, changed


def profile(contender: Contender, device: str, path: Path) -> None:
    """Writes the times of the 40 kernels that take most of one step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        contender.step()
        if device == "cuda":
            torch.cuda.synchronize()
    order = f"self_{device}_time_total"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=100) + "\n")


def check(name: str, figures: dict[str, Any]) -> None:
    stock = next(iter(figures.values()))["first_loss"]
    for each, figure in figures.items():
        loss = figure["first_loss"]
        if not abs(loss - stock) <= LOSSES_AGREE * stock:
            sys.exit(
                f"error: {name}: the first loss is {stock} {next(iter(figures))} and {loss} {each}: not the same model"
            )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.models", description=__doc__.replace("\n", " "))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES), help="(default: all)")
    parser.add_argument("--rounds", type=positive, default=20, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--no-compile", action="store_true", help="eager alone")
    parser.add_argument("--small", action="store_true", help="models of a few thousand parameters, to try it out")
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="(default: all)")
    parser.add_argument(
        "--profile",
        nargs="+",
        choices=[name + mode for mode in ("", COMPILED) for name in CONTENDERS],
        default=[],
        metavar="CONTENDER",
        help="writes the time by kernel of one step of each to profile-MODEL-CONTENDER.txt beside the figures, as of "
        "'converted' or 'stock compiled'",
    )
    parser.add_argument("--json", type=Path, help="where to write the figures (default: out/models-DEVICE.json)")
    options = parser.parse_args(arguments)
    check_options(parser, options)
    return options


def show(console: Console, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    table = Table("model", "", "step ms", "10 to 90 %", "peak GiB", title=str(about))
    for row in rows:
        for name, figures in row["figures"].items():
            time = {key: f"{1e3 * value:.1f}" for key, value in figures["seconds"].items()}
            memory = f"{figures['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in figures else ""
            spread = f"{time['low']} to {time['high']}"
            table.add_row(row["model"], name, time["median"], spread, memory)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    transformers.logging.set_verbosity_error()
    console = Console(width=None if sys.stdout.isatty() else 130)
    about = machine(options.device) | {"rounds": options.rounds, "seed": SEED, "commit": commit()}
    about |= {"versions": versions() | {"transformers": transformers.__version__}}
    path = options.json or Path("out") / f"models-{options.device}.json"
    rows: list[dict[str, Any]] = []
    modes = ("",) if options.no_compile else ("", COMPILED)
    for name in options.model:
        shape = (SMALL if options.small else SHAPES)[name]
        profiles = {each: path.parent / f"profile-{name}-{each.replace(' ', '-')}.txt" for each in options.profile}
        with console.status(name):
            figures, changed = measure(shape, options.device, options.contender, modes, options.rounds, profiles)
        check(name, figures)
        row = {"model": name, "batch": shape.batch, "tokens": shape.tokens, "figures": figures}
        rows.append(row | {"converted_modules": len(changed), "config": shape.config})
        write(path, {"machine": about, "optimizer": "AdamW, fused", "rows": rows})
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    show(console, rows, about)
    console.print(f"The figures are in {path}.")


if __name__ == "__main__":
    main()

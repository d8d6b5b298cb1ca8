"""Times training steps of whole models from transformers in one run: stock, converted by nn.convert, patched by Liger.

"linear loss" is converted with loss="linear", which computes the loss without logits. "liger" takes part if
liger_kernel can be imported and supports the model. Each contender also runs under torch.compile, unchanged and with
"no mask". While a model is traced, transformers makes the causal mask as a tensor, which PyTorch's attention does not
need. In eager mode transformers makes no mask.

A step is forward, backward and AdamW (fused), in bfloat16 with random weights and inputs, with the dropout of the
model's own configuration. bert-large predicts all its tokens, and vit-large classifies images. Gradients are set to
None between steps. All contenders take turns, both eager and compiled ones. They share one set of weights and optimizer
state, so that they fit on one GPU. The peak memory of a step includes this set. Before the first step every contender's
gradients are compared with those of the stock model in float32 (gradients.py), without dropout. An existing --json file
gets the models that it lacks.

On a GPU a row also has the time of the step's kernels alone, as the profiler sums it. With --host it has the host's
time of a step, measured on a model with as many layers, each so small that the device hardly counts. A step takes at
least the longer of the two times.
"""

import contextlib
import copy
import gc
import importlib
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"  # all models are made from configurations, without downloads

import torch
import transformers

import extension_cpp
from benchmarks import gradients, results, table
from benchmarks.timing import BenchmarkParser, take_turns

Inputs = dict[str, torch.Tensor]  # of a model, by name
SEED = 0  # for weights and inputs
PROFILED = 5  # steps


@dataclass(frozen=True)
class Shape:
    model: str  # the name of its class in transformers
    config: dict[str, Any]
    batch: int
    tokens: int  # the length of each sequence; for an image, the number of its patches and the class token


DECODER = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
DECODER |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192}
LLAMA = DECODER | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
GPT2 = {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024, "vocab_size": 50257}
ENCODER = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
BERT = ENCODER | {"vocab_size": 30522, "max_position_embeddings": 512}
VIT = ENCODER | {"image_size": 224, "patch_size": 16, "num_labels": 1000}

SHAPES = {
    "llama-3.2-1b": Shape("LlamaForCausalLM", LLAMA, 4, 2048),
    "gpt2-medium": Shape("GPT2LMHeadModel", GPT2, 16, 1024),
    "bert-large": Shape("BertForMaskedLM", BERT, 32, 512),
    "vit-large": Shape("ViTForImageClassification", VIT, 64, 197),
}
# The configuration of models with few columns, and a smaller vocabulary or image.
NARROW = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
NARROW |= {"head_dim": 16, "n_embd": 64, "n_head": 4, "n_positions": 64}
NARROW |= {"vocab_size": 300, "image_size": 32, "num_labels": 10}


def narrow(shape: Shape, batch: int, tokens: int, **layers: int) -> Shape:
    """Returns the Shape of a model with few columns and few tokens. A model of images always has five tokens."""
    config = {key: (NARROW | layers).get(key, value) for key, value in shape.config.items()}
    return Shape(shape.model, config, batch, 5 if "image_size" in config else tokens)


SMALL = {name: narrow(shape, 2, 32, num_hidden_layers=2, n_layer=2) for name, shape in SHAPES.items()}
OF_HOST = {name: narrow(shape, 1, 8) for name, shape in SHAPES.items()}  # with as many layers

WAYS, MODES = ("stock", "converted", "linear loss", "liger"), ("", " compiled", " compiled, no mask")
KEY_BIAS = (".key.bias", ".k_proj.bias")
CONTENDERS = tuple(way + mode for mode in MODES for way in WAYS)


@dataclass
class Contender:
    """A way to run a model."""

    model: torch.nn.Module
    forward: Callable[..., Any]  # the model, or the compiled model
    inputs: Inputs
    optimizer: torch.optim.Optimizer  # all contenders share its weights
    # Attributes to replace, while the model runs, in the Python module that defines the model's class.
    patches: dict[str, Any] = field(default_factory=dict)

    def loss(self) -> torch.Tensor:
        """Returns the loss with the present weights, and leaves the gradients of its backward."""
        module = sys.modules[type(self.model).__module__]
        with mock.patch.multiple(module, **self.patches) if self.patches else contextlib.nullcontext():
            loss = self.forward(**self.inputs).loss
            loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.loss()
        self.optimizer.step()
        self.optimizer.zero_grad()


def make(shape: Shape, device: str) -> tuple[torch.nn.Module, Inputs]:
    """Returns the stock model and its inputs. What was compiled for another model is freed before."""
    torch.compiler.reset()
    model_class = getattr(transformers, shape.model)
    torch.manual_seed(SEED)
    config = model_class.config_class(**shape.config, use_cache=False)
    with torch.device(device):
        model = model_class(config).to(torch.bfloat16).train()
        if "image_size" in shape.config:
            images = torch.randn(shape.batch, 3, config.image_size, config.image_size, dtype=torch.bfloat16)
            return model, {"pixel_values": images, "labels": torch.randint(config.num_labels, (shape.batch,))}
        tokens = torch.randint(config.vocab_size, (shape.batch, shape.tokens))
        return model, {"input_ids": tokens, "labels": tokens}


def twin(model: torch.nn.Module) -> Any:
    """Returns a copy of the model that shares its parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def patched_by_liger(model: Any) -> tuple[Any, dict[str, Any]] | None:
    """Returns a copy patched by Liger, and the attributes that Liger set in the model's module, which are removed
    again. Returns None if Liger does not support the model."""
    try:
        liger = importlib.import_module("liger_kernel.transformers")
        apply = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
    except (ImportError, AttributeError):
        return None
    module, patched = sys.modules[type(model).__module__], twin(model)
    before = vars(module).copy()
    apply(model=patched)
    patches = {name: value for name, value in vars(module).items() if before.get(name) is not value}
    vars(module).update(before)
    return patched, patches


def without_mask(model: Any) -> Any:
    """Returns a copy that shares the parameters and uses no mask. transformers makes no mask for an attention function
    without a mask function of its own, and PyTorch's attention is then called with is_causal."""
    attention = transformers.AttentionInterface()
    attention.register("sdpa_without_mask", attention["sdpa"])
    maskless = twin(model)
    maskless.set_attn_implementation("sdpa_without_mask")
    return maskless


def contenders_of(stock: Any, inputs: Inputs, names: Sequence[str]) -> tuple[dict[str, Contender], dict[str, str]]:
    """Returns the contenders that can run, and the functions that the converted model's modules call."""
    converted, linear = twin(stock), twin(stock)
    models: dict[str, tuple[Any, dict[str, Any]]] = {"stock": (stock, {}), "converted": (converted, {})}
    changed, _ = extension_cpp.nn.convert(converted)
    if "linear_cross_entropy" in extension_cpp.nn.convert(linear, loss="linear")[0].get("", ""):
        models["linear loss"] = linear, {}  # only causal language models have a linear loss
    if any(name.startswith("liger") for name in names) and (found := patched_by_liger(stock)) is not None:
        models["liger"] = found
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-4, fused=True)
    contenders = {}
    for name in names:
        way, compiled, mask = name.partition(" compiled")
        if way in models:
            model, patches = models[way]
            model = without_mask(model) if mask else model
            forward = torch.compile(model, dynamic=False) if compiled else model
            contenders[name] = Contender(model, forward, inputs, optimizer, patches)
    return contenders, changed


def exact_gradients(stock: torch.nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Returns the float32 gradients, computed for one sequence at a time, because a batch of activations would not fit.

    The bias of a key has no gradient: it adds one number to all scores of a query, which softmax removes again. Its
    computed gradient consists of rounding errors, and is left out.
    """
    wide, batch = copy.deepcopy(stock).float().eval(), len(inputs["labels"])
    wide_inputs = {name: each.float() if each.is_floating_point() else each for name, each in inputs.items()}
    for i in range(batch):
        (wide(**{name: each[i : i + 1] for name, each in wide_inputs.items()}).loss / batch).backward()
    return {name: x.grad for name, x in wide.named_parameters() if x.grad is not None and not name.endswith(KEY_BIAS)}


def judge(stock: torch.nn.Module, inputs: Inputs, contenders: dict[str, Contender]) -> dict[str, Any]:
    """Returns the first loss and the largest error of each contender's gradients. Liger is left out if it raises or is
    wrong, because it may not support this version of transformers. Any other wrong contender ends the program."""
    exact = exact_gradients(stock, inputs)
    has_dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in stock.modules())
    beside, found = dict[str, gradients.Error](), dict[str, Any]()
    for name, contender in [*contenders.items()]:
        contender.model.train(not has_dropout)  # evaluation only where needed, since a change may compile again
        try:
            loss = contender.loss().item()
            errors = gradients.errors({key: each.grad for key, each in stock.named_parameters()}, exact)
            beside = beside or errors
            wrong = gradients.wrong(errors, beside)
        except Exception as error:
            if not name.startswith("liger"):
                raise
            wrong = f"it fails here: {error}"
        contender.optimizer.zero_grad()
        contender.model.train()
        if wrong is None:
            found[name] = {"first_loss": loss, "gradient_error": max(each.distance for each in errors.values())}
        elif name.startswith("liger"):
            print(f"{name} is left out: {wrong}", file=sys.stderr)
            del contenders[name]
        else:
            sys.exit(f"error: {type(stock).__name__}, {name}: {wrong}: not the same model")
    return found


def kernel_seconds(step: Callable[[], object]) -> float:
    """Returns the time of a step's kernels, including copies and fills, as the median of some steps."""
    sums = []
    for _ in range(PROFILED):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        on_gpu = (each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA)
        sums.append(sum(each.self_device_time_total for each in on_gpu if not each.is_user_annotation))
    return 1e-6 * statistics.median(sums)


def measure(shape: Shape, of_host: Shape | None, options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the figures by contender, and the functions that the converted model's modules call. With the model
    `of_host` the figures have the time of a step of this model on the host's clock, which waits for no kernel."""
    device, rounds = options.device, options.rounds
    stock, inputs = make(shape, device)
    contenders, changed = contenders_of(stock, inputs, options.contender)
    figures = judge(stock, inputs, contenders)
    times = take_turns({name: each.step for name, each in contenders.items()}, device, rounds)
    for name, contender in contenders.items():
        figures[name]["seconds"] = times[name]
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            contender.step()
            torch.cuda.synchronize()
            figures[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
            figures[name]["kernel_seconds"] = kernel_seconds(contender.step)
    if of_host is not None:
        small, _ = contenders_of(*make(of_host, device), list(figures))
        for name, time in take_turns({name: each.step for name, each in small.items()}, "cpu", rounds).items():
            figures[name]["host_seconds"] = time
    return figures, changed


# All compiled contenders share the code of one class, so torch.compile counts their compilations together. Beyond its
# limit it would silently run them in eager mode.
@torch._dynamo.config.patch(recompile_limit=100, fail_on_recompile_limit_hit=True)
def main(arguments: Sequence[str] | None = None) -> None:
    parser = BenchmarkParser("benchmarks.models", __doc__, "out/models-DEVICE.json", 20, "steps")
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES), help="(default: all)")
    parser.add_argument("--small", action="store_true", help="models of a few thousand parameters, to try it out")
    parser.add_argument("--host", action="store_true", help="the host's time of a step, too")
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="(default: all)")
    options = parser.parse(arguments)
    transformers.logging.set_verbosity_error()
    settings = {"rounds": options.rounds, "seed": SEED, "optimizer": "AdamW, fused"}
    about = results.about(options.device, {"transformers": transformers.__version__}, **settings)
    found = results.continued(options.path, about, table.KINDS["models-"][0], options.is_new)
    origin_of = results.run(options.device, found["rows"])
    for name in options.model:
        shape = (SMALL if options.small else SHAPES)[name]
        figures, changed = measure(shape, OF_HOST[name] if options.host else None, options)
        head = {"model": name, "batch": shape.batch, "tokens": shape.tokens, "converted_modules": len(changed)}
        functions = {words.split()[0] for words in changed.values()}  # without their options
        origin = origin_of(*sorted(functions | {"linear_cross_entropy"}))
        others = [row for row in found["rows"] if row["model"] != name]
        found["rows"] = [*others, *(head | {"way": way} | origin | each for way, each in figures.items())]
        results.write(options.path, found)  # keeps these figures if the next model fails
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    table.finish(options.path, found, table.models)


if __name__ == "__main__":
    main()

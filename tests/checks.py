"""Makes inputs for tests/battery, runs an op forward and backward, and compares its results with float64 results."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import judge
from tests.judge import Expected, Result, assert_right, convert, run
from tests.opspec import COMPUTED, Make, OpSpec, Sample, as_tuple, leaves

__all__ = ["Expected", "Result", "as_tuple", "convert", "leaves", "run"]  # re-exports names of judge.py for the tests

# Row widths, in elements, at which the tests of the norms run. A row of such a width is a multiple of 16 bytes in every
# dtype, so that all rows of a contiguous tensor are aligned to 16 bytes.
NORM_WIDTHS = (
    *(64, 256, 384, 512, 640, 768, 1000, 1024, 1280, 1536, 1800, 2048, 2304, 2560, 3072, 4096, 4608, 5120, 6144),
    *(7168, 8192, 9216, 10240, 11264, 12288, 13312, 14336, 15000, 16000, 16384),
)
# Odd row widths, in elements. Most rows of a contiguous tensor with such a width are not aligned to 16 bytes.
ODD_WIDTHS = (33, 129, 257, 385, 513, 769, 1025, 1537, 2049, 3001, 4097, 5121, 8193, 10001, 16385)

LAYOUTS = ("contiguous", "sliced", "transposed", "expanded", "offset", "channels_last")


@dataclass(frozen=True)
class Strides:
    """A memory layout with len(order) dimensions in any order, with gaps, an offset and expanded dimensions. Further
    dimensions are inside these, and dense."""

    order: tuple[int, ...]  # the dimensions in memory, the outermost first
    steps: tuple[int, ...]  # for each dimension, its stride divided by the extent of the dimensions inside it
    expanded: frozenset[int]
    offset: int

    def of(self, x: Tensor) -> Tensor:
        """Returns a copy of x in this layout. Along an expanded dimension, the values of x at index 0 are repeated."""
        strides, size = [0] * x.dim(), 1
        order = (*self.order, *range(len(self.order), x.dim()))
        for d in (d for d in reversed(order) if d < x.dim()):
            strides[d] = size * (self.steps[d] if d < len(self.steps) else 1)
            size = strides[d] * max(1 if d in self.expanded else x.shape[d], 1)
        values = x[tuple(slice(1) if d in self.expanded else slice(None) for d in range(x.dim()))]
        memory = x.new_full((self.offset + size,), 7.0)
        return memory.as_strided(values.shape, strides, self.offset).copy_(values).expand(x.shape)


def with_layout(x: Tensor, layout: str | Strides) -> Tensor:
    """Returns a copy of x in the given layout. In the layout "expanded", x[0] is repeated along the first dimension."""
    if isinstance(layout, Strides):
        return layout.of(x)
    if layout == "sliced":
        wide = x.new_full([*x.shape[:-1], 2 * x.shape[-1] + 1], 7.0)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "padded":  # the rows' addresses are multiples of the element size only
        wide = x.new_full([*x.shape[:-1], x.shape[-1] + 3], 7.0)
        wide[..., :-3] = x
        return wide[..., :-3]
    if layout == "spaced":  # the gap between two rows is a multiple of 16 bytes
        wide = x.new_full([*x.shape[:-1], x.shape[-1] + 16], 7.0)
        wide[..., :-16] = x
        return wide[..., :-16]
    if layout == "transposed":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    if layout == "expanded":
        return x[:1].clone().expand(x.shape)
    if layout == "offset":
        return torch.cat([x.new_full((1,), 7.0), x.flatten()])[1:].view(x.shape)
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous()


# Caches random float64 tensors, because drawing a tensor takes longer than most ops on it, and because the tests of all
# ops and dtypes draw the same tensors. A key is the generator's seed and the shapes that the generator has drawn, up to
# this tensor. A value is the tensor and the generator's state after drawing it. Callers must not write into a cached
# tensor. The cache holds at most 2^25 elements (256 MiB). tests/battery/test_runtime.py draws the largest cached
# tensor.
_DRAWN: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
MOST_ELEMENTS, MOST_DRAWN = 300 * 1025, 1 << 25
DRAWN_ON_GPU = 1 << 20  # a GPU draws tensors of this size or more, as drawing them on the CPU takes most of a test


def _normal(generator: torch.Generator, shapes: list[tuple[int, ...]], device: str) -> Tensor:
    """Returns the generator's next normal tensor in float64. `shapes` lists the shapes drawn so far, this one last."""
    key = (generator.initial_seed(), *shapes)
    if device == "cuda" and math.prod(shapes[-1]) >= DRAWN_ON_GPU:
        on_gpu = torch.Generator(device).manual_seed(generator.initial_seed() + len(shapes))
        return torch.randn(shapes[-1], generator=on_gpu, dtype=torch.float64, device=device)
    if key in _DRAWN:
        x, state = _DRAWN[key]
        generator.set_state(state)
        return x
    x = torch.randn(shapes[-1], generator=generator, dtype=torch.float64, device="cpu")
    if x.numel() <= MOST_ELEMENTS:
        _DRAWN[key] = x, generator.get_state()
        while sum(drawn.numel() for drawn, _ in _DRAWN.values()) > MOST_DRAWN:
            del _DRAWN[next(iter(_DRAWN))]
    return x


def maker(
    device: str,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    layout: str | Strides = "contiguous",
    spread: float = 1.0,
    mean: float = 0.0,
) -> Make:
    """Returns a function make(shape), which returns a random normal leaf tensor that requires grad. Tensors with fewer
    than DRAWN_ON_GPU elements have the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = []

    def make(shape: Sequence[int]) -> Tensor:
        shapes.append(tuple(shape))
        x = _normal(generator, shapes, device)
        x = x * spread + mean if (spread, mean) != (1.0, 0.0) else x
        x = x.to(dtype, copy=True).to(device)
        return (with_layout(x, layout) if x.dim() else x).detach().requires_grad_()

    return make


def rows_for(device: str, rows: int, cols: int) -> int:
    """Returns `rows` on a GPU, where this number decides which kernel runs, and a smaller number of rows on the CPU."""
    return rows if device == "cuda" else min(rows, max(8, (1 << 18) // cols))


def last_level_cache() -> int:
    """Returns the size of the CPU's last-level cache in bytes, as csrc/common/cpu/level.c finds it. If a call's tensors
    are larger, CPU kernels write its results with non-temporal stores."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(size.read_text().strip().removesuffix("K")) << 10 if size.exists() else 32 << 20


def norm_arguments(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Any, ...]:
    """Returns the arguments of layer_norm or rms_norm over the last dimension."""
    shape = (x.shape[-1],)
    return (x, shape, weight, bias, 1e-5) if name == "layer_norm" else (x, shape, weight, 1e-5)


def with_float_weights(sample: Sample) -> Sample:
    """Returns a copy of the sample whose one-dimensional tensors, except for the first argument, are float32."""

    def one(x: Any) -> Any:
        weight = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 1
        return x.detach().float().requires_grad_(x.requires_grad) if weight else x

    return Sample((sample.args[0], *(one(x) for x in sample.args[1:])), sample.kwargs)


@functools.lru_cache(maxsize=8)
def _eighths(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randint(-16, 17, shape, generator=generator, device="cpu").double() / 8


def random_grad(layout: str | Strides = "contiguous") -> Callable[[Tensor], Tensor]:
    """Returns a function that makes a grad_out of multiples of 1/8 up to 2, which every dtype represents exactly."""

    def grad_out(output: Tensor) -> Tensor:
        g = _eighths(tuple(output.shape)).to(output.device, output.dtype, copy=True)  # an op may write into it
        return with_layout(g, layout) if g.dim() else g

    return grad_out


def expect(spec: OpSpec, sample: Sample, grad_layout: str = "contiguous") -> Expected:
    """Returns the right outputs and gradients of a call, if random_grad(grad_layout) makes the outputs' gradients."""
    return judge.expect(spec, sample, random_grad(grad_layout))


def result_dtype(spec: OpSpec, sample: Sample, number: int) -> torch.dtype:
    """Returns the right dtype of floating-point result `number`. Arguments that the op writes are the last results."""
    dtype, given = sample.args[0].dtype, dict(enumerate(spec.result_dtypes)).get(number)
    if isinstance(given, torch.dtype):
        return given
    return torch.promote_types(dtype, torch.float32) if spec.float_results or given == COMPUTED else dtype


def check(
    spec: OpSpec,
    sample: Sample,
    grad_layout: str = "contiguous",
    what: str = "",
    limits: bool = False,
    expected: Expected | None = None,
) -> Result:
    """Runs the op and asserts that all outputs and gradients are within their error bounds, those of `expected`."""
    dtype = sample.args[0].dtype
    ours = run(spec.function, sample, random_grad(grad_layout))
    expected = expected or expect(spec, sample, grad_layout)
    for number, x in enumerate(ours.outputs):
        if x.is_floating_point():
            assert x.dtype == result_dtype(spec, sample, number), f"{spec.name}: output {number} has dtype {x.dtype}"
    assert all(x.dtype == leaf.dtype for x, leaf in zip(ours.gradients, leaves(sample), strict=True))
    shapes = [tuple(x.shape) for x in leaves(sample)]
    assert_right(ours, expected, f"{spec.name}{shapes} {dtype} {what}", limits, spec.infinities_may_be_nan)
    return ours


class Calls(TorchDispatchMode):
    """Records each call of an operator that is in none of PyTorch's own namespaces, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim", "prims", "profiler"):
            self.made.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

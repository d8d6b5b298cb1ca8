"""How the battery makes inputs, runs an op forward and backward, and judges a result against float64."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.opspec import Make, OpSpec, Sample

# Of rows of whole vectors up to the widest that a block of a GPU has room for; the norms have a kernel or two for each.
NORM_WIDTHS = (
    *(64, 256, 384, 512, 640, 768, 1000, 1024, 1280, 1536, 1800, 2048, 2304, 2560, 3072, 4096, 4608, 5120, 6144),
    *(7168, 8192, 9216, 10240, 11264, 12288, 13312, 14336, 15000, 16000, 16384),
)
# The same, of rows that begin between multiples of 16 bytes.
ODD_WIDTHS = (33, 129, 257, 385, 513, 769, 1025, 1537, 2049, 3001, 4097, 5121, 8193, 10001, 16385)

LAYOUTS = ("contiguous", "sliced", "transposed", "expanded", "offset", "channels_last")


@dataclass(frozen=True)
class Strides:
    """A layout of up to len(order) dimensions: any order in memory, gaps, an offset, and expanded dimensions."""

    order: tuple[int, ...]  # the outermost dimension first
    steps: tuple[int, ...]  # a dimension's stride is so many times what lies inside it
    expanded: frozenset[int]
    offset: int

    def of(self, x: Tensor) -> Tensor:
        """The values of x (of the first slice of an expanded dimension) in memory of this layout."""
        strides, size = [0] * x.dim(), 1
        for d in (d for d in reversed(self.order) if d < x.dim()):
            strides[d] = size * self.steps[d]
            size = strides[d] * max(1 if d in self.expanded else x.shape[d], 1)
        values = x[tuple(slice(1) if d in self.expanded else slice(None) for d in range(x.dim()))]
        memory = x.new_full((self.offset + size,), 7.0)
        return memory.as_strided(values.shape, strides, self.offset).copy_(values).expand(x.shape)


def with_layout(x: Tensor, layout: str | Strides) -> Tensor:
    """The values of x (expanded: of its first slice) in memory of another layout."""
    if isinstance(layout, Strides):
        return layout.of(x)
    if layout == "sliced":
        wide = x.new_full([*x.shape[:-1], 2 * x.shape[-1] + 1], 7.0)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "padded":  # rows that begin at any multiple of an element's size
        wide = x.new_full([*x.shape[:-1], x.shape[-1] + 3], 7.0)
        wide[..., :-3] = x
        return wide[..., :-3]
    if layout == "transposed":
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    if layout == "expanded":
        return x[:1].clone().expand(x.shape)
    if layout == "offset":
        return torch.cat([x.new_full((1,), 7.0), x.flatten()])[1:].view(x.shape)
    if layout == "channels_last" and x.dim() == 4:
        return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous()


# Float64 tensors by a generator's seed and the shapes of all that it drew, and its state then: every op and dtype asks
# for the same ones. Nobody writes into them. The largest kept is the largest of test_right_for_every_shape on the CPU.
_DRAWN: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
MOST_DRAWN, MOST_ELEMENTS = 1024, 4099 * 33


def _normal(generator: torch.Generator, shapes: list[tuple[int, ...]]) -> Tensor:
    """The next tensor that the generator draws, the last of those shapes."""
    key = (generator.initial_seed(), *shapes)
    if key in _DRAWN:
        x, state = _DRAWN[key]
        generator.set_state(state)
        return x
    x = torch.randn(shapes[-1], generator=generator, dtype=torch.float64, device="cpu")
    if x.numel() <= MOST_ELEMENTS:
        _DRAWN[key] = x, generator.get_state()
    if len(_DRAWN) > MOST_DRAWN:
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
    """make(shape): random normal leaves that require grad, the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = []

    def make(shape: Sequence[int]) -> Tensor:
        shapes.append(tuple(shape))
        x = _normal(generator, shapes)
        x = x * spread + mean if (spread, mean) != (1.0, 0.0) else x
        x = x.to(dtype, copy=True).to(device)
        return (with_layout(x, layout) if x.dim() else x).detach().requires_grad_()

    return make


def rows_for(device: str, rows: int, cols: int) -> int:
    """Of a matrix, that many on a GPU, where they decide which kernel takes them; on the CPU some blocks of work."""
    return rows if device == "cuda" else min(rows, max(8, (1 << 18) // cols))


def last_level_cache() -> int:
    """The bytes that the CPU streams results from, where csrc/common/cpu_level.c finds them; else its default."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(size.read_text().strip().removesuffix("K")) << 10 if size.exists() else 32 << 20


def norm_arguments(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Any, ...]:
    """Of layer_norm or rms_norm, over the last dimension."""
    shape = (x.shape[-1],)
    return (x, shape, weight, bias, 1e-5) if name == "layer_norm" else (x, shape, weight, 1e-5)


def convert(sample: Sample, dtype: torch.dtype) -> Sample:
    """The same call with leaves of another dtype; a seed stays what it is."""

    def one(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if floating else x

    return Sample(tuple(one(x) for x in sample.args), {key: one(x) for key, x in sample.kwargs.items()})


def with_float_weights(sample: Sample) -> Sample:
    """The same call with float32 leaves of one dimension beside the others."""

    def one(x: Any) -> Any:
        weight = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 1
        return x.detach().float().requires_grad_(x.requires_grad) if weight else x

    return Sample((sample.args[0], *(one(x) for x in sample.args[1:])), sample.kwargs)


def leaves(sample: Sample) -> list[Tensor]:
    return [x for x in (*sample.args, *sample.kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a function returns, be it one tensor or several."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


@dataclass
class Result:
    outputs: tuple[Tensor, ...]
    gradients: list[Tensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for i, output in enumerate(self.outputs):
            yield f"output {i}", output
        for i, gradient in enumerate(self.gradients):
            yield f"gradient {i}", gradient


def run(function: Callable[..., Any], sample: Sample, grad_out: Callable[[Tensor], Tensor]) -> Result:
    """Forward and backward; grad_out(output) gives the gradient that comes in."""
    outputs = as_tuple(function(*sample.args, **sample.kwargs))
    gradients = torch.autograd.grad(outputs, leaves(sample), [grad_out(output) for output in outputs])
    return Result(tuple(output.detach() for output in outputs), list(gradients))


@functools.lru_cache(maxsize=8)
def _eighths(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randint(-16, 17, shape, generator=generator, device="cpu").double() / 8


def random_grad(layout: str | Strides = "contiguous") -> Callable[[Tensor], Tensor]:
    """The same values for every dtype and device: multiples of 1/8 up to 2, exact in all of them."""

    def grad_out(output: Tensor) -> Tensor:
        g = _eighths(tuple(output.shape)).to(output.device, output.dtype, copy=True)  # lest an op writes into it
        return with_layout(g, layout) if g.dim() else g

    return grad_out


def largest(x: Tensor, where: Tensor | None = None) -> float:
    """The largest magnitude in those places, or in all; NaN if there is one."""
    if x.numel() == 0:
        return 0.0
    least, most = torch.aminmax(x if where is None else torch.where(where, x, 0))  # in one pass, and vectorized
    return max(-least.item(), most.item())


def is_finite(exact: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Where the exact value is well inside the dtype's range. None: everywhere, the usual case, which saves passes."""
    limit = torch.finfo(dtype).max * 0.99
    return None if largest(exact) < limit else exact.abs() < limit  # which NaN is not


def largest_error(x: Tensor, exact: Tensor, where: Tensor | None) -> float:
    """What is not finite counts as no error."""
    error = x.double() - exact
    found = largest(error, where)
    return found if found < math.inf else largest(error.nan_to_num(0.0, 0.0, 0.0), where)


@dataclass
class Expected:
    """Of a sample: eager PyTorch's result with its errors, the exact one, and at least what max|exact| counts as, in
    the outputs and in the gradients."""

    eager: Result
    eager_errors: list[float]
    exact: Result
    least_scales: tuple[float, float]


def assert_right(
    ours: Result,
    eager: Result,
    eager_errors: list[float],
    exact: Result,
    reduction: int,
    what: str,
    limits: bool,
    least_scales: tuple[float, float],
    nan_for_inf: bool = False,
) -> None:
    """Every tensor: error <= max(2 x eager's error, 4 eps max|exact| sqrt(reduction)); NaN and inf where exact has
    them.

    The first bound asks for no more than twice PyTorch's own rounding. The second allows 4 roundings an element,
    growing as independent rounding errors of a sum do; it serves where eager happens to be exact. `limits`: a finite
    value is right where the reference's formula gives NaN. `nan_for_inf`: NaN is right where it gives an infinity.
    """
    tensors = zip(ours.tensors(), eager.tensors(), exact.tensors(), eager_errors, strict=True)
    for (name, a), (_, b), (_, c), eager_error in tensors:
        where = f"{what}, {name}"
        assert a.shape == c.shape, f"{where}: shape {tuple(a.shape)}, expected {tuple(c.shape)}"
        finite = is_finite(c, a.dtype)
        if finite is not None:
            _assert_same_specials(a, c, limits, nan_for_inf, where)
        if a.dtype == b.dtype and not largest(b) < math.inf:  # where eager overflows, its error is no yardstick
            finite = (b.abs() < math.inf) & (finite if finite is not None else True)
        eps, smallest = torch.finfo(a.dtype).eps, torch.finfo(a.dtype).smallest_normal
        scale = max(largest(c, finite), least_scales[name.startswith("gradient")])
        bound = max(2 * eager_error, 4 * eps * scale * math.sqrt(max(reduction, 1)), smallest * eps)
        error = largest(a.double() - c, finite)
        assert error <= bound, f"{where}: error {error:.3g} over the bound {bound:.3g} (eager {eager_error:.3g})"


def _assert_same_specials(x: Tensor, exact: Tensor, limits: bool, nan_for_inf: bool, where: str) -> None:
    """NaN and infinities where exact has them."""
    special = ~(exact.abs() < math.inf)
    if special.any():
        got, expected = x.double()[special], exact[special]
        if nan_for_inf:
            expected = torch.where(got.isnan(), got, expected)
        if limits:
            got = torch.where(expected.isnan(), expected, got)
        assert torch.equal(got.isnan(), expected.isnan()), f"{where}: NaN in the wrong places"
        assert torch.equal(got[~got.isnan()], expected[~expected.isnan()]), f"{where}: infinities differ"


def expect(spec: OpSpec, sample: Sample, grad_layout: str = "contiguous") -> Expected:
    """From the float64 reference and eager PyTorch.

    In float64 the reference is eager PyTorch, and rounds as much as the op. Its error is taken to be that of eager
    float32 on the same inputs, less the factor between the two types' eps, and counts on top of the twice that the op
    is allowed (1.5 x 2), with a third more, by which the largest errors of two roundings may differ. max|exact| is at
    least the largest input's size, for the reference's error is relative to the terms, not to a sum of them that
    happens to cancel. In every dtype max|exact| is at least spec.terms, of a
    gradient spec.gradient_terms, too.
    """
    dtype, grad_out = sample.args[0].dtype, random_grad(grad_layout)
    exact = run(spec.reference, convert(sample, torch.float64), grad_out)
    if dtype is torch.float64:
        rounded = convert(sample, torch.float32)
        eager, eager_exact = (
            run(spec.reference, rounded, grad_out),
            run(spec.reference, convert(rounded, dtype), grad_out),
        )
        factor = 2.0 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    else:
        eager, eager_exact, factor = run(spec.reference, sample, grad_out), exact, 1.0
    least_scales = spec.least_scales(sample)
    if dtype is torch.float64:
        size = max((largest(x.detach().nan_to_num(0.0, 0.0, 0.0)) for x in leaves(sample)), default=0.0)
        least_scales = max(size, least_scales[0]), max(size, least_scales[1])
    errors = [
        factor * largest_error(b, c, is_finite(c, b.dtype))
        for (_, b), (_, c) in zip(eager.tensors(), eager_exact.tensors(), strict=True)
    ]
    return Expected(eager, errors, exact, least_scales)


def check(
    spec: OpSpec,
    sample: Sample,
    grad_layout: str = "contiguous",
    what: str = "",
    limits: bool = False,
    expected: Expected | None = None,
) -> Result:
    """Runs the op and judges output and gradients; expected, if not given, is what `expect` says of the sample."""
    dtype = sample.args[0].dtype
    ours = run(spec.function, sample, random_grad(grad_layout))
    expected = expected or expect(spec, sample, grad_layout)
    result_dtype = torch.promote_types(dtype, torch.float32) if spec.float_results else dtype
    assert all(x.dtype == result_dtype for x in ours.outputs) and all(x.dtype == dtype for x in ours.gradients)
    shapes = [tuple(x.shape) for x in leaves(sample)]
    assert_right(
        ours,
        *(expected.eager, expected.eager_errors, expected.exact),
        spec.reduction(sample),
        f"{spec.name}{shapes} {dtype} {what}",
        limits,
        expected.least_scales,
        spec.infinities_may_be_nan,
    )
    return ours


class Calls(TorchDispatchMode):
    """Our operators that were called, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "extension_cpp":
            self.made.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

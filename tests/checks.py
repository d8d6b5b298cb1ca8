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

# Widths of rows of whole vectors, up to the widest that fits into a CTA. The norms have one or two kernels for each.
NORM_WIDTHS = (
    *(64, 256, 384, 512, 640, 768, 1000, 1024, 1280, 1536, 1800, 2048, 2304, 2560, 3072, 4096, 4608, 5120, 6144),
    *(7168, 8192, 9216, 10240, 11264, 12288, 13312, 14336, 15000, 16000, 16384),
)
# Widths of rows that begin between multiples of 16 bytes.
ODD_WIDTHS = (33, 129, 257, 385, 513, 769, 1025, 1537, 2049, 3001, 4097, 5121, 8193, 10001, 16385)

LAYOUTS = ("contiguous", "sliced", "transposed", "expanded", "offset", "channels_last")


@dataclass(frozen=True)
class Strides:
    """A layout of up to len(order) dimensions, in any order in memory, with gaps, an offset and expanded dimensions."""

    order: tuple[int, ...]  # the outermost dimension first
    steps: tuple[int, ...]  # a dimension's stride is this many times the extent of the dimensions inside it
    expanded: frozenset[int]
    offset: int

    def of(self, x: Tensor) -> Tensor:
        """x copied into memory of this layout; of an expanded dimension the first slice."""
        strides, size = [0] * x.dim(), 1
        for d in (d for d in reversed(self.order) if d < x.dim()):
            strides[d] = size * self.steps[d]
            size = strides[d] * max(1 if d in self.expanded else x.shape[d], 1)
        values = x[tuple(slice(1) if d in self.expanded else slice(None) for d in range(x.dim()))]
        memory = x.new_full((self.offset + size,), 7.0)
        return memory.as_strided(values.shape, strides, self.offset).copy_(values).expand(x.shape)


def with_layout(x: Tensor, layout: str | Strides) -> Tensor:
    """x copied into memory of another layout; of an expanded dimension the first slice."""
    if isinstance(layout, Strides):
        return layout.of(x)
    if layout == "sliced":
        wide = x.new_full([*x.shape[:-1], 2 * x.shape[-1] + 1], 7.0)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "padded":  # a row may begin at any multiple of an element's size
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


# Float64 tensors, and the generator's state after each. The key is the generator's seed and the shapes of all tensors
# that it drew: every op and dtype asks for the same ones, and to draw a tensor takes longer than most ops on it. Nobody
# may write into them. The largest tensor that is kept is the largest of test_runtime.py on the CPU; all of them take
# 256 MiB.
_DRAWN: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
MOST_ELEMENTS, MOST_DRAWN = 300 * 1025, 1 << 25
DRAWN_ON_GPU = 1 << 20  # elements from which a GPU draws a tensor: on the CPU this takes most of a test's time


def _normal(generator: torch.Generator, shapes: list[tuple[int, ...]], device: str) -> Tensor:
    """The next tensor that the generator draws. It has the last of the shapes."""
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
    """A function make(shape) of random normal leaves that require grad. Up to a million elements, every device has the
    same values."""
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
    """The rows of a matrix: `rows` on a GPU, where they decide which kernel runs; on the CPU some blocks of work."""
    return rows if device == "cuda" else min(rows, max(8, (1 << 18) // cols))


def last_level_cache() -> int:
    """The size in bytes from which the CPU streams results: what csrc/common/cpu_level.c finds, else its default."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return int(size.read_text().strip().removesuffix("K")) << 10 if size.exists() else 32 << 20


def norm_arguments(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Any, ...]:
    """A sample of layer_norm or rms_norm over the last dimension."""
    shape = (x.shape[-1],)
    return (x, shape, weight, bias, 1e-5) if name == "layer_norm" else (x, shape, weight, 1e-5)


def convert(sample: Sample, dtype: torch.dtype) -> Sample:
    """The same call with leaves of another dtype. A seed keeps its dtype."""

    def one(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if floating else x

    return Sample(tuple(one(x) for x in sample.args), {key: one(x) for key, x in sample.kwargs.items()})


def with_float_weights(sample: Sample) -> Sample:
    """The same call with the leaves of one dimension in float32."""

    def one(x: Any) -> Any:
        weight = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 1
        return x.detach().float().requires_grad_(x.requires_grad) if weight else x

    return Sample((sample.args[0], *(one(x) for x in sample.args[1:])), sample.kwargs)


def leaves(sample: Sample) -> list[Tensor]:
    return [x for x in (*sample.args, *sample.kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The result of a function as a tuple, also if it is one tensor."""
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
    """Runs forward and backward. grad_out(output) is the gradient of an output."""
    outputs = as_tuple(function(*sample.args, **sample.kwargs))
    gradients = torch.autograd.grad(outputs, leaves(sample), [grad_out(output) for output in outputs])
    return Result(tuple(output.detach() for output in outputs), list(gradients))


@functools.lru_cache(maxsize=8)
def _eighths(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(99)
    return torch.randint(-16, 17, shape, generator=generator, device="cpu").double() / 8


def random_grad(layout: str | Strides = "contiguous") -> Callable[[Tensor], Tensor]:
    """A grad_out with the same values for every dtype and device: multiples of 1/8 up to 2, which are exact in all."""

    def grad_out(output: Tensor) -> Tensor:
        g = _eighths(tuple(output.shape)).to(output.device, output.dtype, copy=True)  # an op may write into it
        return with_layout(g, layout) if g.dim() else g

    return grad_out


def largest(x: Tensor, where: Tensor | None = None) -> float:
    """The largest magnitude, in the places of `where` if it is given. NaN if x has a NaN there."""
    if x.numel() == 0:
        return 0.0
    least, most = torch.aminmax(x if where is None else torch.where(where, x, 0))  # one vectorized pass
    return max(-least.item(), most.item())


def is_finite(exact: Tensor, dtype: torch.dtype, size: float) -> Tensor | None:
    """Where the exact value is well inside the dtype's range. None stands for everywhere, and saves passes. `size` is
    max|exact|."""
    limit = torch.finfo(dtype).max * 0.99
    return None if size < limit else exact.abs() < limit  # a NaN fails the comparison


def largest_errors(rounded: Result, exact: Result) -> list[float]:
    """The largest error of each tensor. A value that is not finite counts as no error."""
    errors = []
    for (_, x), (_, truth) in zip(rounded.tensors(), exact.tensors(), strict=True):
        error, where = x.double() - truth, is_finite(truth, x.dtype, largest(truth))
        found = largest(error, where)
        errors.append(found if found < math.inf else largest(error.nan_to_num(0.0, 0.0, 0.0), where))
    return errors


@dataclass
class Expected:
    """For a sample: the exact result, the number of terms of a sum, the least value that max|exact| counts as, in the
    outputs and in the gradients, and what computes eager PyTorch's result and its errors."""

    exact: Result
    reduction: int
    least_scales: tuple[float, float]
    with_eager: Callable[[], tuple[Result, list[float]]]

    @functools.cached_property
    def eager(self) -> tuple[Result, list[float]]:
        return self.with_eager()

    @functools.cached_property
    def sizes(self) -> list[float]:
        """max|exact| of each tensor."""
        return [largest(exact) for _, exact in self.exact.tensors()]


def assert_right(ours: Result, expected: Expected, what: str, limits: bool = False, nan_for_inf: bool = False) -> None:
    """Asserts for every tensor: error <= max(2 x eager's error, 4 eps max|exact| sqrt(reduction)), and NaN and inf
    where the exact result has them.

    The first bound allows twice the rounding error of PyTorch. The second bound is for cases in which eager happens to
    be exact: it allows 4 roundings per element, and grows as the error of a sum of independent roundings. Most results
    are within the second bound, so eager PyTorch runs for the others alone. `limits`: a finite value is right where the
    reference's formula gives NaN. `nan_for_inf`: NaN is right where the formula gives an infinity.
    """
    tensors = zip(ours.tensors(), expected.exact.tensors(), expected.sizes, strict=True)
    for number, ((name, a), (_, exact), size) in enumerate(tensors):
        where = f"{what}, {name}"
        assert a.shape == exact.shape, f"{where}: shape {tuple(a.shape)}, expected {tuple(exact.shape)}"
        finite = is_finite(exact, a.dtype, size)
        if finite is not None:
            _assert_same_specials(a, exact, limits, nan_for_inf, where)
            size = largest(exact, finite)
        info, least = torch.finfo(a.dtype), expected.least_scales[name.startswith("gradient")]
        roundings = 4 * info.eps * math.sqrt(max(expected.reduction, 1))
        bound = max(roundings * max(size, least), info.smallest_normal * info.eps)
        difference = a.double() - exact
        if largest(difference, finite) <= bound:
            continue
        eager, eager_errors = expected.eager
        _, b = list(eager.tensors())[number]
        if a.dtype == b.dtype and not largest(b) < math.inf:  # if eager overflows, its error says nothing
            finite = (b.abs() < math.inf) & (finite if finite is not None else True)
            bound = max(roundings * max(largest(exact, finite), least), info.smallest_normal * info.eps)
        error, bound = largest(difference, finite), max(2 * eager_errors[number], bound)
        eager_error = eager_errors[number]
        assert error <= bound, f"{where}: error {error:.3g} over the bound {bound:.3g} (eager {eager_error:.3g})"


def _assert_same_specials(x: Tensor, exact: Tensor, limits: bool, nan_for_inf: bool, where: str) -> None:
    """Asserts that NaN and infinities are where the exact result has them."""
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
    """The expectation from the float64 reference and from eager PyTorch.

    In float64 the reference is eager PyTorch itself, and rounds as much as the op. Its error is taken to be that of
    eager float32 on the same inputs, scaled by the ratio of the two types' eps. The op may have twice this error, the
    reference has it once, and the largest errors of two roundings may differ by a third: 4 times in all, twice as much
    as in the other dtypes. max|exact| is at least the size of the largest input, because the reference's error is
    relative to the terms, and their sum may cancel. In every dtype max|exact| is at least spec.terms, for a gradient at
    least spec.gradient_terms, too.
    """
    dtype, grad_out, reference = sample.args[0].dtype, random_grad(grad_layout), spec.by_hand or spec.reference
    exact = run(reference, convert(sample, torch.float64), grad_out)

    def with_eager() -> tuple[Result, list[float]]:
        if dtype is not torch.float64:
            eager = run(reference, sample, grad_out)
            return eager, largest_errors(eager, exact)
        rounded = convert(sample, torch.float32)
        eager, eager_exact = run(reference, rounded, grad_out), run(reference, convert(rounded, dtype), grad_out)
        factor = 2.0 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return eager, [factor * error for error in largest_errors(eager, eager_exact)]

    least_scales = spec.least_scales(sample)
    if dtype is torch.float64:
        size = max((largest(x.detach().nan_to_num(0.0, 0.0, 0.0)) for x in leaves(sample)), default=0.0)
        least_scales = max(size, least_scales[0]), max(size, least_scales[1])
    return Expected(exact, spec.reduction(sample), least_scales, with_eager)


def check(
    spec: OpSpec,
    sample: Sample,
    grad_layout: str = "contiguous",
    what: str = "",
    limits: bool = False,
    expected: Expected | None = None,
) -> Result:
    """Runs the op and judges outputs and gradients. The default of `expected` is expect() of the sample."""
    dtype = sample.args[0].dtype
    ours = run(spec.function, sample, random_grad(grad_layout))
    expected = expected or expect(spec, sample, grad_layout)
    result_dtype = torch.promote_types(dtype, torch.float32) if spec.float_results else dtype
    assert all(x.dtype == result_dtype for x in ours.outputs) and all(x.dtype == dtype for x in ours.gradients)
    shapes = [tuple(x.shape) for x in leaves(sample)]
    assert_right(ours, expected, f"{spec.name}{shapes} {dtype} {what}", limits, spec.infinities_may_be_nan)
    return ours


class Calls(TorchDispatchMode):
    """Records our operators that are called, and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "extension_cpp":
            self.made.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

"""OpSpec: what one op promises, in the shape of PyTorch's OpInfo. tests/specs/<op>.py defines SPEC; the battery
(tests/battery) and the benchmarks find it by glob."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# make(shape) gives a tensor of the dtype, device, layout and requires_grad under test.
Make = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Sample:
    """One call: function(*args, **kwargs)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorSample:
    """A call that must raise RuntimeError with exactly this message."""

    args: tuple[Any, ...]
    message: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """What to time. The floor counts every input read once and every output written once."""

    sample: Callable[[Make, Sequence[int]], Sample]
    forward: float  # floor, elements moved per element of the shape
    backward: float  # 0: backward moves nothing
    flat: bool = False  # the width makes no difference: one shape is enough
    # What PyTorch offers for it, where that is not the reference.
    stock: Callable[..., Any] | None = None
    # Arithmetic operations an element of the shape, forward and backward, for the roofline; exp, log, a division and
    # a square root count as one each, random bits as none.
    operations: tuple[float, float] | None = None


@dataclass(frozen=True)
class OpSpec:
    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    # Samples whose first tensor has the given shape; yields nothing for a shape the op does not take.
    sample_inputs: Callable[[Make, Sequence[int]], Iterator[Sample]]
    error_inputs: Callable[[str], Iterator[ErrorSample]]
    # The number of terms behind one element of the results and gradients, for the tolerance.
    reduction: Callable[[Sample], int]
    bench: Bench
    keeps_strides: bool  # the result has the strides of a dense first input
    # Kernels on the GPU for one forward and one backward.
    launches: tuple[int, int]
    second_order: bool = True
    # The reference in elementary operations, where PyTorch's own operator errs under torch.func's transforms.
    in_steps: Callable[..., Any] | None = None
    positional: bool = False  # what an element becomes depends on where it lies
    # The largest term of the sums behind a gradient, where they may cancel: rounding is relative to it.
    terms: Callable[[Sample], float] = lambda sample: 0.0
    # The same for the gradients alone.
    gradient_terms: Callable[[Sample], float] = lambda sample: 0.0
    # Where the reference's loop gives an infinity, the products of a tree may give inf * 0 or inf - inf.
    infinities_may_be_nan: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    has_products: bool = False  # matrix products, which are PyTorch's: their time and launches are not ours
    float_results: bool = False  # the results are float32 where the inputs are half
    float_weights: bool = False  # inputs of one dimension may be float32 beside half types
    # More of it to time, that draws no random numbers, each under the op's name and its own.
    variants: dict[str, Bench] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name

    def least_scales(self, sample: Sample) -> tuple[float, float]:
        """At least what max|exact| counts as, of the outputs and of the gradients."""
        least = self.terms(sample)
        return least, max(least, self.gradient_terms(sample))


def timed_specs() -> list[OpSpec]:
    """All ops but those with matrix products, each followed by its variants."""
    found = []
    for spec in (spec for spec in all_specs() if not spec.has_products):
        others = {f"{spec.name}_{name}": bench for name, bench in spec.variants.items()}
        found += [spec, *(replace(spec, name=name, bench=others[name], positional=False) for name in others)]
    return found


def all_specs() -> list[OpSpec]:
    folder = Path(__file__).parent / "specs"
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    return [importlib.import_module(f"tests.specs.{name}").SPEC for name in names]

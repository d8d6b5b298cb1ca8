"""OpSpec: what one op promises, modelled on PyTorch's OpInfo. Each tests/specs/<op>.py defines a SPEC; the battery
(tests/battery) and the benchmarks find all of them by glob."""

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
    """What to time. The floor is the traffic of reading every input once and writing every output once."""

    sample: Callable[[Make, Sequence[int]], Sample]
    forward: float  # floor: elements moved per element of the shape
    backward: float  # 0: backward moves nothing
    flat: bool = False  # the width makes no difference: one shape is enough
    # PyTorch's own implementation, if that is not the reference.
    stock: Callable[..., Any] | None = None
    # Arithmetic operations per element of the shape, forward and backward, for the roofline. exp, log, division and
    # square root count as one each, random bits as none.
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
    # The reference in elementary operations, if PyTorch's own operator is wrong under torch.func's transforms.
    in_steps: Callable[..., Any] | None = None
    # The reference with its first gradients by hand, where loops under autograd take too long.
    by_hand: Callable[..., Any] | None = None
    positional: bool = False  # a result depends on the element's index: a random mask
    # The largest term of sums that may cancel in a result or gradient: the rounding error is relative to it.
    terms: Callable[[Sample], float] = lambda sample: 0.0
    # The same for the gradients alone.
    gradient_terms: Callable[[Sample], float] = lambda sample: 0.0
    # Where the reference's loop gives an infinity, a tree may give NaN, from inf * 0 or inf - inf.
    infinities_may_be_nan: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    has_products: bool = False  # the op calls PyTorch's matrix products: not timed, launches not counted
    float_results: bool = False  # the results are float32 where the inputs are half
    float_weights: bool = False  # one-dimensional inputs may be float32 beside half types
    # Further benchmarks of the op, by name. They draw no random numbers.
    variants: dict[str, Bench] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name

    def least_scales(self, sample: Sample) -> tuple[float, float]:
        """Lower limits of the scale max|exact| of outputs and of gradients, to which errors are relative."""
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

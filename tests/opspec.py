"""OpSpec says what one op promises, modelled on PyTorch's OpInfo. Each tests/specs/<op>.py defines a SPEC. The battery
(tests/battery) and the benchmarks find all specs by glob."""

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COMPUTED = "computed"  # in result_dtypes
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# make(shape) returns a tensor of the dtype, device, layout and requires_grad under test.
Make = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Sample:
    """The arguments of one call: function(*args, **kwargs)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def leaves(sample: Sample) -> list[Tensor]:
    return [x for x in (*sample.args, *sample.kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """Returns the result of a function as a tuple, also if the result is one tensor, a list or None."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else () if outputs is None else (outputs,)


def with_single_tensors(function: Callable[..., Any], is_list: Sequence[bool]) -> Callable[..., Any]:
    """Wraps a function of lists of tensors, so that each tensor is an argument. All lists have the same length."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, list) and all(isinstance(each, Tensor) for each in x) for x in args):
            return function(*args, **kwargs)
        length, rest = divmod(len(args) - is_list.count(False), is_list.count(True))
        assert rest == 0, "expected lists of one length and all arguments by position"
        left = iter(args)
        given = ([next(left) for _ in range(length)] if many else next(left) for many in is_list)
        results = function(*given, **kwargs)
        lists = (x if isinstance(x, (tuple, list)) else (x,) for x in as_tuple(results))
        return None if results is None else tuple(itertools.chain.from_iterable(lists))

    return call


def in_single_tensors(samples: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that returns or yields samples, so that each tensor of a list becomes an argument."""

    def one(sample: Sample) -> Sample:
        args = (x if isinstance(x, list) else [x] for x in sample.args)
        return Sample(tuple(itertools.chain.from_iterable(args)), sample.kwargs)

    def call(*args: Any) -> Any:
        found = samples(*args)
        return one(found) if isinstance(found, Sample) else map(one, found)

    return call


def _copy(x: Any) -> Any:
    return [each.clone() for each in x] if isinstance(x, list) else x.clone()


def on_copies(function: Callable[..., Any], is_written: Sequence[bool]) -> Callable[..., tuple[Tensor, ...]]:
    """Wraps a function to run on copies of the arguments that it writes, and to return its results and these copies.

    is_written has a bool for each argument, because torch.compile of 2.11 evaluates `number in list` wrongly.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = [_copy(x) if written else x for written, x in zip(is_written, args, strict=False)]
        results = as_tuple(function(*given, **kwargs))
        return *results, *(x for written, x in zip(is_written, given, strict=False) if written)

    return call


@dataclass(frozen=True)
class Terms:
    """Bounds the rounding errors of a result or gradient by the size of the terms that add up to each element."""

    size: Tensor  # the sum of the terms' absolute values; broadcasts to the shape of the result
    c: float = 4.0  # how often a term and its partial sums are rounded, in units of eps
    saved: Tensor | float = 0.0  # the change by rounding the results that backward reads
    rounded: Tensor | float = 0.0  # the change by rounding other numbers before their use


@dataclass(frozen=True)
class Call:
    """A call in float64, as the functions `terms` and `from_saved` of a spec get it."""

    sample: Sample
    outputs: tuple[Tensor, ...]  # the exact outputs; for from_saved, the outputs of the op
    grads: list[Tensor]  # the gradient of each output
    dtype: torch.dtype  # the dtype of the op's tensors

    @property
    def computed(self) -> torch.dtype:
        """Returns the dtype in which the op computes."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def leaf_numbers(self) -> list[int]:
        """Returns the indices of the arguments that are leaves."""
        return [i for i, x in enumerate(self.sample.args) if isinstance(x, Tensor) and x.requires_grad]

    @property
    def eps(self) -> float:
        return torch.finfo(self.computed).eps

    @property
    def least(self) -> float:
        """Returns the smallest normal number. Smaller exponentials and products of half types may become 0."""
        return torch.finfo(self.computed).smallest_normal

    @property
    def c_of_exp(self) -> float:
        """Returns the roundings of a sum of exponentials. For half types, exp has an error of 24 eps(float32)."""
        return 32.0 if self.dtype.itemsize == 2 else 8.0

    def rounding(self, x: Tensor) -> Tensor:
        """Returns how far x moves at most when it is rounded to the dtype of the call."""
        info, size = torch.finfo(self.dtype), x.abs()
        moves = torch.where(size > info.max, torch.inf, size * info.eps + info.smallest_normal * info.eps)
        return torch.where(size == torch.inf, 0, moves)


@dataclass(frozen=True)
class ErrorSample:
    """A call that must raise RuntimeError with exactly this message."""

    args: tuple[Any, ...]
    message: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Says what to time. The floor is the number of elements in each input and output, each read or written once."""

    sample: Callable[[Make, Sequence[int]], Sample]
    forward: float  # elements moved per element of the shape, at least
    backward: float  # 0: backward moves nothing
    flat: bool = False  # the time does not depend on the width, so that one shape is enough
    # Whether each line of the results depends on the same line of the first tensor alone. If not, the judge compares
    # whole results.
    by_lines: bool = True
    # PyTorch's own implementation, where it differs from the reference.
    stock: Callable[..., Any] | None = None
    # Arithmetic operations per element of the shape, forward and backward, for the roofline. exp, log, division and
    # square root count as one operation each, and random bits as none.
    operations: tuple[float, float] | None = None


@dataclass(frozen=True)
class Options:
    """The options of an op, every pair of which is tested."""

    values: dict[str, tuple[Any, ...]]  # by option, the values to test beside the default
    sample: Callable[[Make, Sequence[int], dict[str, Any]], Sample]  # makes the call with the chosen values


def without_gradients(samples: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of `make`, so that the tensors of its samples require no grad."""
    return lambda make, *others: samples(lambda shape: make(shape).detach(), *others)


@dataclass(frozen=True)
class OpSpec:
    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    # Yields samples whose first tensor has the given shape, or a similar one of a rank that the op takes. It yields
    # nothing for a shape that the op does not take.
    sample_inputs: Callable[[Make, Sequence[int]], Iterator[Sample]]
    error_inputs: Callable[[str], Iterator[ErrorSample]]
    bench: Bench
    keeps_strides: bool  # the result has the strides of the first input, where that is dense
    # The number of GPU kernels of one forward and of one backward.
    launches: tuple[int, int]
    # The least and the greatest number of dimensions of the first tensor. None means any number.
    least_rank: int = 0
    greatest_rank: int | None = None
    second_order: bool = True
    differentiable: bool = True  # if False, no argument gets a gradient, and samples have no leaves
    # The names of arguments that are lists of tensors. The battery passes each tensor as an argument of its own, named
    # "xs[0]", to samples, `function` and `reference`. All lists of all samples have two tensors.
    lists: tuple[str, ...] = ()
    unknown_sizes: bool = False  # the shape of a result depends on values of the inputs
    # The names of arguments that the op writes. The battery calls `function` and `reference` on copies of them and
    # compares the copies as further results. `in_place` is the function itself.
    mutates: tuple[str, ...] = ()
    in_place: Callable[..., Any] | None = None
    exact: tuple[int, ...] = ()  # results that must equal the rounded reference, as integer results always must
    # The dtypes of floating-point results. None means the dtype of the call. COMPUTED means float32 for calls of a half
    # type, and otherwise the dtype of the call.
    result_dtypes: tuple[torch.dtype | str | None, ...] = ()
    # The reference in elementary operations, where PyTorch's own operator is wrong under torch.func's transforms.
    in_steps: Callable[..., Any] | None = None
    # The reference with handwritten first gradients, where loops under autograd take too long.
    by_hand: Callable[..., Any] | None = None
    positional: bool = False  # a result depends on the element's index, as a random mask does
    # terms(call) returns the terms of each output and, by argument index, those of each gradient. If None, random
    # changes of the inputs estimate them (tests/judge.py), which runs the reference eight times.
    terms: Callable[[Call], tuple[list[Terms], dict[int, Terms]]] | None = None
    # Says, for a spec without `terms`, that backward reads rounded results of the op.
    saves_results: bool = False
    # from_saved(call): float64 outputs and gradients if backward reads call.outputs, the op's rounded results.
    from_saved: Callable[[Call], tuple[tuple[Tensor, ...], list[Tensor]]] | None = None
    # How many of the wrong results planted by test_judge.py are too small to see. The spec says why.
    unseen: int = 0
    # A tree of partial results may give NaN, by inf * 0 or inf - inf, where the reference's loop gives an infinity.
    infinities_may_be_nan: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    has_products: bool = False  # the op calls PyTorch's matrix products, is not timed, and its launches are not counted
    float_results: bool = False  # the results are float32 where the inputs are of a half type
    float_weights: bool = False  # one-dimensional inputs may be float32 where the others are of a half type
    # Further benchmarks of the op, by name. Their samples contain no random masks.
    variants: dict[str, Bench] = field(default_factory=dict, hash=False)
    # Required if the op has two or more options. An optional tensor is an option, and so is a shape that broadcasts.
    options: Options | None = field(default=None, hash=False)
    names: tuple[str, ...] = ()  # the arguments' names, which __post_init__ finds

    def __post_init__(self) -> None:
        if self.names:  # replace() copies a spec that is already initialized
            return
        self._set(names=tuple(inspect.signature(self.function).parameters))
        if self.lists:
            self._take_lists_apart()
        if self.mutates:
            is_written = [name in self.mutates for name in self.names]
            self._set(
                mutates=tuple(name for name in self.names if name in self.mutates),
                in_place=self.in_place or self.function,
                function=on_copies(self.function, is_written),
                reference=on_copies(self.reference, is_written),
            )
        if not self.differentiable:
            self._change_samples(without_gradients)

    def _take_lists_apart(self) -> None:
        is_list = [name in self.lists for name in self.names]
        names = ([f"{name}[{i}]" for i in range(2)] if name in self.lists else [name] for name in self.names)
        written = ([f"{name}[{i}]" for i in range(2)] if name in self.lists else [name] for name in self.mutates)
        self._set(
            names=tuple(itertools.chain.from_iterable(names)),
            mutates=tuple(itertools.chain.from_iterable(written)),
            function=with_single_tensors(self.function, is_list),
            reference=with_single_tensors(self.reference, is_list),
        )
        self._change_samples(in_single_tensors)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _change_samples(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._set(sample_inputs=change(self.sample_inputs))
        self._set(bench=replace(self.bench, sample=change(self.bench.sample)))
        if self.options:
            self._set(options=replace(self.options, sample=change(self.options.sample)))

    def __str__(self) -> str:
        return self.name


def timed_specs() -> list[OpSpec]:
    """Returns all specs except those with matrix products, each followed by its benchmark variants."""
    found = []
    for spec in (spec for spec in all_specs() if not spec.has_products):
        others = {f"{spec.name}_{name}": bench for name, bench in spec.variants.items()}
        found += [spec, *(replace(spec, name=name, bench=others[name], positional=False) for name in others)]
    return found


def all_specs() -> list[OpSpec]:
    folder = Path(__file__).parent / "specs"
    names = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    return [importlib.import_module(f"tests.specs.{name}").SPEC for name in names]

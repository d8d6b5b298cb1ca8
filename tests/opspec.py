"""Defines OpSpec, which describes one op for its tests and benchmarks, as PyTorch's OpInfo does. Each file
tests/specs/<op>.py defines an OpSpec named SPEC. tests/battery and the benchmarks find these files by glob."""

import importlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import extension_cpp

COMPUTED = "computed"  # in result_dtypes
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# The type of make(shape), which returns a tensor with the dtype, device, layout and requires_grad that a test asks for.
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
    """Wraps a function that takes lists of tensors, so that it takes each tensor of the lists as a separate argument.
    All lists of a call have the same length."""

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
    """Wraps a function that returns or yields samples, so that each tensor of a list becomes a separate argument."""

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

    `is_written` has a bool for each argument. A list of the written arguments' numbers does not work, because PyTorch
    2.11's torch.compile evaluates `number in list` wrongly.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = [_copy(x) if written else x for written, x in zip(is_written, args, strict=False)]
        results = as_tuple(function(*given, **kwargs))
        return *results, *(x for written, x in zip(is_written, given, strict=False) if written)

    return call


@dataclass(frozen=True)
class Terms:
    """Bounds the rounding errors of an output or gradient by the sizes of the terms that add up to each element."""

    size: Tensor  # the sum of the terms' absolute values; broadcasts to the shape of the result
    c: float = 4.0  # how often a term and the partial sums that contain it are rounded
    saved: Tensor | float = 0.0  # how much a gradient changes if the outputs that backward reads are rounded
    rounded: Tensor | float = 0.0  # the change of the result by rounding other intermediate numbers


@dataclass(frozen=True)
class Call:
    """A call of the op with its tensors in float64. A spec's functions `terms` and `from_saved` get a Call."""

    sample: Sample
    outputs: tuple[Tensor, ...]  # for `terms` the exact outputs, for `from_saved` the op's rounded outputs
    grads: list[Tensor]  # the gradient of each output
    dtype: torch.dtype  # the dtype of the tensors with which the test calls the op

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
        """Returns the smallest normal number of the computation. For half types, smaller exponentials may become 0."""
        return torch.finfo(self.computed).smallest_normal

    @property
    def c_of_exp(self) -> float:
        """Returns Terms.c for a sum of exponentials. For half types it contains exp's error of 24 eps(float32)."""
        return 32.0 if self.dtype.itemsize == 2 else 8.0

    def rounding(self, x: Tensor) -> Tensor:
        """Returns a bound of the change of each element of x when x is rounded to the dtype of the call."""
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
    """A call to time, and the least number of elements that it moves: each one of its inputs and outputs once."""

    sample: Callable[[Make, Sequence[int]], Sample]
    forward: float  # least number of elements that forward reads and writes, per element of the shape
    backward: float  # the same number for backward, or 0 if backward moves nothing
    flat: bool = False  # the op's time does not depend on the row width, so that one width is timed
    # Whether each line (row or column) of the results depends only on that line of the first tensor. If not, the judge
    # compares whole results.
    by_lines: bool = True
    # PyTorch's implementation of the op to compare with. If None, this is the reference.
    stock: Callable[..., Any] | None = None
    # Arithmetic operations per element of the shape, forward and backward, for the roofline. exp, log, division and
    # square root count as one operation each, and random bits as none.
    operations: tuple[float, float] | None = None


@dataclass(frozen=True)
class Options:
    """The options of an op. battery/test_options.py tests each combination of values of any two options."""

    values: dict[str, tuple[Any, ...]]  # for each option, the values to test beside its default
    sample: Callable[[Make, Sequence[int], dict[str, Any]], Sample]  # makes a call with given values of some options


def indices_below(shape: Sequence[int], below: int, seed: int, different: bool = False) -> Tensor:
    """Returns random indices from 0 to less than `below`, as int64.

    With `different`, no two are equal, unless there are more of them than `below`. An op that writes needs it: with an
    index twice, two work items write one element, and on a GPU nothing says which of them is the last.
    """
    count, generator = math.prod(shape), torch.Generator().manual_seed(seed)
    if not different:
        return torch.randint(max(below, 1), tuple(shape), generator=generator)
    drawn = torch.randperm(max(below, count), generator=generator)[:count]
    return drawn.remainder(max(below, 1)).view(tuple(shape))


def without_gradients(samples: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that makes samples by `make`, so that the tensors in them do not require grad."""
    return lambda make, *others: samples(lambda shape: make(shape).detach(), *others)


@dataclass(frozen=True)
class OpSpec:
    name: str
    # Yields samples whose first tensor has the given shape, or a similar one of a rank that the op takes. It yields
    # nothing for a shape that the op does not take.
    sample_inputs: Callable[[Make, Sequence[int]], Iterator[Sample]]
    error_inputs: Callable[[str], Iterator[ErrorSample]]
    bench: Bench
    keeps_strides: bool  # the result has the strides of the first input, if this input is dense
    # The numbers of GPU kernels that one call of forward and one of backward launch.
    launches: tuple[int, int]
    # The op's function and its reference. None stands for the package's function of that name, and for the one in its
    # module `reference`.
    function: Any = None
    reference: Any = None
    # The least and the greatest number of dimensions of the first tensor. None means any number.
    least_rank: int = 0
    greatest_rank: int | None = None
    second_order: bool = True
    differentiable: bool = True  # if False, no argument gets a gradient, and no tensor of a sample requires grad
    # The names of the arguments that are lists of tensors. In samples, `function` and `reference`, each tensor of a
    # list `xs` is a separate argument, "xs[0]" or "xs[1]". All lists in samples have two tensors.
    lists: tuple[str, ...] = ()
    unknown_sizes: bool = False  # the shape of a result depends on values of the inputs
    # The names of the arguments that the op writes. `function` and `reference` are wrapped to run on copies of these
    # arguments and to return the copies as further results. `in_place` is the function without this wrapper.
    mutates: tuple[str, ...] = ()
    in_place: Callable[..., Any] | None = None
    # The numbers of the floating-point outputs that must equal the rounded reference, as integer outputs always must.
    exact: tuple[int, ...] = ()
    # The dtypes of the floating-point results. None means the dtype of the op's first argument. COMPUTED means float32
    # if this is a half type, and otherwise this dtype.
    result_dtypes: tuple[torch.dtype | str | None, ...] = ()
    # The reference written in elementary operations, if `reference` itself is wrong under torch.func's transforms.
    in_steps: Callable[..., Any] | None = None
    # The reference with handwritten first gradients, if loops in `reference` take too long under autograd.
    by_hand: Callable[..., Any] | None = None
    positional: bool = False  # results depend on an element's position in the tensor, as with a random mask
    # terms(call) returns the Terms of each output and, by argument index, those of each gradient. If None,
    # tests/judge.py estimates the Terms by running the reference eight times with random changes.
    terms: Callable[[Call], tuple[list[Terms], dict[int, Terms]]] | None = None
    # Says, for a spec without `terms`, that backward reads the op's rounded outputs.
    saves_results: bool = False
    # from_saved(call) is for an op whose backward reads its rounded outputs, which are call.outputs. It returns the
    # outputs in float64, and the gradients that are exact for the rounded outputs.
    from_saved: Callable[[Call], tuple[tuple[Tensor, ...], list[Tensor]]] | None = None
    # How many of the errors that test_judge.py plants in results are below the error bound. The op's spec says why.
    unseen: int = 0
    # If True, the op may return NaN where the reference returns an infinity, because it adds in another order.
    infinities_may_be_nan: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    has_products: bool = False  # the op calls PyTorch's matrix products, is not timed, and its launches are not counted
    float_results: bool = False  # the results are float32 where the inputs are of a half type
    float_weights: bool = False  # one-dimensional inputs may be float32 where the others are of a half type
    # Further benchmarks of the op, by name. In their samples no result depends on a random mask.
    variants: dict[str, Bench] = field(default_factory=dict, hash=False)
    # Required if the op has two or more options. An optional tensor is an option, and so is a shape that broadcasts.
    options: Options | None = field(default=None, hash=False)
    names: tuple[str, ...] = ()  # the arguments' names, which __post_init__ finds

    def __post_init__(self) -> None:
        if self.names:  # replace() copies a spec that is already initialized
            return
        self._set(
            function=self.function or getattr(extension_cpp, self.name),
            reference=self.reference or getattr(extension_cpp.reference, self.name),
        )
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
        parameters = inspect.signature(self.function).parameters
        is_list = [name in self.lists for name, x in parameters.items() if x.kind is not x.KEYWORD_ONLY]
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

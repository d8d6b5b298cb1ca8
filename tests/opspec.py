"""OpSpec: what one op promises, modelled on PyTorch's OpInfo. Each tests/specs/<op>.py defines a SPEC; the battery
(tests/battery) and the benchmarks find all of them by glob."""

import importlib
import inspect
import itertools
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


def leaves(sample: Sample) -> list[Tensor]:
    return [x for x in (*sample.args, *sample.kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """The result of a function as a tuple, also if it is one tensor, a list or None."""
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else () if outputs is None else (outputs,)


def with_single_tensors(function: Callable[..., Any], is_list: Sequence[bool]) -> Callable[..., Any]:
    """The function with the tensors of its lists as arguments of their own. All lists have the same length."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, list) for x in args):
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
    """The function that gives a sample, or yields some, with the tensors of lists as arguments of their own."""

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
    """The function on copies of the arguments that it writes. It returns its results and these arguments.

    Whether one is written is a bool for each: torch.compile of 2.11 says wrongly whether a number is in a list of them.
    """

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = [_copy(x) if written else x for written, x in zip(is_written, args, strict=False)]
        results = as_tuple(function(*given, **kwargs))
        return *results, *(x for written, x in zip(is_written, given, strict=False) if written)

    return call


@dataclass(frozen=True)
class Terms:
    """How large the terms are that add up to each element of a result or gradient (tests/judge.py)."""

    size: Tensor  # the sum of their absolute values; of a shape that broadcasts to that of the result
    c: float = 4.0  # roundings of a term and of its way through the sum, in units of eps
    saved: Tensor | float = 0.0  # the change by the rounding of results that the op reads again
    rounded: Tensor | float = 0.0  # the change by other numbers that are rounded before they are used


@dataclass(frozen=True)
class Call:
    """A call in float64, as the spec's functions `terms` and `from_saved` get it."""

    sample: Sample
    outputs: tuple[Tensor, ...]  # the exact ones; for from_saved those of the op
    grads: list[Tensor]  # the gradient of each output
    dtype: torch.dtype  # of the op's tensors

    @property
    def computed(self) -> torch.dtype:
        """The dtype in which the op computes."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    def leaf_numbers(self) -> list[int]:
        """The places of the leaves among the arguments."""
        return [i for i, x in enumerate(self.sample.args) if isinstance(x, Tensor) and x.requires_grad]

    @property
    def eps(self) -> float:
        return torch.finfo(self.computed).eps

    @property
    def least(self) -> float:
        """The smallest normal number: exponentials below may be 0, and PyTorch's products of half types."""
        return torch.finfo(self.computed).smallest_normal

    @property
    def c_of_exp(self) -> float:
        """Roundings of an exponential and of the sum over such. For half types it has an error of 24 eps(float32)."""
        return 32.0 if self.dtype.itemsize == 2 else 8.0

    def rounding(self, x: Tensor) -> Tensor:
        """How far x moves at most when it is rounded to the dtype of the call."""
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
    """What to time. The floor is the traffic of reading every input once and writing every output once."""

    sample: Callable[[Make, Sequence[int]], Sample]
    forward: float  # floor: elements moved per element of the shape
    backward: float  # 0: backward moves nothing
    flat: bool = False  # the width makes no difference: one shape is enough
    by_lines: bool = True  # a line of the first tensor alone decides a line of the results; else all is judged as one
    # PyTorch's own implementation, if that is not the reference.
    stock: Callable[..., Any] | None = None
    # Arithmetic operations per element of the shape, forward and backward, for the roofline. exp, log, division and
    # square root count as one each, random bits as none.
    operations: tuple[float, float] | None = None


@dataclass(frozen=True)
class Options:
    """The options of an op, for the tests of every pair of them."""

    values: dict[str, tuple[Any, ...]]  # by option, values other than the default
    sample: Callable[[Make, Sequence[int], dict[str, Any]], Sample]  # the call with the chosen values


def without_gradients(samples: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `make` and others that gets one which makes no leaves."""
    return lambda make, *others: samples(lambda shape: make(shape).detach(), *others)


@dataclass(frozen=True)
class OpSpec:
    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    # Samples whose first tensor has the given shape, or a similar one of the rank that the op takes; yields nothing for
    # a shape the op does not take.
    sample_inputs: Callable[[Make, Sequence[int]], Iterator[Sample]]
    error_inputs: Callable[[str], Iterator[ErrorSample]]
    bench: Bench
    keeps_strides: bool  # the result has the strides of a dense first input
    # Kernels on the GPU for one forward and one backward.
    launches: tuple[int, int]
    second_order: bool = True
    differentiable: bool = True  # False: no argument gets a gradient, and samples have no leaves
    # The arguments that are lists of tensors. The battery gets samples, `function` and `reference` with each tensor as
    # an argument of its own, named "xs[0]". All lists of all samples have two tensors.
    lists: tuple[str, ...] = ()
    unknown_sizes: bool = False  # the shape of a result depends on values
    # The arguments that the op writes. The battery calls `function` and `reference` on copies of them, which are then
    # further results; `in_place` is the function itself.
    mutates: tuple[str, ...] = ()
    in_place: Callable[..., Any] | None = None
    exact: tuple[int, ...] = ()  # results that equal the reference's, rounded once; those of integers always do
    # The floating-point dtypes of results, where they are not that of the call: None is that of the call.
    result_dtypes: tuple[torch.dtype | None, ...] = ()
    # The reference in elementary operations, if PyTorch's own operator is wrong under torch.func's transforms.
    in_steps: Callable[..., Any] | None = None
    # The reference with its first gradients by hand, where loops under autograd take too long.
    by_hand: Callable[..., Any] | None = None
    positional: bool = False  # a result depends on the element's index: a random mask
    # terms(call): of each output, and of the gradient of each argument by its place. None: found by changes of the
    # inputs (tests/judge.py), which takes the reference eight times.
    terms: Callable[[Call], tuple[list[Terms], dict[int, Terms]]] | None = None
    # Without `terms`: backward reads results of the op, which are rounded. (With them: from_saved.)
    saves_results: bool = False
    # from_saved(call): outputs and gradients in float64 if backward reads call.outputs, the rounded results of the op.
    from_saved: Callable[[Call], tuple[tuple[Tensor, ...], list[Tensor]]] | None = None
    # How many of the results planted in test_judge.py are within the rounding errors of the op. The spec says why.
    unseen: int = 0
    # Where the reference's loop gives an infinity, a tree may give NaN, from inf * 0 or inf - inf.
    infinities_may_be_nan: bool = False
    dtypes: tuple[torch.dtype, ...] = DTYPES
    has_products: bool = False  # the op calls PyTorch's matrix products: not timed, launches not counted
    float_results: bool = False  # the results are float32 where the inputs are half
    float_weights: bool = False  # one-dimensional inputs may be float32 beside half types
    # Further benchmarks of the op, by name. They draw no random numbers.
    variants: dict[str, Bench] = field(default_factory=dict, hash=False)
    # Needed if the op has two options or more. An optional tensor is one, and so is the shape of a tensor that
    # broadcasts.
    options: Options | None = field(default=None, hash=False)
    names: tuple[str, ...] = ()  # of the arguments; __post_init__ finds them

    def __post_init__(self) -> None:
        if self.names:  # replace() copies a spec that has been through this
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

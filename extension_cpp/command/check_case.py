"""Calls an operator that another package registered, with a sample, and compares its results with the expected ones.

The comparison is that of the tests (tests/judge.py), read from this checkout or from its copy in the wheel.
"""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .errors import CannotMake
from .tree import TREE


class Refused(Exception):
    """Says what is wrong with the operator."""


class NotRun(Exception):
    """Says why a check does not apply to this operator."""


def of_tests(*names: str) -> list[Any]:
    """Imports modules of tests/ beside this package. If another package has imported its own `tests`, that stays in
    sys.modules."""
    found = importlib.util.find_spec("tests")
    if found is not None and found.origin == str(TREE / "tests" / "__init__.py"):
        return [importlib.import_module(f"tests.{name}") for name in names]
    theirs = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "tests"}
    sys.path.insert(0, str(TREE))
    try:
        return [importlib.import_module(f"tests.{name}") for name in names]
    finally:
        sys.path.remove(str(TREE))
        if found is not None:
            for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
                del sys.modules[name]
        sys.modules.update(theirs)


judge, checks, opspec = of_tests("judge", "checks", "opspec")


def sentence(error: BaseException) -> str:
    """Returns an exception's type and message as one line of text, with at most 300 characters of the message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Raises CannotMake, which says `what` and the error, if the code inside raises another error."""
    try:
        yield
    except Exception as error:
        raise error if isinstance(error, CannotMake) else CannotMake(f"{what} {sentence(error)}") from None


def in_words(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)


def is_written(argument: Any) -> bool:
    """Returns whether the schema says that the operator writes this argument, or that this result is one it writes."""
    return argument.alias_info is not None and argument.alias_info.is_write


def as_arguments(value: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns the arguments and keyword arguments of a sample: a Sample, one value, or a tuple. If the last element of
    a tuple is a dict, it has the keyword arguments."""
    if hasattr(value, "kwargs"):
        return value.args, value.kwargs
    args = value if isinstance(value, tuple) else (value,)
    return (args[:-1], args[-1]) if args and isinstance(args[-1], dict) else (args, {})


def is_plain(x: Any) -> bool:
    """Returns whether x is a list of numbers or strings, which is one value of a sample, and not a list of tensors."""
    return isinstance(x, (list, tuple)) and all(isinstance(each, (int, float, str)) for each in x)


def tensors(results: Any) -> list[Tensor]:
    """Returns all results of a call as tensors. A number becomes a tensor without dimensions."""
    leaves = [x for x in tree_leaves(results) if x is not None]
    return [torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else torch.as_tensor(x) for x in leaves]


def on_cpu(x: Any) -> Any:
    return x.detach().to("cpu", copy=True).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


class Checked:
    """An operator on one device, with the function `source` that draws one of its samples.

    `source` draws a sample for a seed, as the user wrote it. Here a sample holds positional and keyword arguments in
    one flat list, with the tensors of a list as separate elements. The arguments that the operator writes are copied
    before each call, and the copies count as further results.
    """

    def __init__(
        self,
        op: torch._ops.OpOverload,
        source: Callable[[int], Any],
        reference: Callable[..., Any] | None,
        device: str,
        random: bool,
    ) -> None:
        self.op, self.source, self.reference, self.device, self.random = op, source, reference, device, random
        self.is_judged = reference is not None and not random
        self.names: list[str] = []  # names of the flat arguments
        self.written: list[int] = []
        self.count = sys.maxsize  # number of results to compare
        self.flags: list[bool] = []  # which results require grad, while gradients are compared
        self.asked: list[int] = []  # arguments that require grad in the sample itself
        args, self.keys = as_arguments(source(0))
        schema = {argument.name: argument for argument in op._schema.arguments}
        if len(args) > len(schema) or self.keys.keys() - schema.keys():
            raise CannotMake(f"expected arguments of {op._schema}, but got {len(args)} and {[*self.keys]} by name")
        for name, value in [*zip(schema, args, strict=False), *self.keys.items()]:
            count = len(tree_flatten(value, is_plain)[0])
            self.written += range(len(self.names), len(self.names) + count) if is_written(schema[name]) else []
            self.names += [name if count == 1 else f"{name}[{i}]" for i in range(count)]
        sample = self.draw()
        self.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in sample.args]
        if any(dtype is not None and dtype.is_complex for dtype in self.dtypes):
            raise CannotMake(f"expected real tensors, but got {self.words(sample)}")
        with telling(f"{self.words(sample)}: the operator raised"):
            self.count = self.every = len(self.call(*sample.args))
        if reference is not None:
            double = judge.convert(opspec.Sample(tuple(map(on_cpu, sample.args))), torch.float64)
            with telling(f"{self.words(double)}: the reference raised"):
                count = len(self.right(*double.args))
            if not 0 < count <= self.count:
                raise CannotMake(
                    f"expected as many results as the operator's {self.count}, but the reference has {count}"
                )
            self.count = count
        unused = dict.fromkeys(("sample_inputs", "error_inputs", "bench", "keeps_strides", "launches"))
        right = self.right if self.is_judged else self.itself
        self.spec = opspec.OpSpec(op._schema.name, function=self.call, reference=right, names=(*self.names,), **unused)

    def draw(self, seed: int = 0) -> Any:
        """Draws the sample of this seed, with its tensors in new memory on the device."""
        torch.manual_seed(seed)
        args, kwargs = as_arguments(self.source(seed))
        values = [*args, *kwargs.values()]
        flat, self.tree = tree_flatten(values, lambda x: x is not values and is_plain(x))
        self.asked = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]
        moved = (x.detach().to(self.device, copy=True) if isinstance(x, Tensor) else x for x in flat)
        return opspec.Sample(tuple(moved))

    def words(self, sample: Any) -> str:
        return ", ".join(f"{name}: {in_words(x)}" for name, x in zip(self.names, sample.args, strict=True))

    def places(self, sample: Any, floating: bool = False) -> list[int]:
        """Returns the indices of a sample's arguments that are tensors, or only of those with floating-point dtypes."""
        found = [i for i, x in enumerate(sample.args) if isinstance(x, Tensor)]
        return [i for i in found if not floating or sample.args[i].is_floating_point()]

    def called(self, function: Callable[..., Any], flat: Sequence[Any]) -> tuple[Any, list[Tensor]]:
        """Calls a function with the arguments of a sample. Returns its result, and the copies that it wrote."""
        given = [x.clone() if i in self.written else x for i, x in enumerate(flat)]
        values = tree_unflatten(given, self.tree)
        count = len(values) - len(self.keys)
        result = function(*values[:count], **dict(zip(self.keys, values[count:], strict=True)))
        return result, [given[i] for i in self.written]

    def call(self, *flat: Any, seed: int = 0) -> tuple[Tensor, ...]:
        """Returns the operator's results, followed by the arguments that it wrote. The list is cut to the number of the
        reference's results."""
        if self.random:
            torch.manual_seed(seed)
        result, written = self.called(self.op, flat)
        returns = zip(opspec.as_tuple(result), self.op._schema.returns, strict=False)
        return (*tensors([x for x, each in returns if not is_written(each)]), *written)[: self.count]

    def right(self, *flat: Any) -> tuple[Tensor, ...]:
        """Returns the reference's results. If there are fewer than `count`, the arguments that it wrote follow."""
        assert self.reference is not None
        result, written = self.called(self.reference, flat)
        results = tensors(result)
        if len(results) < self.count:
            results += written
        flags = self.flags or [True] * len(results)
        return tuple(x if flag else x.detach() for x, flag in zip(results, flags, strict=True))

    def itself(self, *flat: Any) -> tuple[Tensor, ...]:
        """Stands for a missing reference: calls the operator on contiguous copies, in the dtypes of the sample."""
        given = [
            x.to(self.device, dtype).contiguous() if dtype else x for x, dtype in zip(flat, self.dtypes, strict=True)
        ]
        return tuple(x.double().cpu() if x.is_floating_point() else x.cpu() for x in self.call(*given))

    def expect(self, sample: Any) -> Any:
        return judge.expect(self.spec, opspec.Sample(tuple(map(on_cpu, sample.args))), checks.random_grad())

    def judged(self, sample: Any, what: str = "", expected: Any = None, call: Any = None, limits: bool = False) -> None:
        """Calls the operator, and asserts that its results are right. If tensors of the sample require grad, their
        gradients must be right, too."""
        expected = expected or self.expect(sample)
        ours = judge.run(call or self.call, sample, checks.random_grad())
        ours = judge.Result(tuple(map(on_cpu, ours.outputs)), list(map(on_cpu, ours.gradients)))
        judge.assert_right(ours, expected, f"{self.words(sample)}{what and ', '}{what}", limits)

    def same(self, now: Sequence[Tensor], before: Sequence[Tensor], sample: Any, what: str) -> None:
        """Raises Refused if the operator's results `now` differ from those `before`."""
        for i, (x, y) in enumerate(zip(now, before, strict=True)):
            shapes = f"shape {list(x.shape)}, expected {list(y.shape)}" if x.shape != y.shape else None
            if message := shapes or judge.unequal(x, y):
                raise Refused(f"{self.words(sample)}: {what}: output {i}: {message}")

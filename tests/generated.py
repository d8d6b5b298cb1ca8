"""What the specs and the tests share that `new --schema` writes: sizes, options, wrong calls, and the test of `out`."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.checks import with_layout
from tests.opspec import ErrorSample, Make, Options, Sample, as_tuple


class Fit(dict[str, int]):
    """Makes shapes of patterns such as "[*, n, 4]". The names and the * get those sizes with which the first tensor's
    `pattern` fits a shape best. Any other name is 3."""

    def __init__(self, shape: Sequence[int], pattern: str) -> None:
        words = re.findall(r"\*|\w+", pattern)
        before = words.index("*") if "*" in words else len(words)
        after = len(words[before + 1 :])
        # Two rows, because tests change one row, or repeat the first one in place of the others.
        shape = [*[2] * (before + after - len(shape)), *shape]
        shape = shape if "*" in words else shape[len(shape) - before :]
        self.any = shape[before : len(shape) - after]  # the sizes of the *
        super().__init__(zip(words[:before], shape, strict=False))
        self.update(zip(reversed(words[before + 1 :]), reversed(shape), strict=False))

    def __call__(self, pattern: str) -> tuple[int, ...]:
        sizes: list[int] = []
        for word in re.findall(r"\*|\w+", pattern):
            sizes += self.any if word == "*" else [int(word) if word.isdigit() else self.get(word, 3)]
        return tuple(sizes)


def by_name(function: Callable[..., Any], sample: Sample) -> dict[str, Any]:
    """Returns the arguments of a call by their names, in the order of the function's parameters."""
    return dict(zip(inspect.signature(function).parameters, sample.args, strict=False)) | sample.kwargs


def replaced(function: Callable[..., Any], sample: Sample, name: str, value: Any) -> Sample:
    """Returns the sample with another value of the argument `name`."""
    given = by_name(function, sample) | {name: value}
    keywords = {each: given.pop(each) for each in sample.kwargs}
    return Sample(tuple(given.values()), keywords)


def options(function: Callable[..., Any], samples: Callable[..., Iterator[Sample]], values: dict[str, Any]) -> Options:
    """Returns Options whose calls are the first sample, in which an optional tensor that is not chosen is None."""

    def sample(make: Make, shape: Sequence[int], chosen: dict[str, Any]) -> Sample:
        call = next(samples(make, shape))  # with every optional tensor
        for name in values:
            value = by_name(function, call)[name]
            is_tensor = isinstance(value, Tensor)
            other = (value if name in chosen else None) if is_tensor else chosen.get(name, value)
            call = replaced(function, call, name, other)
        return call

    return Options(values, sample)


def _of_wrong_dtype(x: Tensor, expected: str) -> Tensor:
    if " like " in expected:
        return x.double()
    # Integers in place of other integers or of masks, and in place of floating-point numbers.
    return x.int() if x.is_floating_point() else x.short()


def _refused(function: Callable[..., Any], sample: Sample, message: str) -> ErrorSample:
    return ErrorSample(sample.args, f"extension_cpp::{function.__name__}: expected {message}", sample.kwargs)


def wrong_dtypes(function: Callable[..., Any], sample: Sample, expected: dict[str, str]) -> Iterator[ErrorSample]:
    """Yields a call for each tensor, whose dtype is another one than the message says."""
    for name, dtypes in expected.items():
        given = by_name(function, sample)[name]
        is_list = isinstance(given, list)
        wrong = [_of_wrong_dtype(x, dtypes) for x in (given if is_list else [given])]
        message = f"{name}{'[0]' * is_list} to be {dtypes}, but got {str(wrong[0].dtype).removeprefix('torch.')}"
        yield _refused(function, replaced(function, sample, name, wrong if is_list else wrong[0]), message)


def too_many_values(function: Callable[..., Any], sample: Sample, expected: dict[str, str]) -> Iterator[ErrorSample]:
    """Yields a call for each list of numbers, with one more than the message says, such as "at most 16 values"."""
    for name, values in expected.items():
        count = int(re.sub(r"\D", "", values)) + 1
        wrong = (by_name(function, sample)[name][:1] or (1,)) * count
        yield _refused(function, replaced(function, sample, name, wrong), f"{name} to have {values}, but got {count}")


def wrong_outputs(function: Callable[..., Any], sample: Sample, expected: dict[str, str]) -> Iterator[ErrorSample]:
    """Yields calls for each tensor of `out`, with another dtype than the message says and with another shape."""
    outs = as_tuple(function(*sample.args, **sample.kwargs))
    for place, (name, dtype) in enumerate(expected.items()):
        shape, wrong = [*outs[place].shape], _of_wrong_dtype(outs[place], dtype)
        for out, message in (
            (wrong, f"to be {dtype}, but got {str(wrong.dtype).removeprefix('torch.')}"),
            (outs[place][None], f"of shape {shape} like the result, but got {[1, *shape]}"),
        ):
            given = (*outs[:place], out, *outs[place + 1 :]) if len(outs) > 1 else out
            call = Sample(sample.args, sample.kwargs | {"out": given})
            yield _refused(function, call, f"{name} {message}")


def check_out(function: Callable[..., Any], sample: Sample, names: Sequence[str], layout: str) -> None:
    """Asserts that a call with `out` writes into tensors of any strides, counts their versions, and returns them, and
    that one of them may be the first argument. The operator names them `names`."""
    expected = as_tuple(function(*sample.args, **sample.kwargs))
    outs = [with_layout(torch.ones_like(y), layout) for y in expected]
    strides, versions = [y.stride() for y in outs], [y._version for y in outs]
    out = tuple(outs) if len(outs) > 1 else outs[0]
    assert function(*sample.args, **sample.kwargs, out=out) is out
    assert all(map(torch.equal, outs, expected)) and [y.stride() for y in outs] == strides
    assert all(y._version > version for y, version in zip(outs, versions, strict=True))
    operator = getattr(torch.ops.extension_cpp, function.__name__).out
    torch.library.opcheck(operator, sample.args, sample.kwargs | dict(zip(names, outs, strict=True)))
    x = sample.args[0]
    alike = next((i for i, y in enumerate(outs) if (y.shape, y.dtype) == (x.shape, x.dtype)), None)
    if alike is not None:
        outs[alike] = x
        function(*sample.args, **sample.kwargs, out=tuple(outs) if len(outs) > 1 else outs[0])
        assert all(map(torch.equal, outs, expected))

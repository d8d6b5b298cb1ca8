"""Tests that every op raises an error for a tensor whose storage was freed, as FSDP does, and names the argument."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.battery import calls_of_every_order, every_op, with_overloads
from tests.checks import maker
from tests.opspec import OpSpec


def freed(like: Tensor, offset: int) -> Tensor:
    """Returns a tensor like `like`, with `offset` as its storage offset, whose storage has been freed."""
    steps = ((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    reach = sum(steps) + 1 if like.numel() else 0
    x = torch.empty(offset + reach, dtype=like.dtype, device=like.device).as_strided(like.shape, like.stride(), offset)
    x.untyped_storage().resize_(0)
    return x.requires_grad_(like.requires_grad)


def with_one_freed(args: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Yields the number of a tensor and the arguments with this tensor freed, for each tensor with two offsets."""
    for i, x in enumerate(args):
        for offset in (0, 3) if isinstance(x, Tensor) and x.numel() > 0 else ():
            yield i, [*args[:i], freed(x, offset), *args[i + 1 :]]


def check_refused(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], sentence: str) -> None:
    """Checks that the call raises this message and changes no argument. `compare` has the assertions, because pytest
    prints the arguments of a function whose assertion fails, and printing a freed tensor crashes the process."""
    alive = [x.detach() for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.untyped_storage().nbytes()]
    before, message = [x.clone() for x in alive], "no error"
    try:
        call(*args, **kwargs)
    except RuntimeError as error:
        message = str(error)
    compare(message, sentence, alive, before)


def compare(message: str, sentence: str, alive: list[Tensor], before: list[Tensor]) -> None:
    assert re.fullmatch(sentence, message), message
    for x, old in zip(alive, before, strict=True):
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)


def sentence_of(op: str, name: str) -> str:
    expected = rf"expected {name} to have memory for its \d+ elements, but got a storage of 0 bytes"
    return f"extension_cpp::{op}: {expected}"


@every_op
def test_freed_arguments_get_a_sentence(spec: OpSpec, device: str) -> None:
    """If an argument was freed, the op's function and all its operators raise an error that names the argument."""
    refused = set()
    for sample in spec.sample_inputs(maker(device, torch.float32), (3, 5)):
        for called, args, kwargs in calls_of_every_order(spec, sample, "contiguous").made:
            names = [argument.name for argument in called._schema.arguments]
            plain = [x.detach() if isinstance(x, Tensor) else x for x in args]
            name = called._schema.name.split("::")[1]
            for i, given in with_one_freed(plain):
                for op in with_overloads(called):
                    check_refused(op, given, kwargs, sentence_of(name, names[i]))
                refused.add((name, names[i]))
        for gradients in (True, False):
            for i, given in with_one_freed(sample.args):
                refused.add((spec.name, str(i)))
                with torch.set_grad_enabled(gradients):
                    check_refused(
                        spec.in_place or spec.function, given, sample.kwargs, sentence_of(spec.name, r"\w+(\[\d\])?")
                    )
    assert len(refused) > 0


@every_op
def test_elements_that_are_not_there_need_no_memory(spec: OpSpec, device: str) -> None:
    for sample in spec.sample_inputs(maker(device, torch.float32), (0, 5)):
        args = [freed(x, 0) if isinstance(x, Tensor) and x.numel() == 0 else x for x in sample.args]
        (spec.in_place or spec.function)(*args, **sample.kwargs)

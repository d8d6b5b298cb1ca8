"""Provides the checks of csrc/common/shim/match.h, with its conditions, order and messages, for fakes.

    match = Match("topk_gate")
    match("logits", logits, FLOATING, "[*, experts]")
    match("bias", bias, SAME, "[experts]")
    match("mask", mask, BOOL, "broadcasts to logits")
    experts = match.size("experts")

Sizes may be symbolic.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks

# The dtypes that an argument may have: a tuple of dtypes, or SAME, the dtype of the first tensor. If the first tensor
# itself has SAME, it may have any floating-point dtype.
FLOATING = checks.DTYPES
INT64, BOOL = (torch.int64,), (torch.bool,)
SAME, SAME_OR_FLOAT32 = "same", "same or float32"  # the second also allows float32 beside a half first tensor
Dtypes = str | tuple[torch.dtype, ...]

# All dtypes, in the order in which a message names them, which is that of EVERY_DTYPE in csrc/common/shim/op.h.
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
EVERY_DTYPE = (*FLOATING, torch.float8_e4m3fn, *_INTEGERS, torch.bool)


def _place(word: str, name: str, x: Tensor, begin: int, end: int) -> str:
    """Returns words for the dimensions [begin, end) of x, for which `word` of a shape pattern stands, such as "the last
    dimension of x", or "" if there are no short ones."""
    left = x.dim() - end
    if word != "*":
        return f"{'the last dimension' if left == 0 else f'dimension {begin}'} of {name}"
    if begin > 0 or left == 0:
        return ""
    return f"{name} without its last {'dimension' if left == 1 else f'{left} dimensions'}"


class Match:
    def __init__(self, op: str) -> None:
        self.op = op
        self.given: dict[str, Tensor] = {}
        # The sizes for which a name or * in the shape patterns stands, and words for the place that they are from.
        self.bound: dict[str, tuple[Sequence[Any], str]] = {}
        self.lists: dict[str, int] = {}  # the lengths of lists of tensors

    def __call__(self, name: str, x: Tensor | Sequence[Tensor] | None, dtypes: Dtypes, shape: str = "") -> None:
        """Fails unless x, or each tensor of the list x, is on the first tensor's device and has one of these dtypes and
        this shape: "[rows, 4, *]", "like x", "broadcasts to x" or "" (see match.h). x may be None."""
        if x is None:
            return
        if not isinstance(x, Tensor):
            return self._check_list(name, x, dtypes, shape)
        self._check_dtypes(name, x, dtypes)
        self.given[name] = x
        if shape.startswith("["):
            self._check_pattern(name, x, [word for word in shape[1:-1].split(", ") if word])
        elif shape:
            self._check_relation(name, x, *shape.rsplit(" ", 1))

    def _check_list(self, name: str, xs: Sequence[Tensor], dtypes: Dtypes, shape: str) -> None:
        is_first = not self.given
        like = shape.removeprefix("like ")
        if like in self.lists:
            expected = f"expected {name} to have as many tensors as {like}, {self.lists[like]}"
            checks.check(self.op, len(xs) == self.lists[like], f"{expected}, but got {len(xs)}")
        for i, x in enumerate(xs):
            place = f"[{i}]" if like in self.lists else ""
            self(f"{name}[{i}]", x, SAME if is_first and i > 0 else dtypes, shape + place)
        self.lists[name] = len(xs)

    def sizes(self, name: str, x: Tensor, sizes: Sequence[Any], like: str) -> None:
        """Fails unless x has these sizes, which are those of the result `like`."""
        expected = f"expected {name} of shape {list(sizes)} like {like}"
        checks.check_sizes(self.op, x.shape, sizes, f"{expected}, but got {list(x.shape)}")

    def length(self, name: str, numbers: Sequence[Any] | None, least: int, most: int) -> None:
        """Fails unless a list of numbers has from `least` to `most` values. None is not checked."""
        got = least if numbers is None else len(numbers)
        expected = f"expected {name} to have {'' if least == most else 'at most '}{most} value{'s' * (most != 1)}"
        checks.check(self.op, least <= got <= most, f"{expected}, but got {got}")

    def size(self, name: str) -> Any:
        """Returns the size, or the product of the sizes, that a name or * in the shape patterns stands for."""
        return math.prod(self.bound[name][0])

    def _check_dtypes(self, name: str, x: Tensor, dtypes: Dtypes) -> None:
        if self.given:
            first_name, first = next(iter(self.given.items()))
            if dtypes == SAME_OR_FLOAT32:
                return checks.check_same_or_float32(self.op, name, x, first_name, first)
            if dtypes == SAME:
                return checks.check_same(self.op, name, x, first_name, first)
            checks.check_device(self.op, name, x, first_name, first)
        allowed = FLOATING if isinstance(dtypes, str) else dtypes
        *others, last = (str(dtype).removeprefix("torch.") for dtype in EVERY_DTYPE if dtype in allowed)
        names = f"{', '.join(others)} or {last}" if others else last
        checks.check(self.op, x.dtype in allowed, f"expected {name} to be {names}, but got {checks.dtype_name(x)}")

    def _check_pattern(self, name: str, x: Tensor, words: list[str]) -> None:
        got, named = list(x.shape), len(words) - ("*" in words)
        sizes = (f"{list(self.bound[word][0])}"[1:-1] if word in self.bound else word for word in words)
        expected = f"expected {name} of shape [{', '.join(filter(None, sizes))}]"
        if len(words) == 1 and words[0] in self.bound and (place := self.bound[words[0]][1]):
            expected += f", {place}"
        message = f"{expected}, but got {got}"
        if "*" in words and not any(word in self.bound or word.isdigit() for word in words):
            least = "one dimension" if named == 1 else f"{named} dimensions"
            message = f"expected {name} to have at least {least}, but got shape {got}"
        checks.check(self.op, x.dim() >= named if "*" in words else x.dim() == named, message)
        here: dict[str, tuple[Sequence[Any], str]] = {}
        d = 0
        for word in words:
            end = d + (x.dim() - named if word == "*" else 1)
            if word.isdigit():
                checks.check(self.op, x.shape[d] == int(word), message)
            else:
                found = x.shape[d:end], _place(word, name, x, d, end)
                before = self.bound.get(word) or here.setdefault(word, found)
                checks.check_sizes(self.op, found[0], before[0], message)
            d = end
        self.bound |= here

    def _check_relation(self, name: str, x: Tensor, relation: str, other: str) -> None:
        if other not in self.given:  # an optional tensor that is None
            return
        to = self.given[other]
        if relation == "like":
            return checks.check_shape(self.op, name, x, other, to)
        expected = f"expected {name} of a shape that broadcasts to {list(to.shape)} of {other}"
        message = f"{expected}, but got {list(x.shape)}"
        checks.check(self.op, x.dim() <= to.dim(), message)
        for size, larger in zip(reversed(x.shape), reversed(to.shape), strict=False):
            checks.check(self.op, (size == 1) | (size == larger), message)

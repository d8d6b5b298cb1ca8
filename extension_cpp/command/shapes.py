"""Reads the shapes in options of `new --schema`: patterns of arguments, and expressions for results and work items."""

import re
from dataclasses import dataclass

from .errors import CannotMake

# One part of an expression: a number, an argument or ?; or one size x[0] of x; or the sizes *x or *x[1:-1].
PART = re.compile(
    r"(0|[1-9]\d*|\?|[a-zA-Z_]\w*)|([a-zA-Z_]\w*)\[(-?\d+)\]|\*([a-zA-Z_]\w*)(?:\[((?:-?\d+)?:(?:-?\d+)?)\])?"
)


def words_of(pattern: str) -> list[str]:
    """Returns the words of a pattern such as "[*, n, 4]". Other shapes, such as "like x", have none."""
    return [word.strip() for word in pattern[1:-1].split(",")] if pattern.startswith("[") else []


def pattern(role: str, name: str) -> str:
    """Returns the shape pattern of a role, spaced as match.h reads it. Raises CannotMake if it is not valid."""
    words = [word for word in words_of(role) if word]
    are_sizes = all(re.fullmatch(r"\*|\d+|[a-z]\w*", word) for word in words)
    if not role.endswith("]") or not are_sizes or words.count("*") > 1:
        raise CannotMake(f"expected sizes of {name} such as [*, rows, 4], with * once at most, but got '{role}'")
    return f"[{', '.join(words)}]"


@dataclass(frozen=True)
class Part:
    """Holds one part of a shape expression: sizes of a tensor, or without `tensor` the one size `number`."""

    tensor: str = ""
    index: str = ""  # "0" for the one size x[0], "1:-1" for the sizes *x[1:-1], "" for all sizes
    number: str = ""  # digits, the name of an argument, or "?" for a size that depends on the data

    @property
    def is_size(self) -> bool:
        return self.index != "" and ":" not in self.index


def parts(expression: str) -> list[Part]:
    """Returns the parts of a shape expression, such as "x" or "[*x[:-1], k, x[0], 3]"."""
    if not expression.startswith("["):
        return [Part(expression)]
    words = words_of(expression) if expression.endswith("]") else [expression]
    if words[-1] == "":  # of [] or [3,]
        words.pop()
    return [_part(word, expression) for word in words]


def _part(word: str, expression: str) -> Part:
    found = PART.fullmatch(re.sub(r"\s*([\[\]:*])\s*", r"\1", word))
    if found is None:
        raise CannotMake(
            "expected a shape of a tensor's name or a list of numbers, arguments, x[0], *x, *x[:-1] and ?, but got "
            f"'{word}' in '{expression}'"
        )
    number, tensor, index, whole, ends = found.groups("")
    index = re.sub(r"\d+", lambda digits: str(int(digits[0])), index or ends)  # in C++, 010 is 8
    return Part(tensor or whole, "" if index == ":" else index, number)

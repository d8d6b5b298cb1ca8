"""Parses the schema of an operator for `new --schema`, without torch. The schema is in PyTorch's syntax, such as

topk_gate(Tensor logits, SymInt k) -> (Tensor weights, Tensor indices)
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import CannotMake

C_KEYWORDS = re.findall(
    r"\w+",
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class
    compl concept const const_cast consteval constexpr constinit continue co_await co_return co_yield decltype
    default delete do double dynamic_cast else enum explicit export extern false float for friend goto if inline
    int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register
    reinterpret_cast requires restrict return short signed sizeof static static_assert static_cast struct switch
    template this thread_local throw true try typedef typeid typename typeof union unsigned using virtual void
    volatile wchar_t while xor xor_eq
    """,
)
TYPES = ("Tensor", "int", "SymInt", "float", "bool")
WRITTEN = r"\(\w+!\)"  # the (a!) of a tensor that is written


@dataclass(frozen=True)
class Argument:
    name: str
    type: str  # one of TYPES
    is_optional: bool = False
    is_list: bool = False
    length: str = ""  # how many values a list of numbers must have: "2" for int[2], "" for int[]
    is_written: bool = False  # Tensor(a!)
    default: str | None = None  # its text in the schema: "None", "1", "1e-05", "True", "[1, 2]"
    keyword_only: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.type == "Tensor"

    @property
    def kind(self) -> str:
        """Returns the type as in a schema, such as "int?". A written tensor has "(!)", where a schema has "(a!)"."""
        written = "(!)" if self.is_written else ""
        return f"{self.type}{written}{f'[{self.length}]' if self.is_list else ''}{'?' if self.is_optional else ''}"

    @property
    def text(self) -> str:
        """Returns the argument as in a schema: its type as in `kind`, its name and its default."""
        # PyTorch prints the default of a list with all its values: int[2] x=1 as int[2] x=[1, 1].
        default = str([*self.value]) if self.is_list and self.value is not None else self.default
        return f"{self.kind} {self.name}" + ("" if default is None else f"={default}")

    @property
    def value(self) -> Any:
        """Returns the default: a number, a tuple of numbers or None. int[2] x=1 is short for int[2] x=[1, 1]."""
        value = ast.literal_eval(self.default or "None")
        if not self.is_list or value is None:
            return value
        return tuple(value) if isinstance(value, list) else (value,) * int(self.length or 0)


@dataclass(frozen=True)
class Schema:
    name: str
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]  # the names of the results; a single result without a name is "out"
    gives_lists: bool = False  # each result is a list of tensors
    has_out: bool = False  # there is also an overload .out, which writes the results into given tensors

    @property
    def has_lists(self) -> bool:
        """Returns whether an argument or a result is a list of tensors."""
        return self.gives_lists or any(each.is_list for each in self.tensors)

    @property
    def tensors(self) -> list[Argument]:
        return [each for each in self.arguments if each.is_tensor]

    @property
    def numbers(self) -> list[Argument]:
        """Returns the arguments that are numbers or lists of numbers."""
        return [each for each in self.arguments if not each.is_tensor]

    @property
    def keyword_only(self) -> list[Argument]:
        return [each for each in self.arguments if each.keyword_only]

    @property
    def positional(self) -> list[Argument]:
        return [each for each in self.arguments if not each.keyword_only]

    def listed(self, texts: Iterable[str], *outs: str) -> str:
        """Joins texts, one for each argument, and those of outputs. A "*" stands before the keyword-only ones."""
        found = [*texts]
        if self.keyword_only or outs:
            found.insert(len(self.positional), "*")
        return ", ".join([*found, *outs])

    @property
    def number_lists(self) -> list[Argument]:
        return [each for each in self.numbers if each.is_list]

    def argument(self, name: str) -> Argument | None:
        return next((each for each in self.arguments if each.name == name), None)


class _Reader:
    """Reads the words of a schema one after the other. At its end, the word is ""."""

    WORD = re.compile(r"\s*(->|\(\w+!\)|\[\d*\]|[A-Za-z_]\w*|-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\S|$)")

    def __init__(self, text: str) -> None:
        self.text, self.left = text, [*self.WORD.finditer(text)]

    @property
    def word(self) -> str:
        return self.left[0][1]

    def take(self, pattern: str) -> str:
        """Takes the word and returns it if it matches the pattern, else an empty text."""
        return self.left.pop(0)[1] if re.fullmatch(pattern, self.word) else ""

    def accept(self, word: str) -> bool:
        return bool(self.take(re.escape(word)))

    def fail(self, expected: str) -> CannotMake:
        got, column = f"'{self.word}'" if self.word else "its end", self.left[0].start(1) + 1
        return CannotMake(f"expected {expected} at column {column} of the schema, but got {got}: {self.text}")

    def expect(self, word: str) -> None:
        if not self.accept(word):
            raise self.fail(f"'{word}'")

    def name(self, what: str) -> str:
        found = self.take(r"[A-Za-z_]\w*")
        if not found:
            raise self.fail(what)
        return found

    def elements(self, end: str) -> Iterator[None]:
        """Yields before each element of a list, of which the caller then reads all but the commas and the `end`."""
        is_first = True
        while not self.accept(end):
            if not is_first:
                self.expect(",")
            is_first = False
            yield


def parse(text: str) -> Schema:
    """Returns the schema that a text describes.

    Raises CannotMake if the text is no schema, or if `new --schema` cannot write an operator with this schema. For a
    syntax error, the message names the column.
    """
    reader = _Reader(text)
    name = reader.name("the operator's name")
    overload = reader.name("the overload's name") if reader.accept(".") else ""
    if overload not in ("", "out"):
        raise CannotMake(
            f"{name}.{overload} is an overload, of which `new --schema` writes .out alone: make {name}, and add the "
            "overload's DEF, impl and register by hand"
        )
    reader.expect("(")
    arguments: list[Argument] = []
    keyword_only = False
    for _ in reader.elements(")"):
        if reader.accept("*"):
            keyword_only = True
            reader.expect(",")
        arguments.append(_argument(reader, keyword_only, {each.name for each in arguments}))
    reader.expect("->")
    results, gives_lists = _results(reader)
    if reader.word:
        raise reader.fail("the end of the schema")
    _check_defaults(arguments)
    schema = Schema(name, tuple(arguments), results, gives_lists)
    return _with_out(schema) if overload else schema


def _with_out(overload: Schema) -> Schema:
    """Returns the schema of an operator, given that of its overload .out, which has the results as arguments."""
    outs = [each for each in overload.arguments if each.is_written]
    fits = all(each.keyword_only and each.kind == "Tensor(!)" for each in outs)
    if not outs or not fits or overload.results:
        raise CannotMake(
            f"expected {overload.name}.out(..., *, Tensor(a!) out) -> (), with more such tensors if need be"
        )
    others = tuple(each for each in overload.arguments if each not in outs)
    return Schema(overload.name, others, tuple(each.name for each in outs), has_out=True)


def _check_defaults(arguments: list[Argument]) -> None:
    """Raises CannotMake if a default has another type, or if a positional argument without a default follows it."""
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "SymInt": (int,), "float": (int, float), "bool": (bool,)}
    before = ""
    for each in arguments:
        if each.default is None:
            if before and not each.keyword_only:
                raise CannotMake(f"expected a default for {each.name}, because {before} before it has one")
            continue
        before = each.name
        values = each.value if each.is_list else [each.value]
        fits = each.is_optional if each.value is None else all(type(x) in kinds.get(each.type, ()) for x in values)
        if each.is_list and each.value is not None:
            fits &= len(values) == int(each.length) if each.length else each.default[0] == "["
        if not fits:
            raise CannotMake(f"expected a default of {each.kind.rstrip('?')} for {each.name}, but got {each.default}")


def _argument(reader: _Reader, keyword_only: bool, taken: set[str]) -> Argument:
    kind = reader.take("|".join(TYPES))
    if not kind:
        raise reader.fail(f"one of the types {', '.join(TYPES)}")
    is_written = kind == "Tensor" and bool(reader.take(WRITTEN))
    brackets = reader.take(r"\[\d*\]")
    is_optional = reader.accept("?")
    if reader.word in taken:
        raise reader.fail("a name that no other argument has")
    name = reader.name("the argument's name")
    default = _default(reader) if reader.accept("=") else None
    return Argument(name, kind, is_optional, bool(brackets), brackets[1:-1], is_written, default, keyword_only)


def _default(reader: _Reader) -> str:
    if reader.accept("["):
        return f"[{', '.join([_value(reader) for _ in reader.elements(']')])}]"
    return _value(reader)


def _value(reader: _Reader) -> str:
    try:
        ast.literal_eval(reader.word)
    except (SyntaxError, ValueError):
        raise reader.fail("a default value") from None
    return reader.take(".+")


def _results(reader: _Reader) -> tuple[tuple[str, ...], bool]:
    """Returns the names of the results, and whether each result is a list of tensors."""
    if not reader.accept("("):
        _expect_tensor(reader)
        is_list = reader.accept("[]")
        return (reader.take(".+") or "out",), is_list
    names: list[str] = []
    are_lists: set[bool] = set()
    for _ in reader.elements(")"):
        _expect_tensor(reader)
        are_lists.add(reader.accept("[]"))
        names.append(reader.name("the result's name"))
    if len(are_lists) > 1:
        raise CannotMake("expected results that are all tensors or all lists of tensors")
    return tuple(names), True in are_lists


def _expect_tensor(reader: _Reader) -> None:
    reader.expect("Tensor")
    if reader.take(WRITTEN):
        raise CannotMake(
            "expected -> () of an operator that writes, because torch.compile in PyTorch 2.10 takes none that returns "
            "an argument; the Python function of an overload .out returns it"
        )

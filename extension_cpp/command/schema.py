"""Describes an operator for `new --schema`, and parses its schema without torch. It is in PyTorch's syntax, such as

topk_gate(Tensor logits, SymInt k) -> (Tensor weights, Tensor indices)
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import CannotMake, require

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
# The types, each with the Python types of its defaults.
TYPES: dict[str, list[type]] = {"Tensor": [], "int": [int], "SymInt": [int], "float": [int, float], "bool": [bool]}
DIFFERENTIABLE = ("same", "float64", "float32")  # dtypes
NAME = r"[A-Za-z_]\w*"
WRITTEN = r"\(\w+!\)"  # the (a!) of a tensor that is written


@dataclass
class Argument:
    """Describes an argument of an operator, or a result. The options of `new --schema` say the dtype and what follows
    it, which are of tensors only."""

    name: str
    type: str = "Tensor"  # one of TYPES
    is_optional: bool = False
    is_list: bool = False
    length: str = ""  # how many values a list of numbers must have: "2" for int[2], "" for int[]
    is_written: bool = False  # Tensor(a!), or a result for which there is also an overload .out
    default: str | None = None  # its text in the schema: "None", "1", "1e-05", "True", "[1, 2]"
    keyword_only: bool = False
    dtype: str = "same"
    shape: str = ""  # a pattern as in match.h, or "" for any shape; of a result an expression, "x" or a list of sizes
    below: str = ""  # for an index tensor: the expression of the size that its values must be below

    @property
    def is_tensor(self) -> bool:
        return self.type == "Tensor"

    @property
    def is_open(self) -> bool:
        """Returns whether the argument is a list of any length, as int[] is, so that kernels get its length, too."""
        return self.is_list and not self.length

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


@dataclass
class Operator:
    """Holds all that `new --schema` needs to generate the files of an operator.

    parse() fills in what the schema says, and roles.describe() what the options say.
    """

    name: str
    arguments: list[Argument]
    results: dict[str, Argument]  # a single result without a name is "out"
    has_out: bool = False  # there is also an overload .out, which writes the results into given tensors
    grads: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)  # names of the arguments and results that backward reads
    work: str = "flat"  # "flat", "rows", or "items=" and the expression of a shape
    of: "Operator | None" = None  # the operator of which this one is the backward

    @property
    def operands(self) -> dict[str, Argument]:
        """Returns the tensors among the arguments by name, in the order in which they are checked. The dtype and device
        of the others are compared with those of the first one."""
        found = [each for each in self.arguments if each.is_tensor]
        if self.of is not None:
            saved = self.of.saved
            found.sort(key=lambda each: (each.dtype != "same" or each.is_optional, each.name not in saved))
        return {each.name: each for each in found}

    @property
    def first(self) -> str:
        return next(iter(self.operands))

    @property
    def numbers(self) -> list[Argument]:
        """Returns the arguments that are numbers or lists of numbers, without the sizes of tensors, of backward."""
        return [each for each in (self.of or self).arguments if not each.is_tensor]

    @property
    def number_lists(self) -> list[Argument]:
        return [each for each in self.numbers if each.is_list]

    @property
    def keyword_only(self) -> list[Argument]:
        """Returns the arguments behind the "*", which are the last ones."""
        return [each for each in self.arguments if each.keyword_only]

    @property
    def written(self) -> list[Argument]:
        return [each for each in self.operands.values() if each.is_written]

    @property
    def inputs(self) -> list[Argument]:
        """Returns the tensors that the kernel only reads."""
        return [each for each in self.operands.values() if not each.is_written]

    @property
    def outputs(self) -> list[Argument]:
        return [*self.written, *self.results.values()]

    @property
    def direction(self) -> str:
        return "forward" if self.of is None else "backward"

    @property
    def kernel(self) -> str:
        return f"{(self.of or self).name}_{self.direction}"

    @property
    def has_lists(self) -> bool:
        """Returns whether an argument or a result is a list of tensors."""
        return any(each.is_list for each in (*self.operands.values(), *self.results.values()))

    @property
    def has_unknown_size(self) -> bool:
        return any("?" in each.shape for each in self.results.values())

    @property
    def indices(self) -> str:
        """Returns the names of the index tensors, such as "index and target", or ""."""
        return " and ".join(each.name for each in self.operands.values() if each.below)

    @property
    def differentiable_results(self) -> list[Argument]:
        return [each for each in self.results.values() if each.dtype in DIFFERENTIABLE]

    @property
    def sizes_of(self) -> list[str]:
        """Returns the names of tensors with a gradient that are not saved. Backward gets their sizes as arguments."""
        return [name for name in self.grads if name not in self.saved]

    def listed(self, texts: Iterable[str], *outs: str) -> str:
        """Joins texts, one for each argument, and those of outputs. A "*" stands before the keyword-only ones."""
        found = [*texts]
        if self.keyword_only or outs:
            found.insert(len(self.arguments) - len(self.keyword_only), "*")
        return ", ".join([*found, *outs])

    @property
    def schema(self) -> str:
        letters = iter("abcdefghijklmnop")
        arguments = [
            each.text.replace("(!)", f"({next(letters)}!)") if each.is_written else each.text for each in self.arguments
        ]
        named = [f"Tensor{'[]' * each.is_list} {each.name}" for each in self.results.values()]
        results = named[0].split()[0] if len(named) == 1 else f"({', '.join(named)})"
        return f"{self.name}({self.listed(arguments)}) -> {results}"

    # ---- backward and the overload .out, as operators of their own ----

    @property
    def launches(self) -> list["Operator"]:
        """Returns the operators that have kernels: the operator and, if it is differentiable, its backward."""
        return [self, self.backward] if self.grads else [self]

    @property
    def registered(self) -> list["Operator"]:
        """Returns the operators that have a schema, in the order of `make docs`."""
        return [self, *([self.overload] if self.has_out else []), *self.launches[1:]]

    @property
    def overload(self) -> "Operator":
        """Returns the overload .out, which has the results as arguments."""
        outs = [replace(each, keyword_only=True) for each in self.results.values()]
        return Operator(f"{self.name}.out", [*self.arguments, *outs], {})

    @property
    def backward(self) -> "Operator":
        """Returns the backward. Its arguments are the gradients of the results, what is saved, the sizes of other
        tensors with a gradient, and numbers."""
        arguments = []
        for each in self.differentiable_results:
            shape = f"like {each.name}" if each.name in self.saved else ""
            arguments.append(Argument(f"grad_{each.name}", dtype=each.dtype, shape=shape))
        arguments += [self._saved(name) for name in self.saved]
        for name in self.sizes_of:
            arguments.append(Argument(f"{name}_sizes", "SymInt", self.operands[name].is_optional, is_list=True))
        arguments += [replace(each, default=None, keyword_only=False) for each in self.numbers]
        results = {}
        for each in (self.operands[name] for name in self.grads):
            grad = Argument(f"grad_{each.name}", is_optional=each.is_optional, dtype=each.dtype, shape=each.name)
            results[grad.name] = grad
        return Operator(f"{self.name}_backward", arguments, results, of=self)

    def _saved(self, name: str) -> Argument:
        """Returns a saved tensor as an argument of backward.

        Its pattern "like x" may name a tensor x that backward does not get. If a result has the shape of x, the pattern
        names the gradient of that result instead.
        """
        if name in self.results:
            like = self.results[name].shape
            return replace(self.results[name], shape=f"like {like}" if like in self.saved else "", is_written=False)
        tensor = self.operands[name]
        shape = tensor.shape
        relation, _, of = shape.rpartition(" ")
        if relation in ("like", "broadcasts to") and of not in self.saved:
            alike = [each.name for each in self.differentiable_results if each.shape == of]
            shape = f"{relation} grad_{alike[-1]}" if alike else ""
        return replace(tensor, shape=shape, below="", default=None)


class _Reader:
    """Reads the words of a schema one after the other. At its end, the word is ""."""

    WORD = re.compile(r"\s*(->|\(\w+!\)|\[\d*\]|[A-Za-z_]\w*|-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|\S|$)")

    def __init__(self, text: str) -> None:
        self.text, self.left = text, [*self.WORD.finditer(text)]

    @property
    def word(self) -> str:
        return self.left[0][1]

    def take(self, pattern: str, expected: str = "") -> str:
        """Takes the word and returns it if it matches the pattern. Else returns "", or fails if one was expected."""
        if re.fullmatch(pattern, self.word):
            return self.left.pop(0)[1]
        if expected:
            raise self.fail(expected)
        return ""

    def fail(self, expected: str) -> CannotMake:
        got, column = f"'{self.word}'" if self.word else "its end", self.left[0].start(1) + 1
        return CannotMake(f"expected {expected} at column {column} of the schema, but got {got}: {self.text}")

    def elements(self, end: str) -> Iterator[None]:
        """Yields before each element of a list, of which the caller then reads all but the commas and the `end`."""
        is_first = True
        while not self.take(end):
            if not is_first:
                self.take(",", "','")
            is_first = False
            yield


def parse(text: str) -> Operator:
    """Returns the operator that a schema describes.

    Raises CannotMake if the text is no schema, or if `new --schema` cannot write an operator with this schema. For a
    syntax error, the message names the column.
    """
    reader = _Reader(text)
    name = reader.take(NAME, "the operator's name")
    overload = reader.take(NAME, "the overload's name") if reader.take(r"\.") else ""
    require(
        overload in ("", "out"),
        f"{name}.{overload} is an overload, of which `new --schema` writes .out alone: make {name}, and add the "
        "overload's DEF, impl and register by hand",
    )
    reader.take(r"\(", "'('")
    arguments: list[Argument] = []
    keyword_only = False
    for _ in reader.elements(r"\)"):
        if reader.take(r"\*"):
            keyword_only = True
            reader.take(",", "','")
        arguments.append(_argument(reader, keyword_only, {each.name for each in arguments}))
    reader.take("->", "'->'")
    results = _results(reader)
    reader.take("", "the end of the schema")
    _check_defaults(arguments)
    operator = Operator(name, arguments, {each.name: each for each in results})
    return _with_out(operator) if overload else operator


def _with_out(overload: Operator) -> Operator:
    """Returns the operator of an overload .out, which has the results as arguments."""
    outs = [each for each in overload.arguments if each.is_written]
    fits = all(each.keyword_only and each.kind == "Tensor(!)" for each in outs)
    message = f"expected {overload.name}.out(..., *, Tensor(a!) out) -> (), with more such tensors if need be"
    require(outs and fits and not overload.results, message)
    others = [each for each in overload.arguments if each not in outs]
    results = {each.name: Argument(each.name, is_written=True) for each in outs}
    return Operator(overload.name, others, results, has_out=True)


def _check_defaults(arguments: list[Argument]) -> None:
    """Raises CannotMake if a default has another type, or if a positional argument without a default follows it."""
    before = ""
    for each in arguments:
        if each.default is None:
            message = f"expected a default for {each.name}, because {before} before it has one"
            require(not before or each.keyword_only, message)
            continue
        before = each.name
        values = each.value if each.is_list else [each.value]
        fits = each.is_optional if each.value is None else all(type(x) in TYPES[each.type] for x in values)
        if each.is_list and each.value is not None:
            fits &= len(values) == int(each.length) if each.length else each.default[0] == "["
        require(fits, f"expected a default of {each.kind.rstrip('?')} for {each.name}, but got {each.default}")


def _argument(reader: _Reader, keyword_only: bool, taken: set[str]) -> Argument:
    kind = reader.take("|".join(TYPES), f"one of the types {', '.join(TYPES)}")
    is_written = kind == "Tensor" and bool(reader.take(WRITTEN))
    brackets = reader.take(r"\[\d*\]")
    is_optional = bool(reader.take(r"\?"))
    if reader.word in taken:
        raise reader.fail("a name that no other argument has")
    name = reader.take(NAME, "the argument's name")
    default = _default(reader) if reader.take("=") else None
    return Argument(name, kind, is_optional, bool(brackets), brackets[1:-1], is_written, default, keyword_only)


def _default(reader: _Reader) -> str:
    if reader.take(r"\["):
        return f"[{', '.join([_value(reader) for _ in reader.elements(r']')])}]"
    return _value(reader)


def _value(reader: _Reader) -> str:
    try:
        ast.literal_eval(reader.word)
    except (SyntaxError, ValueError):
        raise reader.fail("a default value") from None
    return reader.take(".+")


def _results(reader: _Reader) -> list[Argument]:
    if not reader.take(r"\("):
        is_list = _is_list(reader)
        return [Argument(reader.take(".+") or "out", is_list=is_list)]
    found: list[Argument] = []
    for _ in reader.elements(r"\)"):
        is_list = _is_list(reader)
        if reader.word in [each.name for each in found]:
            raise reader.fail("a name that no other result has")
        found.append(Argument(reader.take(NAME, "the result's name"), is_list=is_list))
    kinds = {each.is_list for each in found}
    require(len(kinds) < 2, "expected results that are all tensors or all lists of tensors")
    return found


def _is_list(reader: _Reader) -> bool:
    """Reads the type of a result, which is Tensor or Tensor[]."""
    reader.take("Tensor", "'Tensor'")
    require(
        not reader.take(WRITTEN),
        "expected -> () of an operator that writes, because torch.compile in PyTorch 2.10 takes none that returns an "
        "argument; the Python function of an overload .out returns it",
    )
    return bool(reader.take(r"\[\]"))

"""What `new --schema` knows of an operator beyond its schema: roles, dtypes and shapes, derivatives and work."""

import ast
import re
from dataclasses import dataclass, field
from typing import NoReturn

from .errors import CannotMake
from .schema import Argument, Schema

# A dtype as an option names it, and the C type. "same" is the dtype of the first tensor, which is floating.
C_TYPES = {
    "same": "T",
    "float64": "double",
    "float32": "float",
    "int64": "int64_t",
    "int32": "int32_t",
    "int16": "int16_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
    "bool": "bool",
}
DIFFERENTIABLE = ("same", "float64", "float32")
VECTORS = ("weight", "bias", "gamma", "beta", "scale")  # names of tensors with a number for each column
MASK, INDEX = re.compile(r"(.*_)?mask"), re.compile(r"(.*_)?(index|indices|ids?|target)")


@dataclass
class Operand:
    """A tensor that a kernel reads or writes."""

    name: str
    dtype: str = "same"
    shape: str = ""  # a pattern of match.h
    is_optional: bool = False
    is_written: bool = False
    below: str = ""  # an index: the expression of which its numbers are below


@dataclass
class Operator:
    """All that the generated files need."""

    schema: Schema
    operands: dict[str, Operand]  # the tensors of the schema
    results: dict[str, Operand]  # shape is an expression here: "x", or a list of sizes
    grads: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)  # names of operands and results
    work: str = "flat"  # rows, flat, or an expression

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def first(self) -> str:
        return next(iter(self.operands))

    @property
    def written(self) -> list[Operand]:
        return [each for each in self.operands.values() if each.is_written]

    @property
    def differentiable_results(self) -> list[Operand]:
        return [each for each in self.results.values() if each.dtype in DIFFERENTIABLE]

    @property
    def sizes_of(self) -> list[str]:
        """The tensors with a gradient whose sizes backward gets as an argument, because they are not saved."""
        return [name for name in self.grads if name not in self.saved]


def pairs(words: list[str], option: str, known: list[str]) -> dict[str, str]:
    """--dtype a=int64 b=bool as a dictionary."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value or name not in known:
            raise CannotMake(f"expected {option} NAME=... with a name of {', '.join(known)}, but got '{word}'")
        found[name] = value
    return found


def describe(
    schema: Schema,
    dtypes: list[str],
    shapes: list[str],
    roles: list[str],
    grads: list[str] | None,
    saved: list[str] | None,
    work: str,
) -> Operator:
    """The operator of a schema and its options. Raises CannotMake for what does not fit."""
    _check_supported(schema)
    names = [each.name for each in schema.tensors]
    dtype = pairs(dtypes, "--dtype", [*names, *schema.results])
    for each in dtype.values():
        if each not in C_TYPES:
            raise CannotMake(f"expected a dtype of {', '.join(C_TYPES)}, but got '{each}'")
    operands = {each.name: _operand(each, names[0], dtype) for each in schema.tensors}
    for name, role in pairs(roles, "--role", names).items():
        _give_role(operands[name], role, operands)
    if operands[names[0]].dtype != "same":
        raise CannotMake(f"expected a floating-point tensor as the first argument, but got {names[0]} of {dtype}")
    if operands[names[0]].shape == "" and any(each.shape == "[n]" for each in operands.values()):
        operands[names[0]].shape = "[*, n]"
    if work == "rows" and not operands[names[0]].shape:
        operands[names[0]].shape = "[*, n]"
    given = pairs(shapes, "--shape", list(schema.results))
    results = {name: Operand(name, dtype.get(name, "same"), given.get(name, names[0])) for name in schema.results}
    operator = Operator(schema, operands, results, list(grads or []), list(saved if saved is not None else names), work)
    _check_gradients(operator)
    for result in results.values():
        for part in parts(result.shape, operator):
            _check_part(part, operator, result.name)
    return operator


def _check_supported(schema: Schema) -> None:
    for each in schema.arguments:
        kind = "a keyword-only argument" if each.keyword_only else "a list" if each.is_list else ""
        kind = "an optional number" if each.is_optional and not each.is_tensor else kind
        if kind:
            raise CannotMake(f"{each.name} is {kind}: `new --schema` cannot write it yet, so begin with --kind")
    if not schema.tensors or schema.tensors[0].is_optional:
        raise CannotMake("expected a first tensor that is not optional")
    if any(each.is_written for each in schema.tensors) == bool(schema.results):
        raise CannotMake("expected either results or arguments that are written, Tensor(a!), with -> ()")
    taken = {each.name for each in schema.arguments} & set(schema.results)
    if taken:
        raise CannotMake(f"expected names for the results that no argument has, but got {min(taken)}")


def _operand(argument: Argument, first: str, dtype: dict[str, str]) -> Operand:
    name = argument.name
    operand = Operand(name, dtype.get(name, "same"), "", argument.is_optional, argument.is_written)
    if name == first:
        return operand
    if MASK.fullmatch(name):
        operand.dtype, operand.shape = dtype.get(name, "bool"), f"broadcasts to {first}"
    elif INDEX.fullmatch(name):
        operand.dtype = dtype.get(name, "int64")
    else:
        operand.shape = "[n]" if name in VECTORS else f"like {first}"
    return operand


def _give_role(operand: Operand, role: str, operands: dict[str, Operand]) -> None:
    word, _, of = role.partition(":")
    of, _, shape = of.partition(":") if word == "index" else (of, "", "")
    if role.startswith("[") and role.endswith("]"):
        operand.shape = role
    elif word == "any" and not of:
        operand.shape = ""
    elif word == "index" and of:
        operand.dtype, operand.shape, operand.below = "int64", shape, of
    elif word in ("mask", "like") and of in operands:
        operand.shape = f"{'like' if word == 'like' else 'broadcasts to'} {of}"
        operand.dtype = "bool" if word == "mask" else operand.dtype
    else:
        raise CannotMake(
            f"expected a role of any, [sizes], like:TENSOR, mask:TENSOR, index:SIZE or index:SIZE:[sizes] for "
            f"{operand.name}, but got '{role}'"
        )


def _check_gradients(operator: Operator) -> None:
    known = {**operator.operands, **operator.results}
    for name in operator.saved:
        if name not in known:
            raise CannotMake(f"expected --save with names of {', '.join(known)}, but got '{name}'")
    for name in operator.grads:
        operand = operator.operands.get(name)
        if operand is None or operand.dtype not in DIFFERENTIABLE:
            got = f"'{name}'" if operand is None else f"{name}, which is {operand.dtype}"
            raise CannotMake(f"expected --grad with names of floating-point tensors of the schema, but got {got}")
        if operand.is_optional:
            raise CannotMake(f"{name} is optional: `new --schema` cannot write its gradient yet")
    if operator.grads and operator.written:
        raise CannotMake("expected no --grad: an operator that writes into an argument has no derivative")
    if operator.grads and not operator.differentiable_results:
        raise CannotMake("expected no --grad: the operator has no floating-point result")


# ---- shapes ----


@dataclass(frozen=True)
class Part:
    """A part of a shape: dimensions [begin, end) of a tensor; its dimension `begin` alone; a number or an argument."""

    tensor: str = ""
    begin: int | None = None
    end: int | None = None
    is_size: bool = False
    number: str = ""


def parts(expression: str, operator: Operator) -> list[Part]:
    """The parts of "x" or "[*x[:-1], k, x[0], 3]"."""
    if not expression.startswith("["):
        return [Part(expression)]
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return _fail_shape(expression, expression)
    assert isinstance(tree, ast.List)
    return [_part(element, expression) for element in tree.elts]


def _fail_shape(got: str, expression: str) -> NoReturn:
    raise CannotMake(
        "expected a shape of a tensor's name or a list of numbers, arguments, x[0], *x and *x[:-1], but got "
        f"'{got}' in '{expression}'"
    )


def _part(node: ast.expr, expression: str) -> Part:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Part(number=str(node.value))
    if isinstance(node, ast.Name):
        return Part(number=node.id)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return Part(node.value.id, _index(node.slice, expression), is_size=True)
    if isinstance(node, ast.Starred) and isinstance(node.value, ast.Name):
        return Part(node.value.id)
    inner = node.value if isinstance(node, ast.Starred) else None
    if isinstance(inner, ast.Subscript) and isinstance(inner.value, ast.Name) and isinstance(inner.slice, ast.Slice):
        begin, end = (
            None if each is None else _index(each, expression) for each in (inner.slice.lower, inner.slice.upper)
        )
        return Part(inner.value.id, begin, end)
    return _fail_shape(ast.unparse(node), expression)


def _index(node: ast.expr, expression: str) -> int:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return _fail_shape(ast.unparse(node), expression)
    return value if type(value) is int else _fail_shape(ast.unparse(node), expression)


def _check_part(part: Part, operator: Operator, result: str) -> None:
    if part.tensor:
        if part.tensor not in {**operator.operands, **operator.results} or part.tensor == result:
            raise CannotMake(f"expected the shape of {result} to name tensors of the schema, but got '{part.tensor}'")
        return
    argument = operator.schema.argument(part.number)
    if part.number.isdigit() or (argument is not None and argument.type == "SymInt"):
        return
    got = f"'{part.number}'" if argument is None else f"{argument.type} {part.number}"
    hint = "; write SymInt, because an int compiles again for each size" if "int " in got else ""
    raise CannotMake(f"expected the shape of {result} to name SymInt arguments, but got {got}{hint}")

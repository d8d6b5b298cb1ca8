"""Builds the description of an operator from its schema and the options of `new --schema`.

The options give the roles, dtypes and shapes of tensors, the derivatives, and the work items of the kernels.
"""

import argparse
import keyword
import re
from dataclasses import dataclass

from .errors import CannotMake
from .schema import C_KEYWORDS, Argument, Schema
from .shapes import Part, parts, pattern, words_of

# The C type for each dtype that an option can name. "same" is the dtype of the first tensor, a floating-point one.
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
MOST = 16  # the most values of a list of numbers, which kernels get in an array of their argument struct
DIFFERENTIABLE = ("same", "float64", "float32")
VECTORS = ("weight", "bias", "gamma", "beta", "scale")  # a tensor of such a name has one element for each column
MASK, INDEX = re.compile(r"(.*_)?mask"), re.compile(r"(.*_)?(index|indices|ids?|target)")


@dataclass
class Operand:
    """Describes a tensor that a kernel reads or writes."""

    name: str
    dtype: str = "same"
    shape: str = ""  # a shape pattern as in match.h, or "" for any shape
    is_optional: bool = False
    is_written: bool = False
    is_list: bool = False
    below: str = ""  # for an index tensor: the expression of the size that its values must be below


@dataclass
class Operator:
    """Holds all that `new --schema` needs to generate the files of an operator."""

    schema: Schema
    operands: dict[str, Operand]  # the tensors of the schema
    results: dict[str, Operand]  # their `shape` is an expression, "x" or a list of sizes, and no pattern
    grads: list[str]
    saved: list[str]  # names of the operands and results that backward reads
    work: str  # "flat", "rows", or "items=" and the expression of a shape

    @property
    def name(self) -> str:
        return self.schema.name

    @property
    def has_unknown_size(self) -> bool:
        return any("?" in each.shape for each in self.results.values())

    @property
    def first(self) -> str:
        return next(iter(self.operands))

    @property
    def written(self) -> list[Operand]:
        return [each for each in self.operands.values() if each.is_written]

    @property
    def indices(self) -> str:
        """Returns the names of the index tensors, such as "index and target", or ""."""
        return " and ".join(each.name for each in self.operands.values() if each.below)

    @property
    def differentiable_results(self) -> list[Operand]:
        return [each for each in self.results.values() if each.dtype in DIFFERENTIABLE]

    @property
    def sizes_of(self) -> list[str]:
        """Returns the names of tensors with a gradient that are not saved. Backward gets their sizes as arguments."""
        return [name for name in self.grads if name not in self.saved]


def pairs(words: list[str], option: str, known: list[str]) -> dict[str, str]:
    """Returns the words of an option by name: {"a": "int64", "b": "bool"} for --dtype a=int64 b=bool."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value or name not in known:
            raise CannotMake(f"expected {option} NAME=... with a name of {', '.join(known)}, but got '{word}'")
        found[name] = value
    return found


def describe(schema: Schema, options: argparse.Namespace) -> Operator:
    """Returns the operator that a schema and the options of add_schema() in new.py describe.

    Raises CannotMake if they do not fit together.
    """
    _check_supported(schema)
    if options.save is not None and not options.grad:
        raise CannotMake("expected --grad beside --save, which says what backward reads")
    work = options.work or "flat"
    names = [each.name for each in schema.tensors]
    saved = names if options.save is None else options.save
    dtype = pairs(options.dtype, "--dtype", [*names, *schema.results])
    for each in dtype.values():
        if each not in C_TYPES:
            raise CannotMake(f"expected a dtype of {', '.join(C_TYPES)}, but got '{each}'")
    operands = {each.name: _operand(each, schema.tensors[0], dtype) for each in schema.tensors}
    for name, role in pairs(options.role, "--role", names).items():
        _give_role(operands[name], role, names[: names.index(name)])
    if operands[names[0]].dtype != "same":
        got = f"{names[0]} of {operands[names[0]].dtype}"
        raise CannotMake(f"expected a floating-point tensor as the first argument, but got {got}")
    has_rows = work == "rows" or any(each.shape == "[n]" for each in operands.values())
    if has_rows and not operands[names[0]].shape:
        operands[names[0]].shape = "[*, n]"
    given = pairs(options.shape, "--shape", list(schema.results))
    results = {
        name: Operand(name, dtype.get(name, "same"), given.get(name, names[0]), is_written=schema.has_out)
        for name in schema.results
    }
    operator = Operator(schema, operands, results, options.grad or [], saved, work)
    _check_names(operator)
    _check_roles_of_lists(operator)
    _check_gradients(operator)
    for number, result in enumerate(results.values()):
        _check_shape(result.shape, operator, f"the shape of {result.name}", list(results)[:number])
    for operand in operands.values():
        if operand.below:
            _check_shape(f"[{operand.below}]", operator, f"the size of {operand.name}", [])
    _check_work(operator)
    return operator


# Names that the generated files use for variables of their own, in scopes where arguments and results are variables.
RESERVED = {"args", "call", "checks", "ctx", "dtype", "fit", "i", "indices_below", "inputs", "items", "j"}
RESERVED |= {"keyword_only_inputs", "make", "match", "number", "op", "output", "results", "sample", "shape", "torch"}
RESERVED |= {"unknown_size"}


def _check_names(operator: Operator) -> None:
    """Raises CannotMake unless every name is free in C, C++, Python and the generated files, and has one meaning."""
    sizes = {word for each in operator.operands.values() for word in words_of(each.shape) if word.isidentifier()}
    names = [*(each.name for each in operator.schema.arguments), *operator.results]
    for name in (*names, *sizes):
        is_taken = name in C_KEYWORDS or keyword.iskeyword(name) or name in RESERVED or name.endswith("_t")
        if is_taken or not re.fullmatch("[a-z][a-z0-9_]*", name):
            raise CannotMake(
                f"expected names in lower case that C, C++, Python and the files leave free, but got '{name}'"
            )
    tensors = [*operator.operands, *operator.results]
    made = [*names, *sizes, *(f"{name}_{end}" for name in tensors for end in ("numel", "dense", "sizes"))]
    made += [f"grad_{name}" for name in tensors]
    made += [f"{each.name}_count" for each in operator.schema.number_lists]
    twice = next((name for name in made if made.count(name) > 1), None)
    if twice is not None:
        raise CannotMake(
            f"expected a name for each argument, result and size, but '{twice}' would stand for two things"
        )


def _check_work(operator: Operator) -> None:
    work = operator.work
    if work == "rows" and "*" not in words_of(operator.operands[operator.first].shape):
        raise CannotMake(f"expected a shape of {operator.first} with * for --work rows, such as [*, n]")
    if work.startswith("items="):
        _check_shape(work.removeprefix("items="), operator, "the work items", [])
    elif work not in ("flat", "rows"):
        raise CannotMake(f"expected --work flat, rows or items=SHAPE, but got '{work}'")


def _check_roles_of_lists(operator: Operator) -> None:
    if not operator.schema.has_lists:
        return
    if operator.work != "flat":
        raise CannotMake(f"expected --work flat with lists, but got {operator.work}")
    lists = [each.name for each in operator.operands.values() if each.is_list]
    for each in operator.operands.values():
        relation, _, of = each.shape.rpartition(" ")
        # Each launch takes one tensor of every list, so all lists have the length of the first.
        is_alike = each.is_list and relation == "like" and of in lists
        fits = is_alike or (each.shape == "" and each.name not in lists[1:])
        if not fits or each.below:
            got = f"index:{each.below}" if each.below else each.shape or "any"
            raise CannotMake(
                f"expected the role any, or like:LIST of a list after the first, beside lists, but got {got} of "
                f"{each.name}"
            )
    for each in operator.results.values():
        if each.shape not in lists:
            raise CannotMake(
                f"expected the shape of {each.name} to be a list of {', '.join(lists)}, but got {each.shape}"
            )
    if operator.grads:
        raise CannotMake("expected no --grad with lists: the template 'tensors' has such gradients")


def _check_supported(schema: Schema) -> None:
    for each in schema.arguments:
        if each.keyword_only and each.is_tensor:
            raise CannotMake(f"expected {each.name} before the *, because autograd takes tensors only by position")
        if each.is_list and each.is_tensor and each.is_optional:
            raise CannotMake(f"{each.name} is {each.kind}: of lists of tensors `new --schema` writes Tensor[] alone")
        if each.is_list and not 0 < int(each.length or MOST) <= MOST:
            raise CannotMake(f"expected {each.name} to have at most {MOST} values, but got {each.kind}")
    if schema.has_out and (schema.has_lists or any(each.is_written for each in schema.tensors)):
        raise CannotMake("expected the overload .out of an operator without lists of tensors that writes no argument")
    _check_lists(schema)
    if schema.has_out and schema.argument("out"):
        raise CannotMake("expected another name than out, which Python gives to the tensors of the overload .out")
    if not schema.tensors or schema.tensors[0].is_optional:
        raise CannotMake("expected a first tensor that is not optional")
    if any(each.is_written for each in schema.tensors) == bool(schema.results):
        raise CannotMake("expected either results or arguments that are written, Tensor(a!), with -> ()")
    taken = {each.name for each in schema.arguments} & set(schema.results)
    if taken:
        raise CannotMake(f"expected names for the results that no argument has, but got {min(taken)}")


def _check_lists(schema: Schema) -> None:
    """Raises CannotMake for lists that do not fit one kernel launch for each index.

    The launch for index i reads and writes only the tensors at index i of all lists.
    """
    if not schema.has_lists:
        return
    if not schema.tensors or not schema.tensors[0].is_list:
        raise CannotMake("expected a list as the first tensor, because the others have its length")
    if schema.results and not schema.gives_lists:
        raise CannotMake("expected results of Tensor[], one tensor for each of the list")
    single = next((each.name for each in schema.arguments if each.is_written and not each.is_list), None)
    if single is not None:
        raise CannotMake(f"expected {single} to be a list, because each of the launches would write it")


def _operand(argument: Argument, first: Argument, dtype: dict[str, str]) -> Operand:
    name = argument.name
    operand = Operand(name, dtype.get(name, "same"), "", argument.is_optional, argument.is_written, argument.is_list)
    if argument is first:
        return operand
    if MASK.fullmatch(name):
        operand.dtype, operand.shape = dtype.get(name, "bool"), f"broadcasts to {first.name}"
    elif INDEX.fullmatch(name):
        operand.dtype = dtype.get(name, "int64")
    else:
        operand.shape = "[n]" if name in VECTORS and not first.is_list else f"like {first.name}"
    if first.is_list and not argument.is_list:
        operand.shape = ""
    return operand


def _give_role(operand: Operand, role: str, before: list[str]) -> None:
    """Sets the shape, dtype and bound of an operand to those of the role that --role gave it.

    The roles like and mask may only name a tensor in `before`, because match.h compares with a tensor checked earlier.
    """
    word, _, of = role.partition(":")
    of, _, shape = of.partition(":") if word == "index" else (of, "", "")
    if role.startswith("["):
        operand.shape = pattern(role, operand.name)
    elif word == "any" and not of:
        operand.shape = ""
    elif word == "index" and of:
        operand.dtype, operand.shape, operand.below = "int64", pattern(shape, operand.name) if shape else "", of
    elif word in ("mask", "like") and of in before:
        operand.shape = f"{'like' if word == 'like' else 'broadcasts to'} {of}"
        operand.dtype = "bool" if word == "mask" else operand.dtype
    else:
        raise CannotMake(
            "expected a role of any, [sizes], like:TENSOR or mask:TENSOR (a tensor before it), index:SIZE or "
            f"index:SIZE:[sizes] for {operand.name}, but got '{role}'"
        )


def _check_gradients(operator: Operator) -> None:
    known = {**operator.operands, **operator.results}
    for option, listed in (("--grad", operator.grads), ("--save", operator.saved)):
        if len(listed) != len({*listed}):
            raise CannotMake(f"expected {option} to name each tensor once, but got {','.join(listed)}")
    for name in operator.saved:
        if name not in known:
            raise CannotMake(f"expected --save with names of {', '.join(known)}, but got '{name}'")
    for name in operator.grads:
        operand = operator.operands.get(name)
        if operand is None or operand.dtype not in DIFFERENTIABLE:
            got = f"'{name}'" if operand is None else f"{name}, which is {operand.dtype}"
            raise CannotMake(f"expected --grad with names of floating-point tensors of the schema, but got {got}")
    if operator.grads and operator.written:
        raise CannotMake("expected no --grad: an operator that writes into an argument has no derivative")
    if operator.grads and not operator.differentiable_results:
        raise CannotMake("expected no --grad: the operator has no floating-point result")


# ---- shapes ----


def _is_list_of_sizes(part: Part, operator: Operator, what: str) -> bool:
    """Returns whether a part of a result's shape, or of the work items, names values of an argument SymInt[]."""
    argument = next((each for each in operator.schema.number_lists if each.name == part.tensor), None)
    if argument is None or argument.type != "SymInt" or argument.is_optional:
        return False
    length = int(argument.length or 0)
    if part.is_size and part.begin is not None and not -length <= part.begin < length:
        got = f"{part.tensor}[{part.begin}] of {argument.kind}"
        raise CannotMake(f"expected {what} to name a value that is there, as k[1] of SymInt[2] k, but got {got}")
    return not what.startswith("the size of")


def _check_unknown_size(operator: Operator) -> None:
    if not operator.work.startswith("items="):
        raise CannotMake(
            "expected --work items=... with a size of ?, because the results cannot tell how much there is"
        )
    if operator.schema.has_out:
        raise CannotMake("expected no overload .out with a size of ?, because the caller could not allocate it")
    if operator.grads:
        raise CannotMake("expected no --grad with a size of ?: backward could not check the shape of its gradient")


def _check_shape(expression: str, operator: Operator, what: str, before: list[str]) -> None:
    """Raises CannotMake unless a shape expression uses only names and numbers that are allowed in it.

    These are tensors of the schema that are not optional, results in `before`, numbers and SymInt arguments. The shape
    of a result may also have sizes of "?".
    """
    for part in parts(expression):
        if part.tensor:
            operand = operator.operands.get(part.tensor)
            is_known = operand is not None and not operand.is_optional
            if part.tensor not in before and not is_known and not _is_list_of_sizes(part, operator, what):
                raise CannotMake(
                    f"expected {what} to name tensors of the schema that are not optional, or results before it, "
                    f"but got '{part.tensor}'"
                )
            if part.tensor in operator.results and part != Part(part.tensor):
                raise CannotMake(
                    f"expected {what} to name all sizes of the result, *{part.tensor}, but got some of them"
                )
            continue
        argument = operator.schema.argument(part.number)
        if part.number.isdigit() or (argument is not None and argument.kind == "SymInt"):
            continue
        if part.number == "?" and what.startswith("the shape of"):
            _check_unknown_size(operator)
            continue
        got = f"'{part.number}'" if argument is None else f"{argument.kind} {part.number}"
        hint = "; write SymInt, because an int compiles again for each size" if "int " in got else ""
        raise CannotMake(f"expected {what} to name SymInt arguments, but got {got}{hint}")

"""Completes the description of an operator by the options of `new --schema`, and checks it.

The options give the roles, dtypes and shapes of tensors, the derivatives, and the work items of the kernels.
"""

import argparse
import keyword
import re
from collections.abc import Iterable

from .errors import CannotMake, require
from .schema import C_KEYWORDS, DIFFERENTIABLE, Argument, Operator
from .shapes import Part, parts, pattern, words_of

# The C type, and the text in the shim, of each dtype that an option can name. "same" is the dtype of the first tensor,
# which is floating point.
DTYPES = {
    "same": ("T", "dtype"),
    "float64": ("double", "ScalarType::Double"),
    "float32": ("float", "ScalarType::Float"),
    "int64": ("int64_t", "ScalarType::Long"),
    "int32": ("int32_t", "ScalarType::Int"),
    "int16": ("int16_t", "ScalarType::Short"),
    "int8": ("int8_t", "ScalarType::Char"),
    "uint8": ("uint8_t", "ScalarType::Byte"),
    "bool": ("bool", "ScalarType::Bool"),
}
NUMBER_TYPES = {"int": "int64_t", "SymInt": "int64_t", "float": "double", "bool": "bool"}  # the C types of numbers
MOST = 16  # the most values of a list of numbers, which kernels get in an array of their argument struct
VECTORS = ("weight", "bias", "gamma", "beta", "scale")  # a tensor of such a name has one element for each column
MASK, INDEX = re.compile(r"(.*_)?mask"), re.compile(r"(.*_)?(index|indices|ids?|target)")


def pairs(words: list[str], option: str, known: Iterable[str]) -> dict[str, str]:
    """Returns the words of an option by name: {"a": "int64", "b": "bool"} for --dtype a=int64 b=bool."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        expected = f"expected {option} NAME=... with a name of {', '.join(known)}"
        require(value and name in known, f"{expected}, but got '{word}'")
        found[name] = value
    return found


def describe(operator: Operator, options: argparse.Namespace) -> None:
    """Fills in what the options of add_schema() in new.py say of an operator that has been parsed.

    Raises CannotMake if they do not fit together, or if `new --schema` cannot write such an operator.
    """
    _check_supported(operator)
    require(options.save is None or options.grad, "expected --grad beside --save, which says what backward reads")
    operands, results = operator.operands, operator.results
    first, *others = operands.values()
    for each in others:
        _guess(each, first)
    for name, dtype in pairs(options.dtype, "--dtype", [*operands, *results]).items():
        require(dtype in DTYPES, f"expected a dtype of {', '.join(DTYPES)}, but got '{dtype}'")
        (operands | results)[name].dtype = dtype
    names = [*operands]
    for name, role in pairs(options.role, "--role", names).items():
        _give_role(operands[name], role, names[: names.index(name)])
    got = f"{first.name} of {first.dtype}"
    require(first.dtype == "same", f"expected a floating-point tensor as the first argument, but got {got}")
    operator.work = options.work or "flat"
    has_rows = operator.work == "rows" or any(each.shape == "[n]" for each in operands.values())
    if has_rows and not first.shape:
        first.shape = "[*, n]"
    given = pairs(options.shape, "--shape", results)
    for each in results.values():
        each.shape = given.get(each.name, first.name)
    operator.grads = options.grad or []
    operator.saved = names if options.save is None else options.save
    _check_names(operator)
    _check_lists(operator)
    _check_gradients(operator)
    for number, result in enumerate(results.values()):
        _check_shape(result.shape, operator, f"the shape of {result.name}", [*results][:number])
    for operand in operands.values():
        if operand.below:
            _check_shape(f"[{operand.below}]", operator, f"the size of {operand.name}")
    _check_work(operator)


def _guess(tensor: Argument, first: Argument) -> None:
    """Sets the dtype and the shape of a tensor behind the first one by its name."""
    if MASK.fullmatch(tensor.name):
        tensor.dtype, tensor.shape = "bool", f"broadcasts to {first.name}"
    elif INDEX.fullmatch(tensor.name):
        tensor.dtype = "int64"
    else:
        tensor.shape = "[n]" if tensor.name in VECTORS and not first.is_list else f"like {first.name}"
    if first.is_list and not tensor.is_list:
        tensor.shape = ""


def _give_role(tensor: Argument, role: str, before: list[str]) -> None:
    """Sets the shape, dtype and bound of a tensor to those of the role that --role gave it.

    The roles like and mask may only name a tensor in `before`, because match.h compares with a tensor checked earlier.
    """
    word, _, of = role.partition(":")
    of, _, shape = of.partition(":") if word == "index" else (of, "", "")
    if role.startswith("["):
        tensor.shape = pattern(role, tensor.name)
    elif word == "any" and not of:
        tensor.shape = ""
    elif word == "index" and of:
        tensor.dtype, tensor.shape, tensor.below = "int64", pattern(shape, tensor.name) if shape else "", of
    elif word in ("mask", "like") and of in before:
        tensor.shape = f"{'like' if word == 'like' else 'broadcasts to'} {of}"
        tensor.dtype = "bool" if word == "mask" else tensor.dtype
    else:
        raise CannotMake(
            "expected a role of any, [sizes], like:TENSOR or mask:TENSOR (a tensor before it), index:SIZE or "
            f"index:SIZE:[sizes] for {tensor.name}, but got '{role}'"
        )


# ---- what `new --schema` can write ----


def _check_supported(operator: Operator) -> None:
    arguments, tensors = operator.arguments, [*operator.operands.values()]
    for each in arguments:
        if each.keyword_only and each.is_tensor:
            raise CannotMake(f"expected {each.name} before the *, because autograd takes tensors only by position")
        if each.is_list and each.is_tensor and each.is_optional:
            raise CannotMake(f"{each.name} is {each.kind}: of lists of tensors `new --schema` writes Tensor[] alone")
        fits = not each.is_list or 0 < int(each.length or MOST) <= MOST
        require(fits, f"expected {each.name} to have at most {MOST} values, but got {each.kind}")
    if operator.has_out and (operator.has_lists or operator.written):
        raise CannotMake("expected the overload .out of an operator without lists of tensors that writes no argument")
    if operator.has_out and "out" in [each.name for each in arguments]:
        raise CannotMake("expected another name than out, which Python gives to the tensors of the overload .out")
    require(tensors and not tensors[0].is_optional, "expected a first tensor that is not optional")
    message = "expected either results or arguments that are written, Tensor(a!), with -> ()"
    require(bool(operator.written) != bool(operator.results), message)
    taken = [each.name for each in arguments if each.name in operator.results]
    require(not taken, f"expected names for the results that no argument has, but got {min(taken, default='')}")


# Names that the generated files use for variables of their own, in scopes where arguments and results are variables.
RESERVED = {"args", "call", "checks", "ctx", "dtype", "fit", "i", "indices_below", "inputs", "items", "j"}
RESERVED |= {"keyword_only_inputs", "make", "match", "number", "op", "output", "results", "sample", "shape", "torch"}
RESERVED |= {"unknown_size"}


def _check_names(operator: Operator) -> None:
    """Raises CannotMake unless every name is free in C, C++, Python and the generated files, and has one meaning."""
    sizes = {word for each in operator.operands.values() for word in words_of(each.shape) if word.isidentifier()}
    names = [*(each.name for each in operator.arguments), *operator.results]
    for name in (*names, *sizes):
        is_taken = name in C_KEYWORDS or keyword.iskeyword(name) or name in RESERVED or name.endswith("_t")
        expected = "expected names in lower case that C, C++, Python and the files leave free"
        require(not is_taken and re.fullmatch("[a-z][a-z0-9_]*", name), f"{expected}, but got '{name}'")
    tensors = [*operator.operands, *operator.results]
    made = [*names, *sizes, *(f"{name}_{end}" for name in tensors for end in ("numel", "dense", "sizes"))]
    made += [f"grad_{name}" for name in tensors]
    made += [f"{each.name}_count" for each in operator.number_lists]
    twice = next((name for name in made if made.count(name) > 1), None)
    expected = "expected a name for each argument, result and size"
    require(twice is None, f"{expected}, but '{twice}' would stand for two things")


def _check_lists(operator: Operator) -> None:
    """Raises CannotMake for lists that do not fit one kernel launch for each index. The launch for index i reads and
    writes only the tensors at index i of all lists."""
    if not operator.has_lists:
        return
    is_first = operator.operands[operator.first].is_list
    require(is_first, "expected a list as the first tensor, because the others have its length")
    fits = all(each.is_list for each in operator.results.values())
    require(fits, "expected results of Tensor[], one tensor for each of the list")
    for each in operator.written:
        require(each.is_list, f"expected {each.name} to be a list, because each of the launches would write it")
    require(operator.work == "flat", f"expected --work flat with lists, but got {operator.work}")
    lists = [each.name for each in operator.operands.values() if each.is_list]
    for each in operator.operands.values():
        relation, _, of = each.shape.rpartition(" ")
        # Each launch takes one tensor of every list, so all lists have the length of the first.
        is_alike = each.is_list and relation == "like" and of in lists
        fits = is_alike or (each.shape == "" and each.name not in lists[1:])
        got = f"index:{each.below}" if each.below else each.shape or "any"
        expected = "expected the role any, or like:LIST of a list after the first, beside lists"
        require(fits and not each.below, f"{expected}, but got {got} of {each.name}")
    for each in operator.results.values():
        expected = f"expected the shape of {each.name} to be a list of {', '.join(lists)}"
        require(each.shape in lists, f"{expected}, but got {each.shape}")
    require(not operator.grads, "expected no --grad with lists: the template 'tensors' has such gradients")


def _check_gradients(operator: Operator) -> None:
    known = operator.operands | operator.results
    for option, listed in (("--grad", operator.grads), ("--save", operator.saved)):
        is_once = len(listed) == len({*listed})
        require(is_once, f"expected {option} to name each tensor once, but got {','.join(listed)}")
    for name in operator.saved:
        require(name in known, f"expected --save with names of {', '.join(known)}, but got '{name}'")
    for name in operator.grads:
        operand = operator.operands.get(name)
        if operand is None or operand.dtype not in DIFFERENTIABLE:
            got = f"'{name}'" if operand is None else f"{name}, which is {operand.dtype}"
            raise CannotMake(f"expected --grad with names of floating-point tensors of the schema, but got {got}")
    if operator.grads:
        message = "expected no --grad: an operator that writes into an argument has no derivative"
        require(not operator.written, message)
        require(operator.differentiable_results, "expected no --grad: the operator has no floating-point result")


def _check_work(operator: Operator) -> None:
    work = operator.work
    if work == "rows" and "*" not in words_of(operator.operands[operator.first].shape):
        raise CannotMake(f"expected a shape of {operator.first} with * for --work rows, such as [*, n]")
    if work.startswith("items="):
        _check_shape(work.removeprefix("items="), operator, "the work items")
    else:
        require(work in ("flat", "rows"), f"expected --work flat, rows or items=SHAPE, but got '{work}'")


# ---- shapes ----


def _check_shape(expression: str, operator: Operator, what: str, before: Iterable[str] = ()) -> None:
    """Raises CannotMake unless a shape expression uses only names and numbers that are allowed in it.

    These are tensors of the schema that are not optional, results in `before`, numbers and SymInt arguments. The shape
    of a result may also have sizes of "?".
    """
    arguments = {each.name: each for each in operator.arguments}
    for part in parts(expression):
        name = part.tensor or part.number
        argument = arguments.get(name)
        if part.tensor:
            expected = f"expected {what} to name tensors of the schema that are not optional, or results before it"
            is_known = name in before or (argument is not None and _has_sizes(argument, part, what))
            require(is_known, f"{expected}, but got '{name}'")
            expected = f"expected {what} to name all sizes of the result, *{name}"
            require(name not in operator.results or part == Part(name), f"{expected}, but got some of them")
        elif name == "?" and what.startswith("the shape of"):
            _check_unknown_size(operator)
        elif not name.isdigit() and (argument is None or argument.kind != "SymInt"):
            got = f"'{name}'" if argument is None else f"{argument.kind} {name}"
            hint = "; write SymInt, because an int compiles again for each size" if "int " in got else ""
            raise CannotMake(f"expected {what} to name SymInt arguments, but got {got}{hint}")


def _has_sizes(argument: Argument, part: Part, what: str) -> bool:
    """Returns whether a part of a shape may name an argument: a tensor, or for results and work items a SymInt[]."""
    if argument.is_optional or argument.is_tensor:
        return not argument.is_optional
    if argument.type != "SymInt" or not argument.is_list:
        return False
    length = int(argument.length or 0)
    got = f"{part.tensor}[{part.index}] of {argument.kind}"
    expected = f"expected {what} to name a value that is there, as k[1] of SymInt[2] k"
    require(not part.is_size or -length <= int(part.index) < length, f"{expected}, but got {got}")
    return not what.startswith("the size of")


def _check_unknown_size(operator: Operator) -> None:
    expected = "expected --work items=... with a size of ?"
    require(operator.work.startswith("items="), f"{expected}, because the results cannot tell how much there is")
    expected = "expected no overload .out with a size of ?"
    require(not operator.has_out, f"{expected}, because the caller could not allocate it")
    expected = "expected no --grad with a size of ?"
    require(not operator.grads, f"{expected}: backward could not check the shape of its gradient")

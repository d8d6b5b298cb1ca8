"""Generates the Python code of an operator for `new --schema`, and its text in docs/ops.md."""

import functools
import re
from collections.abc import Collection, Iterable, Sequence

from .generate import NAMED_DTYPES, checks, checks_of_gradients, checks_of_memory, known_sizes, lines, resolved
from .roles import DTYPES
from .schema import Argument, Operator
from .shapes import Part

# What Match gets: the dtypes that a tensor may have; name and tensor of element i of a list.
ALLOWED = {dtype: f"(torch.{dtype},)" for dtype in DTYPES} | NAMED_DTYPES
ELEMENT = 'f"{0}[{{i}}]", {0}[i]'
body = functools.partial(lines, indent="    ")


def _annotation(argument: Argument) -> str:
    kind = {"SymInt": "int"}.get(argument.type, argument.type)
    return (f"Sequence[{kind}]" if argument.is_list else kind) + (" | None" if argument.is_optional else "")


def _typed(arguments: Iterable[Argument]) -> list[str]:
    return [f"{each.name}: {_annotation(each)}" for each in arguments]


def _parameters(operator: Operator, *outs: str, defaults: bool = False) -> str:
    arguments = operator.arguments
    values = (f" = {each.value!r}" if defaults and each.default else "" for each in arguments)
    return operator.listed(map("".join, zip(_typed(arguments), values, strict=True)), *outs)


def _names(operator: Operator, by_keyword: bool = True) -> str:
    """Returns the arguments of a call as Python text."""
    keywords = operator.keyword_only if by_keyword else []
    return ", ".join(f"{each.name}={each.name}" if each in keywords else each.name for each in operator.arguments)


def _returned(operator: Operator) -> str:
    kinds = ["list[Tensor]" if each.is_list else "Tensor" for each in operator.results.values()]
    return f"tuple[{', '.join(kinds)}]" if len(kinds) > 1 else kinds[0] if kinds else "None"


def python_shape(expression: str, operator: Operator) -> str:
    """Translates a shape expression to Python."""
    made = [_python_part(part, known_sizes(operator)) for part in resolved(expression, operator)]
    if len(made) == 1 and made[0].startswith("*"):
        return made[0][1:]
    return f"[{', '.join(made)}]"


def _python_part(part: Part, known: dict[str, str]) -> str:
    if not part.tensor:
        return part.number.replace("?", "unknown_size")
    sizes = known[part.tensor].replace(".sizes()", ".shape")
    return f"{'' if part.is_size else '*'}{sizes}{f'[{part.index}]' if part.index else ''}"


def tuple_of(values: Sequence[str]) -> str:
    return f"({', '.join(values)}{',' if len(values) == 1 else ''})"


def quoted(names: Iterable[str]) -> str:
    return tuple_of([f'"{name}"' for name in names])


# ---- the module in functional/ ----


def docstring(operator: Operator) -> str:
    """Returns the docstring of the public function. The user still has to write its first sentence and the formula."""
    text = f"{operator.name}: write what it computes, and the formula.\n\nArgs:\n"
    for each in operator.arguments:
        if not each.is_tensor:
            text += f"    {each.name}: {_annotation(each)}.\n"
            continue
        kind = "floating point" if each.dtype == "same" else each.dtype
        of_shape = f"shape {each.shape}" if each.shape.startswith("[") else each.shape or "any shape"
        of_shape = f"list of tensors of {of_shape}" if each.is_list else of_shape
        notes = "; None is allowed" if each.is_optional else "; it is written" if each.is_written else ""
        notes += f"; values from 0 to below {each.below}" if each.below else ""
        text += f"    {each.name}: {kind}, {of_shape}{notes}.\n"
    if operator.has_out:
        what = "the result" if len(operator.results) == 1 else f"{' and '.join(operator.results)}, of any strides"
        text += f"    out: where to write {what}; None is allowed.\n"
    results = [
        f"``{each.name}``, {'floating point' if each.dtype == 'same' else each.dtype}, of shape {each.shape}"
        for each in operator.results.values()
    ]
    text += f"\nReturns:\n    {'; '.join(results) or 'Nothing'}.\n"
    on_cpu = "; on the CPU also: a value of an index is out of range" if operator.indices else ""
    text += f"\nRaises:\n    RuntimeError: a tensor has another device, dtype or shape{on_cpu}.\n\n"
    text += f"On a GPU, nothing checks the values of {operator.indices}.\n" if operator.indices else ""
    if operator.grads:
        grads = " and ".join(f"``{name}``" for name in operator.grads)
        kept = ", ".join(f"``{name}``" for name in operator.saved) or "nothing"
        return text + f"Differentiable in {grads}, once. Saves {kept}.\n"
    return text + "Not differentiable.\n"


# The imports of the module in their groups, each with a pattern of the code that needs it.
IMPORTS = (
    {"from collections.abc import Sequence": r"\bSequence\b", "from typing import Any": r"\bAny\b"},
    {"import torch": r"\btorch\.(?!fx\b)", "from torch import Tensor": r"\bTensor\b"},  # a comment names torch.fx
    {
        "from .. import _ops, reference": r"\b_ops\.",
        "from ..registration import checks": r"\bchecks\.",
        "from ..registration.autograd import Gradients": r"\bGradients\b",
        "from ..registration.calls import call": r"\bcall\(",
    },
)


def _imports(code: str) -> str:
    groups = ["".join(f"{line}\n" for line, use in group.items() if re.search(use, code)) for group in IMPORTS]
    names = [name for name in ("BOOL", "FLOATING", "INT64", "SAME", "Match") if re.search(rf"\b{name}\b", code)]
    groups[-1] += f"from ..registration.match import {', '.join(names)}\n"
    return "\n".join(filter(None, groups))


def functional(operator: Operator) -> str:
    name = operator.name
    results = _returned(operator)
    outs = [f"out: {results} | None = None"] if operator.has_out else []
    text = f"def {name}({_parameters(operator, *outs, defaults=True)}) -> {results}:\n"
    text += body(f'"""{docstring(operator)}"""'.splitlines())
    call = f'call("{name}", {_names(operator)})'
    call = f"_ops.{name}({_names(operator, by_keyword=False)})" if operator.grads else call
    count = len(operator.results)
    if operator.has_out:
        outs = [f"{each}=out[{i}]" if count > 1 else f"{each}=out" for i, each in enumerate(operator.results)]
        into = f'call("{name}.out", {_names(operator)}, {", ".join(outs)})'
        text += body(["if out is not None:", f"    {into}", "    return out"])
    if count > 1 and not operator.grads:
        text += f"    results = {call}\n"
        call = ", ".join(f"results[{number}]" for number in range(count)) + "  # torch.fx has one Proxy for all"
    text += f"    {'return ' if operator.results else ''}{call}\n\n\n"
    text += _fake(operator) + (_out_fake(operator) if operator.has_out else "")
    if operator.grads:
        text += _fake(operator.backward) + _setup_context(operator) + _backward(operator)
        text += f"\n\n{name}_plain = reference.{name}  # for forward-mode differentiation\n"
    title = f'"""{name}: the public function, and what ops.py registers for its operators."""'
    return f"{title}\n\n{_imports(text)}\n\n{text.rstrip()}\n"


def _fake(operator: Operator) -> str:
    made = [_new(each, operator) for each in operator.results.values()]
    text = f"def {operator.name}_fake({_parameters(operator)}) -> {_returned(operator)}:\n"
    text += body([f'match = Match("{operator.name}")', *checks(operator, ALLOWED)])
    for each in operator.written:
        text += body(_checks_of_memory(each, operator))
    text += body(checks_of_gradients(operator, python_shape))
    text += body(["unknown_size = torch.library.get_ctx().new_dynamic_size()"]) if operator.has_unknown_size else ""
    return text + (body([f"return {', '.join(made)}"]) if made else "") + "\n\n"


def _new(result: Argument, operator: Operator) -> str:
    """Returns the expression of a result of a fake."""
    dtype = "" if result.dtype == "same" else f", dtype=torch.{result.dtype}"
    if result.is_list:
        return f"[x.new_empty(x.shape{dtype}) for x in {result.shape}]"
    shape = python_shape(result.shape, operator)
    if result.is_optional:  # the gradient of an optional tensor
        shape = f"[0] if {shape.removesuffix('.shape')} is None else {shape}"
    return f"{operator.first}.new_empty({shape}{dtype})"


def _out_fake(operator: Operator) -> str:
    """Returns the fake of the overload .out. It gets the shapes of its outputs from the operator's fake."""
    outs, first = [*operator.results.values()], operator.first
    text = f"def {operator.name}_out_fake({_parameters(operator.overload)}) -> None:\n"
    text += body([f"{'results' if len(outs) > 1 else 'result'} = {operator.name}_fake({_names(operator)})"])
    text += body([f'match = Match("{operator.name}")', f'match("{first}", {first}, FLOATING)'])
    for place, each in enumerate(outs):
        made = f"results[{place}]" if len(outs) > 1 else "result"
        text += body(
            [
                f'match("{each.name}", {each.name}, {ALLOWED[each.dtype]})',
                f'match.sizes("{each.name}", {each.name}, {made}.shape, "the result")',
                *_checks_of_memory(each, operator),
            ]
        )
    return text + "\n\n"


def _checks_of_memory(written: Argument, operator: Operator) -> list[str]:
    texts = [f"checks.{call}" for call in checks_of_memory(written, operator, f'"{operator.name}"', ELEMENT)]
    if written.is_list:
        return [f"for i in range(len({written.name})):", *(f"    {text}" for text in texts)]
    return texts


def _setup_context(operator: Operator) -> str:
    results = [*operator.results]
    places = {each.name: f"inputs[{i}]" for i, each in enumerate(operator.arguments)}
    places |= {each.name: f'keyword_only_inputs["{each.name}"]' for each in operator.keyword_only}
    places |= {name: f"output[{i}]" if len(results) > 1 else "output" for i, name in enumerate(results)}
    texts, options = [f"ctx.save_for_backward({', '.join(places[name] for name in operator.saved)})"], []
    for name in operator.sizes_of:
        is_none = f"None if {places[name]} is None else " if operator.operands[name].is_optional else ""
        options.append(f"{is_none}{places[name]}.shape")
    options += [places[each.name] for each in operator.numbers]
    texts += [f"ctx.options = {tuple_of(options)}  # of the backward operator"] if options else []
    whole = [places[each.name] for each in operator.results.values() if each not in operator.differentiable_results]
    texts += [f"ctx.mark_non_differentiable({', '.join(whole)})"] if whole else []
    if _lacks_some_grads(operator):
        texts.append(
            "ctx.set_materialize_grads(False)  # else autograd would allocate zeros as gradients of the others"
        )
    parameters = "ctx: Any, inputs: tuple[Any, ...], output: Any"
    parameters += ", keyword_only_inputs: dict[str, Any]" if operator.keyword_only else ""
    header = f"def {operator.name}_setup_context({parameters}) -> None:\n"
    return header + body(texts) + "\n\n"


def _lacks_some_grads(operator: Operator) -> bool:
    """Returns whether exactly one of several results is differentiable. If so, backward gets None and not zeros as the
    gradients of the other results, which saves their allocation."""
    return len(operator.differentiable_results) == 1 < len(operator.results)


def _backward(operator: Operator) -> str:
    name = operator.name
    optional = " | None" if _lacks_some_grads(operator) else ""
    grads = ", ".join(f"grad_{result}: Tensor{optional}" for result in operator.results)
    given = [f"grad_{each.name}" for each in operator.differentiable_results]
    text = f"def {name}_backward(ctx: Any, {grads}) -> Gradients:\n"
    if _lacks_some_grads(operator):
        text += body([f"if {given[0]} is None:  # only the others are used", "    return {}"])
    given += ["*ctx.saved_tensors"] if operator.saved else []
    given += ["*ctx.options"] if operator.sizes_of or operator.numbers else []
    call = f"_ops.{name}_backward({', '.join(given)})"
    if len(operator.grads) == 1:
        return text + body([f'return {{"{operator.grads[0]}": {call}}}'])
    return text + body([f"return dict(zip({quoted(operator.grads)}, {call}, strict=True))"])


# ---- what goes into the other files ----


def entry(name: str, functions: Collection[str], underived: str = "WRITES") -> str:
    """Returns an op's section of ops.py, which registers its operators. `functions` has the names in the op's module.
    `underived` is the mark of an op without a derivative."""
    text = f"# ---- {name} ----\n\n"
    # For each operator that there may be: its derivative, and the mark in place of a derivative that is not there.
    operators = {name: (f"{name}_backward", underived), f"{name}.out": (f"{name}_out_backward", "WRITES")}
    operators |= {f"{name}_backward": (f"{name}_second", "NO_SECOND")}
    for op, (derivative, mark) in operators.items():
        start, parts = op.replace(".", "_"), [f'"{op}"']
        given = {"fake": f"{start}_fake", "setup_context": f"{start}_setup_context", "backward": derivative}
        for part, function in (given | {"plain": f"{start}_plain"}).items():
            if function in functions:
                parts.append(f"{part}={name}_functions.{function}")
            elif part == "backward":
                parts.append(f"backward={mark}")
        parts += ["nested=NONE"] * (op == name) + ["sharding=NONE"]
        text += "register(\n" + body(f"{part}," for part in parts) + ")\n" if given["fake"] in functions else ""
    return text


def reference(operator: Operator) -> str:
    """Returns the function for reference.py. Until the user writes the formula there, a call raises an error that names
    the file and the line. tree.with_op() fills in the number of the line."""
    place = "extension_cpp/reference.py:{line}"
    text = f"def {operator.name}({_parameters(operator, defaults=True)}) -> {_returned(operator)}:\n"
    return text + f'    raise NotImplementedError("write the formula of {operator.name} in {place}")\n'


def stub(operator: Operator) -> str:
    """Returns the text for _ops.pyi: the types of the op's functions if they have no-grad overloads, else nothing."""
    text = ""
    for each in operator.launches if operator.grads else []:
        parameters = _typed(each.arguments)
        for place in reversed(range(len(parameters))):  # by position, a default before an argument without one is none
            if each.arguments[place].default is None:
                break
            parameters[place] += " = ..."
        text += f"def {each.name}({', '.join(parameters)}, /) -> {_returned(each)}: ...\n"
    return text


def documents(operator: Operator) -> tuple[str, str]:
    """Returns the operator's row and section of docs/ops.md, in the format of `make docs`."""
    name = operator.name
    parameters = (each.name + (f"={each.value!r}" if each.default else "") for each in operator.arguments)
    call = f"{name}({operator.listed(parameters, *['out=None'] * operator.has_out)})"
    order = f"in {' and '.join(f'`{each}`' for each in operator.grads)}, once" if operator.grads else "none"
    text = docstring(operator).replace("``", "`")
    row = f"| [`{call}`](#{name}) | {text.splitlines()[0]} | {order} |\n"
    text = re.sub(r"(?m)^(\w+):$", r"**\1**\n", text)
    text = re.sub(r"(?m)^ {4}(\w+): ", r"* `\1`: ", text).replace("    ", "")
    schemas = "".join(f"extension_cpp::{each.schema}\n" for each in operator.registered)
    return row, f"## {name}\n\n`{call}`\n\n{text}\n```text\n{schemas}```\n"

"""The Python files of an operator that `new --schema` writes."""

import re
from collections.abc import Iterable

from .generate import backward_inputs, backward_schema, forward_schema, grads_out, in_backward, saved, tensors_in
from .roles import Operand, Operator, Part, parts
from .schema import Argument

NUMBERS = {"int": "int", "SymInt": "int", "float": "float", "bool": "bool"}
VALUES = {"int": "1", "SymInt": "2", "float": "0.5", "bool": "True"}
OTHERS = {"int": "2", "SymInt": "1", "float": "0.25", "bool": "False"}  # in the second sample


def _annotation(argument: Argument) -> str:
    return ("Tensor" if argument.is_tensor else NUMBERS[argument.type]) + (" | None" if argument.is_optional else "")


def _parameters(operator: Operator, defaults: bool = False) -> str:
    return ", ".join(
        f"{each.name}: {_annotation(each)}" + (f" = {each.default}" if defaults and each.default is not None else "")
        for each in operator.schema.arguments
    )


def _names(operator: Operator) -> str:
    return ", ".join(each.name for each in operator.schema.arguments)


def _results_type(count: int) -> str:
    return "None" if count == 0 else "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"


def _dtypes(operand: Operand, is_first: bool) -> str:
    if operand.dtype == "same":
        return "FLOATING" if is_first else "SAME"
    return {"int64": "INT64", "bool": "BOOL"}.get(operand.dtype, f"(torch.{operand.dtype},)")


def _matches(op: str, operands: list[Operand]) -> list[str]:
    shapes = (f', "{each.shape}"' if each.shape else "" for each in operands)
    calls = (
        f'match("{each.name}", {each.name}, {_dtypes(each, number == 0)}{shape})'
        for number, (each, shape) in enumerate(zip(operands, shapes, strict=True))
    )
    return [f'match = Match("{op}")', *calls]


def python_shape(expression: str, operator: Operator, known: dict[str, str]) -> str:
    """A shape as a Python expression. `known` has the sizes of tensors, by their names."""
    made = [_python_part(part, operator, known) for part in parts(expression, operator)]
    if len(made) == 1 and made[0].startswith("*"):
        return made[0][1:]
    return f"[{', '.join(made)}]"


def _python_part(part: Part, operator: Operator, known: dict[str, str]) -> str:
    if not part.tensor:
        return part.number
    if part.tensor not in known:
        return f"*{python_shape(operator.results[part.tensor].shape, operator, known)}"
    sizes = known[part.tensor]
    if part.is_size:
        return f"{sizes}[{part.begin}]"
    if part.begin is None and part.end is None:
        return f"*{sizes}"
    return f"*{sizes}[{'' if part.begin is None else part.begin}:{'' if part.end is None else part.end}]"


def body(texts: Iterable[str]) -> str:
    return "".join(f"    {text}\n" if text else "\n" for text in texts)


# ---- functional/NAME.py ----


def docstring(operator: Operator) -> str:
    """What the public function promises; the first sentence and the formula are the user's."""
    text = f"{operator.name}: write what it computes, and the formula.\n\nArgs:\n"
    for each in operator.schema.arguments:
        operand = operator.operands.get(each.name)
        if operand is None:
            text += f"    {each.name}: {NUMBERS[each.type]}.\n"
            continue
        kind = "floating point" if operand.dtype == "same" else operand.dtype
        of_shape = f"shape {operand.shape}" if operand.shape.startswith("[") else operand.shape or "any shape"
        notes = "; None is allowed" if operand.is_optional else "; it is written" if operand.is_written else ""
        text += f"    {each.name}: {kind}, {of_shape}{notes}.\n"
    results = [
        f"``{each.name}``, {'floating point' if each.dtype == 'same' else each.dtype}, of shape {each.shape}"
        for each in operator.results.values()
    ]
    text += f"\nReturns:\n    {'; '.join(results) or 'Nothing'}.\n"
    text += "\nRaises:\n    RuntimeError: a tensor has another device, dtype or shape.\n\n"
    if operator.grads:
        grads = " and ".join(f"``{name}``" for name in operator.grads)
        kept = ", ".join(f"``{name}``" for name in operator.saved) or "nothing"
        return text + f"Differentiable in {grads}, once. Saves {kept}.\n"
    return text + "Not differentiable.\n"


def functional(operator: Operator) -> str:
    name = operator.name
    operands = [*operator.operands.values()]
    dtypes = {_dtypes(each, number == 0) for number, each in enumerate(operands)}
    checked = backward_inputs(operator) if operator.grads else []
    dtypes |= {_dtypes(each, number == 0) for number, each in enumerate(checked)}
    imported = sorted(each for each in dtypes if not each.startswith("("))
    text = f'"""{name}: the public function, and what ops.py registers for its operators."""\n\n'
    text += "from collections.abc import Sequence\n" if operator.sizes_of else ""
    text += "from typing import Any\n" if operator.grads else ""
    text += "\n" if operator.grads else ""
    text += "from torch import Tensor\n\n"
    text += "from .. import _ops, reference\nfrom ..registration.autograd import Gradients\n" if operator.grads else ""
    text += "" if operator.grads else "from ..registration.calls import own_ops\n"
    text += f"from ..registration.match import {', '.join([*imported, 'Match'])}\n\n\n"
    results = _results_type(len(operator.results))
    text += f"def {name}({_parameters(operator, defaults=True)}) -> {results}:\n"
    quoted = '"""' + docstring(operator) + '"""'
    text += body(quoted.splitlines())
    call = f"{f'_ops.{name}' if operator.grads else f'own_ops.{name}.default'}({_names(operator)})"
    count = len(operator.results)
    if count > 1 and not operator.grads:
        text += f"    results = {call}\n"
        call = ", ".join(f"results[{number}]" for number in range(count)) + "  # torch.fx has one Proxy for all"
    text += f"    {'return ' if operator.results else ''}{call}\n\n\n"
    text += _fake(operator)
    if operator.grads:
        text += _backward_fake(operator) + _setup_context(operator) + _backward(operator) + _plain(operator)
    if "torch." in text:
        text = text.replace("from torch import Tensor\n", "import torch\nfrom torch import Tensor\n")
    return text.rstrip("\n") + "\n"


def _fake(operator: Operator) -> str:
    sizes = {name: f"{name}.shape" for name in operator.operands}
    made = [_new(each, operator.first, python_shape(each.shape, operator, sizes)) for each in operator.results.values()]
    text = f"def {operator.name}_fake({_parameters(operator)}) -> {_results_type(len(made))}:\n"
    text += body(_matches(operator.name, [*operator.operands.values()]))
    return text + (body([f"return {', '.join(made)}"]) if made else "") + "\n\n"


def _new(operand: Operand, like: str, shape: str) -> str:
    dtype = "" if operand.dtype == "same" else f", dtype=torch.{operand.dtype}"
    return f"{like}.new_empty({shape}{dtype})"


def _backward_fake(operator: Operator) -> str:
    op = f"{operator.name}_backward"
    kept, grads = saved(operator), grads_out(operator)
    parameters = [f"{each.name}: Tensor" for each in grads]
    parameters += [f"{each.name}: Tensor{' | None' if each.is_optional else ''}" for each in kept]
    parameters += [f"{name}_sizes: Sequence[int]" for name in operator.sizes_of]
    parameters += [f"{each.name}: {NUMBERS[each.type]}" for each in operator.schema.numbers]
    known = {name: text.replace(".sizes()", ".shape") for name, text in in_backward(operator).items()}
    text = f"def {op}_fake({', '.join(parameters)}) -> {_results_type(len(operator.grads))}:\n"
    text += body(_matches(op, backward_inputs(operator)))
    for result, grad in zip(operator.differentiable_results, grads, strict=True):
        if not grad.shape and tensors_in(result.shape, operator) <= known.keys():
            sizes = python_shape(result.shape, operator, known)
            text += body([f'match.sizes("{grad.name}", {grad.name}, {sizes}, "{result.name}")'])
    first = backward_inputs(operator)[0].name
    made = [
        _new(Operand(name, operator.operands[name].dtype), first, known.get(name, f"{name}.shape"))
        for name in operator.grads
    ]
    return text + body([f"return {', '.join(made)}"]) + "\n\n"


def _setup_context(operator: Operator) -> str:
    arguments = [each.name for each in operator.schema.arguments]
    results = [*operator.results]

    def place(name: str) -> str:
        if name in arguments:
            return f"inputs[{arguments.index(name)}]"
        return "output" if len(results) == 1 else f"output[{results.index(name)}]"

    kept = ", ".join(place(each.name) for each in saved(operator))
    texts = [f"ctx.save_for_backward({kept})"]
    texts += [f"ctx.{name}_sizes = {place(name)}.shape" for name in operator.sizes_of]
    texts += [f"ctx.{each.name} = {place(each.name)}" for each in operator.schema.numbers]
    whole = [place(each.name) for each in operator.results.values() if each not in operator.differentiable_results]
    texts += [f"ctx.mark_non_differentiable({', '.join(whole)})"] if whole else []
    if _lacks_some_grads(operator):
        texts.append(
            "ctx.set_materialize_grads(False)  # else autograd would allocate zeros as gradients of the others"
        )
    header = f"def {operator.name}_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:\n"
    return header + body(texts) + "\n\n"


def _lacks_some_grads(operator: Operator) -> bool:
    """Whether autograd gives None for gradients: of results that are not differentiable it would allocate zeros."""
    return len(operator.differentiable_results) == 1 < len(operator.results)


def _backward(operator: Operator) -> str:
    name = operator.name
    kept = [each.name for each in saved(operator)]
    optional = " | None" if _lacks_some_grads(operator) else ""
    grads = ", ".join(f"grad_{result}: Tensor{optional}" for result in operator.results)
    text = f"def {name}_backward(ctx: Any, {grads}) -> Gradients:\n"
    if _lacks_some_grads(operator):
        text += body([f"if {grads_out(operator)[0].name} is None:  # only the others are used", "    return {}"])
    text += body([f"{', '.join(kept)}{',' if len(kept) == 1 else ''} = ctx.saved_tensors"] if kept else [])
    given = [each.name for each in grads_out(operator)] + kept
    given += [f"ctx.{each}_sizes" for each in operator.sizes_of]
    given += [f"ctx.{each.name}" for each in operator.schema.numbers]
    call = f"_ops.{name}_backward({', '.join(given)})"
    if len(operator.grads) == 1:
        return text + body([f'return {{"{operator.grads[0]}": {call}}}'])
    names = ", ".join(f'"{each}"' for each in operator.grads)
    return text + body([f"return dict(zip(({names}), {call}, strict=True))"])


def _plain(operator: Operator) -> str:
    text = f"\n\ndef {operator.name}_plain({_parameters(operator)}) -> {_results_type(len(operator.results))}:\n"
    text += body(['"""The same in plain tensor operations, for forward-mode differentiation."""'])
    return text + body([f"return reference.{operator.name}({_names(operator)})"])


# ---- what goes into the other files ----


def entry(operator: Operator) -> str:
    """The operator's section of ops.py."""
    name = operator.name
    module = f"{name}_functions"
    text = f'# ---- {name} ----\n\nregister(\n    "{name}",\n    fake={module}.{name}_fake,\n'
    if not operator.grads:
        return text + f"    backward={'WRITES' if operator.written else 'NOT_DIFFERENTIABLE'},\n    sharding=NONE,\n)\n"
    text += f"    setup_context={module}.{name}_setup_context,\n    backward={module}.{name}_backward,\n"
    text += f"    plain={module}.{name}_plain,\n"
    text += f'    nested=NONE,\n    sharding=NONE,\n)\nregister(\n    "{name}_backward",\n'
    return text + f"    fake={module}.{name}_backward_fake,\n    backward=NO_SECOND,\n    sharding=NONE,\n)\n"


def reference(operator: Operator, file: str, line: int) -> str:
    """The function for reference.py. It stands at this line, and says so until it is written."""
    text = f"def {operator.name}({_parameters(operator, defaults=True)}) -> {_results_type(len(operator.results))}:\n"
    return text + f'    raise NotImplementedError("write the formula of {operator.name} in {file}:{line + 1}")\n'


def stub(operator: Operator) -> str:
    """The types of its functions in _ops.pyi, which has those with a no-grad overload."""
    if not operator.grads:
        return ""
    count = len(operator.results)
    parameters = [
        f"{each.name}: {_annotation(each)}{' = ...' if each.default is not None else ''}"
        for each in operator.schema.arguments
    ]
    text = f"def {operator.name}({', '.join(parameters)}, /) -> {_results_type(count)}: ...\n"
    kept = [f"{each.name}: Tensor{' | None' if each.is_optional else ''}" for each in saved(operator)]
    parameters = [*(f"{each.name}: Tensor" for each in grads_out(operator)), *kept]
    parameters += [f"{name}_sizes: Sequence[int]" for name in operator.sizes_of]
    parameters += [f"{each.name}: {NUMBERS[each.type]}" for each in operator.schema.numbers]
    results = _results_type(len(operator.grads))
    return text + f"def {operator.name}_backward({', '.join(parameters)}, /) -> {results}: ...\n"


def documents(operator: Operator) -> tuple[str, str]:
    """The row and the section of docs/ops.md, as `make docs` writes them."""
    name = operator.name
    parameters = (each.name + (f"={each.default}" if each.default else "") for each in operator.schema.arguments)
    call = f"{name}({', '.join(parameters)})"
    order = f"in {' and '.join(f'`{each}`' for each in operator.grads)}, once" if operator.grads else "none"
    summary, *rest = docstring(operator).replace("``", "`").splitlines()
    lines = [f"## {name}", "", f"`{call}`", "", summary]
    for line in rest:
        heading, argument = re.fullmatch(r"(\w+):", line), re.fullmatch(r" {4}(\w+): (.*)", line)
        if heading:
            lines += [f"**{heading[1]}**", ""]
        else:
            lines.append(f"* `{argument[1]}`: {argument[2]}" if argument else line.strip())
    listed = [forward_schema(operator), *([backward_schema(operator)] if operator.grads else [])]
    lines += ["", "```text", *(f"extension_cpp::{schema}" for schema in listed), "```"]
    return f"| [`{call}`](#{name}) | {summary} | {order} |\n", "\n".join(lines) + "\n"


# ---- the spec and the test ----


def spec(operator: Operator) -> str:
    name, first = operator.name, operator.operands[operator.first]
    options = _options(operator) if len(_options(operator)) > 1 else []
    imported = f"Bench, ErrorSample, OpSpec, {'Options, ' if options else ''}Sample"
    text = f"import torch\n\nimport extension_cpp\nfrom tests.opspec import {imported}\n\n\n"
    text += "def sample_inputs(make, shape):\n" + body(_sizes(first, _words(operator)))
    made = _sample(operator)
    if any("number" in line for line in made):
        made = ["for number in range(2):", *(f"    {line}" for line in made)]
    text += body(made)
    text += "\n\ndef error_inputs(device):\n"
    text += body(_errors(operator))
    text += f"\n\n{_with_options(operator)}" if options else ""
    text += f'\n\nSPEC = OpSpec(\n    name="{name}",\n    function=extension_cpp.{name},\n'
    text += f"    reference=extension_cpp.reference.{name},\n    sample_inputs=sample_inputs,\n"
    text += "    error_inputs=error_inputs,\n"
    text += "    bench=Bench(lambda make, shape: next(sample_inputs(make, shape)), forward=2, backward="
    text += (
        f"{3 if operator.grads else 0}),\n    keeps_strides=False,\n    launches=(1, {int(bool(operator.grads))}),\n"
    )
    text += "    second_order=False,\n"
    if options:
        values = (f'"{each.name}": ({"True" if each.is_tensor else OTHERS[each.type]},)' for each in options)
        text += f"    options=Options({{{', '.join(values)}}}, with_options),\n"
    if not operator.grads:
        text += "    differentiable=False,\n"
    if operator.written:
        text += "    mutates=(" + "".join(f'"{each.name}", ' for each in operator.written).rstrip() + "),\n"
    dtypes = [f"torch.{each.dtype}" if each.dtype.startswith("float") else "None" for each in _float_results(operator)]
    if set(dtypes) - {"None"}:
        text += f"    result_dtypes=({', '.join(dtypes)},),\n"
    return text + ")\n"


def _float_results(operator: Operator) -> list[Operand]:
    """The results as the battery sees them: the written arguments are the last ones."""
    return [*operator.results.values(), *operator.written]


def _sizes(first: Operand, used: set[str]) -> list[str]:
    """Lines that take the first tensor's shape apart, and leave where it does not fit."""
    if not first.shape.startswith("["):
        return []
    words = first.shape[1:-1].split(", ")
    named = len(words) - ("*" in words)
    test = f"len(shape) < {named}" if "*" in words else f"len(shape) != {named}"
    numbers = [f"shape[{i}] != {word}" for i, word in enumerate(words) if word.isdigit()]
    left = (
        ", ".join(word if word in used else "_" if word.isdigit() else f"_{word}" for word in words)
        .replace("*", "*batch" if "*" in used else "*_batch")
        .replace("_*", "*")
    )
    unpacked = [f"{left}{',' if len(words) == 1 else ''} = shape"] if used & set(words) else []
    return [f"if {' or '.join([test, *numbers])}:", "    return", *unpacked]


def _words(operator: Operator) -> set[str]:
    """The names in the shapes of all tensors but the first."""
    _, *others = operator.operands.values()
    return {word for each in others if each.shape.startswith("[") for word in each.shape[1:-1].split(", ")}


def _shape(operand: Operand, known: set[str]) -> str:
    """The shape of a sample's tensor as an expression. A name that no other tensor has is 3."""
    if not operand.shape.startswith("["):
        return "shape"
    words = operand.shape[1:-1].split(", ")
    made = ", ".join("*batch" if word == "*" else word if word in known or word.isdigit() else "3" for word in words)
    return f"({made}{',' if len(words) == 1 else ''})"


def _sample(operator: Operator) -> list[str]:
    first = operator.operands[operator.first]
    known = set(first.shape[1:-1].split(", ")) if first.shape.startswith("[") else set()
    made, lines, numbers = [], [], []
    for each in operator.schema.arguments:
        operand = operator.operands.get(each.name)
        if operand is None:
            value = each.default if each.default not in (None, "None") else VALUES[each.type]
            numbers.append(f"{each.name} = ({value}, {OTHERS[each.type]})[number]")
            made.append(each.name)
            continue
        shape = "shape" if operand is first else _shape(operand, known)
        lines.append(f"{each.name} = {_tensor(operand, shape, operator)}")
        made.append(f"{each.name} if number == 0 else None" if operand.is_optional else each.name)
    return [*numbers, *lines, f"yield Sample(({', '.join(made)}{',' if len(made) == 1 else ''}))"]


def _tensor(operand: Operand, shape: str, operator: Operator) -> str:
    device = operator.first
    if operand.dtype == "same":
        needs = operand.name in operator.grads
        return f"make({shape})" + ("" if needs or not operator.grads else ".detach()")
    if operand.dtype.startswith("float"):
        return f"make({shape}).detach().to(torch.{operand.dtype})"
    if operand.dtype == "bool":
        # In the second sample it has one number for each column, and broadcasts.
        return f"make({shape} if number == 0 else {shape}[-1:]).detach() > 0"
    below = "3" if not operand.below else f"max({_below(operand.below, operator)}, 1)"
    drawn = f"torch.randint({below}, tuple({shape}), generator=torch.Generator().manual_seed(number))"
    return f"{drawn}.to({device}.device, torch.{operand.dtype})"


def _below(expression: str, operator: Operator) -> str:
    part = parts(f"[{expression}]", operator)[0]
    return f"{part.tensor}.shape[{part.begin}]" if part.tensor else part.number


def _rank(operator: Operator) -> str:
    """A shape that the first tensor may have."""
    pattern = operator.operands[operator.first].shape
    rank = len(pattern[1:-1].split(", ")) if pattern.startswith("[") else 2
    return str((2, 3, 4, 5, 6)[:rank])


def _errors(operator: Operator) -> list[str]:
    first = operator.operands[operator.first]
    lines = [
        f"sample = next(sample_inputs(lambda shape: torch.ones(shape, device=device), {_rank(operator)}))",
        f'op = "extension_cpp::{operator.name}: expected"',
        "",
        "def with_argument(place, x):",
        "    return *sample.args[:place], x, *sample.args[place + 1 :]",
        "",
    ]
    dtypes = "float64, float32, bfloat16 or float16"
    for place, each in enumerate(operator.schema.arguments):
        operand = operator.operands.get(each.name)
        if operand is None:
            continue
        if operand is first:
            wrong, message = "int()", f"{each.name} to be {dtypes}, but got int32"
        elif operand.dtype == "same":
            wrong, message = "double()", f"{each.name} to be float32 like {first.name}, but got float64"
        else:
            wrong, message = "to(torch.int16)", f"{each.name} to be {operand.dtype}, but got int16"
        given = f"with_argument({place}, sample.args[{place}].{wrong})"
        lines.append(f'yield ErrorSample({given}, f"{{op}} {message}")')
    return lines


def test(operator: Operator) -> str:
    """A test of what the options said: the dtypes of one call's results."""
    text = f'"""What only {operator.name} promises. tests/battery tests what every op promises."""\n\n'
    text += "import pytest\nimport torch\n\nimport extension_cpp\n"
    text += f"from tests.specs.{operator.name} import sample_inputs\n\n\n"
    text += (
        '@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)\n'
    )
    text += "def test_dtypes(dtype: torch.dtype, device: str) -> None:\n"
    text += body(
        [
            '"""Each result has its dtype, for inputs of any."""',
            f"x = torch.ones({_rank(operator)}, device=device, dtype=dtype)",
            "sample = next(sample_inputs(x.new_ones, x.shape))",
            f"results = extension_cpp.{operator.name}(*sample.args)",
        ]
    )
    if not operator.results:
        return text + body(["assert results is None"])
    if len(operator.results) == 1:
        return text + body([f"assert results.dtype == {_dtypes_of_results(operator)[1:-1]}"])
    return text + body([f"assert [x.dtype for x in results] == {_dtypes_of_results(operator)}"])


def _options(operator: Operator) -> list[Argument]:
    """What tests/battery/test_options.py takes for an option: numbers and optional tensors."""
    return [each for each in operator.schema.arguments if each.is_optional or not each.is_tensor]


def _with_options(operator: Operator) -> str:
    """The function of the spec that makes a call with the options that a test chose."""
    names = ", ".join(f'"{each.name}"' for each in operator.schema.arguments)
    pattern = operator.operands[operator.first].shape
    fixed = pattern.startswith("[") and "*" not in pattern
    shape = f"shape[-{len(pattern.split(', '))}:]" if fixed else "shape"
    text = "def with_options(make, shape, chosen):\n"
    text += body([f"sample = next(sample_inputs(make, {shape}))  # with every optional tensor"])
    text += body([f"args = dict(zip(({names}), sample.args, strict=True))"])
    texts = []
    for each in _options(operator):
        if each.is_tensor:
            texts.append(f'"{each.name}": args["{each.name}"] if "{each.name}" in chosen else None')
        else:
            texts.append(f'"{each.name}": chosen.get("{each.name}", args["{each.name}"])')
    return text + body([f"args |= {{{', '.join(texts)}}}", "return Sample(tuple(args.values()))"])


def _dtypes_of_results(operator: Operator) -> str:
    found = ("dtype" if each.dtype == "same" else f"torch.{each.dtype}" for each in operator.results.values())
    return f"[{', '.join(found)}]"

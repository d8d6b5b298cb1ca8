"""Generates the spec and the test of an operator for `new --schema`."""

import json
import re
from typing import Any

from .generate_python import body, quoted, tuple_of
from .roles import MOST
from .schema import Argument, Operator
from .shapes import Part, parts, words_of

# The values of number arguments by type. The first sample has the default, or the first of these values. The second
# sample has that of the others that differs from it.
VALUES = {"int": (1, 2, 3), "SymInt": (2, 1, 2), "float": (0.5, 0.25, 0.5), "bool": (True, False, True)}


def spec(operator: Operator) -> str:
    # tests/battery/test_options.py varies numbers and optional tensors, where there are several.
    options = [each for each in operator.arguments if each.is_optional or not each.is_tensor]
    options = options if len(options) > 1 else []
    fit, errors = _fit(operator), _errors(operator)
    helpers = ["Fit"] * bool(fit) + ["options"] * bool(options) + re.findall(r"yield from (\w+)", "".join(errors))
    text = "import torch\n\nimport extension_cpp\n"
    text += f"from tests.generated import {', '.join(sorted(helpers))}\n"
    text += f"from tests.opspec import Bench, OpSpec, Sample{', indices_below' if operator.indices else ''}\n\n\n"
    text += "def sample_inputs(make, shape):\n" + body(fit)
    made = _sample(operator)
    if any("number" in line for line in made):
        made = ["for number in range(2):", *(f"    {line}" for line in made)]
    text += body(made)
    text += "\n\ndef error_inputs(device):\n" + body(errors)
    fields = _fields(operator, options)
    text += "\n\nSPEC = OpSpec(\n" + body(f"{field}={value}," for field, value in fields.items() if value is not None)
    return text + ")\n"


def _fields(operator: Operator, options: list[Argument]) -> dict[str, Any]:
    """Returns the arguments of OpSpec as Python text, or None for those that keep their default."""
    name, words = operator.name, words_of(operator.operands[operator.first].shape)
    rank = len(words) - ("*" in words)
    backward = f"{3 if operator.grads else 0}{'' if _is_by_lines(operator) else ', by_lines=False'}"
    values = (f'"{each.name}": ({"True" if each.is_tensor else _values(each, operator)[1]},)' for each in options)
    lists = [each.name for each in operator.operands.values() if each.is_list]
    saves_results = operator.grads and any(each.name in operator.saved for each in operator.differentiable_results)
    written = [each.name for each in operator.written]
    found = [each.dtype for each in _battery_results(operator)]
    dtypes = [f"torch.{dtype}" if dtype.startswith("float") else "None" for dtype in found]
    return {
        "name": f'"{name}"',
        "sample_inputs": "sample_inputs",
        "error_inputs": "error_inputs",
        "bench": f"Bench(lambda make, shape: next(sample_inputs(make, shape)), forward=2, backward={backward})",
        "keeps_strides": False,
        "launches": (2 if operator.has_lists or operator.has_unknown_size else 1, int(bool(operator.grads))),
        "least_rank": rank or None,
        "greatest_rank": None if "*" in words else rank or None,
        "second_order": False,
        "options": f"options(extension_cpp.{name}, sample_inputs, {{{', '.join(values)}}})" if options else None,
        "differentiable": None if operator.grads else False,
        "saves_results": True if saves_results else None,
        "lists": quoted(lists) if lists else None,
        "unknown_sizes": operator.has_unknown_size or None,
        "mutates": quoted(written) if written else None,
        "result_dtypes": tuple_of(dtypes) if {*dtypes} - {"None"} else None,
    }


def _is_by_lines(operator: Operator) -> bool:
    """Returns whether each row of the results may depend on the same row of the first tensor alone. The answer follows
    from the shapes. The formula is not known here."""
    first, *others = operator.operands.values()
    words = words_of(first.shape)
    fits = (f"like {first.name}", f"broadcasts to {first.name}", f"[{words[-1]}]" if words else "")
    starts = f"[*{first.name}[:-1]", f"[*{first.name},"
    results = (
        each.shape in (first.name, *operator.results) or each.shape.startswith(starts)
        for each in operator.results.values()
    )
    return all(each.shape in fits and not each.below for each in others) and all(results)


def _values(number: Argument, operator: Operator) -> tuple[Any, Any]:
    """Returns the values of a number in the two samples. The second one is also its other value in test_options.py.

    A number that bounds the values of an index is 3 there. With 1, the index of the first sample could be out of
    bounds, and test_options.py uses that index with this number. A list of any length has one value more there.
    """
    first, second, third = VALUES[number.type]
    one: Any = number.value
    if number.is_list:
        one = ((first, second) * MOST)[: int(number.length or 2)] if one is None else one
        other: Any = tuple(third if value == second else second for value in one) + (first,) * number.is_open
    else:
        one = first if one is None else one
        is_bound = any(number.name == each.below for each in operator.operands.values())
        other = 3 if is_bound else third if one == second else second
    return one, None if number.is_optional else other


def _battery_results(operator: Operator) -> list[Argument]:
    """Returns the results as the battery gets them. Written arguments come last, and a list counts as two tensors."""
    copies = 2 if operator.has_lists else 1
    return [each for each in (*operator.results.values(), *operator.written) for _ in range(copies)]


def _shape(operand: Argument, operator: Operator) -> str:
    """Returns the Python expression of the shape of a sample's tensor. The pattern "like y" stands for that of y."""
    relation, _, of = operand.shape.rpartition(" ")
    if operand.shape.startswith("["):
        return f'fit("{operand.shape}")'
    return _shape(operator.operands[of], operator) if relation else "shape"


def _fit(operator: Operator) -> list[str]:
    """Returns the statements that make `fit`, which knows the sizes of the names in shape patterns.

    A free size of an index is at most the index's bound. If the op writes, a free bound is larger than the number of
    the index's values, which can then all be different.
    """
    if not any(each.shape.startswith("[") for each in operator.operands.values()):
        return []
    pattern = operator.operands[operator.first].shape
    known, texts = {*words_of(pattern)}, [f'fit = Fit(shape, "{pattern}")']
    for each in (each for each in operator.operands.values() if each.below):
        part = parts(f"[{each.below}]")[0]
        bound, shape = _word(part, operator), _shape(each, operator)
        if operator.written and bound.isidentifier() and bound not in known:
            texts.append(f'fit["{bound}"] = torch.Size({shape}).numel() + 1')
            known.add(bound)
        elif part.tensor:
            below = _size(_shape(operator.operands[part.tensor], operator), part)
            free = [word for word in words_of(each.shape) if word.isidentifier() and word not in known]
            texts += [f'fit["{word}"] = min(3, {below})' for word in free]
            known |= {*free}
    return texts


def _size(shape: str, part: Part) -> str:
    """Returns the Python expression of a size, or of a product of sizes, in the shape of a tensor."""
    return f"{shape}[{part.index}]" if part.is_size else f"torch.Size({shape}[{part.index or ':'}]).numel()"


def _word(part: Part, operator: Operator) -> str:
    """Returns the word of a shape pattern that `part`, one size of a tensor, stands for, or "" if it has none."""
    words = words_of(operator.operands[part.tensor].shape) if part.is_size else []
    place = int(part.index) if part.is_size else 0
    return words[place] if "*" not in words and -len(words) <= place < len(words) else ""


def _sample(operator: Operator) -> list[str]:
    made, tensors, numbers, indices = [], [], [], []
    for each in operator.arguments:
        if not each.is_tensor:
            first, other = _values(each, operator)
            numbers.append(f"{each.name} = ({first}, {other})[number]")
        elif each.below:
            indices += _index(each, operator)
        else:
            tensors.append(f"{each.name} = {_tensor(each, operator)}")
        is_left_out = each.is_tensor and each.is_optional
        made.append(f"{each.name} if number == 0 else None" if is_left_out else each.name)
    positional = tuple_of(made[: len(made) - len(operator.keyword_only)])
    keywords = ", ".join(f'"{each.name}": {each.name}' for each in operator.keyword_only)
    return [*numbers, *tensors, *indices, f"yield Sample({positional}{f', {{{keywords}}}' if keywords else ''})"]


def _tensor(tensor: Argument, operator: Operator) -> str:
    """Returns the Python expression of an argument of a sample: a tensor or a list of tensors."""
    shape = "each" if tensor.is_list else _shape(tensor, operator)
    if tensor.dtype == "same":
        needs = tensor.name in operator.grads
        made = f"make({shape})" + ("" if needs or not operator.grads else ".detach()")
    elif tensor.dtype.startswith("float"):
        made = f"make({shape}).detach().to(torch.{tensor.dtype})"
    elif tensor.dtype == "bool":
        # In the second sample, the tensor has one element for each column, and is broadcast over the rows.
        made = f"make({shape} if number == 0 else {shape}[-1:]).detach() > 0"
    else:
        drawn = f"torch.randint(3, tuple({shape}), generator=torch.Generator().manual_seed(number))"
        made = f"{drawn}.to({operator.first}.device, torch.{tensor.dtype})"
    shapes = "(shape, shape[:1])" if tensor.name == operator.first else f"(x.shape for x in {operator.first})"
    return f"[{made} for each in {shapes}]" if tensor.is_list else made


def _index(operand: Argument, operator: Operator) -> list[str]:
    """Returns the statements that make an index tensor, behind those that make the tensors that bound it. A shape for
    which no value is below the bound gets no sample."""
    part = parts(f"[{operand.below}]")[0]
    below = _size(f"{part.tensor}.shape", part) if part.tensor else part.number
    drawn = f"{_shape(operand, operator)}, {below}, number{', different=True' if operator.written else ''}"
    made = f"{operand.name} = indices_below({drawn}).to({operator.first}.device)"
    none = [f"if {below} == 0 < {operand.name}.numel():", "    return  # no value is below 0"]
    return [made, *(none if part.tensor else [])]


def _rank(operator: Operator) -> str:
    """Returns a shape that the first tensor may have, as Python text."""
    pattern = operator.operands[operator.first].shape
    words = words_of(pattern) or ["", ""]
    return str(tuple(int(word) if word.isdigit() else size for size, word in enumerate(words, 2)))


def _errors(operator: Operator) -> list[str]:
    """Returns the statements that yield the wrong calls, each with the message that it must raise."""
    function = f"extension_cpp.{operator.name}"
    dtypes = {name: _dtypes(each, operator) for name, each in operator.operands.items()}
    counts = {}
    for each in operator.number_lists:
        most = int(each.length or MOST)
        counts[each.name] = f"{'' if each.length else 'at most '}{most} value{'s' * (most != 1)}"
    outs = {name: _dtypes(each, operator) for name, each in operator.results.items()} if operator.has_out else {}
    wrong = {"wrong_dtypes": dtypes, "too_many_values": counts, "wrong_outputs": outs}
    return [
        f"sample = next(sample_inputs(lambda shape: torch.ones(shape, device=device), {_rank(operator)}))",
        *(f"yield from {each}({function}, sample, {json.dumps(wrong[each])})" for each in wrong if wrong[each]),
    ]


def _dtypes(operand: Argument, operator: Operator) -> str:
    """Returns the dtypes that a tensor may have, as a message says them. Samples of wrong calls are float32."""
    if operand.name == operator.first:
        return "float64, float32, bfloat16 or float16"
    is_list = operator.operands[operator.first].is_list
    return f"float32 like {operator.first}{'[0]' * is_list}" if operand.dtype == "same" else operand.dtype


def test(operator: Operator) -> str:
    """Returns the test file. Its tests check that the results of a call have the dtypes in `operator`, and a call with
    `out`."""
    name = operator.name
    text = f'"""Tests properties that only {name} has. tests/battery tests what every op must have."""\n\n'
    text += "import pytest\nimport torch\n\n"
    text += "import extension_cpp\n" if operator.has_out else ""
    text += "from tests.checks import as_tuple\n"
    text += "from tests.generated import check_out\n" if operator.has_out else ""
    text += f"from tests.opspec import DTYPES\nfrom tests.specs.{name} import SPEC\n\n\n"
    text += '@pytest.mark.parametrize("dtype", DTYPES, ids=str)\n'
    text += "def test_dtypes(dtype: torch.dtype, device: str) -> None:\n"
    found = ("dtype" if each.dtype == "same" else f"torch.{each.dtype}" for each in _battery_results(operator))
    text += body(
        [
            '"""Each result, and each argument that the op writes, has its dtype, for inputs of any."""',
            f"x = torch.ones({_rank(operator)}, device=device, dtype=dtype)",
            "sample = next(SPEC.sample_inputs(x.new_ones, x.shape))",
            "results = as_tuple(SPEC.function(*sample.args, **sample.kwargs))",
            f"assert [x.dtype for x in results] == [{', '.join(found)}]",
        ]
    )
    if not operator.has_out:
        return text
    text += '\n\n@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])\n'
    text += "def test_out(layout: str, device: str) -> None:\n"
    return text + body(
        [
            '"""A call with `out` writes into tensors of any strides, counts their versions, and returns them."""',
            f"x = torch.rand({_rank(operator)}, device=device)",
            "sample = next(SPEC.sample_inputs(lambda shape: torch.rand(shape, device=device), x.shape))",
            f"check_out(extension_cpp.{name}, sample, {quoted(operator.results)}, layout)",
        ]
    )

"""Generates the spec and the test of an operator for `new --schema`."""

import ast
import re
from collections.abc import Sequence

from .generate import is_open
from .generate_python import body
from .roles import MOST, Operand, Operator, Part, parts, words_of
from .schema import Argument

# The values of number arguments by type. The first sample has the default, or VALUES without one. The second has the
# first of OTHERS that differs from it.
VALUES = {"int": "1", "SymInt": "2", "float": "0.5", "bool": "True"}
OTHERS = {"int": ("2", "3"), "SymInt": ("1", "2"), "float": ("0.25", "0.5"), "bool": ("False", "True")}


def spec(operator: Operator) -> str:
    name, first = operator.name, operator.operands[operator.first]
    options = _options(operator) if len(_options(operator)) > 1 else []
    imported = f"Bench, ErrorSample, OpSpec, {'Options, ' if options else ''}Sample"
    imported += ", as_tuple" * operator.schema.has_out
    imported += ", indices_below" if any(each.below for each in operator.operands.values()) else ""
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
    lines = "" if _is_by_lines(operator) else ", by_lines=False"
    text += f"{3 if operator.grads else 0}{lines}),\n    keeps_strides=False,\n"
    launches = 2 if operator.schema.has_lists or operator.has_unknown_size else 1
    text += f"    launches=({launches}, {int(bool(operator.grads))}),\n"
    text += _ranks(first) + "    second_order=False,\n"
    if options:
        values = (f'"{each.name}": ({"True" if each.is_tensor else _other(each, operator)},)' for each in options)
        text += f"    options=Options({{{', '.join(values)}}}, with_options),\n"
    if not operator.grads:
        text += "    differentiable=False,\n"
    elif any(each.name in operator.saved for each in operator.differentiable_results):
        text += "    saves_results=True,\n"
    lists = [each.name for each in operator.operands.values() if each.is_list]
    text += f"    lists={_quoted(lists)},\n" if lists else ""
    text += "    unknown_sizes=True,\n" if operator.has_unknown_size else ""
    if operator.written:
        text += "    mutates=" + _quoted([each.name for each in operator.written]) + ",\n"
    dtypes = [
        f"torch.{each.dtype}" if each.dtype.startswith("float") else "None" for each in _battery_results(operator)
    ]
    if set(dtypes) - {"None"}:
        text += f"    result_dtypes=({', '.join(dtypes)}{',' if len(dtypes) == 1 else ''}),\n"
    return text + ")\n"


def _is_by_lines(operator: Operator) -> bool:
    """Returns whether each row of the results may depend on the same row of the first tensor alone.

    The answer follows from the shapes. The formula is not known here.
    """
    first, *others = operator.operands.values()
    words = words_of(first.shape)
    fits = (f"like {first.name}", f"broadcasts to {first.name}", f"[{words[-1]}]" if words else "")
    starts = f"[*{first.name}[:-1]", f"[*{first.name},"
    results = (
        each.shape in (first.name, *operator.results) or each.shape.startswith(starts)
        for each in operator.results.values()
    )
    return all(each.shape in fits and not each.below for each in others) and all(results)


def _other(number: Argument, operator: Operator) -> str:
    """Returns the value of a number in the second sample, which is also its other value in test_options.py.

    A number that bounds the values of an index is 3. With 1, the index of the first sample could be out of bounds, and
    test_options.py uses that index with this number. A list of any length has one value more than in the first sample.
    """
    if number.is_optional:
        return "None"
    if number.is_list:
        values = ast.literal_eval(_first(number))
        others = [next(x for x in OTHERS[number.type] if x != repr(value)) for value in values]
        return _tuple([*others, *([VALUES[number.type]] if is_open(number) else [])])
    bounds = any(number.name == each.below for each in operator.operands.values())
    return "3" if bounds else next(value for value in OTHERS[number.type] if value != _first(number))


def _first(number: Argument) -> str:
    """Returns the value of a number in the first sample. A list of any length without a default has two values."""
    if number.value is not None:
        return repr(number.value)
    values = (VALUES[number.type], OTHERS[number.type][0]) * MOST
    return _tuple(values[: int(number.length or 2)]) if number.is_list else values[0]


def _battery_results(operator: Operator) -> list[Operand]:
    """Returns the results as the battery gets them. Written arguments come last, and a list counts as two tensors."""
    copies = 2 if operator.schema.has_lists else 1
    return [each for each in (*operator.results.values(), *operator.written) for _ in range(copies)]


def _quoted(names: list[str]) -> str:
    return _tuple([f'"{name}"' for name in names])


def _tuple(values: Sequence[str]) -> str:
    return f"({', '.join(values)}{',' if len(values) == 1 else ''})"


def _sizes(first: Operand, used: set[str]) -> list[str]:
    """Returns the statements that change `shape` to a rank of the first tensor, and assign its sizes to names."""
    if not first.shape.startswith("["):
        return []
    words = words_of(first.shape)
    named = len(words) - ("*" in words)
    last = "" if "*" in words else f"[-{named}:]"
    # Two rows, because tests change one row, or repeat the first one in place of the others.
    ranked = f"shape = (*[2] * ({named} - len(shape)), *shape{last})"
    left = (
        ", ".join("_" if word.isdigit() else word if word in used else f"_{word}" for word in words)
        .replace("*", "*batch" if "*" in used else "*_batch")
        .replace("_*", "*")
    )
    unpacked = [f"{left}{',' if len(words) == 1 else ''} = shape"] if used & set(words) else []
    return [*([ranked] if named else []), *unpacked]


def _ranks(first: Operand) -> str:
    """Returns the arguments of OpSpec for the least and the greatest number of dimensions of the first tensor."""
    named = len(words_of(first.shape)) - ("*" in words_of(first.shape))
    text = f"    least_rank={named},\n" if named else ""
    return text + (f"    greatest_rank={named},\n" if named and "*" not in words_of(first.shape) else "")


def _words(operator: Operator) -> set[str]:
    """Returns the words of shape patterns whose sizes sample_inputs needs one by one.

    The words of the first tensor are among them only if its pattern has a number. Without a number, sample_inputs makes
    this tensor from the whole `shape`.
    """
    first, *others = operator.operands.values()
    shapes = [*others, *([first] if _has_number(first) else [])]
    return {word for each in shapes for word in words_of(each.shape)}


def _has_number(operand: Operand) -> bool:
    """Returns whether the pattern fixes a size to a number. The shapes in the battery may have another size there."""
    return any(word.isdigit() for word in words_of(operand.shape))


def _shape(operand: Operand, sizes: dict[str, str]) -> str:
    """Returns the Python expression of the shape of a sample's tensor. A named size that is not in `sizes` is 3."""
    if not operand.shape.startswith("["):
        return "shape"
    words = words_of(operand.shape)
    return _tuple(["*batch" if word == "*" else word if word.isdigit() else sizes.get(word, "3") for word in words])


def _named_sizes(operator: Operator) -> dict[str, str]:
    """Returns the Python expressions of named sizes in samples. Those of the first tensor are variables.

    A free size of an index is at most the index's bound. If the op writes, a free bound is larger than the number of
    the index's values, which can then all be different.
    """
    sizes = {word: word for word in words_of(operator.operands[operator.first].shape)}
    for each in (each for each in operator.operands.values() if each.below):
        part, below = _bound(each, operator), _below(each, operator, sizes)
        word = _word(part, operator)
        if operator.written and word.isidentifier() and word not in sizes:
            sizes[word] = f"{_count(_shape(each, sizes))} + 1"
        elif part.tensor and not below.isdigit():
            free = (word for word in words_of(each.shape) if word.isidentifier() and word not in sizes)
            sizes |= dict.fromkeys(free, f"min(3, {below})")
    return sizes


def _count(shape: str) -> str:
    """Returns the Python expression of the number of elements of a shape."""
    single = re.fullmatch(r"\((\w+),\)", shape)
    return single[1] if single else f"torch.Size({shape}).numel()"


def _sample(operator: Operator) -> list[str]:
    first = operator.operands[operator.first]
    sizes = _named_sizes(operator)
    made, lines, numbers, indices = [], [], [], []
    for each in operator.schema.arguments:
        operand = operator.operands.get(each.name)
        if operand is None:
            numbers.append(f"{each.name} = ({_first(each)}, {_other(each, operator)})[number]")
            made.append(each.name)
            continue
        sized = operator.operands.get(operand.shape.rpartition(" ")[2], operand)  # "like key" has the shape of key
        shape = "shape" if sized is first and not _has_number(first) else _shape(sized, sizes)
        if operand.below:
            indices += _index(operand, shape, operator, sizes)
        else:
            lines.append(f"{each.name} = {_tensor(operand, shape, operator)}")
        made.append(f"{each.name} if number == 0 else None" if operand.is_optional else each.name)
    positional = _tuple(made[: len(operator.schema.positional)])
    keywords = ", ".join(f'"{each.name}": {each.name}' for each in operator.schema.keyword_only)
    return [*numbers, *lines, *indices, f"yield Sample({positional}{f', {{{keywords}}}' if keywords else ''})"]


def _tensor(operand: Operand, shape: str, operator: Operator) -> str:
    """Returns the Python expression of an argument of a sample: a tensor or a list of tensors."""
    if operand.is_list:
        shapes = "(shape, shape[:1])" if operand.name == operator.first else f"(x.shape for x in {operator.first})"
        return f"[{_one_tensor(operand, 'each', operator)} for each in {shapes}]"
    return _one_tensor(operand, shape, operator)


def _one_tensor(operand: Operand, shape: str, operator: Operator) -> str:
    if operand.dtype == "same":
        needs = operand.name in operator.grads
        return f"make({shape})" + ("" if needs or not operator.grads else ".detach()")
    if operand.dtype.startswith("float"):
        return f"make({shape}).detach().to(torch.{operand.dtype})"
    if operand.dtype == "bool":
        # In the second sample, the tensor has one element for each column, and is broadcast over the rows.
        return f"make({shape} if number == 0 else {shape}[-1:]).detach() > 0"
    drawn = f"torch.randint(3, tuple({shape}), generator=torch.Generator().manual_seed(number))"
    return f"{drawn}.to({operator.first}.device, torch.{operand.dtype})"


def _index(operand: Operand, shape: str, operator: Operator, sizes: dict[str, str]) -> list[str]:
    """Returns the statements that make an index tensor, behind those that make the tensors that bound it.

    A shape for which no value is below the bound gets no sample.
    """
    below = _below(operand, operator, sizes)
    different = ", different=True" if operator.written else ""
    lines = [f"{operand.name} = indices_below({shape}, {below}, number{different}).to({operator.first}.device)"]
    # A bound that is a number or a sum is above 0, and a count of min(3, bound) is 0 if the bound is.
    if not re.fullmatch(r"\d+|.* .*", below) and f"min(3, {below})" not in shape and _bound(operand, operator).tensor:
        lines += [f"if {below} == 0 < {operand.name}.numel():", "    return  # no value is below 0"]
    return lines


def _bound(index: Operand, operator: Operator) -> Part:
    return parts(f"[{index.below}]", operator)[0]


def _word(part: Part, operator: Operator) -> str:
    """Returns the word of a shape pattern that `part`, one size of a tensor, stands for, or "" if it has none."""
    words, place = words_of(operator.operands[part.tensor].shape) if part.tensor else [], part.begin or 0
    return words[place] if "*" not in words and -len(words) <= place < len(words) else ""


def _below(index: Operand, operator: Operator, sizes: dict[str, str]) -> str:
    """Returns the Python expression of the number that the values of an index are below."""
    part = _bound(index, operator)
    word = _word(part, operator)
    if part.tensor and (part.tensor == operator.first or not word):
        return f"{part.tensor}.shape[{part.begin}]"
    return sizes.get(word, word if word.isdigit() else "3") if part.tensor else part.number


def _rank(operator: Operator) -> str:
    """Returns a shape that the first tensor may have, as Python text."""
    pattern = operator.operands[operator.first].shape
    words = words_of(pattern) or ["", ""]
    return str(tuple(int(word) if word.isdigit() else size for size, word in enumerate(words, 2)))


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
    keywords = ", sample.kwargs" if operator.schema.keyword_only else ""
    for place, each in enumerate(operator.schema.arguments):
        operand = operator.operands.get(each.name)
        if operand is None:
            lines += [f"yield {_one_too_many(place, each, keywords)}"] if each.is_list else []
            continue
        name, like = (f"{x.name}[0]" if x.is_list else x.name for x in (operand, first))
        if operand is first:
            wrong, message = "int()", f"{name} to be {dtypes}, but got int32"
        elif operand.dtype == "same":
            wrong, message = "double()", f"{name} to be float32 like {like}, but got float64"
        else:
            wrong, message = "to(torch.int16)", f"{name} to be {operand.dtype}, but got int16"
        argument = f"[x.{wrong} for x in sample.args[{place}]]" if operand.is_list else f"sample.args[{place}].{wrong}"
        given = f"with_argument({place}, {argument})"
        lines.append(f'yield ErrorSample({given}, f"{{op}} {message}"{keywords})')
    return lines + (_errors_of_out(operator) if operator.schema.has_out else [])


def _errors_of_out(operator: Operator) -> list[str]:
    """Returns the statements that yield ErrorSamples with outputs of another dtype or shape."""
    lines = [f"outs = as_tuple(extension_cpp.{operator.name}(*sample.args, **sample.kwargs))"]
    for place, each in enumerate(operator.results.values()):
        out = f"outs[{place}]"
        dtypes = f"float32 like {operator.first}, but got float64", f"{each.dtype}, but got complex64"
        shape = f"of shape {{[*{out}.shape]}} like the result, but got {{[1, *{out}.shape]}}"
        of_dtype = ("double()", dtypes[0]) if each.dtype == "same" else ("cfloat()", dtypes[1])
        for wrong, message in ((f"{out}.{of_dtype[0]}", f"to be {of_dtype[1]}"), (f"{out}[None]", shape)):
            given = f"(*outs[:{place}], {wrong}, *outs[{place + 1} :])" if len(operator.results) > 1 else wrong
            keywords = f'sample.kwargs | {{"out": {given}}}'
            lines.append(f'yield ErrorSample(sample.args, f"{{op}} {each.name} {message}", {keywords})')
    return lines


def _one_too_many(place: int, numbers: Argument, keywords: str) -> str:
    """Returns the Python expression of an ErrorSample with more numbers than the list may have."""
    most = int(numbers.length or MOST)
    values = f"{_tuple([VALUES[numbers.type]])} * {most + 1}"
    expected = f"{numbers.name} to have {'' if numbers.length else 'at most '}{most} value{'s' * (most != 1)}"
    if numbers.keyword_only:
        given, keywords = "sample.args", f'{keywords} | {{"{numbers.name}": {values}}}'
    else:
        given = f"with_argument({place}, {values})"
    return f'ErrorSample({given}, f"{{op}} {expected}, but got {most + 1}"{keywords})'


def test(operator: Operator) -> str:
    """Returns the test file. Its test checks that the results of a call have the dtypes in `operator`."""
    text = f'"""Tests properties that only {operator.name} has. tests/battery tests what every op must have."""\n\n'
    text += "import pytest\nimport torch\n\nimport extension_cpp\n"
    text += "from tests.checks import as_tuple, with_layout\n" if operator.schema.has_out else ""
    text += f"from tests.specs.{operator.name} import sample_inputs\n\n\n"
    text += (
        '@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)\n'
    )
    text += "def test_dtypes(dtype: torch.dtype, device: str) -> None:\n"
    keywords = ", **sample.kwargs" if operator.schema.keyword_only else ""
    text += body(
        [
            '"""Each result has its dtype, for inputs of any."""',
            f"x = torch.ones({_rank(operator)}, device=device, dtype=dtype)",
            "sample = next(sample_inputs(x.new_ones, x.shape))",
            f"results = extension_cpp.{operator.name}(*sample.args{keywords})",
        ]
    )
    return text + _assertion(operator) + (_test_of_out(operator) if operator.schema.has_out else "")


def _test_of_out(operator: Operator) -> str:
    """Returns the test of the argument `out`, which may also be the first argument if a result is like that one."""
    results, call = [*operator.results.values()], f"extension_cpp.{operator.name}(*sample.args, **sample.kwargs"
    out = "tuple(outs)" if len(results) > 1 else "outs[0]"
    lines = [
        '"""A call with `out` writes into tensors of any strides, counts their versions, and returns them."""',
        f"x = torch.rand({_rank(operator)}, device=device)",
        "sample = next(sample_inputs(lambda shape: torch.rand(shape, device=device), x.shape))",
        f"expected = as_tuple({call}))",
        "outs = [with_layout(torch.ones_like(y), layout) for y in expected]",
        "strides, versions = [y.stride() for y in outs], [y._version for y in outs]",
        f"out = {out}",
        f"assert {call}, out=out) is out",
        "assert all(map(torch.equal, outs, expected)) and [y.stride() for y in outs] == strides",
        "assert all(y._version > version for y, version in zip(outs, versions, strict=True))",
        f"keywords = sample.kwargs | dict(zip({_quoted([*operator.results])}, outs, strict=True))",
        f"torch.library.opcheck(torch.ops.extension_cpp.{operator.name}.out, sample.args, keywords)",
    ]
    for place, each in enumerate(results):
        if each.shape == operator.first and each.dtype == "same":
            lines += [f"outs[{place}] = sample.args[0]", f"{call}, out={out})"]
            lines.append("assert all(map(torch.equal, outs, expected))")
            break
    text = '\n\n@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])\n'
    return text + "def test_out(layout: str, device: str) -> None:\n" + body(lines)


def _assertion(operator: Operator) -> str:
    """Returns the last line of the test of dtypes."""
    if not operator.results:
        return body(["assert results is None"])
    if operator.schema.gives_lists:
        many = f"({'results,' if len(operator.results) == 1 else '*results,'})"
        expected = f"[{', '.join(f'[{each}] * 2' for each in _dtypes_of_results(operator)[1:-1].split(', '))}]"
        return body([f"assert [[x.dtype for x in each] for each in {many}] == {expected}"])
    if len(operator.results) == 1:
        return body([f"assert results.dtype == {_dtypes_of_results(operator)[1:-1]}"])
    return body([f"assert [x.dtype for x in results] == {_dtypes_of_results(operator)}"])


def _options(operator: Operator) -> list[Argument]:
    """Returns the arguments that tests/battery/test_options.py varies: numbers and optional tensors."""
    return [each for each in operator.schema.arguments if each.is_optional or not each.is_tensor]


def _with_options(operator: Operator) -> str:
    """Returns the text of with_options(), a function of the spec that makes a call with given values of options."""
    names = _quoted([each.name for each in operator.schema.positional])
    keywords = operator.schema.keyword_only
    text = "def with_options(make, shape, chosen):\n"
    text += body(["sample = next(sample_inputs(make, shape))  # with every optional tensor"])
    text += body([f"args = dict(zip({names}, sample.args, strict=True)){' | sample.kwargs' * bool(keywords)}"])
    texts = []
    for each in _options(operator):
        if each.is_tensor:
            texts.append(f'"{each.name}": args["{each.name}"] if "{each.name}" in chosen else None')
        else:
            texts.append(f'"{each.name}": chosen.get("{each.name}", args["{each.name}"])')
    text += body([f"args |= {{{', '.join(texts)}}}"])
    popped = ", ".join(f'"{each.name}": args.pop("{each.name}")' for each in keywords)
    named = ", keywords" if keywords else ""
    text += body([f"keywords = {{{popped}}}"] if keywords else [])
    return text + body([f"return Sample(tuple(args.values()){named})"])


def _dtypes_of_results(operator: Operator) -> str:
    found = ("dtype" if each.dtype == "same" else f"torch.{each.dtype}" for each in operator.results.values())
    return f"[{', '.join(found)}]"

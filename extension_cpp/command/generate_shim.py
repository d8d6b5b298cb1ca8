"""Generates the shim of an operator for `new --schema`: schemas, checks, allocation and registration."""

from collections.abc import Iterable
from dataclasses import replace

from .generate import (
    NUMBER_TYPES,
    Launch,
    backward_arguments,
    checked_gradients,
    checks,
    checks_of_memory,
    dtypes_of,
    in_backward,
    in_forward,
    is_open,
    launches,
    lines,
    resolved,
    schemas_of,
)
from .roles import Operand, Operator
from .schema import Argument
from .shapes import Part

SCALAR_TYPES = {
    "float64": "Double",
    "float32": "Float",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
}
ANY_OF = {dtype: f"any_of(ScalarType::{kind})" for dtype, kind in SCALAR_TYPES.items()}


def cpp_shape(expression: str, operator: Operator, known: dict[str, str]) -> str:
    """Translates a shape expression to C++. `known` maps names of tensors to C++ expressions of their sizes."""
    made = [_cpp_part(part, known) for part in resolved(expression, operator)]
    return made[0] if len(made) == 1 and made[0][0] != "{" else f"joined({{{', '.join(made)}}})"


def _cpp_part(part: Part, known: dict[str, str]) -> str:
    if not part.tensor:
        return f"{{{part.number.replace('?', 'unknown_size')}}}"
    sizes = known[part.tensor]
    if part.is_size:
        return f"{{size_of({sizes}, {part.begin})}}"
    bounds = "" if part.begin is None and part.end is None else f", {part.begin or 0}"
    return f"sizes_of({sizes}{bounds}{'' if part.end is None else f', {part.end}'})"


def _scalar(operand: Operand) -> str:
    return "dtype" if operand.dtype == "same" else f"ScalarType::{SCALAR_TYPES[operand.dtype]}"


def _parameters(arguments: Iterable[Argument]) -> str:
    return ", ".join(map(_parameter, arguments))


def _parameter(argument: Argument) -> str:
    kind = "Tensor" if argument.is_tensor else NUMBER_TYPES[argument.type]
    kind = f"std::vector<{kind}>" if argument.is_list else kind
    kind = f"std::optional<{kind}>" if argument.is_optional else kind
    return f"const {kind} &{argument.name}" if argument.is_tensor or argument.is_list else f"{kind} {argument.name}"


def _returned(names: list[str]) -> str:
    return "" if not names else names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"


def _result_type(count: int, kind: str = "Tensor") -> str:
    return "void" if count == 0 else kind if count == 1 else f"std::tuple<{', '.join([kind] * count)}>"


def _set_outputs(launch: Launch) -> str:
    made = {each.name: f"{each.name}_dense" if each.is_written else each.name for each in launch.outputs}
    return lines(f"set_output({made[name]}, args.{name}, args.{name}_numel);" for name in made)


def _call(launch: Launch, items: str, returned: str) -> str:
    """Returns the statements from the early return to the launch and the copies after it.

    The early return is for empty results, or, if the op only writes into arguments, for a call without work items. The
    copies bring the results back into written arguments that are not contiguous.
    """
    only_writes = all(each.name in launch.operator.operands for each in launch.outputs)
    empty = f"{items} == 0" if only_writes else " && ".join(f"{each.name}.numel() == 0" for each in launch.outputs)
    text = f"  if ({empty}) return{f' {returned}' if returned else ''};\n"
    text += "" if only_writes or launch.direction == "backward" else _without_items(launch.operator, items)
    text += _arguments(launch, items) + _set_outputs(launch) + _launch(launch)
    return text + lines(f"copy_into({each.name}, {each.name}_dense);" for each in launch.outputs if each.is_written)


def _without_items(operator: Operator, items: str) -> str:
    """Returns the statements that write zeros into the results of a call without work items, as a sum of nothing is 0.

    Flat work needs none, because its results have elements only if there are work items.
    """
    if operator.work == "flat":
        return ""
    made = ", ".join(operator.results)
    text = f"  if ({items} == 0) {{\n    for (Tensor each : {{{made}}}) torch::stable::zero_(each);\n"
    returned = "" if operator.schema.has_out else f" {_returned([*operator.results])}"
    return text + f"    return{returned};\n  }}\n"


def _launch(launch: Launch) -> str:
    first = launch.inputs[0].name if launch.inputs else launch.outputs[0].name
    return f"  launch(op, KERNEL({launch.name}), args, {first}, args.items, 1);\n"


def _arguments(launch: Launch, items: str) -> str:
    """Returns the statements that make the tensors contiguous and fill the argument struct.

    They do not set the pointers to outputs, which may not be allocated yet.
    """
    # Each input is in a local variable, because a copy must live until the launch.
    text = lines(f"const auto {each.name}_dense = {_dense(each, launch)};" for each in launch.inputs)
    for each in (each for each in launch.outputs if each.name in launch.operator.operands):
        text += f"  const Tensor {each.name}_dense = as_contiguous({each.name});\n"
    text += f"  {launch.name}_args args{{}};\n"
    for each in launch.inputs:
        text += f"  set_input({each.name}_dense, args.{each.name}, args.{each.name}_numel);\n"
    for each in (each for each in launch.outputs if each.is_written and each.name in launch.operator.results):
        # Items that are already written must not change what other items read.
        read = " || ".join(f"args.{other.name} == {each.name}.const_data_ptr()" for other in launch.inputs)
        made = f"allocate({each.name}.sizes(), {_scalar(each)}, {each.name})"
        text += f"  const bool reads_{each.name} = {read};\n"
        text += f"  const Tensor {each.name}_dense = reads_{each.name} ? {made} : as_contiguous({each.name});\n"
    text += lines(f"args.{name} = {size};" for name, size in launch.sizes.items())
    for number in launch.operator.schema.numbers:
        name = number.name
        if number.is_list:
            text += f"  set_numbers({name}, args.{name}{f', args.{name}_count' if is_open(number) else ''});\n"
        else:
            text += f"  args.{name} = {name}{'.value_or(0)' if number.is_optional else ''};\n"
        text += f"  args.has_{name} = {name}.has_value();\n" if number.is_optional else ""
    return text + f"  args.items = {items};\n  args.dtype = dtype;\n"


def _dense(tensor: Operand, launch: Launch) -> str:
    """Returns the C++ expression of an input as the kernel reads it.

    The input is contiguous. If its pattern is "broadcasts to x", it is also expanded to the shape of x.
    """
    # backward_inputs() leaves a shape empty that backward cannot check. The operand itself still has it.
    shape = tensor.shape or launch.operator.operands.get(tensor.name, tensor).shape
    relation, _, of = shape.rpartition(" ")
    sizes = {each.name: f"{each.name}.sizes()" for each in launch.tensors if not each.is_optional}
    if launch.direction == "backward":
        sizes |= {each: f"{each}_sizes" for each in launch.operator.sizes_of}
    if relation == "broadcasts to" and of in sizes:
        return f"as_expanded({tensor.name}, {sizes[of]})"
    return f"as_contiguous({tensor.name})"


def _items(operator: Operator, launch: Launch) -> str:
    """Returns the C++ expression of the number of work items of a launch."""
    if operator.work == "flat" or launch.direction == "backward":
        numels = [f"{each.name}.numel()" for each in launch.outputs]
        return numels[0] if len(numels) == 1 else f"std::max({{{', '.join(numels)}}})"
    if operator.work == "rows":
        return 'match.size("*")'
    shape = cpp_shape(operator.work.removeprefix("items="), operator, in_forward(operator))
    return f"product_of({shape})"


def _matches(op: str, operands: Iterable[Operand], operator: Operator) -> str:
    """Returns the statements that declare the op's name and check the arguments by a Match."""
    return lines(
        f"{each};" for each in (f'const char *op = "{op}"', "Match match(op)", *checks(operands, operator, ANY_OF))
    )


def _checks(operator: Operator) -> str:
    text = _matches(operator.name, operator.operands.values(), operator)
    for each in operator.operands.values():
        if each.below:
            sizes = cpp_shape(f"[{each.below}]", operator, in_forward(operator))
            text += f'  match.index("{each.name}", {each.name}, product_of({sizes}));\n'
    for each in operator.written:
        if each.is_list:
            text += f"  for (size_t i = 0; i < {each.name}.size(); ++i) {{\n"
            text += '    const std::string place = "[" + std::to_string(i) + "]";\n'
        text += lines(f"{call};" for call in checks_of_memory(each, operator, "op", _named))
        text += "  }\n" if each.is_list else ""
    return text


def _named(operand: Operand) -> str:
    """Returns two C++ arguments: a tensor's name, and the tensor. For a list, they are those of element i."""
    name = operand.name
    return f'("{name}" + place).c_str(), {name}[i]' if operand.is_list else f'"{name}", {name}'


def _with_out(operator: Operator) -> str:
    """Returns the functions of an operator with an overload .out: one computes into given tensors, and two call it."""
    outs, parameters = [*operator.results.values()], _parameters(operator.schema.arguments)
    given = ", ".join([*(each.name for each in operator.schema.arguments), *operator.results])
    with_outs = ", ".join([parameters, *(f"const Tensor &{name}" for name in operator.results)])
    launch = launches(operator)[0]
    text = f"static void compute(const Match &match, {with_outs}) {{\n"
    text += f'  const char *op = "{operator.name}";\n  const dtype_t dtype = match.dtype();\n'
    text += _call(launch, _items(operator, launch), "") + "}\n\n"
    text += f"static {_result_type(len(outs))} forward({parameters}) {{\n"
    text += _checks(operator) + _allocated(operator).replace(" dtype,", " match.dtype(),")
    text += f"  compute(match, {given});\n  return {_returned([*operator.results])};\n}}\n\n"
    text += f"static void forward_out({with_outs}) {{\n" + _checks(operator)
    for each in outs:
        sizes = cpp_shape(each.shape, operator, in_forward(operator))
        text += f'  match("{each.name}", {each.name}, {dtypes_of(each, False, ANY_OF)});\n'
        text += f'  match.sizes("{each.name}", {each.name}, {sizes}, "the result");\n'
        text += lines(f"{call};" for call in checks_of_memory(each, operator, "op", _named))
    return text + f"  compute(match, {given});\n}}\n"


def _allocated(operator: Operator) -> str:
    """Returns the statements that allocate the results."""
    made = ""
    for result in operator.results.values():
        shape = cpp_shape(result.shape, operator, in_forward(operator))
        made += f"  const Tensor {result.name} = allocate({shape}, {_scalar(result)}, {operator.first});\n"
    return made


def _one_call(operator: Operator) -> str:
    """Returns the statements that allocate the results, launch the kernel and return the results."""
    made = _allocated(operator)
    launch, returned = launches(operator)[0], _returned([*operator.results])
    text, items = "  const dtype_t dtype = match.dtype();\n", _items(operator, launch)
    if operator.has_unknown_size:
        text += _arguments(launch, items) + "  int64_t unknown_size = 0;\n  if (args.items > 0) {\n"
        text += f"    const Tensor count = allocate(std::vector<int64_t>{{1}}, ScalarType::Long, {operator.first});\n"
        text += "    args.count = static_cast<int64_t *>(count.mutable_data_ptr());\n"
        text += _launch(launch) + "    unknown_size = number_of(count);\n    args.count = nullptr;\n  }\n" + made
        text += f"  if ({' && '.join(f'{name}.numel() == 0' for name in operator.results)}) return {returned};\n"
        text += _without_items(operator, "args.items")
        text += _set_outputs(launch) + _launch(launch)
    else:
        text += made + _call(launch, items, returned)
    return text + (f"  return {returned};\n" if returned else "") + "}\n"


def _forward(operator: Operator) -> str:
    count, arguments = len(operator.results), operator.schema.arguments
    if operator.schema.has_out:
        return _with_out(operator)
    if not operator.schema.has_lists:
        text = f"static {_result_type(count)} forward({_parameters(arguments)}) {{\n"
        return text + _checks(operator) + _one_call(operator)
    singles = (replace(each, is_list=False) if each.is_tensor else each for each in arguments)
    text = "// Reads and writes one tensor of each list.\n"
    text += f"static {_result_type(count)} one(const Match &match, {_parameters(singles)}) {{\n"
    text += f'  const char *op = "{operator.name}";\n' + _one_call(operator)
    text += f"\nstatic {_result_type(count, 'std::vector<Tensor>')} forward({_parameters(arguments)}) {{\n"
    text += _checks(operator) + lines(f"std::vector<Tensor> {name};" for name in operator.results)
    given = (f"{each.name}[i]" if each.is_tensor and each.is_list else each.name for each in arguments)
    text += f"  for (size_t i = 0; i < {operator.first}.size(); ++i) {{\n"
    call = f"one(match, {', '.join(given)})"
    made = ", ".join(f"{name}_i" for name in operator.results)
    kept = f"const auto [{made}] = " if count > 1 else f"const Tensor {made} = " if count else ""
    text += f"    {kept}{call};\n"
    text += lines((f"{name}.push_back({name}_i);" for name in operator.results), "    ") + "  }\n"
    return text + (f"  return {_returned([*operator.results])};\n" if count else "") + "}\n"


def _backward(operator: Operator) -> str:
    launch = launches(operator)[1]
    parameters = _parameters(backward_arguments(operator))
    text = f"static {_result_type(len(launch.outputs))} backward({parameters}) {{\n"
    text += _matches(f"{operator.name}_backward", launch.inputs, operator)
    for grad, shape, result in checked_gradients(operator):
        sizes = cpp_shape(shape, operator, in_backward(operator))
        text += f'  match.sizes("{grad.name}", {grad.name}, {sizes}, "{result}");\n'
    first = launch.inputs[0].name
    text += "  const dtype_t dtype = match.dtype();\n"
    for name, made in zip(operator.grads, launch.outputs, strict=True):
        given = f"{name}_sizes" if name in operator.sizes_of else name
        sizes = f"gradient_sizes({given})" if made.is_optional else in_backward(operator)[name]
        text += f"  const Tensor {made.name} = allocate({sizes}, {_scalar(made)}, {first});\n"
    returned = _returned([each.name for each in launch.outputs])
    return text + _call(launch, _items(operator, launch), returned) + f"  return {returned};\n}}\n"


def shim(operator: Operator) -> str:
    name = operator.name
    text = f"// {name}: schemas, checks, allocation and registration. {name}.h has the kernels' contract.\n"
    text += f'#include "{name}/{name}.h"\n\n#include "common/shim/fields.h"\n\n'
    text += f"namespace extension_cpp::{name} {{\n\n" + _forward(operator) + "\n"
    text += _backward(operator) + "\n" if operator.grads else ""
    define = "DEF_WITH_NO_GRAD" if operator.grads else "DEF"
    implement = "impl_with_no_grad" if operator.grads else "impl"
    functions = {f"{name}.out": "forward_out", f"{name}_backward": "backward"}
    defined, implemented = "", ""
    for schema in schemas_of(operator):
        op = schema.partition("(")[0]
        is_out = op.endswith(".out")  # the overload has no Autograd kernel, so that it needs none without one
        defined += f'  {"DEF" if is_out else define}(m, "{schema}", &{functions.get(op, "forward")});\n'
        boxed = f"TORCH_BOX(&{functions.get(op, 'forward')})"
        implemented += f'  {"impl" if is_out else implement}(m, "{op}", {boxed});\n'
    text += f"STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {{\n{defined}}}\n\n"
    text += f"REGISTER_KERNELS(m) {{\n{implemented}}}\n\n"
    return text + f"}}  // namespace extension_cpp::{name}\n"

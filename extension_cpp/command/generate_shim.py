"""Generates the shim of an operator for `new --schema`: schemas, checks, allocation and registration."""

from collections.abc import Iterable
from dataclasses import replace

from .generate import NAMED_DTYPES, checks, checks_of_gradients, checks_of_memory, known_sizes, lines, resolved, sizes
from .roles import DTYPES, NUMBER_TYPES
from .schema import Argument, Operator
from .shapes import Part

# What Match gets: the dtypes that a tensor may have; name and tensor of element i of a list.
ALLOWED = {dtype: f"any_of({scalar})" for dtype, (_, scalar) in DTYPES.items()} | NAMED_DTYPES
ELEMENT = '("{0}" + place).c_str(), {0}[i]'


def cpp_shape(expression: str, operator: Operator) -> str:
    """Translates a shape expression to C++."""
    made = [_cpp_part(part, known_sizes(operator)) for part in resolved(expression, operator)]
    return made[0] if len(made) == 1 and made[0][0] != "{" else f"joined({{{', '.join(made)}}})"


def _cpp_part(part: Part, known: dict[str, str]) -> str:
    if not part.tensor:
        return f"{{{part.number.replace('?', 'unknown_size')}}}"
    if part.is_size:
        return f"{{size_of({known[part.tensor]}, {part.index})}}"
    begin, _, end = part.index.partition(":")
    bounds = [begin or "0"] * bool(part.index) + [end] * bool(end)
    return f"sizes_of({', '.join([known[part.tensor], *bounds])})"


def _parameters(arguments: Iterable[Argument]) -> str:
    return ", ".join(map(_parameter, arguments))


def _parameter(argument: Argument) -> str:
    kind = "Tensor" if argument.is_tensor else NUMBER_TYPES[argument.type]
    kind = f"std::vector<{kind}>" if argument.is_list else kind
    kind = f"std::optional<{kind}>" if argument.is_optional else kind
    return f"const {kind} &{argument.name}" if argument.is_tensor or argument.is_list else f"{kind} {argument.name}"


def _returned(operator: Operator) -> str:
    """Returns the statement that returns the results."""
    names = ", ".join(operator.results)
    return f"return{'' if not names else f' {names}' if len(operator.results) == 1 else f' {{{names}}}'};"


def _result_type(operator: Operator, kind: str = "Tensor") -> str:
    kinds = [kind] * len(operator.results)
    return "void" if not kinds else kind if len(kinds) == 1 else f"std::tuple<{', '.join(kinds)}>"


# ---- the call of a kernel ----


def _call(operator: Operator, returned: str) -> str:
    """Returns the statements from the early return to the launch and the copies after it.

    The early return is for empty results, or, if the op only writes into arguments, for a call without work items. The
    copies bring the results back into written arguments that are not contiguous.
    """
    items = "args.items" if operator.has_unknown_size else _items(operator)
    empty = " && ".join(f"{name}.numel() == 0" for name in operator.results) or f"{items} == 0"
    text = f"  if ({empty}) {returned}\n"
    # Results may have elements without work items, but of flat work. They are zeros then, as a sum of nothing is 0.
    if operator.work != "flat" and operator.results:
        zeros = f"for (Tensor each : {{{', '.join(operator.results)}}}) torch::stable::zero_(each);"
        text += f"  if ({items} == 0) {{\n    {zeros}\n    {returned}\n  }}\n"
    text += "" if operator.has_unknown_size else _arguments(operator)
    made = {each.name: f"{each.name}_dense" if each.is_written else each.name for each in operator.outputs}
    text += lines(f"set_output({made[name]}, args.{name}, args.{name}_numel);" for name in made)
    text += _launch(operator)
    return text + lines(f"copy_into({each.name}, {each.name}_dense);" for each in operator.outputs if each.is_written)


def _launch(operator: Operator) -> str:
    first = [*operator.inputs, *operator.outputs][0].name
    return f"  launch(op, KERNEL({operator.kernel}), args, {first}, args.items, 1);\n"


def _arguments(operator: Operator) -> str:
    """Returns the statements that make the tensors contiguous and fill the argument struct. They do not set the
    pointers to outputs, which may not be allocated yet."""
    # Each input is in a local variable, because a copy must live until the launch.
    text = lines(f"const auto {each.name}_dense = {_dense(each, operator)};" for each in operator.inputs)
    text += lines(f"const Tensor {each.name}_dense = as_contiguous({each.name});" for each in operator.written)
    text += f"  {operator.kernel}_args args{{}};\n"
    for each in operator.inputs:
        text += f"  set_input({each.name}_dense, args.{each.name}, args.{each.name}_numel);\n"
    for each in operator.results.values() if operator.has_out else ():
        # Items that are already written must not change what other items read.
        read = " || ".join(f"args.{other.name} == {each.name}.const_data_ptr()" for other in operator.inputs)
        made = f"allocate({each.name}.sizes(), {DTYPES[each.dtype][1]}, {each.name})"
        text += f"  const bool reads_{each.name} = {read};\n"
        text += f"  const Tensor {each.name}_dense = reads_{each.name} ? {made} : as_contiguous({each.name});\n"
    text += lines(f"args.{name} = {size};" for name, size in sizes(operator).items())
    for number in operator.numbers:
        name = number.name
        if number.is_list:
            text += f"  set_numbers({name}, args.{name}{f', args.{name}_count' if number.is_open else ''});\n"
        else:
            text += f"  args.{name} = {name}{'.value_or(0)' if number.is_optional else ''};\n"
        text += f"  args.has_{name} = {name}.has_value();\n" if number.is_optional else ""
    return text + f"  args.items = {_items(operator)};\n  args.dtype = dtype;\n"


def _dense(tensor: Argument, operator: Operator) -> str:
    """Returns the C++ expression of an input as the kernel reads it. The input is contiguous. If its pattern is
    "broadcasts to x", it is also expanded to the shape of x."""
    # The shape of a saved tensor is empty if backward cannot check it. The operand itself still has it.
    shape = tensor.shape or (operator.of or operator).operands.get(tensor.name, tensor).shape
    relation, _, of = shape.rpartition(" ")
    is_given = of in known_sizes(operator) and not (of in operator.operands and operator.operands[of].is_optional)
    if relation == "broadcasts to" and is_given:
        return f"as_expanded({tensor.name}, {known_sizes(operator)[of]})"
    return f"as_contiguous({tensor.name})"


def _items(operator: Operator) -> str:
    """Returns the C++ expression of the number of work items."""
    if operator.work == "rows":
        return 'match.size("*")'
    if operator.work != "flat":
        return f"product_of({cpp_shape(operator.work.removeprefix('items='), operator)})"
    numels = [f"{each.name}.numel()" for each in operator.outputs]
    return numels[0] if len(numels) == 1 else f"std::max({{{', '.join(numels)}}})"


# ---- the functions ----


def _checks(operator: Operator) -> str:
    """Returns the statements that declare the op's name and check the arguments."""
    text = lines([f'const char *op = "{operator.name}";', "Match match(op);"])
    text += lines(f"{call};" for call in checks(operator, ALLOWED))
    for each in operator.operands.values():
        if each.below:
            sizes = cpp_shape(f"[{each.below}]", operator)
            text += f'  match.index("{each.name}", {each.name}, product_of({sizes}));\n'
    for each in operator.written:
        if each.is_list:
            text += f"  for (size_t i = 0; i < {each.name}.size(); ++i) {{\n"
            text += '    const std::string place = "[" + std::to_string(i) + "]";\n'
        text += lines(f"{call};" for call in checks_of_memory(each, operator, "op", ELEMENT))
        text += "  }\n" if each.is_list else ""
    return text + lines(f"{call};" for call in checks_of_gradients(operator, cpp_shape))


def _allocated(operator: Operator, dtype: str = "dtype") -> str:
    """Returns the statements that allocate the results. `dtype` is that of the first tensor."""
    text = ""
    for each in operator.results.values():
        shape = cpp_shape(each.shape, operator)
        if each.is_optional:  # the gradient of an optional tensor
            shape = f"gradient_sizes({known_sizes(operator)[each.shape].removesuffix('.sizes()')})"
        kind = dtype if each.dtype == "same" else DTYPES[each.dtype][1]
        text += f"  const Tensor {each.name} = allocate({shape}, {kind}, {operator.first});\n"
    return text


def _body(operator: Operator) -> str:
    """Returns the statements that allocate the results, launch the kernel and return the results."""
    text, returned = "  const dtype_t dtype = match.dtype();\n", _returned(operator)
    if operator.has_unknown_size:
        text += _arguments(operator) + "  int64_t unknown_size = 0;\n  if (args.items > 0) {\n"
        text += f"    const Tensor count = allocate(std::vector<int64_t>{{1}}, ScalarType::Long, {operator.first});\n"
        text += "    args.count = static_cast<int64_t *>(count.mutable_data_ptr());\n"
        text += _launch(operator) + "    unknown_size = number_of(count);\n    args.count = nullptr;\n  }\n"
    text += _allocated(operator) + _call(operator, returned)
    return text + (f"  {returned}\n" if operator.results else "") + "}\n"


def _function(operator: Operator) -> str:
    if operator.has_out:
        return _with_out(operator)
    if operator.has_lists:
        return _with_lists(operator)
    header = f"static {_result_type(operator)} {operator.direction}({_parameters(operator.arguments)}) {{\n"
    return header + _checks(operator) + _body(operator)


def _with_out(operator: Operator) -> str:
    """Returns the functions of an operator with an overload .out: one computes into given tensors, and two call it."""
    parameters, with_outs = _parameters(operator.arguments), _parameters(operator.overload.arguments)
    given = ", ".join(each.name for each in operator.overload.arguments)
    text = f"static void compute(const Match &match, {with_outs}) {{\n"
    text += f'  const char *op = "{operator.name}";\n  const dtype_t dtype = match.dtype();\n'
    text += _call(operator, "return;") + "}\n\n"
    text += f"static {_result_type(operator)} forward({parameters}) {{\n"
    text += _checks(operator) + _allocated(operator, "match.dtype()")
    text += f"  compute(match, {given});\n  {_returned(operator)}\n}}\n\n"
    text += f"static void forward_out({with_outs}) {{\n" + _checks(operator)
    for each in operator.results.values():
        text += f'  match("{each.name}", {each.name}, {ALLOWED[each.dtype]});\n'
        text += f'  match.sizes("{each.name}", {each.name}, {cpp_shape(each.shape, operator)}, "the result");\n'
        text += lines(f"{call};" for call in checks_of_memory(each, operator, "op", ELEMENT))
    return text + f"  compute(match, {given});\n}}\n"


def _with_lists(operator: Operator) -> str:
    """Returns the functions of an operator on lists. The first computes with a tensor of each list."""
    singles = (replace(each, is_list=False) if each.is_tensor else each for each in operator.arguments)
    text = "// Reads and writes one tensor of each list.\n"
    text += f"static {_result_type(operator)} one(const Match &match, {_parameters(singles)}) {{\n"
    text += f'  const char *op = "{operator.name}";\n' + _body(operator)
    kind = _result_type(operator, "std::vector<Tensor>")
    text += f"\nstatic {kind} forward({_parameters(operator.arguments)}) {{\n"
    text += _checks(operator) + lines(f"std::vector<Tensor> {name};" for name in operator.results)
    given = (f"{each.name}[i]" if each.is_tensor and each.is_list else each.name for each in operator.arguments)
    text += f"  for (size_t i = 0; i < {operator.first}.size(); ++i) {{\n"
    made = ", ".join(f"{name}_i" for name in operator.results)
    kept = f"const auto [{made}] = " if "," in made else f"const Tensor {made} = " if made else ""
    text += f"    {kept}one(match, {', '.join(given)});\n"
    text += lines((f"{name}.push_back({name}_i);" for name in operator.results), "    ") + "  }\n"
    return text + (f"  {_returned(operator)}\n" if operator.results else "") + "}\n"


def shim(operator: Operator) -> str:
    name = operator.name
    text = f"// {name}: schemas, checks, allocation and registration. {name}.h has the kernels' contract.\n"
    text += f'#include "{name}/{name}.h"\n\n#include "common/shim/fields.h"\n\n'
    text += f"namespace extension_cpp::{name} {{\n\n"
    text += "".join(f"{_function(each)}\n" for each in operator.launches)
    defined, implemented = "", ""
    for each in operator.registered:
        is_out = each.name.endswith(".out")  # the overload has no Autograd kernel, so that it needs none without one
        function = "forward_out" if is_out else each.direction
        suffix = "_WITH_NO_GRAD" if operator.grads and not is_out else ""
        defined += f'  DEF{suffix}(m, "{each.schema}", &{function});\n'
        implemented += f'  impl{suffix.lower()}(m, "{each.name}", TORCH_BOX(&{function}));\n'
    text += f"STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {{\n{defined}}}\n\n"
    text += f"REGISTER_KERNELS(m) {{\n{implemented}}}\n\n"
    return text + f"}}  // namespace extension_cpp::{name}\n"

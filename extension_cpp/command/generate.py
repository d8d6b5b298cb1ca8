"""The C, C++ and CUDA files of an operator that `new --schema` writes, and its Python files (generate_python.py).

The kernels compile and loop, and write zeros. `make format` lays the C code out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from .roles import C_TYPES, Operand, Operator, Part, parts
from .schema import Argument

# Found by tests/checks.py, which names the line where a result is wrong.
MARK = "WRITE THE FORMULA HERE: so far these are zeros."
NUMBER_TYPES = {"int": "int64_t", "SymInt": "int64_t", "float": "double", "bool": "bool"}
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


@dataclass
class Launch:
    """One kernel: what it reads and writes."""

    operator: Operator
    direction: str  # forward or backward
    inputs: list[Operand]
    outputs: list[Operand]

    @property
    def name(self) -> str:
        return f"{self.operator.name}_{self.direction}"

    @property
    def numbers(self) -> list[Argument]:
        return self.operator.schema.numbers

    @property
    def sizes(self) -> list[str]:
        """The names in the shapes of its tensors, for which the match has a size."""
        checked = self.operator.operands.values() if self.direction == "forward" else self.inputs
        shapes = (each.shape for each in checked if each.shape.startswith("[") and not each.is_optional)
        words = (word for shape in shapes for word in shape[1:-1].split(", "))
        return [*dict.fromkeys(word for word in words if word != "*" and not word.isdigit())]

    @property
    def tensors(self) -> list[Operand]:
        return [*self.inputs, *self.outputs]


def launches(operator: Operator) -> list[Launch]:
    read = [each for each in operator.operands.values() if not each.is_written]
    found = [Launch(operator, "forward", read, [*operator.written, *operator.results.values()])]
    if operator.grads:
        made = [Operand(f"grad_{name}", operator.operands[name].dtype) for name in operator.grads]
        found.append(Launch(operator, "backward", backward_inputs(operator), made))
    return found


def saved(operator: Operator) -> list[Operand]:
    """The operands and results that backward reads, in the order of its schema."""
    return [operator.operands.get(name) or _saved_result(name, operator) for name in operator.saved]


def backward_inputs(operator: Operator) -> list[Operand]:
    """What backward reads, in the order in which it is checked. The first decides dtype and device of the others."""
    found = sorted([*saved(operator), *grads_out(operator)], key=lambda each: each.dtype != "same" or each.is_optional)
    names = {each.name for each in found}
    # A tensor that is not saved has the sizes of the gradient of a result of its shape.
    like = {each.shape: f"grad_{each.name}" for each in operator.differentiable_results}
    for place, each in enumerate(found):
        relation, _, of = each.shape.rpartition(" ")
        if relation in ("like", "broadcasts to") and of not in names:
            found[place] = replace(each, shape=f"{relation} {like[of]}" if of in like else "")
    return found


def _saved_result(name: str, operator: Operator) -> Operand:
    like = operator.results[name].shape
    return replace(operator.results[name], shape=f"like {like}" if like in operator.saved else "")


def grads_out(operator: Operator) -> list[Operand]:
    """The gradients of results, which backward gets."""
    saved_results = {each.name for each in operator.differentiable_results if each.name in operator.saved}
    return [
        Operand(f"grad_{each.name}", each.dtype, f"like {each.name}" if each.name in saved_results else "")
        for each in operator.differentiable_results
    ]


def backward_schema(operator: Operator) -> str:
    grads = [f"Tensor grad_{each.name}" for each in operator.differentiable_results]
    kept = [f"Tensor{'?' if each.is_optional else ''} {each.name}" for each in saved(operator)]
    sizes = [f"SymInt[] {name}_sizes" for name in operator.sizes_of]
    numbers = [f"{each.type} {each.name}" for each in operator.schema.numbers]
    made = [f"Tensor grad_{name}" for name in operator.grads]
    results = f"({', '.join(made)})" if len(made) > 1 else "Tensor"
    return f"{operator.name}_backward({', '.join([*grads, *kept, *sizes, *numbers])}) -> {results}"


def forward_schema(operator: Operator) -> str:
    letters = iter("abcdefghijklmnop")
    arguments = [
        each.text.replace("(!)", f"({next(letters)}!)") if each.is_written else each.text
        for each in operator.schema.arguments
    ]
    names = [f"Tensor {name}" for name in operator.results]
    results = "()" if not names else "Tensor" if len(names) == 1 else f"({', '.join(names)})"
    return f"{operator.name}({', '.join(arguments)}) -> {results}"


def lines(texts: Iterable[str], indent: str = "  ") -> str:
    return "".join(f"{indent}{text}\n" for text in texts)


# ---- the header ----


def header(operator: Operator) -> str:
    text = f"/* {operator.name}: write the formula here\n"
    for launch in launches(operator):
        text += f" * {launch.name}:\n" if launch.direction == "backward" else ""
        for each in launch.tensors:
            kind = "floating" if each.dtype == "same" else each.dtype
            notes = [kind, "contiguous", *(["NULL if it is None"] if each.is_optional else [])]
            text += f" *   {each.name:<12} {each.shape or 'any shape'}: {', '.join(notes)}\n"
    text += " * Nothing is written if there are no work items. */\n#pragma once\n\n#include <stdbool.h>\n\n"
    text += '#include "common/dtype.h"\n#include "common/range.h"\n\n#ifdef __cplusplus\nextern "C" {\n#endif\n\n'
    for launch in launches(operator):
        text += "typedef struct {\n" + lines(_fields(launch)) + f"}} {launch.name}_args;\n\n"
    text += "/* CPU: work items [begin, end). args points to the struct. */\n"
    text += "".join(f"void {each.name}_cpu(int64_t begin, int64_t end, void *args);\n" for each in launches(operator))
    text += "\n/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */\n"
    for launch in launches(operator):
        text += f"int {launch.name}_cuda(const {launch.name}_args *args, void *stream);\n"
    return text + "\n#ifdef __cplusplus\n}\n#endif\n"


def _fields(launch: Launch) -> list[str]:
    fields = [f"const void *{each.name};" for each in launch.inputs]
    fields += [f"void *{each.name};" for each in launch.outputs]
    fields += [f"int64_t {each.name}_numel;" for each in launch.tensors]
    fields += [f"int64_t {name};" for name in launch.sizes]
    fields += [f"{NUMBER_TYPES[each.type]} {each.name};" for each in launch.numbers]
    return [*fields, "int64_t items;", "dtype_t dtype;"]


# ---- kernels ----


def _pointers(launch: Launch, args: str, cast: str) -> list[str]:
    """Locals of the tensors' types."""
    found = []
    for each in launch.tensors:
        kind = ("" if each in launch.outputs else "const ") + C_TYPES[each.dtype] + " *"
        found.append(f"{kind}{each.name} = {cast.format(kind)}{args}{each.name}{')' if '<' in cast else ''};")
    return found


def _zeros(launch: Launch, args: str, zero: str) -> list[str]:
    found = []
    for each in launch.outputs:
        numel = f"{args}{each.name}_numel"
        value = zero if each.dtype == "same" else "0"
        found += [
            f"for (int64_t j = i * {numel} / {args}items; j < (i + 1) * {numel} / {args}items; ++j) {{",
            f"  {each.name}[j] = {value};",
            "}",
        ]
    return found


def cpu(operator: Operator) -> str:
    name = operator.name
    text = f"/* {name} on the CPU: one work item after the other. The arithmetic is in\n * {name}_cpu_kernel.h. */\n"
    text += f'#include "{name}/{name}.h"\n\n#include "common/cpu/block.h"\n#include "common/cpu/level.h"\n'
    text += '#include "common/cpu/math.h" /* <math.h>, and exp, tanh and fma for loops that vectorise */\n\n'
    text += "".join(f"typedef {each.name}_args {each.direction}_args;\n" for each in launches(operator))
    text += f'\n#define KERNEL_BODY "{name}/{name}_cpu_kernel.h"\n#include "common/cpu/for_each_dtype.h"\n\n'
    for each in launches(operator):
        text += f"static void {each.name}_cpu_range(int64_t begin, int64_t end, const {each.direction}_args *args) {{\n"
        text += (
            f"  for (int64_t i = begin; i < end; ++i) DISPATCH_DTYPE(args->dtype, {each.direction}_item, args, i);\n"
        )
        text += "}\n\n"
    return text + "".join(f"CPU_ENTRY({each.name}_cpu, {each.direction}_args)\n" for each in launches(operator))


def cpu_kernel(operator: Operator) -> str:
    text = f"/* Compiled once per element type by {operator.name}_cpu.c (for_each_dtype.h defines T, ACC, NAME, and\n"
    text += " * WIDEN and NARROW, which make an ACC of a T and a T of an ACC). */\n"
    for launch in launches(operator):
        text += f"\n/* Work item i of args->items. */\nstatic void NAME({launch.direction}_item)"
        text += f"(const {launch.direction}_args *args, int64_t i) {{\n"
        text += lines(_pointers(launch, "args->", "({0})"))
        text += lines(f"(void){each.name};" for each in launch.inputs)
        text += f"  /* {MARK} */\n" + lines(_zeros(launch, "args->", "NARROW(0)")) + "}\n"
    return text


def cuda(operator: Operator) -> str:
    name = operator.name
    text = f"// {name} on the GPU: one thread per work item.\n"
    text += f'#include "{name}/{name}.h"\n\n#include "common/cuda/vector.cuh"\n\nnamespace {name}_kernels {{\n\n'
    text += (
        "constexpr int THREADS = 256;\nconstexpr int64_t MOST_BLOCKS = INT64_C(1) << 30;  // gridDim.x is below 2^31\n"
    )
    for launch in launches(operator):
        text += "\ntemplate <typename T>\n__global__ void __launch_bounds__(THREADS) "
        text += f"{launch.direction}_kernel({launch.name}_args args) {{\n"
        text += lines(_pointers(launch, "args.", "static_cast<{0}>("))
        text += lines(f"(void){each.name};" for each in launch.inputs)
        text += "  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;\n"
        text += "  const int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;\n"
        text += "  for (int64_t i = first; i < args.items; i += step) {\n"
        text += f"    // {MARK}\n" + lines(_zeros(launch, "args.", "from_acc<T>(0)"), "    ") + "  }\n}\n"
    text += "\nstatic unsigned blocks_for(int64_t items) {\n"
    text += "  const int64_t blocks = ceil_div(items, THREADS);\n"
    text += "  return static_cast<unsigned>(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);\n}\n\n"
    text += f"}}  // namespace {name}_kernels\n"
    for launch in launches(operator):
        text += f'\nextern "C" int {launch.name}_cuda(const {launch.name}_args *args, void *stream) {{\n'
        text += f"  using namespace {name}_kernels;\n"
        text += "  return with_dtype(args->dtype, [&](auto zero) {\n    using T = decltype(zero);\n"
        text += "    const cudaStream_t on = static_cast<cudaStream_t>(stream);\n"
        text += f"    {launch.direction}_kernel<T><<<blocks_for(args->items), THREADS, 0, on>>>(*args);\n"
        text += "    return cudaGetLastError();\n  });\n}\n"
    return text


# ---- the shim ----


def cpp_shape(expression: str, operator: Operator, known: dict[str, str]) -> str:
    """A shape as a C++ expression. `known` has the sizes of tensors, by their names."""
    made = [_cpp_part(part, operator, known) for part in parts(expression, operator)]
    return made[0] if len(made) == 1 and made[0][0] != "{" else f"joined({{{', '.join(made)}}})"


def _cpp_part(part: Part, operator: Operator, known: dict[str, str]) -> str:
    if not part.tensor:
        return f"{{{part.number}}}"
    if part.tensor not in known:  # a result: its own expression
        return cpp_shape(operator.results[part.tensor].shape, operator, known)
    sizes = known[part.tensor]
    if part.is_size:
        return f"{{size_of({sizes}, {part.begin})}}"
    bounds = "" if part.begin is None and part.end is None else f", {part.begin or 0}"
    return f"sizes_of({sizes}{bounds}{'' if part.end is None else f', {part.end}'})"


def of_operands(operator: Operator) -> dict[str, str]:
    return {name: f"{name}.sizes()" for name in operator.operands}


def in_backward(operator: Operator) -> dict[str, str]:
    """The sizes that backward knows, of tensors by their names."""
    known = {name: f"{name}.sizes()" for name in operator.saved if name in operator.operands}
    return known | {name: f"{name}_sizes" for name in operator.sizes_of}


def tensors_in(expression: str, operator: Operator) -> set[str]:
    """The operands whose sizes a shape has."""
    found: set[str] = set()
    for part in parts(expression, operator):
        if part.tensor in operator.results:
            found |= tensors_in(operator.results[part.tensor].shape, operator)
        elif part.tensor:
            found.add(part.tensor)
    return found


def _dtypes(operand: Operand, is_first: bool) -> str:
    if operand.dtype == "same":
        return "FLOATING" if is_first else "SAME"
    return {"int64": "INT64", "bool": "BOOL"}.get(
        operand.dtype, f"any_of(ScalarType::{SCALAR_TYPES.get(operand.dtype)})"
    )


def _scalar(operand: Operand) -> str:
    return "dtype" if operand.dtype == "same" else f"ScalarType::{SCALAR_TYPES[operand.dtype]}"


def _parameter(operand: Operand) -> str:
    return f"const {'std::optional<Tensor>' if operand.is_optional else 'Tensor'} &{operand.name}"


def _returned(names: list[str]) -> str:
    return "" if not names else names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"


def _result_type(count: int) -> str:
    return "void" if count == 0 else "Tensor" if count == 1 else f"std::tuple<{', '.join(['Tensor'] * count)}>"


def _call(launch: Launch, items: str, returned: str) -> str:
    """From the early return to the launch."""
    first = launch.inputs[0].name if launch.inputs else launch.outputs[0].name
    empty = " && ".join(f"{each.name}.numel() == 0" for each in launch.outputs)
    text = f"  if ({empty}) return{f' {returned}' if returned else ''};\n"
    for each in launch.inputs:  # a local: a copy must live until the launch
        if each.is_optional:
            text += f"  const std::optional<Tensor> {each.name}_dense =\n      {each.name} ? "
            text += f"std::optional<Tensor>(as_contiguous(*{each.name})) : std::nullopt;\n"
        else:
            text += f"  const Tensor {each.name}_dense = as_contiguous({each.name});\n"
    for each in (each for each in launch.outputs if each.is_written):
        text += f"  const Tensor {each.name}_dense = as_contiguous({each.name});\n"
    text += f"  {launch.name}_args args{{}};\n"
    for each in launch.tensors:
        dense = f"{each.name}_dense" if each in launch.inputs or each.is_written else each.name
        const = "const" if each in launch.inputs else "mutable"
        if each.is_optional:
            text += f"  if ({dense}) args.{each.name} = {dense}->const_data_ptr();\n"
            text += f"  if ({dense}) args.{each.name}_numel = {dense}->numel();\n"
        else:
            text += f"  args.{each.name} = {dense}.{const}_data_ptr();\n  args.{each.name}_numel = {dense}.numel();\n"
    text += lines(f'args.{name} = match.size("{name}");' for name in launch.sizes)
    text += lines(f"args.{each.name} = {each.name};" for each in launch.numbers)
    text += f"  args.items = {items};\n  args.dtype = dtype;\n"
    text += f"  launch(op, KERNEL({launch.name}), args, {first}, args.items, 1);\n"
    return text + lines(f"copy_into({each.name}, {each.name}_dense);" for each in launch.outputs if each.is_written)


def _items(operator: Operator, launch: Launch) -> str:
    """How many work items a launch has."""
    if operator.work == "flat" or launch.direction == "backward":
        numels = [f"{each.name}.numel()" for each in launch.outputs]
        return numels[0] if len(numels) == 1 else f"std::max({{{', '.join(numels)}}})"
    if operator.work == "rows":
        return 'match.size("*")'
    shape = cpp_shape(operator.work.removeprefix("items="), operator, of_operands(operator))
    return f"product_of({shape})"


def _matches(operands: list[Operand]) -> str:
    shapes = (f', "{each.shape}"' if each.shape else "" for each in operands)
    return lines(
        f'match("{each.name}", {each.name}, {_dtypes(each, number == 0)}{shape});'
        for number, (each, shape) in enumerate(zip(operands, shapes, strict=True))
    )


def _forward(operator: Operator) -> str:
    launch, names = launches(operator)[0], list(operator.results)
    parameters = [
        _parameter(operator.operands[each.name]) if each.is_tensor else f"{NUMBER_TYPES[each.type]} {each.name}"
        for each in operator.schema.arguments
    ]
    text = f"static {_result_type(len(names))} forward({', '.join(parameters)}) {{\n"
    text += f'  const char *op = "{operator.name}";\n  Match match(op);\n' + _matches(list(operator.operands.values()))
    for each in operator.operands.values():
        if each.below:
            sizes = cpp_shape(f"[{each.below}]", operator, of_operands(operator))
            text += f'  match.index("{each.name}", {each.name}, product_of({sizes}));\n'
    for each in operator.written:
        text += f'  check_writable(op, "{each.name}", {each.name});\n'
        for other in operator.operands.values():
            if other is not each and not other.is_optional:
                text += f'  check_no_partial_overlap(op, "{each.name}", {each.name}, "{other.name}", {other.name});\n'
    text += "  const dtype_t dtype = match.dtype();\n"
    for result in operator.results.values():
        shape = cpp_shape(result.shape, operator, of_operands(operator))
        text += f"  const Tensor {result.name} = allocate({shape}, {_scalar(result)}, {operator.first});\n"
    returned = _returned(names)
    text += _call(launch, _items(operator, launch), returned)
    return text + (f"  return {returned};\n" if returned else "") + "}\n"


def _backward(operator: Operator) -> str:
    launch = launches(operator)[1]
    grads, kept, known = grads_out(operator), saved(operator), in_backward(operator)
    parameters = [*map(_parameter, [*grads, *kept])]
    parameters += [f"const std::vector<int64_t> &{name}_sizes" for name in operator.sizes_of]
    parameters += [f"{NUMBER_TYPES[each.type]} {each.name}" for each in operator.schema.numbers]
    text = f"static {_result_type(len(launch.outputs))} backward({', '.join(parameters)}) {{\n"
    text += f'  const char *op = "{operator.name}_backward";\n  Match match(op);\n' + _matches(launch.inputs)
    for result, grad in zip(operator.differentiable_results, grads, strict=True):
        if not grad.shape and tensors_in(result.shape, operator) <= known.keys():
            sizes = cpp_shape(result.shape, operator, known)
            text += f'  match.sizes("{grad.name}", {grad.name}, {sizes}, "{result.name}");\n'
    first = launch.inputs[0].name
    text += "  const dtype_t dtype = match.dtype();\n"
    for name, made in zip(operator.grads, launch.outputs, strict=True):
        sizes = f"{name}_sizes" if name in operator.sizes_of else f"{name}.sizes()"
        text += f"  const Tensor {made.name} = allocate({sizes}, {_scalar(made)}, {first});\n"
    returned = _returned([each.name for each in launch.outputs])
    return text + _call(launch, _items(operator, launch), returned) + f"  return {returned};\n}}\n"


def shim(operator: Operator) -> str:
    name = operator.name
    text = f"// {name}: schemas, checks, allocation and registration. {name}.h has the kernels' contract.\n"
    text += f'#include "{name}/{name}.h"\n\n#include <algorithm>\n\n#include "common/shim/match.h"\n\n'
    text += f"namespace extension_cpp::{name} {{\n\n" + _forward(operator) + "\n"
    text += _backward(operator) + "\n" if operator.grads else ""
    define = "DEF_WITH_NO_GRAD" if operator.grads else "DEF"
    schemas = [(name, "forward", forward_schema(operator))]
    if operator.grads:
        schemas.append((f"{name}_backward", "backward", backward_schema(operator)))
    text += "STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {\n"
    text += "".join(f'  {define}(m, "{schema}", &{function});\n' for _, function, schema in schemas) + "}\n\n"
    implement = "impl_with_no_grad" if operator.grads else "impl"
    text += "REGISTER_KERNELS(m) {\n"
    text += "".join(f'  {implement}(m, "{op}", TORCH_BOX(&{function}));\n' for op, function, _ in schemas) + "}\n\n"
    return text + f"}}  // namespace extension_cpp::{name}\n"

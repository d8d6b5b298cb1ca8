"""Generates the header and the kernels of an operator for `new --schema`.

The module also has the functions that the generators of the other files share. The generated kernels compile, and
write zeros into all outputs. tree.laid_out() formats the C code later.
"""

from collections.abc import Callable, Iterable

from .roles import DTYPES, MOST, NUMBER_TYPES
from .schema import Argument, Operator
from .shapes import Part, parts, words_of

# Marks the place for the formula. If a result is wrong, tests/judge.py names the lines that still have this mark.
MARK = "WRITE THE FORMULA HERE: so far these are zeros."


# ---- sizes ----


def sizes(operator: Operator) -> dict[str, str]:
    """Returns a dictionary from the sizes that the shape patterns name to their C++ expressions in the shim. Backward
    also knows the named sizes of a tensor with a gradient that is not saved."""
    found: dict[str, str] = {}
    for each in operator.operands.values():
        names = [word for word in words_of(each.shape) if word.isidentifier() and not each.is_optional]
        found |= {word: f'match.size("{word}")' for word in names}
    for each in _unsaved(operator):
        words = [] if each.is_optional else words_of(each.shape)
        for place, word in enumerate(words):
            if word.isidentifier():
                dim = place - len(words) if "*" in words[:place] else place
                found.setdefault(word, f"size_of({each.name}_sizes, {dim})")
    return found


def _unsaved(operator: Operator) -> list[Argument]:
    """Returns the tensors of which backward gets the sizes alone."""
    return [] if operator.of is None else [operator.of.operands[name] for name in operator.of.sizes_of]


def known_sizes(operator: Operator) -> dict[str, str]:
    """Returns a dictionary from the tensors to the C++ expressions of their sizes. Lists of numbers are in it, too,
    because a shape may have their values as sizes."""
    found = {name: f"{name}.sizes()" for name in operator.operands}
    found |= {each.name: each.name for each in operator.number_lists}
    return found | {each.name: f"{each.name}_sizes" for each in _unsaved(operator)}


def resolved(expression: str, operator: Operator) -> list[Part]:
    """Returns the parts of a shape expression, with those of a result's shape in place of the result."""
    found: list[Part] = []
    for part in parts(expression):
        result = (operator.of or operator).results.get(part.tensor)
        found += [part] if result is None else resolved(result.shape, operator)
    return found


# ---- checks, the same in the shim and in the fake ----


# The dtypes that a tensor may have, as Match gets them. The generators have the texts of those without a name.
NAMED_DTYPES = {"same": "SAME", "int64": "INT64", "bool": "BOOL"}


def checks_of_memory(written: Argument, operator: Operator, op: str, element: str) -> list[str]:
    """Returns the calls that check the memory of a tensor that is written, beside that of arguments and of the outputs
    before it. `element` has two arguments of such a call, the name of element i of a list and the element."""

    def named(tensor: Argument) -> str:
        return (element if tensor.is_list else '"{0}", {0}').format(tensor.name)

    before = [*operator.results.values()]
    before = before[: before.index(written)] if written in before else []
    others = [each for each in (*operator.operands.values(), *before) if each is not written and not each.is_optional]
    calls = [f"check_no_partial_overlap({op}, {named(written)}, {named(each)})" for each in others]
    return [f"check_writable({op}, {named(written)})", *calls]


def checks(operator: Operator, dtypes: dict[str, str]) -> list[str]:
    """Returns the calls that check tensors and the lengths of lists of numbers, which are equal in C++ and Python."""
    calls = []
    for place, each in enumerate(operator.operands.values()):
        dtype = "FLOATING" if place == 0 and each.dtype == "same" else dtypes[each.dtype]
        shape = f', "{each.shape}"' if each.shape else ""
        calls.append(f'match("{each.name}", {each.name}, {dtype}{shape})')
    for numbers in operator.number_lists:
        least, most = (numbers.length, numbers.length) if numbers.length else (0, MOST)
        calls.append(f'match.length("{numbers.name}", {numbers.name}, {least}, {most})')
    return calls


def checks_of_gradients(operator: Operator, shape: Callable[[str, Operator], str]) -> list[str]:
    """Returns the calls by which backward checks gradients of results that are not saved, if it knows the sizes.
    `shape` translates the shape of a result to the language of the calls."""
    calls = []
    for result in operator.of.differentiable_results if operator.of else []:
        grad = f"grad_{result.name}"
        used = {part.tensor for part in resolved(result.shape, operator) if part.tensor}
        if not operator.operands[grad].shape and used <= known_sizes(operator).keys():
            calls.append(f'match.sizes("{grad}", {grad}, {shape(result.shape, operator)}, "{result.name}")')
    return calls


def lines(texts: Iterable[str], indent: str = "  ") -> str:
    return "".join(f"{indent * bool(text)}{text}\n" for text in texts)


# ---- the header ----


def header(operator: Operator) -> str:
    text = f"/* {operator.name}: write the formula here\n"
    for launch in operator.launches:
        text += f" * {launch.name}:\n" if launch.of else ""
        text += "".join(f" *   {_described(each, operator)}\n" for each in (*launch.inputs, *launch.outputs))
    if operator.indices:
        text += f" * The shim checks the values of {operator.indices} on the CPU alone. On the GPU the kernel must\n"
        text += " * skip those that are negative or too large.\n"
    if operator.has_unknown_size:
        text += " * There are two launches. The first writes the unknown size to *count, where no result is allocated\n"
        text += " * yet. In the second, count is NULL.\n"
    left = "written arguments stay as they are" if operator.written else "results are zeros"
    text += f" * Without work items no kernel runs, and {left}. */\n#pragma once\n\n#include <stdbool.h>\n\n"
    text += '#include "common/dtype.h"\n#include "common/range.h"\n\n#ifdef __cplusplus\nextern "C" {\n#endif\n\n'
    for launch in operator.launches:
        text += "typedef struct {\n" + lines(_fields(launch)) + f"}} {launch.kernel}_args;\n\n"
    text += "/* CPU: work items [begin, end). args points to the struct. */\n"
    text += "".join(f"void {each.kernel}_cpu(int64_t begin, int64_t end, void *args);\n" for each in operator.launches)
    text += "\n/* CUDA: on a cudaStream_t of the current device, which holds the tensors. Returns a cudaError_t. */\n"
    for launch in operator.launches:
        text += f"int {launch.kernel}_cuda(const {launch.kernel}_args *args, void *stream);\n"
    return text + "\n#ifdef __cplusplus\n}\n#endif\n"


def _described(tensor: Argument, operator: Operator) -> str:
    notes = ["floating" if tensor.dtype == "same" else tensor.dtype, "contiguous"]
    notes += ["NULL if it is None"] if tensor.is_optional else []
    notes += ["one tensor of the list"] if tensor.is_list else []
    notes += ["expanded to that shape"] if tensor.shape.startswith("broadcasts to") else []
    is_gradient = tensor.name not in (*operator.operands, *operator.results)
    shape = f"like {tensor.name.removeprefix('grad_')}" if is_gradient else tensor.shape or "any shape"
    return f"{tensor.name:<12} {shape}: {', '.join(notes)}"


def _fields(launch: Operator) -> list[str]:
    fields = [f"const void *{each.name};" for each in launch.inputs]
    fields += [f"void *{each.name};" for each in launch.outputs]
    fields += [f"int64_t {each.name}_numel;" for each in (*launch.inputs, *launch.outputs)]
    fields += [f"int64_t {name};" for name in sizes(launch)]
    numbers = launch.numbers
    for each in numbers:
        fields.append(f"{NUMBER_TYPES[each.type]} {each.name}{f'[{each.length or MOST}]' if each.is_list else ''};")
        fields += [f"int64_t {each.name}_count; /* the number of values in {each.name} */"] if each.is_open else []
    fields += [f"bool has_{each.name};" for each in numbers if each.is_optional]
    fields += ["int64_t *count;"] if launch.has_unknown_size else []
    return [*fields, "int64_t items;", "dtype_t dtype;"]


# ---- kernels ----


def _pointers(launch: Operator, args: str, cast: str) -> list[str]:
    """Returns the C declarations of local pointers to the elements of the tensors, and uses of the inputs."""
    found = []
    for each in (*launch.inputs, *launch.outputs):
        kind = ("" if each in launch.outputs else "const ") + DTYPES[each.dtype][0] + " *"
        found.append(f"{kind}{each.name} = {cast.format(kind)}{args}{each.name}{')' if '<' in cast else ''};")
    return [*found, *(f"(void){each.name};" for each in launch.inputs)]


def _zeros(launch: Operator, args: str, zero: str) -> list[str]:
    found = []
    for each in launch.outputs:
        numel = f"{args}{each.name}_numel"
        value = zero if each.dtype == "same" else "0"
        loop = f"for (int64_t j = i * {numel} / {args}items; j < (i + 1) * {numel} / {args}items; ++j)"
        found += [f"{loop} {{", f"  {each.name}[j] = {value};", "}"]
    return found


def cpu(operator: Operator) -> str:
    name = operator.name
    text = f"/* {name} on the CPU: one work item after the other. The arithmetic is in\n * {name}_cpu_kernel.h. */\n"
    text += f'#include "{name}/{name}.h"\n\n#include "common/cpu/block.h"\n#include "common/cpu/level.h"\n'
    text += '#include "common/cpu/math.h" /* <math.h>, and exp, tanh and fma for loops that vectorise */\n\n'
    text += "".join(f"typedef {each.kernel}_args {each.direction}_args;\n" for each in operator.launches)
    text += f'\n#define KERNEL_BODY "{name}/{name}_cpu_kernel.h"\n#include "common/cpu/for_each_dtype.h"\n\n'
    for each in operator.launches:
        text += f"static void {each.kernel}_cpu_range(int64_t begin, int64_t end, const {each.direction}_args *args)"
        text += " {\n  for (int64_t i = begin; i < end; ++i)"
        text += f" DISPATCH_DTYPE(args->dtype, {each.direction}_item, args, i);\n}}\n\n"
    return text + "".join(f"CPU_ENTRY({each.kernel}_cpu, {each.direction}_args)\n" for each in operator.launches)


def cpu_kernel(operator: Operator) -> str:
    text = f"/* Compiled once per element type by {operator.name}_cpu.c (for_each_dtype.h defines T, ACC, NAME, and\n"
    text += " * WIDEN and NARROW, which make an ACC of a T and a T of an ACC). */\n"
    for launch in operator.launches:
        text += f"\n/* Work item i of args->items. */\nstatic void NAME({launch.direction}_item)"
        text += f"(const {launch.direction}_args *args, int64_t i) {{\n"
        text += lines(_pointers(launch, "args->", "({0})"))
        if operator.has_unknown_size:
            text += "  if (args->count != NULL) {\n    if (i == 0) *args->count = 0;\n    return;\n  }\n"
        text += f"  /* {MARK} */\n" + lines(_zeros(launch, "args->", "NARROW(0)")) + "}\n"
    return text


def cuda(operator: Operator) -> str:
    name = operator.name
    text = f"// {name} on the GPU: one thread per work item.\n"
    if operator.indices:
        text += f"// Nothing has checked the values of {operator.indices}: skip those that are negative or too large.\n"
    text += f'#include "{name}/{name}.h"\n\n#include "common/cuda/vector.cuh"\n\nnamespace {name}_kernels {{\n\n'
    text += "constexpr int THREADS = 256;\n"
    text += "constexpr int64_t MOST_BLOCKS = INT64_C(1) << 30;  // gridDim.x is below 2^31\n"
    for launch in operator.launches:
        text += "\ntemplate <typename T>\n__global__ void __launch_bounds__(THREADS) "
        text += f"{launch.direction}_kernel({launch.kernel}_args args) {{\n"
        text += lines(_pointers(launch, "args.", "static_cast<{0}>("))
        text += "  const int64_t grid_step = static_cast<int64_t>(gridDim.x) * THREADS;\n"
        text += "  const int64_t first_item = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;\n"
        text += "  for (int64_t i = first_item; i < args.items; i += grid_step) {\n"
        if operator.has_unknown_size:
            text += "    if (args.count != nullptr) {\n      if (i == 0) *args.count = 0;\n      continue;\n    }\n"
        text += f"    // {MARK}\n" + lines(_zeros(launch, "args.", "from_acc<T>(0)"), "    ") + "  }\n}\n"
    text += "\nstatic unsigned blocks_for(int64_t items) {\n"
    text += "  const int64_t blocks = ceil_div(items, THREADS);\n"
    text += "  return static_cast<unsigned>(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);\n}\n\n"
    text += f"}}  // namespace {name}_kernels\n"
    for launch in operator.launches:
        text += f'\nextern "C" int {launch.kernel}_cuda(const {launch.kernel}_args *args, void *stream) {{\n'
        text += f"  using namespace {name}_kernels;\n"
        text += "  return with_dtype(args->dtype, [&](auto zero) {\n    using T = decltype(zero);\n"
        text += "    const cudaStream_t on = static_cast<cudaStream_t>(stream);\n"
        text += f"    {launch.direction}_kernel<T><<<blocks_for(args->items), THREADS, 0, on>>>(*args);\n"
        text += "    return cudaGetLastError();\n  });\n}\n"
    return text

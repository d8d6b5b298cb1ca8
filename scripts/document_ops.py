"""Writes docs/ops.md, extension_cpp/_ops.pyi, and all tables of figures in the documents: `make docs`.

These files are made from the docstrings, the schemas and the published results. A test reports which file is stale.
"""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch

try:
    import extension_cpp
except ImportError as error:
    sys.exit(f"error: {error}")
from benchmarks import table
from benchmarks.published import TABLES
from extension_cpp import ops
from extension_cpp.command import info
from extension_cpp.registration import calls

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "ops.md"
STUB = ROOT / "extension_cpp" / "_ops.pyi"


def call(name: str, function: Callable[..., Any]) -> str:
    """Returns how a function is called, such as relu(input), with the arguments' defaults but without types."""
    signature = inspect.signature(function)
    if signature == inspect.signature(torch.nn.Module):  # (*args, **kwargs), which the class does not take
        return f"{name}()"
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return f"{name}{inspect.Signature(bare)}"


def markdown(text: str) -> str:
    """Converts reStructuredText's ``code`` to markdown's `code`."""
    return text.replace("``", "`")


def summary(object: Any) -> str:
    return markdown(" ".join((inspect.getdoc(object) or "").split("\n\n")[0].split()))


def gradients(name: str, function: Callable[..., Any]) -> str:
    """Returns the beginning of the docstring's sentence about derivatives: the arguments and the order."""
    text = " ".join((inspect.getdoc(function) or "").split())
    match = re.search(r"\b(Not d|D)ifferentiable\b[\s,]*([^.;]*)[.;]", text)
    if match is None:
        sys.exit(f"error: the docstring of {name} has no sentence that begins with 'Differentiable' or 'Not ...'.")
    return markdown("none" if match[1] != "D" else match[2] or "yes")


def schemas_of(names: list[str]) -> dict[str, list[str]]:
    """Returns the schemas of each operator by its name. Those of mish are mish, mish_backward, mish_double_backward."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for schema in info.schemas():
        stem = re.split(r"[.(]", schema.removeprefix("extension_cpp::"))[0]
        owners = [name for name in names if stem == name or stem.startswith(f"{name}_")]
        if not owners:
            sys.exit(f"error: {schema} belongs to no public function of ops.py.")
        found[max(owners, key=len)].append(schema)
    return found


def described(name: str, function: Callable[..., Any]) -> str:
    """Converts a docstring to markdown: sections become bold words, arguments a list, and text after "::" a block."""
    lines, text = [], markdown(inspect.getdoc(function) or "")
    text = re.sub(r"::\n\n((?: {4}.*\n)+)", lambda block: f":\n\n```text\n{dedent(block[1])}```\n", text)
    for line in text.splitlines():
        if re.fullmatch(r"\w+:", line):
            lines.append(f"**{line[:-1]}**\n")
        elif argument := re.fullmatch(r" {4}(\w+(?:, \w+)*): (.*)", line):
            lines.append(f"* {', '.join(f'`{name}`' for name in argument[1].split(', '))}: {argument[2]}")
        else:
            lines.append(re.sub(r"^ {4}", "" if not line.startswith(" " * 8) else "  ", line).rstrip())
    body = re.sub(r"(?m)^ {6}", "  ", "\n".join(lines))
    return f"## {name}\n\n`{call(name, function)}`\n\n{body}"


def page() -> str:
    functions = {name: getattr(ops, name) for name in ops.__all__}
    schemas = schemas_of(ops.__all__)
    modules = {name: x for name, x in vars(extension_cpp.modules).items() if name in extension_cpp.nn.__all__}
    rows = [[f"[`{call(name, x)}`](#{name})", summary(x), gradients(name, x)] for name, x in functions.items()]
    of_modules = [[f"`{call(name, x)}`", summary(x)] for name, x in modules.items() if isinstance(x, type)]
    parts = [
        "# Operators",
        "Written by `make docs` from the docstrings in `extension_cpp/functional/` and the schemas; edit those.",
        markdown((ops.__doc__ or "").split("\n\n", 2)[2].strip()),
        "\n".join(table.markdown(["function", "meaning", "differentiable"], rows)),
    ]
    for name, function in functions.items():
        parts += [described(name, function), "\n".join(["```text", *schemas[name], "```"])]
    parts += ["## Modules", "In `extension_cpp.nn`, with the names and habits of torch.nn."]
    parts.append("\n".join(table.markdown(["module", "meaning"], of_modules)))
    parts += [described("convert", extension_cpp.nn.convert), described("revert", extension_cpp.nn.revert)]
    return "\n\n".join(parts) + "\n"


def between(page: str, text: str, what: str, new: str) -> str:
    """Replaces the text between the two comments that name `what` by `new`."""
    begin, end = f"<!-- {what}: written by `make docs` -->\n", f"<!-- end of {what} -->\n"
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"error: {page} has lost the lines between which a table stands: {begin.strip()} {end.strip()}")
    before, rest = text.split(begin)
    return before + begin + new + end + rest.split(end)[1]


def documents() -> dict[Path, str]:
    """Returns the texts of all files that this script writes, by path."""
    found = {PAGE: page(), STUB: stub()}
    for name, what, make in TABLES:
        path = ROOT / name
        found[path] = between(name, found[path] if path in found else path.read_text(), what, make())
    return found


def typed(name: str, schema: torch.FunctionSchema) -> str:
    """Returns the text of a function in _ops.pyi, with the types of a schema, formatted as ruff does."""
    parameters = []
    required = max((i for i, x in enumerate(schema.arguments) if not x.has_default_value()), default=-1)
    for place, argument in enumerate(schema.arguments):  # all by position, the keyword-only ones, too
        kind = re.sub(r"^Optional\[(.*)\]$", r"\1 | None", str(argument.type)).replace("List", "Sequence")
        parameters.append(f"{argument.name}: {kind}{' = ...' if place > required else ''}")
    parameters.append("/")
    results = ", ".join(str(result.type).replace("List", "list") for result in schema.returns)
    joined = ", ".join(parameters)
    end = f") -> {f'tuple[{results}]' if len(schema.returns) > 1 else results}: ..."
    if len(f"def {name}({joined}{end}") <= 120:
        return f"def {name}({joined}{end}\n"
    if len(f"    {joined}") <= 120:
        return f"def {name}(\n    {joined}\n{end}\n"
    return "".join([f"def {name}(\n", *(f"    {parameter},\n" for parameter in parameters), f"{end}\n"])


def stub() -> str:
    """Returns the text of _ops.pyi: functions with the operators' arguments and their no-grad overloads' results."""
    known = calls.overloads()
    schemas = (schema for listed in schemas_of(ops.__all__).values() for schema in listed)
    names = dict.fromkeys(re.split(r"[.(]", schema.removeprefix("extension_cpp::"))[0] for schema in schemas)
    overloads = {name: known[name + calls.NO_GRAD] for name in names if name + calls.NO_GRAD in known}
    head = '"""The types of _ops.py. `make docs` writes them from the operators\' schemas."""\n\n'
    head += "from collections.abc import Sequence\n\nfrom torch import Tensor\n\n"
    return head + "".join(typed(name, overload._schema) for name, overload in overloads.items())


if __name__ == "__main__":
    for path, text in documents().items():
        path.write_text(text)

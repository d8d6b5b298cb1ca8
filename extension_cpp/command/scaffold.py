"""Implements `new --kind`, which copies a template under another name, as an op of this repository or an example."""

import argparse
import ctypes
import importlib.util
import re
import sys

from . import generate_python, new, tree
from .errors import require
from .tree import Addition, Plan

# For each kind of template, the default name of the first op in a new package: what the template computes.
FIRST_OP = {"pointwise": "square", "rows": "mean_square", "reduction": "rms_norm", "scan": "decayed_sum"}
FIRST_OP |= {"index": "gather_rows", "inplace": "momentum_step", "tensors": "foreach_mul", "stencil": "causal_conv"}
FIRST_OP |= {"segments": "segment_sum"}
OP_KINDS = tuple(FIRST_OP)
KINDS = (*OP_KINDS, "accessor")

TORCH_NAMESPACES = ("aten", "prim", "prims", "at", "c10", "std")  # namespaces of operators and of C++

PLACEHOLDER = re.compile("kernel_template|ops_template")

NEXT_EXAMPLE = """
Next:
  python -m pytest -s examples/{name}    compiles it and tests it as it stands
  Then put your arithmetic into {name}.cpp and {name}_cuda.cu (f and derivative), and into reference in {name}.py.
  To take it out again, delete the folder."""


def check_module(what: str, name: str) -> None:
    """Raises CannotMake if Python would find another module under this name, or if it cannot be a C++ namespace."""
    found = importlib.util.find_spec(name)  # a folder without __init__.py has no origin
    is_module = name in sys.stdlib_module_names or (found is not None and found.origin is not None)
    expected = f"expected a name that is free for the {what}"
    require(not is_module and name not in TORCH_NAMESPACES, f"{expected}, but there is a module or namespace '{name}'")
    require(not hasattr(ctypes.CDLL(None), name), f"{expected}, but C has a function '{name}'")


def template_texts(kind: str) -> dict[str, str]:
    """Returns the texts of a template's files, by their place in its folder."""
    folder = tree.TREE / "templates" / kind
    paths = sorted([*folder.glob("*"), *folder.glob("kernel_template/*")])
    return {str(path.relative_to(folder)): path.read_text() for path in paths if path.is_file()}


def from_template(kind: str, name: str) -> Addition:
    """Makes an op from a template, under the name `name`. The op works without further edits."""
    tree.check_identifier("op", name)
    texts = template_texts(kind)
    functions = tree.top_level_names(texts["functional_template.py"])
    named = {PLACEHOLDER.sub(name, place): PLACEHOLDER.sub(name, text) for place, text in texts.items()}

    def definitions(place: str) -> str:
        """Returns the text of a file from its first function on."""
        return named[place][named[place].index("\ndef ") :].strip("\n") + "\n"

    files = {f"extension_cpp/csrc/{place}": text for place, text in named.items() if place.startswith(f"{name}/")}
    files[f"extension_cpp/functional/{name}.py"] = named["functional_template.py"]
    files[f"tests/specs/{name}.py"] = named["spec_template.py"]
    files[f"tests/test_{name}.py"] = named["test_template.py"]
    # The row of the table in docs/ops.md and the op's section there. `make docs` writes the same text.
    row, page = named["docs_template.md"].split("\n\n", 1)
    return Addition(
        name,
        files,
        entry=PLACEHOLDER.sub(name, generate_python.entry("kernel_template", functions)),
        reference=definitions("reference_template.py"),
        # only differentiable operators are in _ops.pyi
        stub=definitions("stub_template.pyi") if "stub_template.pyi" in texts else "",
        row=row + "\n",
        section=page,
        own=functions - {"kernel_template"},
    )


def new_example(name: str) -> None:
    """Writes the template "accessor", which is a separate example and not an op of the library, into examples/."""
    tree.check_identifier("example", name)
    texts = template_texts("accessor")
    symbols = tree.top_level_names(texts["ops_template.py"])
    tree.check_free(Addition(name), tree.sources())
    # The example's test imports the file <name>.py. The name must not hide another module, or be used in that file.
    is_free = name not in {"torch", "pytest"} | symbols
    require(is_free, f"the name '{name}' is taken: the example's own code needs it")
    check_module("example", name)
    plan = Plan()
    for file, text in texts.items():
        file = PLACEHOLDER.sub(name, file.replace("test_template", "test_kernel_template"))
        plan.new[tree.TREE / "examples" / name / file] = PLACEHOLDER.sub(name, text)
    tree.write(plan)
    tree.report(plan, tree.TREE)
    print(NEXT_EXAMPLE.format(name=name))


def addition(options: argparse.Namespace, name: str | None) -> Addition:
    """Returns the op that --schema or --kind asks for. Without a name it gets its default name."""
    operator = new.described(options, name)
    if operator is not None:
        return new.from_schema(operator)
    kind = options.kind or KINDS[0]
    return from_template(kind, FIRST_OP[kind] if name is None else name)


def run_new(options: argparse.Namespace) -> None:
    if options.kind == "accessor":
        new.described(options, None)
        return new_example(options.name)
    state = " as it stands" if options.schema is None else new.UNWRITTEN
    return new.new(addition(options, options.name), state)

"""Implements `new --kind`, which copies a template under another name, as an op of this repository or an example."""

import argparse
import ctypes
import importlib.util
import re
import sys

from . import new, tree
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


def from_template(kind: str, name: str) -> Addition:
    """Makes an op from a template, under the name `name`. The op works without further edits."""
    tree.check_identifier("op", name)
    template = tree.TREE / "templates" / kind
    texts = {path.name: path.read_text() for path in template.iterdir() if path.is_file()}
    named_texts = {file: PLACEHOLDER.sub(name, text) for file, text in texts.items()}

    def section(file: str, start: str) -> str:
        """Returns the text of a file from the line that begins with `start` on."""
        text = named_texts[file]
        return text[text.index(f"\n{start}") :].strip("\n") + "\n"

    files = {
        f"extension_cpp/csrc/{name}/{PLACEHOLDER.sub(name, path.name)}": PLACEHOLDER.sub(name, path.read_text())
        for path in sorted((template / "kernel_template").iterdir())
    }
    files[f"extension_cpp/functional/{name}.py"] = named_texts["functional_template.py"]
    files[f"tests/specs/{name}.py"] = named_texts["spec_template.py"]
    files[f"tests/test_{name}.py"] = named_texts["test_template.py"]
    # The row of the table in docs/ops.md and the op's section there. `make docs` writes the same text.
    row, page = named_texts["docs_template.md"].split("\n\n", 1)
    return Addition(
        name,
        files,
        entry=section("ops_template.py", "# ---- "),
        reference=section("reference_template.py", "def "),
        # only differentiable operators are in _ops.pyi
        stub=section("stub_template.pyi", "def ") if "stub_template.pyi" in texts else "",
        row=row + "\n",
        section=page,
        own=tree.top_level_names(texts["functional_template.py"]) - {"kernel_template"},
    )


def new_example(name: str) -> None:
    """Writes the template "accessor", which is a separate example and not an op of the library, into examples/."""
    tree.check_identifier("example", name)
    template = tree.TREE / "templates" / "accessor"
    texts = {path.name: path.read_text() for path in sorted(template.iterdir()) if path.is_file()}
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

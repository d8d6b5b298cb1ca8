"""Which mutants there are, and which tests may fail with each (scripts/mutants.py)."""

import ast
import contextlib
import functools
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "extension_cpp"
PYTHON_FILES = ["ops", "functional/*", "registration/*", "modules", "layers", "convert/*"]
RULES = {".py": "python.rules", ".cpp": "cpp.rules c_like.rules", ".c": "c.rules c_like.rules"}

# Groups of tests, the likeliest to fail first. A group takes at most 1 to 2 minutes, which a stopped run loses.
Group = tuple[str, ...]
FIRST, LAST = ("refusals", "values", "autograd"), ("graphs", "runtime")  # names of the battery's files
# Tests of the battery that run for all ops at once.
NO_OP = ("test_instruction_sets_agree", "test_compile_with_inductor", "test_ahead_of_time_inductor")


def files(*names: str) -> Group:
    return tuple(f"tests/test_{name}.py" for name in names)


def battery(*names: str) -> Group:
    return tuple(f"tests/battery/test_{name}.py" for name in names)


EVERYTHING = (
    (*battery("refusals"), *files("options", "autograd", "nested", "muladd", "mish", "activation", "gate", "library")),
    files("norm", "fused_norm", "loss", "scan", "rotary", "reduce_sum", "dropout", "bias_gelu", "nn", "layers"),
    battery("autograd"),
    battery("values"),
    battery("graphs"),
    battery("runtime"),
)
CONVERT = tuple(files(name) for name in ("convert_parts", "convert", "convert_loss", "convert_models"))
OF_FILES = {
    "nested": (files("nested"), *EVERYTHING),
    "modules": (files("nn", "norm", "fused_norm", "dropout"), files("convert")),
    "layers": (files("layers", "nn"), files("convert")),
    "norms": ((*battery(*FIRST), "-k", "norm"), files("norm", "fused_norm"), (*battery(*LAST), "-k", "norm")),
    "norm_formulas": ((*battery("autograd"), "-k", "norm"), files("norm", "fused_norm")),
    "plan": (("tests/test_c.py::test_plan", "tests/test_commands.py::test_plan"),),
}
# The test files of a folder of csrc, if they are not just test_FOLDER.py.
OF_FOLDERS = {
    "norm": files("norm", "fused_norm", "norm_kernels"),
    "scan": files("scan", "scan_kernels"),
    "rotary_embedding": files("rotary"),
    "loss": files("loss", "large_logits", "convert_loss"),
}


@dataclass(frozen=True)
class Mutant:
    file: str  # its path from the root
    line: int = field(compare=False)
    right: str
    wrong: str
    nth: int = 0  # its number among equal lines of the file

    def __str__(self) -> str:
        return f"{self.file}: {self.right.strip()}  ->  {self.wrong.strip()}"

    def put_into(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        lines[self.line - 1] = lines[self.line - 1].replace(self.right, self.wrong)
        return "".join(lines)


# ---- which mutants ----


def sources(parts: Sequence[str]) -> list[Path]:
    """The files to mutate; with parts, only those whose path contains one of them."""
    csrc = [path for path in sorted((ROOT / PACKAGE / "csrc").rglob("*")) if path.suffix in (".c", ".h", ".cpp")]
    csrc = [path for path in csrc if "cuda" not in path.name and path.parent.name != "cuda"]
    found = [*(path for name in PYTHON_FILES for path in sorted((ROOT / PACKAGE).glob(f"{name}.py"))), *csrc]
    return [path for path in found if not parts or any(part in str(path.relative_to(ROOT)) for part in parts)]


def is_no_code(statement: ast.stmt) -> bool:
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass)


@functools.lru_cache(maxsize=32)
def code(suffix: str, text: str) -> str | None:
    """A file without comments and annotations, for comparison; None if it is not valid Python."""
    if suffix != ".py":
        return re.sub(r"\s+", " ", re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL))
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # docstrings, and statements that may replace one
            body[:] = [each for each in body if not is_no_code(each)]
        for name in ("annotation", "returns"):  # only mypy reads them
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(""))
    return ast.dump(tree)


def changes_code(mutant: Mutant) -> bool:
    text, suffix = (ROOT / mutant.file).read_text(), Path(mutant.file).suffix
    return code(suffix, mutant.put_into(text)) not in (None, code(suffix, text))


def mutants_of(path: Path) -> list[Mutant]:
    from universalmutator.mutator import mutants_regexp

    lines = path.read_text().splitlines(keepends=True)
    rules = ["universal.rules", *RULES[".c" if path.suffix == ".h" else path.suffix].split()]
    with contextlib.redirect_stdout(io.StringIO()):
        made = mutants_regexp(lines, rules, ignorePatterns=[])
    seen = Counter[str]()
    nth = [seen.update([line]) or seen[line] - 1 for line in lines]
    file = str(path.relative_to(ROOT))
    return [
        Mutant(file, number, lines[number - 1].rstrip("\n"), wrong.rstrip("\n"), nth[number - 1])
        for number, wrong, *_ in made
        if wrong.count("\n") == 1
    ]


def draw(parts: Sequence[str], seed: int) -> list[Iterator[Mutant]]:
    """The mutants of Python and the mutants of C, each in the order in which they are tried. The order comes from a
    hash of the line, so it stays if other lines change."""

    def order(mutant: Mutant) -> bytes:
        key = (seed, mutant.file, mutant.right, mutant.nth, mutant.wrong)
        return hashlib.sha256(repr(key).encode()).digest()

    pool = sorted((mutant for path in sources(parts) for mutant in mutants_of(path)), key=order)
    halves = [[mutant for mutant in pool if mutant.file.endswith(".py") is python] for python in (True, False)]
    return [filter(changes_code, half) for half in halves if half]


# ---- which tests ----


@functools.cache
def ops_of_folders() -> dict[str, list[str]]:
    """The ops of each folder of csrc: the specs whose name occurs in a shim of the folder."""
    specs = [path.stem for path in sorted((ROOT / "tests" / "specs").glob("[!_]*.py"))]
    found = {}
    for folder in sorted((ROOT / PACKAGE / "csrc").iterdir()):
        shims = "".join(path.read_text() for path in folder.glob("*.cpp"))
        found[folder.name] = [name for name in specs if f'"{name}(' in shims]
    return found


def ops_of(mutant: Mutant) -> list[str]:
    """The ops that a change can affect; empty if it may be any op."""
    path = ROOT / mutant.file
    if path.suffix != ".py":
        return ops_of_folders().get(path.parent.name, [])
    if path.stem == "linear_loss":
        return ["linear_cross_entropy", "token_log_probs"]
    text = path.read_text()
    for node in ast.parse(text).body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        if first <= mutant.line <= (node.end_lineno or first):
            if not isinstance(node, ast.FunctionDef):
                of = ast.unparse(node)
            else:
                of = " ".join([node.name, *map(ast.unparse, decorators)])
            return [op for ops in ops_of_folders().values() for op in ops if re.search(rf"(?<![a-z]){op}", of)]
    return []


def tests_of(mutant: Mutant) -> list[Group]:
    stem = Path(mutant.file).stem
    if "/convert/" in mutant.file:
        return [files("convert_loss"), *CONVERT] if stem == "model_loss" else list(CONVERT)
    if stem in OF_FILES:
        return list(OF_FILES[stem])
    ops = ops_of(mutant)
    in_c = [(*files("c"), "-k", "plain")] if not mutant.file.endswith(".py") else []
    if not ops:
        return [*EVERYTHING, *in_c]
    folders = [folder for folder, names in ops_of_folders().items() if set(names) & set(ops)]
    own = tuple(file for folder in folders for file in OF_FOLDERS.get(folder, files(folder)) if (ROOT / file).exists())
    these = " or ".join(ops)
    groups = [(*battery(*FIRST), "-k", these), own, (*battery(*LAST), "-k", " or ".join([these, *NO_OP])), *in_c]
    return [group for group in groups if group]

"""Implements `new-package`, which writes a package with one op, and updates the files that the package copied."""

import argparse
import hashlib
import re
import shlex
from pathlib import Path

import extension_cpp

from . import scaffold, tree
from .errors import CannotMake, require
from .tree import Plan

# The files of a new package. OWN and COPIED come from templates/package, and SHARED from this repository. The user
# edits the files of OWN. --update replaces the other files by those of a later version.
OWN = [".github/workflows/ci.yml", "CHANGELOG.md", "MANIFEST.in", "README.md", "pyproject.toml", "requirements.txt"]
OWN += ["docs/ops.md", "extension_cpp/__init__.py", "extension_cpp/_ops.pyi", "extension_cpp/ops.py"]
OWN += ["extension_cpp/reference.py"]
COPIED = ["Makefile", "benchmark.py", "extension_cpp/__main__.py"]  # from templates/package
SHARED = [".ci/run", ".clang-format", ".gitignore", "LICENSE"]
SHARED += ["build_library.py", "check_environment.py", "setup.py"]
SHARED += ["extension_cpp/_namespace.py", "extension_cpp/_ops.py", "extension_cpp/py.typed"]
SHARED += ["extension_cpp/command/errors.py", "extension_cpp/command/generate*.py", "extension_cpp/command/new.py"]
SHARED += ["extension_cpp/command/roles.py", "extension_cpp/command/schema.py", "extension_cpp/command/shapes.py"]
SHARED += ["extension_cpp/command/tree.py", "extension_cpp/command/__init__.py"]
SHARED += ["extension_cpp/functional/__init__.py", "extension_cpp/registration/*.py"]
SHARED += ["extension_cpp/csrc/library.cpp", "extension_cpp/csrc/common/*.h", "extension_cpp/csrc/common/*/*"]
SHARED += ["tests/__init__.py", "tests/checks.py", "tests/conftest.py", "tests/forked.py", "tests/judge.py"]
SHARED += ["tests/generated.py", "tests/opspec.py", "tests/specs/__init__.py", "tests/battery/*.py"]
SHARED += ["tests/test_judge.py", "tests/test_library.py", "tests/guarded.py", "tests/c/guarded_allocator.c"]
# The file of a new package that lists the copied files, with their digests when they were written and the version of
# extension_cpp that they come from.
MANIFEST = "copied.sha256"

NEXT = """
Next:
  cd {folder}
  make test    builds it in a .venv of its own and tests it; PYTHON=/path/to/python: in an environment of yours
  Then put your arithmetic into {name}/csrc/{op}/, and your formula into {name}/reference.py.
  python -m {name} new my_op --schema "my_op(Tensor x) -> Tensor"    adds another op. README.md says more."""


def renamed(text: str, name: str) -> str:
    text = text.replace("docs/TEMPLATE_USAGE.md", "README.md")
    return re.sub("extension_cpp|EXTENSION_CPP", lambda found: name if found[0].islower() else name.upper(), text)


def copies() -> dict[str, str]:
    """Returns the texts of the files that a new package copies, by their path."""
    texts = {place: (tree.TREE / "templates" / "package" / place).read_text() for place in COPIED}
    found = (path for pattern in SHARED for path in tree.TREE.glob(pattern) if path.is_file())
    return texts | {str(path.relative_to(tree.TREE)): path.read_text() for path in found}


def of_package(texts: dict[str, str], name: str) -> dict[Path, str]:
    """Renames extension_cpp to `name` in the texts and their places, and formats them."""
    license_text = texts.get("LICENSE")  # the copyright line must not be renamed
    found = {Path(renamed(place, name)): renamed(text, name) for place, text in sorted(texts.items())}
    return tree.laid_out(found) | ({Path("LICENSE"): license_text} if license_text is not None else {})


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest(found: dict[Path, str]) -> str:
    """Returns the text of the MANIFEST: a line with a digest for each path, in the format of `sha256sum --check`."""
    lines = (f"{known}  {place}\n" for place, known in sorted(found.items()))
    return f"# Written by new-package of extension_cpp {extension_cpp.__version__.split('+')[0]}\n" + "".join(lines)


def texts_of(folder: Path, name: str, op: tree.Addition) -> tuple[dict[Path, str], dict[Path, str]]:
    """Returns the files of a new package that are the user's, and those that are copied."""
    tree.check_identifier("package", name)
    is_used = name in ("tests", "build", "dist", "docs", "build_library", "benchmark")
    require(not is_used, f"expected a name that is free for the package, but its tree has '{name}' for something else")
    scaffold.check_module("package", name)
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(is_free, f"{folder} exists; nothing is overwritten, so name a folder that does not, or an empty one")
    own = {place: (tree.TREE / "templates" / "package" / place).read_text() for place in OWN}
    shared = copies()
    texts = own | shared
    tree.check_free(op, texts, lambda place: any(f"{each}/".startswith(f"{place}/") for each in texts))
    own = {place: text.replace("kernel_template", op.name) for place, text in own.items()} | op.files
    own |= tree.with_op(own, op)
    copied = of_package(shared, name)
    listed = manifest({place: digest(text.encode()) for place, text in copied.items()})
    return of_package(own, name) | {Path(MANIFEST): listed}, copied


def plan_update(root: Path, name: str) -> tuple[Plan, list[Path]]:
    """Returns the plan of an update, and the copied files that the update leaves because the user changed them."""
    lines = [line.split("  ", 1) for line in (root / MANIFEST).read_text().splitlines() if not line.startswith("#")]
    before = {Path(place): known for known, place in lines}
    texts = of_package(copies(), name)
    after = {place: digest(text.encode()) for place, text in texts.items()}
    plan, left = Plan(), []
    for place in sorted({*after, *before}):
        path = root / place
        now = digest(path.read_bytes()) if path.is_file() else None
        if now == after.get(place):
            continue
        if now != before.get(place):
            left.append(place)
        elif now is None:
            plan.new[path] = texts[place]
        elif place in texts:
            plan.changed[path] = texts[place]
        else:
            plan.removed.append(path)
    # For a file that is left, the MANIFEST keeps the digest of the text that the user started from.
    text = manifest(after | {place: before[place] for place in left if place in before})
    if text != (root / MANIFEST).read_text():
        plan.changed[root / MANIFEST] = text
    return plan, left


def update(folder: Path, dry_run: bool) -> None:
    found = tree.tree_of(folder.resolve())
    if found is None or not (found[0] / MANIFEST).is_file():
        raise CannotMake(f"expected a package that new-package wrote, with a file {MANIFEST}, but got {folder}")
    root = found[0]
    plan, left = plan_update(*found)
    if not dry_run:
        tree.write(plan)
    tree.report(plan, root)
    if left:
        print("Left as they are, because you changed them:")
        print("".join(f"  {place}\n" for place in left), end="")
    print("Nothing was written." if dry_run else "Next:\n  make test")


def run(options: argparse.Namespace) -> None:
    """Runs `new-package`."""
    if options.update:
        return update(options.folder, options.dry_run)
    if options.name is None or options.dry_run:
        raise CannotMake("--dry-run goes with --update" if options.dry_run else "expected --name, or --update")
    op = scaffold.addition(options, options.op)
    own, copied = texts_of(options.folder, options.name, op)
    tree.write(Plan({options.folder / place: text for place, text in (own | copied).items()}))
    tree.report(Plan({options.folder / place: text for place, text in own.items()}), options.folder)
    print(f"  and {len(copied)} copied files, see {MANIFEST}")
    print(NEXT.format(folder=shlex.quote(str(options.folder)), name=options.name, op=op.name))
    return None

"""Tests the commands new, remove and new-package: what they write, reject and undo, and that their files compile.

Names such as planted_op are in no document, because readers give the names in documents' examples to their own ops. So
these tests also pass in a repository with such an op.
"""

import compileall
import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import build_library
from extension_cpp import __main__ as command
from extension_cpp.command import scaffold
from extension_cpp.command import tree as changes
from extension_cpp.command.info import read_build
from tests.forked import python
from tests.test_c import library_objects

ROOT = Path(build_library.__file__).parent
LONG = "a2345678901234567890123_6789"  # the longest allowed name
NOT_COPIED = [".git", ".venv", ".matrix", ".*_cache", ".hypothesis", "__pycache__"]
NOT_COPIED += ["build", "dist", "out", "site", "*.so", "*.egg-info"]
TRACES = re.compile(r"(kernel|ops|test|spec|reference|docs)_template", re.IGNORECASE)


def run(*words, **options) -> subprocess.CompletedProcess:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def run_python(*words, **options) -> subprocess.CompletedProcess:
    done = python(*words, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


@functools.lru_cache(2000)
def read(path: str, of: tuple[int, ...]) -> bytes:
    """Reads a file, and reads it again only if its attributes `of` have changed."""
    return Path(path).read_bytes()


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Returns the contents of every file below a folder, and None for every folder."""
    found: dict[Path, bytes | None] = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("__pycache__", ".ruff_cache", ".mypy_cache")]
        place = Path(parent).relative_to(folder)
        found |= {place / name: None for name in folders}
        for name in files:
            path = os.path.join(parent, name)
            marks = os.stat(path)
            found[place / name] = read(path, (marks.st_ino, marks.st_size, marks.st_mtime_ns, marks.st_ctime_ns))
    return found


def copy_tree(folder: Path) -> Path:
    """Returns a copy of this repository without built files. The folder's name has a space and an accent."""
    copy = folder / "a trée"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return copy


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    copy = copy_tree(tmp_path)
    monkeypatch.setattr(changes, "TREE", copy)
    monkeypatch.chdir(copy)
    return copy


@pytest.fixture(scope="module")
def one_tree(tmp_path_factory) -> Iterator[Path]:
    copy = copy_tree(tmp_path_factory.mktemp("one"))
    before = contents(copy)
    yield copy
    assert contents(copy) == before


@pytest.fixture
def untouched(one_tree, monkeypatch) -> None:
    """Provides one copy of the repository for all commands that must change nothing. It is compared with its first
    state once, after the last of them, because a comparison takes ten times as long as a command."""
    monkeypatch.setattr(changes, "TREE", one_tree)
    monkeypatch.chdir(one_tree)


def lint(folder: Path, mypy: bool, *only: str, new: list[Path] | None = None) -> None:
    """Runs the linters of `make lint` in a folder, and mypy, which is slow, only on request. clang-format checks the
    files `new`, or all files."""
    for module in ("ruff", "mypy", "clang_format"):  # `make lint` needs them, and `make test` does not
        pytest.importorskip(module)
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=folder)
    run(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", ".", cwd=folder)
    if mypy:
        known, cache = ROOT / ".mypy_cache", ROOT / "build" / "tests-mypy"  # the cache has mostly files of torch
        if known.exists() and not cache.exists():
            shutil.copytree(known, cache, dirs_exist_ok=True)
        run(sys.executable, "-m", "mypy", "--cache-dir", cache, *only, cwd=folder)
    paths = folder.rglob("*") if new is None else new
    sources = [path for path in paths if path.suffix in changes.C_SUFFIXES and "build" not in path.parts]
    assert sources
    run(Path(sysconfig.get_path("scripts")) / "clang-format", "--dry-run", "-Werror", *sources, cwd=folder)


# ---- what the commands refuse ----

BAD_IDENTIFIERS = [("", "but got an empty one"), ("planted_op\n", r"but got 'planted_op\n'")]
BAD_IDENTIFIERS += [(name, "is a keyword of C, C++ or Python") for name in ("int", "lambda", "template", "co_await")]
BAD_IDENTIFIERS += [(name, "to be lower-case letters") for name in ("9lives", "_hidden", "in_place_", "a__b", "Gelu")]
BAD_IDENTIFIERS += [(name, "to be lower-case letters") for name in ("my-op", "my op", "../an_op", "ops/an_op", "größe")]
BAD_IDENTIFIERS += [("a" * 29, "at most 28 characters for the")]
TAKEN = [
    ("mish", "extension_cpp/csrc/mish exists"),
    ("layer_norm", "extension_cpp/csrc/norm/norm.cpp has the op layer_norm"),
    ("mish_double", "has the op mish_double_backward"),
    ("mish_no_grad", "has the op mish_no_grad"),
    ("common", "extension_cpp/csrc/common exists"),
    ("modules", "extension_cpp/modules.py exists"),
    ("tests", "tests exists"),
    ("norms", "extension_cpp/functional/norms.py exists"),
    ("drop", "extension_cpp/ops.py has drop"),
    ("load_error", "extension_cpp/__init__.py has load_error"),
    ("sum", "is a builtin of Python"),
]


def refused(capsys, *arguments: str) -> str:
    assert command.main(arguments) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def test_refused_names_of_the_op_module(untouched, capsys):
    assert "the op's own code needs it" in refused(capsys, "new", "checks")


@pytest.mark.parametrize("kind", scaffold.KINDS)
@pytest.mark.parametrize("name, sentence", [*BAD_IDENTIFIERS, *TAKEN], ids=lambda text: repr(text[:20]))
def test_refused_names(untouched, capsys, name, sentence, kind):
    assert sentence in refused(capsys, "new", name, "--kind", kind)


@pytest.mark.parametrize("name", ["load", "reference", "pytest", "json", "numpy", "aten", "exp"])
def test_refused_names_of_examples(untouched, capsys, name):
    refused(capsys, "new", name, "--kind", "accessor")


@pytest.mark.parametrize(
    "name, sentence",
    [
        *BAD_IDENTIFIERS,
        *[(name, f"a module or namespace '{name}'") for name in ("torch", "json", "aten", "extension_cpp")],
        ("exp", "C has a function 'exp'"),
        ("tests", "its tree has 'tests' for something else"),
    ],
    ids=lambda text: repr(text[:20]),
)
def test_refused_names_of_packages(tmp_path, capsys, name, sentence):
    assert sentence in refused(capsys, "new-package", str(tmp_path / "new"), "--name", name)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize(
    "file, text, sentence",
    [
        ("tests/test_planted_op.py", "mine", "tests/test_planted_op.py exists"),
        ("tests/specs/planted_op.py", "mine", "tests/specs/planted_op.py exists"),
        ("docs/ops.md", "\n## Modules\n", "the page of the operators has no table that begins with '| function |'"),
        ("extension_cpp/ops.py", "", "extension_cpp/ops.py has no __all__"),
        ("extension_cpp/ops.py", "__all__ = []\n", "extension_cpp/ops.py imports nothing from .registration.entries"),
    ],
)
def test_nothing_is_overwritten(tree, capsys, file, text, sentence):
    """A command overwrites no existing file, and does not edit a file in which it cannot find the place to edit."""
    (tree / file).write_text(text)
    before = contents(tree)
    assert sentence in refused(capsys, "new", "planted_op")
    assert contents(tree) == before


def test_package_goes_into_an_empty_folder_only(tmp_path, capsys):
    for name, make in (("file", Path.touch), ("full", lambda path: (path / "sub").mkdir(parents=True))):
        make(tmp_path / name)
        before = contents(tmp_path)
        sentence = refused(capsys, "new-package", str(tmp_path / name), "--name", "my_kernels")
        assert "exists; nothing is overwritten" in sentence and contents(tmp_path) == before
    before = contents(tmp_path)
    sentence = refused(capsys, "new-package", str(tmp_path / "file" / "sub"), "--name", "my_kernels")
    assert "File exists; everything is as it was" in sentence or "Not a directory" in sentence
    assert contents(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert command.main(["new-package", str(tmp_path / "empty"), "--name", "my_kernels"]) == 0
    assert (tmp_path / "empty" / "my_kernels" / "ops.py").exists()


@pytest.mark.parametrize("words", [["new", "an_op"], ["new", "an_op", "--kind", "accessor"], ["remove", "mish"]])
def test_commands_refuse_a_folder_that_is_in_no_tree(untouched, one_tree, tmp_path, monkeypatch, capsys, words):
    """Commands report an error in a folder of no repository or package, and in a package without its own command."""
    monkeypatch.chdir(tmp_path)
    sentence = f"'{words[0]}' works on a checkout of extension_cpp or a package made by new-package, and {tmp_path} is"
    assert sentence in refused(capsys, *words)
    (tmp_path / "build_library.py").write_text('import os\nNAMESPACE = "my_kernels"  # of its operators\n')
    sentence = f"the package my_kernels in {tmp_path} has no command of its own"
    assert sentence in refused(capsys, *words) and sentence in refused(capsys, *words, "--in", str(tmp_path))
    # With --in, or in a folder of a repository, the command finds the repository and runs the repository's own command.
    # The message about the name "common" comes from that command.
    assert "common" in refused(capsys, *words[:1], "common", "--in", str(one_tree / "docs"))
    monkeypatch.chdir(one_tree / "docs")
    assert "common" in refused(capsys, *words[:1], "common")


# ---- what the commands undo ----


FULL_DISK, BY_SIGTERM = OSError(28, "No space left on device"), SystemExit(128 + signal.SIGTERM)
STOPS = [(what, FULL_DISK) for what in ("new", "new --kind accessor", "new-package", "remove")]
STOPS += [("new", KeyboardInterrupt()), ("remove", KeyboardInterrupt()), ("new", BY_SIGTERM)]


@pytest.mark.parametrize("what, error", STOPS, ids=repr)
def test_half_a_job_is_undone(tree, tmp_path, monkeypatch, capsys, what, error):
    """A command that is stopped at any write or deletion undoes all changes, even if a file is half written. A full
    disk, Ctrl-C or SIGTERM stops it, and a second signal does not stop the undoing."""
    arguments = [what.split()[0], "planted_op", *what.split()[1:]]
    if what == "new-package":
        arguments = ["new-package", str(tmp_path / "far" / "away"), "--name", "my_kernels"]
    monkeypatch.setattr(changes, "laid_out", lambda texts: texts)  # formatting at each stop takes most of the time
    if what == "remove":
        assert command.main(["new", "planted_op"]) == 0
    before, at_interrupt = contents(tmp_path), signal.getsignal(signal.SIGINT)
    stop_at = calls = 0

    def stopping(action):
        def run(path: Path, *text, **options):
            nonlocal calls
            calls += 1
            if calls > stop_at and not isinstance(error, OSError):
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
            action(path, *[part[: len(part) // 2] if calls == stop_at else part for part in text], **options)
            if calls == stop_at and isinstance(error, SystemExit):
                signal.raise_signal(signal.SIGTERM)
            if calls == stop_at:
                raise error

        return run

    for name in ("write_text", "write_bytes", "unlink", "rmdir"):
        monkeypatch.setattr(Path, name, stopping(getattr(Path, name)))
    while calls >= stop_at:
        assert contents(tmp_path) == before, f"stopped at {stop_at}"
        stop_at, calls = stop_at + 1, 0
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            command.main(arguments)
        is_told = bool(re.search(r"cannot write .+\w: No space left on device", capsys.readouterr().err))
        assert is_told == (calls >= stop_at and isinstance(error, OSError))
    assert stop_at > 4 and contents(tmp_path) != before
    assert signal.getsignal(signal.SIGINT) is at_interrupt


@pytest.mark.parametrize("place", ["extension_cpp/csrc/planted_op", "tests/specs/planted_op.py", "build/x/planted_op"])
def test_what_is_behind_a_link_stays(tree, tmp_path, capsys, monkeypatch, place):
    monkeypatch.setattr(changes, "laid_out", lambda texts: texts)
    assert command.main(["new", "planted_op"]) == 0
    capsys.readouterr()
    there, elsewhere = tree / place, tmp_path / "elsewhere"
    if there.exists():
        there.rename(elsewhere)
    else:
        elsewhere.mkdir()
        there.parent.mkdir(parents=True)
    there.symlink_to(elsewhere)
    before = contents(tmp_path)
    assert "is behind a symbolic link" in refused(capsys, "remove", "planted_op")
    assert contents(tmp_path) == before


# ---- what the commands write ----


@pytest.mark.parametrize("name", ["ab", "my_template", LONG])
def test_any_name_is_laid_out_and_leaves_no_trace(tree, capsys, name):
    before = contents(tree)
    for kind, suffix in zip(scaffold.KINDS, ["", *"0123456789"], strict=False):
        assert command.main(["new", (name[:-1] if suffix else name) + suffix, "--kind", kind]) == 0
    example = f"{name[:-1]}{suffix}"
    assert "docs/TEMPLATE_USAGE.md" in capsys.readouterr().out
    new = [path for path, text in contents(tree).items() if before.get(path, b"") != text and text is not None]
    for path in new:
        assert not TRACES.search((tree / path).read_text()) and not TRACES.search(str(path)), path
    lint(tree, name == LONG, "extension_cpp", f"examples/{example}", new=[tree / path for path in new])


# Without --slow, packages are made of these kinds alone. Ops of all kinds are made in a copy of the repository, where
# the tests of FEW run.
QUICK = ("pointwise", "rows", "reduction", "scan")
PACKAGES = [("ab", "pointwise"), *((LONG, kind) for kind in QUICK[1:])]
PACKAGES += [pytest.param(LONG, kind, marks=pytest.mark.slow) for kind in scaffold.OP_KINDS if kind not in QUICK]


@pytest.mark.parametrize("name, kind", PACKAGES)
def test_any_package_is_laid_out_and_leaves_no_trace(tmp_path, name, kind):
    folder = tmp_path / "a pâckage"
    assert command.main(["new-package", str(folder), "--name", name, "--kind", kind]) == 0
    for path, text in contents(folder).items():
        assert not TRACES.search(str(path)) and "extension_cpp" not in str(path)
        if text is not None and path.name not in ("LICENSE", "copied.sha256"):
            assert not TRACES.search(text.decode()) and b"extension_cpp" not in text.lower(), path
        if text is not None and path.parts[0] == "tests":  # the modules and sources that it names are in the package
            used = [f"tests/{module}*" for module in re.findall(r"\btests\.(\w+)", text.decode())]
            used += [f"tests/**/{source}" for source in re.findall(r'"(\w+\.c)"', text.decode())]
            assert not [pattern for pattern in used if not list(folder.glob(pattern))], path
    assert (folder / ".ci" / "run").stat().st_mode & 0o111
    lint(folder, mypy=(name, kind) == (LONG, "reduction"))


@pytest.mark.parametrize("kind", scaffold.OP_KINDS)
def test_by_hand_as_the_document_says_is_what_the_command_writes(tree, tmp_path, kind):
    by_hand = tmp_path / "by hand"
    shutil.copytree(tree, by_hand)
    document = (ROOT / "docs" / "TEMPLATE_USAGE.md").read_text().split("## By hand")[1]
    commands = document.split("```bash\n")[1].split("```")[0].replace("my_op", "planted_op")
    run("bash", "-euc", commands.replace("KIND=pointwise", f"KIND={kind}"), cwd=by_hand)
    sources = {path: path.read_text() for path in (by_hand / "extension_cpp" / "csrc" / "planted_op").iterdir()}
    for path, text in changes.laid_out(sources).items():  # as `make format` does
        path.write_text(text)
    ops = by_hand / "extension_cpp" / "ops.py"  # edited as in an editor
    before, added = "from .functional import reduce_sum as sums\n", changes.imports_of("planted_op")
    text = ops.read_text().replace('    "rotary_embedding",\n', '    "rotary_embedding",\n    "planted_op",\n')
    text = text.replace(before, added[0] + before)
    text = text.replace("from .functional.pointwise ", added[1] + "from .functional.pointwise ")
    ops.write_text(f"{text}\n{scaffold.from_template(kind, 'planted_op').entry}")
    readme = by_hand / "README.md"
    readme.write_text(changes.with_count(readme.read_text(), 1))
    assert command.main(["new", "planted_op", "--kind", kind]) == 0
    edited = {Path("docs/ops.md"), *([Path("extension_cpp/_ops.pyi")] if kind != "inplace" else [])}  # by `make docs`
    one, other = contents(by_hand), contents(tree)
    assert one.keys() == other.keys()
    assert {path for path in one if one[path] != other[path]} == edited


def test_an_entry_has_the_functions_of_the_module_and_marks_in_place_of_derivatives():
    given = {
        "scan": [
            "planted_op: fake setup_context backward plain NONE NONE",
            "planted_op_backward: backward_fake backward_setup_context second backward_plain NONE",
        ],
        "stencil": ["planted_op: fake backward plain NONE NONE", "planted_op_backward: backward_fake NO_SECOND NONE"],
        "inplace": ["planted_op: fake WRITES NONE NONE", "planted_op.out: out_fake WRITES NONE"],
        "tensors": ["planted_op: fake setup_context backward plain NONE NONE"],
    }
    for kind, entries in given.items():
        heading, *calls = scaffold.from_template(kind, "planted_op").entry.split("register(")
        assert heading == "# ---- planted_op ----\n\n"
        found = [re.findall(r'"(.+)"|\w+=(?:planted_op_functions\.planted_op_)?(\w+),\n', call) for call in calls]
        assert [f"{op}: {' '.join(given for _, given in others)}" for (op, _), *others in found] == entries
        parts = [part for call in calls for part in re.findall(r"(\w+)=", call)]
        assert [part for part in parts if part not in ("setup_context", "plain", "nested")] == (
            ["fake", "backward", "sharding"] * len(calls)
        )


def test_the_marks_of_an_entry_are_imported():
    """The ops.py of a package of an earlier version imports only the marks that its ops use. A new op adds others."""
    text = "from .registration.entries import NONE, register\n\n__all__ = [\n]\n"
    entry = scaffold.from_template("stencil", "planted_op").entry
    head, added = changes.with_entry(text, "planted_op", entry).split("\n\n__all__")
    assert head.splitlines() == [
        *map(str.strip, changes.imports_of("planted_op")),
        "from .registration.entries import NO_SECOND",
        "from .registration.entries import NONE, register",
    ]
    assert entry in added
    package = (ROOT / "templates" / "package" / "extension_cpp" / "ops.py").read_text()
    for kind in scaffold.OP_KINDS:
        entry = scaffold.from_template(kind, "planted_op").entry
        assert changes.with_entry(package, "planted_op", entry).count("from .registration.entries") == 1


def test_removed_leaves_nothing(tree, capsys):
    """Removing ops one by one leaves no file and no object. There is an op of each kind, and a second of one."""
    before = contents(tree)
    names = {"other_op": scaffold.OP_KINDS[0]} | {f"planted_{kind}": kind for kind in scaffold.OP_KINDS}
    for name, kind in names.items():
        assert command.main(["new", name, "--kind", kind]) == 0
    for name in (*list(names)[1::2], *list(names)[::2]):
        for folder in (f"build/release-cpu/v4/{name}", f"build/release-cpu/{name}"):
            (tree / folder).mkdir(parents=True)
        capsys.readouterr()
        assert command.main(["remove", name]) == 0
        told = capsys.readouterr().out
        assert f"  extension_cpp/csrc/{name}/{name}.cpp\n" in told and "  extension_cpp/ops.py\n" in told
        assert not any(name in str(path) for path in contents(tree))
    shutil.rmtree(tree / "build")
    after = contents(tree)
    assert after == before


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("nothing", "there is no op 'nothing': no extension_cpp/csrc/nothing/nothing.cpp"),
        ("accessor", "(an example is a folder: delete it)"),
        ("common", "there is no op 'common'"),
        ("mish", "uses extension_cpp.mish; take that out first"),
        ("relu", "uses "),
        ("../mish", "to be lower-case letters"),
    ],
)
def test_refused_removals(untouched, capsys, name, sentence):
    assert sentence in refused(capsys, "remove", name)


# ---- whether new ops and packages work ----


def environment(device: str) -> dict[str, str]:
    others = ("MAKE", "MFLAGS", "DEBUG", "PYTEST", "TORCHINDUCTOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    build = {"TORCH_CUDA_ARCH_LIST": "native"} if device == "cuda" else {"USE_CUDA": "0"}
    return kept | build


def with_objects(tree: Path) -> dict[str, str]:
    """Copies the objects of this repository's build into `tree`, so that only new code and the shims are compiled
    there. Returns the environment for a build without GPU code, where new code would share a file with other ops."""
    build, folder = read_build(), library_objects()
    if build is None or folder is None:  # no release build in build/ has this library, or a source is newer
        return environment("cpu") | {"DEBUG": "1"}
    shutil.copytree(folder, tree / "build" / "release-cpu")
    return environment("cpu")


def check_versions(installed: Path, package: str) -> None:
    """Checks that pip reports the version of an installed package that the package itself has."""
    ask = f"import {package}, importlib.metadata; print(importlib.metadata.version('{package}'), {package}.__version__)"
    names = run_python("-c", ask, cwd=installed).stdout.split()
    assert len(names) == 2 and names[0] == names[1] and "+" in names[0]


def test_library_that_is_older_than_its_sources(tree):
    """Between `new` and the build, commands report that the library is old, and another `new` works."""
    shutil.copy(ROOT / "extension_cpp" / build_library.LIBRARY, tree / "extension_cpp")
    assert command.main(["new", "first_op"]) == 0
    run_python("-m", "extension_cpp", "new", "second_op", cwd=tree)
    told = python("-m", "extension_cpp", "demo", cwd=tree)
    assert told.returncode == 1 and told.stderr.count("\n") == 1
    assert told.stderr.startswith("error: extension_cpp's library is older than its sources: ")


# An option of pytest for copied tests. Without it pytest would rewrite their assertions, which takes seconds and only
# makes failures more readable.
AS_IT_STANDS = ["--assert=plain"]
# Selects, for pytest -k, tests of unchanged templates in runs without --slow: values, gradients, fakes, messages.
FEW = "right_for_every_shape or opcheck or gradcheck or refuse_what or sentence or real_strides or test_mutation"
FEW += " or dimensions"


# Tests of at most a second that compare the names of all ops with a list. An op made by `new` is in no list.
NAME_LISTS = ["operators_are_documented", "function_is_documented", "demo_shows_every_function", "test_info"]


def test_new_ops_compile_and_pass(tree, pytestconfig):
    """Ops from unchanged templates pass their tests, and tests that compare all ops with a list of names still pass."""
    same_build = with_objects(tree)
    kinds = [kind for kind in scaffold.OP_KINDS if kind != "rows"]
    ops = {"my_kernel_template": "rows"} | {f"kernel_template_{kind}": kind for kind in kinds}
    for name, kind in ops.items():  # these names contain the placeholder, kernel_template
        assert command.main(["new", name, "--kind", kind]) == 0
    assert "my_my_" not in "".join(str(path) for path in contents(tree))
    run(sys.executable, "build_library.py", cwd=tree, env=same_build)
    test = ["-m", "pytest", "-q", *AS_IT_STANDS, "-p", "no:cacheprovider", "--device", "cpu"]
    # Only files that test every op or the templates are collected, which saves seconds. The files in `without` name
    # templates or specs, but have no test for an op made from a template.
    about_ops = re.compile("|".join(["all_specs", "timed_specs", *ops, *NAME_LISTS]))
    without = {"examples", "norm_kernels", "scaffold", "scan", "scan_kernels", "sharding"}
    files = [
        path
        for path in (tree / "tests").glob("test_*.py")
        if path.stem.removeprefix("test_") not in without and about_ops.search(path.name + path.read_text())
    ]
    words = f"kernel_template or {' or '.join(NAME_LISTS)}"
    if not pytestconfig.getoption("--slow"):
        own = " or ".join(f"test_{name}" for name in ops)
        words = f"kernel_template and ({FEW} or {own}) or {' or '.join(NAME_LISTS)}"
    done = run_python(*test, "tests/battery", *files, "-k", words, cwd=tree)
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50


def test_a_new_example_compiles_and_passes(tree, tmp_path):
    """A new example compiles and passes. Its library needs no symbol of PyTorch or Python outside the stable ABI."""
    assert command.main(["new", "planted_op", "--kind", "accessor"]) == 0
    settings = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built")}
    test = ["-m", "pytest", "-q", *AS_IT_STANDS, "-p", "no:cacheprovider", tree / "examples" / "planted_op"]
    run_python(*test, cwd=tree, env=settings)
    (library,) = (tmp_path / "built").rglob("*.so")
    needed = {line.split()[-1] for line in run("nm", "-D", "--undefined-only", library).stdout.splitlines()}
    assert "aoti_torch_new_tensor_handle" in needed
    assert not [name for name in needed if re.match(r"_?Py|_ZNK?(2at|3c10|5torch)", name)]


@pytest.mark.parametrize("kind", scaffold.OP_KINDS)
def test_new_package_compiles_and_passes(tmp_path, kind, device, pytestconfig):
    if device == "cpu" and not (kind == "reduction" and pytestconfig.getoption("--slow")):
        pytest.skip("test_new_ops_compile_and_pass has the same kernels on the CPU; the slow tier builds one package")
    folder = tmp_path / "a pâckage"
    run_python("-m", "extension_cpp", "new-package", folder, "--name", "my_kernels", "--kind", kind, cwd=ROOT)
    with_device = environment(device) | ({"DEBUG": "1"} if device == "cpu" else {})
    run(sys.executable, "build_library.py", cwd=folder, env=with_device)
    some = "not ahead_of_time" if "not ahead_of_time" in pytestconfig.getoption("keyword") else "test"
    done = run_python("-m", "pytest", "-q", *AS_IT_STANDS, "--device", device, "-k", some, cwd=folder, env=with_device)
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50
    if device == "cpu":
        run("make", "wheel", f"PYTHON={sys.executable}", cwd=folder, env=with_device)
        (wheel,) = (folder / "dist").iterdir()
        assert re.fullmatch(r"my_kernels-0\.1\.0\+cpu-py3-none-manylinux_\d+_\d+_\w+\.whl", wheel.name)
        assert {"my_kernels/libmy_kernels.so", "my_kernels/ops.py"} < set(zipfile.ZipFile(wheel).namelist())
        zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
        check_versions(tmp_path / "installed", "my_kernels")


@pytest.mark.slow
@pytest.mark.parametrize("kind", scaffold.OP_KINDS)
def test_the_whole_suite_passes_around_an_op(tree, kind):
    """`make test` passes with a new op, and again after its removal."""
    same_build = with_objects(tree)
    for words in (["new", "my_op", "--kind", kind], ["remove", "my_op"]):
        run_python("-m", "extension_cpp", *words, cwd=tree)
        run("make", "test", f"PYTHON={sys.executable}", cwd=tree, env=same_build)


@pytest.mark.slow
def test_a_new_package_with_the_newest_torch(tmp_path, device):
    """Both commands in the README of a new package work. The first makes an environment, which here all kinds share."""
    python_of_all = []
    for kind in scaffold.OP_KINDS:
        run_python("-m", "extension_cpp", "new-package", tmp_path / kind, "--name", "my_kernels", "--kind", kind)
        for target in ("test", "wheel"):
            done = run("make", target, *python_of_all, cwd=tmp_path / kind, env=environment(device))
            assert "leaked" not in done.stderr  # Triton's binding would report objects kept by gc.freeze as leaked
        python_of_all = [f"PYTHON={tmp_path / scaffold.OP_KINDS[0] / '.venv' / 'bin' / 'python'}"]


@pytest.mark.slow
def test_commands_of_an_installed_wheel(tree, tmp_path):
    """An installed wheel contains all that new-package and the demo need. `new` fails there, because there is no source
    tree."""
    pack = ["setup.py", "--quiet", "bdist_wheel", "--dist-dir", tmp_path]  # pip calls the same, but takes longer
    run(sys.executable, *pack, cwd=tree, env=with_objects(tree))
    (file,) = tmp_path.glob("*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(file).extractall(installed)
    check_versions(installed, "extension_cpp")
    metadata = next(installed.glob("*.dist-info/METADATA")).read_text()
    assert {"Author: The extension_cpp authors", "Classifier: Typing :: Typed"} <= set(metadata.splitlines())
    import_all = (
        "import importlib, pkgutil, re, extension_cpp as e\n"
        "names = [m.name for m in pkgutil.walk_packages(e.__path__, 'extension_cpp.')]\n"
        "names = [name for name in names if not re.search('[.](tree|__main__|lib)', name)]\n"
        "print(*[importlib.import_module(name).__name__ for name in names])"
    )
    modules = [run_python("-c", import_all, cwd=where).stdout.split() for where in (installed, ROOT)]
    assert modules[0] == modules[1] and "extension_cpp.convert.norms" in modules[0]
    of_demo = "from extension_cpp.command import demo_table; print(*(spec.name for spec in demo_table.specs()))"
    shown = [run_python("-c", of_demo, cwd=where).stdout.split() for where in (installed, ROOT)]
    assert shown[0] == shown[1] and "rms_norm" in shown[0]
    compileall.compile_dir(installed, quiet=1)  # as pip does
    for templates in (*scaffold.OP_KINDS, "package"):
        there = installed / "extension_cpp" / "tree" / "templates" / templates
        assert contents(there) == contents(ROOT / "templates" / templates)
    made = ["-m", "extension_cpp", "new-package"]
    for where in (installed, ROOT):
        run_python(*made, tmp_path / f"by {where.name}", "--name", "my_kernels", "--kind", "rows", cwd=where)
    assert contents(tmp_path / f"by {installed.name}") == contents(tmp_path / f"by {ROOT.name}")
    told = python("-m", "extension_cpp", "new", "planted_op", cwd=installed)
    assert told.returncode == 1 and told.stderr.count("\n") == 1
    assert "'new' works on a checkout of extension_cpp or a package made by new-package" in told.stderr

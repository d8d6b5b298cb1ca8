"""Tests that the documents agree with the repository, that their links resolve, and that their code runs.

The words after the three backticks that open a code block say how the block is tested:

    python          It runs. All such blocks of a document run in order and in one namespace.
    python no-run   It must compile. It is a part of a file, or needs a GPU.
    pycon           It is an interactive session (>>>), which runs and must print what the block shows.
    sh, bash        Its make targets, commands and files must exist.
    diff            It shows an error in right code. A test must detect the error (test_pitfalls.py).
    c, cpp, text    It is not tested.
    cpp some/file   The block must occur in this file. The same holds for another language than cpp.

A path in `backticks` or in a sh block must exist if it begins with a folder of the repository. Paths that contain my_
are exempt, because they stand for files of the reader.
"""

import doctest
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest
import yaml

import extension_cpp
from benchmarks import plot, published
from extension_cpp.__main__ import parser
from extension_cpp.command import scaffold
from scripts import document_ops

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", *(f"{folder}/**/*.md" for folder in ("docs", "examples", "benchmarks")))
    for path in ROOT.glob(pattern)
)
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build", "dist", "out", "site"}
LANGUAGES = {"python", "python no-run", "pycon", "sh", "bash", "diff", "c", "cpp", "text"}

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(document: Path, *languages: str) -> Iterator[tuple[int, str, str]]:
    """Yields the line number, language and code of each code block in one of the languages, or of all code blocks."""
    text = document.read_text()
    for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if not languages or match[1].strip() in languages:
            yield text[: match.start()].count("\n") + 2, match[1].strip(), match[2]


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(document: Path) -> set[str]:
    """Returns the anchors that GitHub generates for the headings of a document."""
    titles = re.findall(r"^#+ +(.+?) *$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# Tests of the contents


@pytest.mark.parametrize("name", plot.PUBLISHED)
def test_pictures_are_those_of_the_results(name: str) -> None:
    there, fresh = (ROOT / name).read_text(), plot.published(name)
    digest = re.search(r"<dc:description>[0-9a-f]{64}</dc:description>", fresh)
    assert digest and digest[0] in there, f"{name} is stale: python -m benchmarks plot"
    # Another version of Matplotlib draws the same results slightly differently.
    if f"Matplotlib v{matplotlib.__version__}," in there:
        assert there == fresh, f"{name} is stale: python -m benchmarks plot"


def test_results_can_be_measured_again() -> None:
    """benchmarks/results/README.md names each file there, documents show each JSON file, and all files are small."""
    folder = ROOT / "benchmarks" / "results"
    files = [path for path in folder.iterdir() if path.name != "README.md"]
    text = (folder / "README.md").read_text()
    assert [path.name for path in files if f"`{path.name}`" not in text] == []
    shown = {stem for page in (published.WHOLE, published.ON_THE_SITE) for stems in page.values() for stem in stems}
    assert {path.stem for path in files if path.suffix == ".json"} == shown
    texts = [path.read_text() for path in files]
    assert sum(map(len, texts)) <= 1e6 and sum(text.count("\n") for text in texts) <= 1500


def test_operators_are_documented_as_they_are() -> None:
    """docs/ops.md and the tables of benchmark results in the documents are as `make docs` would write them now."""
    stale = [path.name for path, text in document_ops.documents().items() if path.read_text() != text]
    assert not stale, f"make docs writes {', '.join(stale)} anew"


def test_every_function_is_documented() -> None:
    """docs/ops.md has a table row and a section for every public function of the package."""
    page = document_ops.PAGE.read_text()
    for name in set(extension_cpp.__all__) - {"nn", "reference"}:
        assert f"| [`{name}(" in page and f"\n## {name}\n" in page


@pytest.mark.parametrize("record", sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_decisions_fit_on_a_page(record: Path) -> None:
    text = record.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Evidence", "Rejected"]
    assert text.startswith(f"# {record.name[:3]} ")
    assert len(text.splitlines()) <= 60
    assert f"({record.name})" in record.with_name("README.md").read_text(), "docs/decisions/README.md does not list it"


@each_document
def test_documents_are_short(document: Path) -> None:
    """A document has at most 200 handwritten lines. What `make docs` writes, such as docs/ops.md, does not count."""
    if document.name != "ops.md":
        table = r"<!-- (.*): written by `make docs` -->\n.*?<!-- end of \1 -->\n"
        by_hand = re.sub(table, "", document.read_text(), flags=re.DOTALL)
        assert len(by_hand.splitlines()) <= 200


def test_compatibility_rows_name_their_tests() -> None:
    """Every row of docs/compatibility.md names at least one test, and the test exists."""
    rows = [line for line in (ROOT / "docs" / "compatibility.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| with ")]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`((?:battery/)?test_\w+\.py)::(\w+)`", row.split("|")[-2])
        assert named, row
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), f"{file}: {name}"


def test_the_version_is_the_newest_of_the_changelog() -> None:
    releases = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0][0] == extension_cpp.__version__.split("+")[0]
    numbers = [tuple(map(int, version.split("."))) for version, _ in releases]
    assert numbers == sorted(numbers, reverse=True)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == releases[0]
    metadata = (ROOT / "pyproject.toml").read_text()
    assert f'authors = [{{ name = "{citation["authors"][0]["name"]}" }}]\n' in metadata
    assert f"keywords = {json.dumps(citation['keywords'])}\n" in metadata


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows(workflow: Path) -> None:
    """GitHub workflows have read permission only, and run no commands but those of the repository. Packages are pinned
    to a version, and actions to a commit, because a tag could be moved to other code."""
    content = yaml.safe_load(workflow.read_text())
    targets = "|".join(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    allowed = rf"\.ci/run|make ({targets})( ARGS=\S+)?|rm -r extension_cpp|"
    allowed += r"\.venv/bin/python (scripts/matrix\.py .+|-m pip install (\w+==[\d.]+|--pre --upgrade torch))"
    assert content["permissions"] == {"contents": "read"}
    steps = [step for job in content["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands and [command for command in commands if not re.fullmatch(allowed, command)] == []
    assert all(re.search(r"@[0-9a-f]{40}$", step["uses"]) for step in steps if "uses" in step)


def test_a_commit_with_a_long_subject_is_refused(tmp_path: Path) -> None:
    """The git hook that `pre-commit install` installs rejects a commit whose subject line is too long."""
    pytest.importorskip("pre_commit", reason="pre-commit, of requirements.txt, is not installed")
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    names = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = os.environ | names | {"PRE_COMMIT_HOME": str(tmp_path / "cache"), "GIT_CONFIG_GLOBAL": "/dev/null"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert run("git", "init", "-q").returncode == 0 and run("git", "add", ".pre-commit-config.yaml").returncode == 0
    assert run(sys.executable, "-m", "pre_commit", "install").returncode == 0
    body = "A line of the body may have more characters than that, because it is no subject at all."
    assert run("git", "commit", "-m", "x" * 73, "-m", body).returncode == 1
    told = run("git", "commit", "-m", "x" * 72, "-m", body)
    assert told.returncode == 0, told.stdout + told.stderr


# Tests of links


@each_document
def test_links(document: Path) -> None:
    targets = re.findall(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)", prose(document))
    for target in targets:
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        there = (document.parent / name).resolve() if name else document
        assert there.exists(), f"{target}: no such file"
        assert ROOT in [there, *there.parents], f"{target} leaves the repository"
        assert not anchor or anchor in anchors(there), f"{target}: no such heading"


def names(document: Path) -> Iterator[str]:
    """Yields the texts in a document that may name files and commands: those in backticks and lines of shell blocks."""
    yield from re.findall(r"`([^`\n]+)`", prose(document))
    for _, _, code in blocks(document, "sh", "bash"):
        yield from (line.partition(" #")[0].strip() for line in code.replace("\\\n", " ").splitlines())


@each_document
def test_files_and_commands_exist(document: Path) -> None:
    make_targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = parser()._subparsers._group_actions[0].choices
    for text in names(document):
        for word in re.findall(r"(?<![\w/.<])[\w.]+(?:/[\w.*-]+)+(?![\w.$<{])", text):
            if word.split("/")[0] in FOLDERS and "my_" not in word:
                assert any(ROOT.glob(word)), f"`{text}`: there is no {word}"
        for target in re.findall(r"(?:^|&& |; |=\S+ )make ([a-z][a-z-]*)(?![=\w])", text):
            assert target in make_targets, f"`{text}`: the Makefile has no target {target}"
        for command in re.findall(r"-m extension_cpp ([a-z-]+)", text):
            assert command in commands, f"`{text}`: python -m extension_cpp has no command {command}"


# Tests of code


@each_document
def test_blocks_say_what_they_are(document: Path) -> None:
    for line, language, code in blocks(document):
        if "/" in language:
            language, _, file = language.partition(" ")
            assert code in (ROOT / file).read_text(), f"line {line}: this is not in {file}"
        assert language in LANGUAGES, f"line {line}: '{language}' is none of {sorted(LANGUAGES)}"
    assert document.read_text().count("\n```") % 2 == 0, "a block is not closed"


def in_a_fresh_shell(document: Path, folder: Path) -> str:
    """Runs a document's shell blocks and first Python block in a new copy of the checkout, and returns their output.

    pip and the compilation are replaced by stubs, because the packages and the library already exist. `make run` and
    `make test` take minutes, and are replaced by dry runs.
    """
    checkout = folder / "a checkout"
    left_out = ".git", ".venv", ".matrix", ".*_cache", ".hypothesis", "build", "dist", "out", "site", "__pycache__"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*left_out))
    script = (checkout / "build_library.py").read_text().replace('build(ROOT / "extension_cpp" / LIBRARY)', "pass")
    (checkout / "build_library.py").write_text(script)
    site = checkout / ".venv" / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    venv.create(checkout / ".venv", symlinks=True)
    (site / "pip").mkdir()
    (site / "pip" / "__init__.py").touch()
    (site / "pip" / "__main__.py").write_text("import sys; print('pip', *sys.argv[1:])")
    (site / "there.pth").write_text(sysconfig.get_path("purelib"))
    python = next(blocks(document, "python"))
    chosen = [block for block in blocks(document, "sh", "python") if block[1] == "sh" or block == python]
    commands = [f"python - <<'END'\n{code}END\n" if language == "python" else code for _, language, code in chosen]
    lines = re.sub(r"(?m)^make (?=run|test)", "make --dry-run ", "".join(commands))
    path = f"{Path(sys.base_prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin"  # the first python3 on it is new enough
    shell = ["env", "-i", f"PATH={path}", f"HOME={folder}", "OMP_NUM_THREADS=1", "bash", "--norc", "-euc"]
    done = subprocess.run([*shell, lines], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart_copied_into_a_fresh_shell(tmp_path: Path) -> None:
    told = in_a_fresh_shell(ROOT / "docs" / "QUICKSTART.md", tmp_path)
    assert "pip install --disable-pip-version-check -r requirements.txt\n" in told
    assert "Do they fit?" in told and "x.grad   (1024, 2048)" in told
    assert f"library        {tmp_path / 'a checkout' / 'extension_cpp'}" in told  # the library of the copied checkout


def test_readme_copied_into_a_fresh_shell(tmp_path: Path) -> None:
    told = in_a_fresh_shell(ROOT / "README.md", tmp_path)
    assert "-m extension_cpp demo" in told and "-m pytest" in told
    assert (tmp_path / "a checkout" / "extension_cpp" / "csrc" / "my_op" / "my_op_cpu.c").exists()
    assert (tmp_path / "my_kernels" / "my_kernels" / "ops.py").exists()


def test_readme_has_one_table_and_one_picture_and_names_the_templates() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(re.findall(r"^\|[-|]+\|$", text, re.MULTILINE)) == text.count("![") == 1
    kinds = {path.parent.name for path in ROOT.glob("templates/*/test_template.py")}
    assert all(f"`{kind}`" in text for kind in kinds) and len(kinds) == len(scaffold.KINDS)
    counts = ["five", "six", "seven", "eight", "nine", "ten"]
    assert f"There are {counts[len(kinds) - 5]} [templates]" in text
    assert f"**{len({*extension_cpp.__all__} - {'nn', 'reference'})} fast operators**" in text


@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if any(blocks(path, "python", "python no-run", "pycon"))],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_python_blocks(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, language, code in blocks(document, "python", "python no-run", "pycon"):
        if language == "pycon":
            test = doctest.DocTestParser().get_doctest(code, namespace, document.name, str(document), line - 1)
            told: list[str] = []
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            failed = runner.run(test, out=told.append, clear_globs=False).failed
            assert not failed, "".join(told)
            namespace = test.globs
            continue
        compiled = compile("\n" * (line - 1) + code, str(document), "exec")
        if language == "python":
            exec(compiled, namespace)

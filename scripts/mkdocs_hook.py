"""Hooks of mkdocs (mkdocs.yml, `make site`), which keep the documents at their paths, so that links in them work.

The pages are the documents of the root and of docs/, and the files that they link to: a source file becomes a page with
its text. The navigation is the table of docs/SUMMARY.md. mkdocstrings' docstrings replace those that `make docs` has
written into docs/ops.md for a code host. The schemas there stay.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.lexers import find_lexer_class_for_filename

from benchmarks import published

ROOT = Path(__file__).resolve().parent.parent
HOME, SUMMARY, DECISIONS = "README.md", "docs/SUMMARY.md", "docs/decisions/README.md"
OPERATORS, MODULES, REFERENCE = "docs/ops.md", "docs/nn.md", "docs/reference.md"
TABLES = "docs/performance_tables.md"  # every published figure; the repository does not have this page
AS_THEY_ARE = {".css", ".csv", ".ipynb", ".json", ".md", ".svg", ".txt"}  # other files become pages


class Source(File):
    """A page that shows a file that is not a document."""

    def __init__(self, name: str, site: str) -> None:
        super().__init__(name, None, site, True, dest_uri=f"{name}/index.html")
        lexer = find_lexer_class_for_filename(name)
        language = lexer.aliases[0] if lexer else "text"
        self.content_string = f"# {name}\n\n~~~~~{language}\n{(ROOT / name).read_text()}\n~~~~~\n"

    def is_documentation_page(self) -> bool:
        return True


def links(document: str, text: str) -> Iterator[str]:
    """Yields the files of the repository that a document's text links to."""
    for target in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", re.sub(r"(?ms)^```.*?^```$", "", text)):
        path = (ROOT / document).parent.joinpath(target).resolve()
        if path.is_file():  # mkdocs reports the links to missing files
            yield str(path.relative_to(ROOT))


def sources() -> list[str]:
    """Returns the documents, the files that they link to, and so on."""
    patterns = ("*.md", "docs/**/*.md", "docs/*.css")
    found = sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))
    for name in found:  # the loop appends to the list
        if name.endswith(".md"):
            found += [target for target in dict.fromkeys(links(name, (ROOT / name).read_text())) if target not in found]
    return found


def operators(text: str) -> str:
    """Replaces each docstring in docs/ops.md by mkdocstrings' text. The anchors of the headings stay."""

    def section(match: re.Match[str]) -> str:
        name, schemas = match[1], re.search(r"(?ms)^```text\nextension_cpp::.*?^```\n", match[0])
        if schemas is None:
            target = "(nn.md)" if name == "Modules" else f"[extension_cpp.nn.{name}]"
            return f"## {name}\n\n[On the page of the modules]{target}.\n\n"
        return f'<a id="{name}"></a>\n\n::: extension_cpp.{name}\n\n{schemas[0]}\n'

    return re.sub(r"(?ms)^## (\w+)\n.*?(?=^## |\Z)", section, text)


def generated() -> dict[str, str]:
    """Returns the pages that only the site has."""
    root = "\n    options: {show_root_heading: false, show_root_toc_entry: false"
    code = "show_if_no_docstring: true, show_signature: false, separate_signature: false, show_source: true"
    # The table of modules in docs/ops.md, with links. Its calls also have the arguments inherited from torch.nn.
    table = (ROOT / OPERATORS).read_text().partition("## Modules\n\n")[2].partition("## ")[0]
    table = re.sub(r"(?m)^\| (`(\w+)\(.*?\)`) \|", r"| [\1][extension_cpp.nn.\2] |", table)
    return {
        MODULES: f"# Modules\n\n{table}\n::: extension_cpp.nn{root}}}\n",
        TABLES: published.site_page(),
        REFERENCE: f"# In plain PyTorch\n\n::: extension_cpp.reference{root}, {code}}}\n",
    }


# mkdocs calls the next functions by name.


def on_config(config: MkDocsConfig) -> None:
    """Makes the navigation: the table of docs/SUMMARY.md, with sections for the API reference and the decisions."""
    table = (ROOT / SUMMARY).read_text().partition("\n| document |")[2]
    listed = [name for name in links(SUMMARY, table) if name.endswith(".md") and name not in (OPERATORS, DECISIONS)]
    records = sorted(str(path.relative_to(ROOT)) for path in (ROOT / DECISIONS).parent.glob("[0-9]*.md"))
    config.nav = [
        {"Home": HOME},
        {"API reference": [OPERATORS, MODULES, REFERENCE]},
        {"Documents": [SUMMARY, *listed, TABLES]},
        {"Decisions": [DECISIONS, *records]},
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    found = [file for file in files if file.src_dir != config.docs_dir]  # there paths begin at docs/, not at the root
    for name in sources():
        is_page = Path(name).suffix not in AS_THEY_ARE
        found.append(Source(name, config.site_dir) if is_page else File(name, str(ROOT), config.site_dir, True))
    return Files([*found, *(File.generated(config, name, content=text) for name, text in generated().items())])


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == OPERATORS:
        text = operators(text)
    text = re.sub(r"(?m)^(```\w+) no-run$", r"\1", text)  # tests/test_docs.py explains no-run
    return re.sub(r"(?m)^(```\w+) (\S+/\S+)$", r'\1 title="\2"', text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Removes the "::" that comes before a block in docstrings. Shows the code of reference.py without a click."""
    return html.replace("::</p>", ":</p>").replace('<details class="mkdocstrings-source"', "<details open")

"""Tests `make site`: the API reference has every public name, the navigation every document, and every link works."""

import inspect
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

import extension_cpp
from benchmarks import published

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site into a temporary folder. Broken links and documents outside the navigation are errors."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(module, reason=f"{module}, of requirements.txt, is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"zlib.\n", 1)[1]).decode()
    described = {line.split()[0] for line in inventory.splitlines()}
    functions = [name for name, x in vars(extension_cpp.reference).items() if inspect.isfunction(x)]
    public = {f"extension_cpp.{name}" for name in set(extension_cpp.__all__) - {"nn", "reference"}}
    public |= {f"extension_cpp.nn.{name}" for name in extension_cpp.nn.__all__}
    public |= {f"extension_cpp.reference.{name}" for name in functions}
    assert len(public) > 60
    assert public - described == set()


def test_every_document_is_in_the_navigation(site: Path) -> None:
    page = (site / "404.html").read_text().replace('href="/."', 'href="/"')  # the links of this page begin at the root
    navigation = re.search(r'<nav class="md-nav md-nav--primary".*?</nav>\s*</div>', page, re.DOTALL)
    assert navigation is not None
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        url = f"/{path.relative_to(ROOT).with_suffix('')}/".replace("/README/", "/")
        assert f'href="{url}"' in navigation[0], f"docs/SUMMARY.md does not list {path}"


def test_every_published_table_is_on_the_site(site: Path) -> None:
    """The site has every row of the result tables that no document contains, under the name of the result file."""
    text = (site / "docs" / "performance_tables" / "index.html").read_text()
    for stem in (stem for stems in published.ON_THE_SITE.values() for stem in stems):
        part = text.partition(f">{stem}.json<")[2].partition("<h3")[0]
        assert part.count("<tr>") == published.whole(stem).count("\n| ") > 0, stem


def test_a_source_file_is_a_page_with_its_text(site: Path) -> None:
    text = (site / "extension_cpp" / "csrc" / "scan" / "scan_plan.h" / "index.html").read_text()
    assert re.search(r"<h1[^>]*>extension_cpp/csrc/scan/scan_plan.h<", text)
    assert '<span class="cp">#include' in text

"""Tests tests/planted.py: its verdicts on errors in tiny modules, and that each error of planted_errors.py applies."""

from pathlib import Path

import pytest

from tests import planted
from tests.planted_errors import ERRORS, Planted

TINY = {
    "code_.py": "def f(x):\n    while x > 9:\n        x -= 1\n    return x\n",
    "tests/test_foreign.py": "def test_broken(): assert False\n",
    "tests/test_large.py": "import code_\ndef test_f(): assert code_.f(12) == 9\n",
    "tests/test_end.py": "import code_, os\ndef test_end(): assert code_.f(1) == 1 or os._exit(3)\n",
}


@pytest.mark.parametrize("error", ERRORS, ids=range(1, len(ERRORS) + 1))
def test_every_error_applies(error: Planted) -> None:
    text = planted.planted_text(planted.ROOT, error)
    assert text and text != (planted.ROOT / error.file).read_text()
    if error.file.endswith(".py"):
        compile(text, error.file, "exec")
    files = [word for word in error.tests.split() if word.startswith("tests")]
    assert files and all((planted.ROOT / file).exists() for file in files)


def test_no_error_is_there_twice() -> None:
    assert len({(error.file, error.old) for error in ERRORS}) == len(ERRORS)


@pytest.mark.parametrize(
    "old, new, tests, verdict, test",
    [
        ("-= 1", "-= 2", "tests/test_large.py", "killed", "tests/test_large.py::test_f"),
        ("-= 1", "-= 2", "tests", "killed", "tests/test_large.py::test_f"),  # test_broken fails without the error, too
        ("return x", "return x + 1", "tests/test_end.py", "killed", "tests/test_end.py::test_end"),
        ("> 9", "> 8 + 1", "tests/test_large.py", "survived", ""),
        ("-= 1", "-= 2", "tests/test_end.py", "survived", ""),
        ("-= 1", "-= 2", "tests/test_foreign.py", "fails without it, too", "tests/test_foreign.py::test_broken"),
        ("-= 1", "-= 0", "tests/test_large.py", "timeout", ""),
        ("-= 3", "-= 2", "tests", "no longer applies", ""),
        ("x", "y", "tests", "no longer applies", ""),
    ],
)
def test_verdicts(
    old: str, new: str, tests: str, verdict: str, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in TINY.items():
        for tree in ("built", "unchanged"):
            (tmp_path / tree / "tests").mkdir(parents=True, exist_ok=True)
            (tmp_path / tree / name).write_text(text)
    error = Planted("code_.py", old, new, "", tests=tests)
    seconds = 5 if verdict == "timeout" else 60
    judged = planted.measure(error, tmp_path / "built", tmp_path / "unchanged", False, seconds)
    assert judged == (verdict, test)

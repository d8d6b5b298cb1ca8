"""Every example runs, on the CPU at least, and shows what it says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*words: str) -> str:
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_basic_usage() -> None:
    told = run("-m", "examples.basic_usage")
    assert "x.grad   (1024, 2048)\nbias.grad (2048,)" in told
    first, last = re.search(r"loss +([\d.]+) at first, ([\d.]+) after", told).groups()
    assert float(last) < 0.1 * float(first)
    assert len(re.findall(r"^ +\d+ us  ", told, re.MULTILINE)) == 2

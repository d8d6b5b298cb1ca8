"""Tests, on the CPU, the barriers between the CTAs of a thread block cluster. A CTA must not write into another CTA's
shared memory before the other CTA has started and has read the previous value."""

import re
import subprocess
from pathlib import Path

import build_library

CSRC = build_library.CSRC


def test_strips_are_joined_behind_barriers(tmp_path: Path) -> None:
    """CTAs that add up their sums of a row wait for each other. tests/c/strip_join.cpp runs class StripJoin on the
    CPU."""
    text = (CSRC / "rows" / "strips.cuh").read_text()
    begin, end = text.index("// A sum over the columns of a strip."), text.index("// ---- on the host ----")
    (tmp_path / "strip_join.inc").write_text(text[begin:end])
    program, source = tmp_path / "strip_join", Path(__file__).parent / "c" / "strip_join.cpp"
    compiler = [*build_library.compiler("CXX", "c++", "g++"), "-std=c++17", "-O1", "-pthread", f"-I{tmp_path}"]
    subprocess.run([*compiler, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_rows_wait_for_the_other_ctas() -> None:
    """Each kernel with a RowSum over a cluster, its own or that of a RowOpening, waits once for the other CTAs'
    mbarriers. The test reads the source, because mbarriers run only on a GPU."""
    seen = []
    for path in sorted(CSRC.rglob("*.cu*")):
        text = path.read_text()
        made = re.findall(r"row_sum\([^)]*, p\.cluster, rank\)|using Opening = RowOpening<", text)
        waits = re.findall(r"\bsum\.wait_for_others\(\)|row_sum\.wait_for_others\(\)", text)
        assert len(made) == len(waits), f"{path.name}: {len(made)} sums over clusters, {len(waits)} waits"
        seen += [path.name] * len(made)
    assert len(seen) == 5, seen

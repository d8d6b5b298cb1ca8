"""The profiling tools: the summary of Nsight Compute's report, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts import run_op

ROOT = Path(__file__).resolve().parent.parent

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
# Name, unit and value of one launch, as ncu prints them with --print-units base.
METRICS = {
    "dram__bytes_read.sum": ("byte", "268,435,456"),
    "dram__bytes_write.sum": ("byte", "131,564,544"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "83.49"),
    "gpu__time_duration.sum": ("ns", "100,000"),
    "launch__occupancy_limit_registers": ("block", "2"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "12.50"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "12.21"),
    STALLED.format("barrier"): ("inst", "2"),
    STALLED.format("long_scoreboard"): ("inst", "5"),
    STALLED.format("long_scoreboard_not_issued"): ("inst", "4.9"),
    STALLED.format("selected"): ("inst", "1"),
    STALLED.format("short_scoreboard"): ("inst", "1"),
}
NAME = "void norm_cuda::backward_kernel<__nv_bfloat16, (bool)1, (norm_cuda::Fused)0, (int)128>(norm_cuda::Backward<T1>)"


def csv_of(metrics: dict[str, tuple[str, str]]) -> str:
    head, about = ["ID", "Process ID", "Kernel Name"], ["0", "4242", NAME]
    rows = [
        head + list(metrics),
        [""] * len(head) + [unit for unit, _ in metrics.values()],
        about + [value for _, value in metrics.values()],
    ]
    lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join(["==PROF== Connected to process 4242", *lines]) + "\n"


PAGE = """\
norm_cuda::backward_kernel<__nv_bfloat16, 1, 0, 128>
  duration      100.0 us
  DRAM          268.4 MB read, 131.6 MB written: 4000 GB/s, 83 % of peak
  busy          memory - %, compute - %
  grid          - blocks of - threads
  occupancy     12 % of the warps of 12 %; blocks an SM: 2 by registers, - by shared memory, - by warps, - by blocks
  registers     168 a thread
  shared memory - KB a block
  spills        - requests of local memory
  stalls        long scoreboard 56 %, barrier 22 %, short scoreboard 11 % of 9.0 cycles in all"""


def summary(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.ncu_summary", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_summary_of_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.csv"
    path.write_text(csv_of(METRICS))
    assert summary(path).stdout == PAGE + "\n"


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.csv"
    path.write_text("==WARNING== No kernels were profiled.\n")
    told = summary(path)
    assert told.returncode == 1 and told.stderr.startswith(f"error: {path} ") and told.stderr.count("\n") == 1
    for words in (["no_such_op"], ["relu", "--dtype", "int8"], ["relu", "--width", "0"]):
        with pytest.raises(SystemExit, match="2"):
            run_op.main(words)

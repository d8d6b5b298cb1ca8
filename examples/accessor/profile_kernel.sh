#!/usr/bin/env bash
# Nsight Compute on accessor_mish's forward kernel: one launch after the warm-up, all sections. Prints a summary, and leaves the
# report for the graphical ncu-ui in out/. Use: examples/accessor/profile_kernel.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
scripts/ncu --version >/dev/null # it says what is missing
"$python" -c 'import sys; sys.path.insert(0, "examples/accessor"); import accessor_mish' # compiles it, not under ncu
mkdir -p out
scripts/ncu --set full --kernel-name regex:forward_kernel --launch-skip 20 --launch-count 1 --force-overwrite \
  --export out/accessor_mish "$python" examples/accessor/benchmark.py
scripts/ncu --import out/accessor_mish.ncu-rep --page details
cat <<'TEXT'

What to look at, in this order:
  GPU Speed Of Light   Memory Throughput against Compute Throughput: the higher one is the limit. A pointwise op should sit
                       near the top of Memory, or leave room for wider loads.
  Memory Workload      DRAM bytes read and written: 16 MiB each for 4096 x 1024 float32. More means that data came twice.
  Memory Tables        Sectors per Request of global loads: 4 is coalesced for 4-byte elements. 32 is one thread, one sector.
  Warp State           Long Scoreboard: waiting for memory, too few loads in flight. Math Pipe: the arithmetic is the limit.
  Occupancy            achieved against theoretical, and what limits the latter (registers, shared memory, block size).
  Launch Statistics    registers a thread; a spill shows as local memory traffic in the Memory Tables.
  The report for the graphical view: ncu-ui out/accessor_mish.ncu-rep
TEXT

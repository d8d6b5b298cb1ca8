#!/usr/bin/env bash
# Nsight Compute on accessor_mish's forward kernel: one launch after the warm-up, all sections. Prints a summary, and leaves the
# report for the graphical ncu-ui in out/. Use: examples/accessor/profile_kernel.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-.venv/bin/python}"
PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin"
if ! command -v ncu >/dev/null; then
  cat >&2 <<'TEXT'
error: ncu, Nsight Compute, is not on this machine.
  With the CUDA toolkit: add its bin folder to PATH, or set CUDA_HOME.
  Alone, from NVIDIA's apt or yum repository: apt install nsight-compute-VERSION (apt-cache search nsight-compute).
  Or from https://developer.nvidia.com/nsight-compute; the report can be read on a machine without a GPU.
TEXT
  exit 1
fi
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "error: there is no NVIDIA GPU on this machine, or no driver for it." >&2
  exit 1
fi
"$python" -c 'import sys; sys.path.insert(0, "examples/accessor"); import accessor_mish' # compiles it, not under ncu
mkdir -p out
if ! ncu --set full --kernel-name regex:forward_kernel --launch-skip 20 --launch-count 1 --force-overwrite \
  --export out/accessor_mish "$python" examples/accessor/benchmark.py; then
  echo "error: ncu failed. ERR_NVGPUCTRPERM above means that reading the GPU's counters is not allowed here: run it as" \
    "root, or ask the administrator to load nvidia with NVreg_RestrictProfilingToAdminUsers=0." >&2
  exit 1
fi
ncu --import out/accessor_mish.ncu-rep --page details
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

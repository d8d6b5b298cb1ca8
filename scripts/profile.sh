#!/usr/bin/env bash
# Runs one op under a profiler and prints what it did.
#
#   scripts/profile.sh OP [--dtype bfloat16] [--width 4096] [--mib 128] [--cpu]
#
# On a GPU Nsight Compute measures each kernel of one forward and one backward. The report stays in out/ for ncu-ui. On the CPU,
# with --cpu or without a GPU, perf counts and samples some seconds of calls. Without perf, valgrind counts the instructions of
# a few calls. docs/profiling.md says how to read the output. PYTHON names the environment.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export LC_ALL=C # the tools write numbers with decimal points
device=cuda
nvidia-smi -L >/dev/null 2>&1 || device=cpu
words=()
for word in "$@"; do
  if [ "$word" = --cpu ]; then device=cpu; else words+=("$word"); fi
done
case "${words[0]-}" in
  "" | -*)
    sed -n '2,/^set/{/^#/s/^# \?//p}' "$0"
    exit
    ;;
esac
if ! command -v "$python" >/dev/null; then
  echo "error: $python was not found: \`make setup\` makes it, or PYTHON=/path/to/python names another." >&2
  exit 1
fi
mkdir -p out
report=out/profile-${words[0]##*/}-$device
# glibc hands large blocks back to the kernel, and then every call pays for page faults (benchmarks/run.py does the same).
export MALLOC_MMAP_THRESHOLD_=$((1 << 40)) MALLOC_TRIM_THRESHOLD_=$((1 << 40))
run=("$python" -m scripts.run_op "${words[@]}" --device "$device")

with_ncu() {
  local measured=(--metrics dram__bytes_read.sum,dram__bytes_write.sum)
  for section in SpeedOfLight MemoryWorkloadAnalysis Occupancy LaunchStats WarpStateStats; do
    measured+=(--section "$section")
  done
  # --clock-control none: at the clocks that users have, as the benchmarks measure.
  scripts/ncu "${measured[@]}" --profile-from-start off --clock-control none --force-overwrite --export "$report" \
    "${run[@]}" >"$report.log" || { cat "$report.log" >&2; exit 1; }
  sed '/^==/d' "$report.log"
  echo
  scripts/ncu --import "$report.ncu-rep" --page raw --csv --print-units base --print-kernel-base demangled >"$report.csv"
  "$python" -m scripts.ncu_summary "$report.csv"
  printf '\nThe report for the graphical view: ncu-ui %s\n' "$report.ncu-rep"
}

with_perf() {
  fifos=$(mktemp -d)
  trap 'rm -rf "$fifos"' EXIT
  mkfifo "$fifos/stat" "$fifos/record"
  # Both leave out the start, the warm-up and the end. Counters that the machine lacks (most virtual ones) are shown as not supported.
  perf stat -D -1 --control "fifo:$fifos/stat" -o "$report.stat" \
    -e task-clock,page-faults,context-switches,cycles,instructions,cache-misses -- \
    perf record -D -1 --control "fifo:$fifos/record" -F 999 -o "$report.perf" -- \
    "${run[@]}" --control "$fifos/stat" "$fifos/record" 2>"$report.log" || { cat "$report.log" >&2; exit 1; }
  printf '\nCounted in that time:\n'
  grep -oE '[0-9<].* (msec task-clock|page-faults|context-switches|cycles|instructions|cache-misses)' "$report.stat"
  printf '\nShare of the samples, where from, function:\n'
  perf report -i "$report.perf" --stdio -F overhead,dso,sym --percent-limit 0.5 --no-inline 2>/dev/null |
    sed '/^#/d; /^$/d; s/ *$//' | sed -n 1,20p
  printf '\nInstruction by instruction: perf annotate -i %s FUNCTION\n' "$report.perf"
}

with_valgrind() {
  # Its processor is slow and has no AVX-512: a few rows, a few calls of each pass, and only what our own functions do.
  valgrind --quiet --tool=callgrind --toggle-collect='*_cpu_v3' --toggle-collect='*_cpu_baseline' \
    --callgrind-out-file="$report.callgrind" "${run[@]}" --mib 1 --seconds 0
  printf '\nInstructions of our functions, in five forward and four backward calls:\n'
  callgrind_annotate "$report.callgrind" | grep -E '^ *[0-9,]+ \(' | sed -n 1,20p
  printf '\nLine by line, of a library built with DEBUG=1: callgrind_annotate %s FILE.c\n' "$report.callgrind"
}

if [ "$device" = cuda ]; then
  with_ncu
elif command -v perf >/dev/null; then
  with_perf
elif command -v valgrind >/dev/null; then
  with_valgrind
else
  cat >&2 <<'TEXT'
error: neither perf nor valgrind is on this machine.
  Debian: apt install linux-perf, or valgrind. Ubuntu: apt install linux-tools-generic, or valgrind. Fedora: dnf install perf.
  perf may need permission: sysctl kernel.perf_event_paranoid=2.
TEXT
  exit 1
fi

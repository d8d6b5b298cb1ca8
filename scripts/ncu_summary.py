"""A page about each kernel in a report of Nsight Compute, from `ncu --import FILE --page raw --csv --print-units base`.

    python -m scripts.ncu_summary out/profile-layer_norm-cuda.csv

Figures that the report does not have are shown as "-".
"""

import csv
import re
import sys
from pathlib import Path

from scripts.kernel_resources import short_name

Kernel = dict[str, str]

STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
DRAM_THROUGHPUT = ("gpu__dram_throughput", "dram__throughput")
LIMITS = {"registers": "registers", "shared_mem": "shared memory", "warps": "warps", "blocks": "blocks"}


def kernels(text: str) -> list[Kernel]:
    """One row for each launch, in order. Before them ncu writes messages, a row of names and a row of units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    return [row for row in rows if row.get("ID")]  # the row of units has no ID


def number(kernel: Kernel, *names: str) -> float | None:
    """The first of these metrics that the report has. Some metrics have other names in other versions."""
    for name in names:
        try:
            return float(kernel.get(name, "").replace(",", ""))
        except ValueError:
            continue
    return None


def show(value: float | None, form: str = ".0f", unit: str = "", scale: float = 1.0) -> str:
    return f"{'-' if value is None else format(scale * value, form)}{unit}"


def total(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def dram(kernel: Kernel) -> str:
    read, written = (number(kernel, f"dram__bytes_{what}.sum") for what in ("read", "write"))
    nanoseconds, moved = number(kernel, "gpu__time_duration.sum"), total(read, written)
    rate = moved / nanoseconds if moved is not None and nanoseconds else None  # bytes per nanosecond are GB/s
    peak = number(kernel, *(f"{name}.avg.pct_of_peak_sustained_elapsed" for name in DRAM_THROUGHPUT))
    sides = f"{show(read, '.1f', ' MB', 1e-6)} read, {show(written, '.1f', ' MB', 1e-6)} written"
    return f"{sides}: {show(rate, '.0f', ' GB/s')}, {show(peak)} % of peak"


def occupancy(kernel: Kernel) -> str:
    achieved = number(kernel, "sm__warps_active.avg.pct_of_peak_sustained_active")
    possible = number(kernel, "sm__maximum_warps_per_active_cycle_pct")
    limits = {name: number(kernel, f"launch__occupancy_limit_{key}") for key, name in LIMITS.items()}
    blocks = ", ".join(f"{show(value)} by {name}" for name, value in limits.items())
    return f"{show(achieved)} % of the warps of {show(possible)} %; blocks an SM: {blocks}"


def stalls(kernel: Kernel, most: int = 4) -> str:
    """The share that each reason has in the cycles between two instructions of a warp."""
    cycles = {}
    for name in kernel:
        match, value = STALL.fullmatch(name), number(kernel, name)
        if match and value is not None and not match[1].endswith("not_issued"):
            cycles[match[1].replace("_", " ")] = value
    everything = sum(cycles.values())
    cycles.pop("selected", None)  # the cycle in which the instruction is issued
    if not cycles or everything == 0:
        return "-"
    longest = sorted(cycles, key=lambda name: -cycles[name])[:most]
    shares = ", ".join(f"{name} {100 * cycles[name] / everything:.0f} %" for name in longest)
    return f"{shares} of {everything:.1f} cycles in all"


def describe(kernel: Kernel) -> str:
    shared = {kind: number(kernel, f"launch__shared_mem_per_block_{kind}") for kind in ("dynamic", "static")}
    memory = number(kernel, "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed")
    compute = number(kernel, "sm__throughput.avg.pct_of_peak_sustained_elapsed")
    grid, block = (show(number(kernel, f"launch__{what}_size")) for what in ("grid", "block"))
    lines = {
        "duration": show(number(kernel, "gpu__time_duration.sum"), ".1f", " us", 1e-3),
        "DRAM": dram(kernel),
        "busy": f"memory {show(memory)} %, compute {show(compute)} %",
        "grid": f"{grid} blocks of {block} threads",
        "occupancy": occupancy(kernel),
        "registers": f"{show(number(kernel, 'launch__registers_per_thread'))} a thread",
        "shared memory": f"{show(total(*shared.values()), '.1f', ' KB', 1e-3)} a block",
        "spills": f"{show(number(kernel, 'derived__local_spilling_requests'))} requests of local memory",
        "stalls": stalls(kernel),
    }
    title = short_name(kernel.get("Kernel Name") or "-")
    return "\n".join([title, *(f"  {name:14}{text}" for name, text in lines.items())])


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"error: expected one file, but got {len(sys.argv) - 1}; python -m scripts.ncu_summary FILE.csv")
    path = Path(sys.argv[1])
    if not path.is_file():
        sys.exit(f"error: {path} is not a file.")
    found = kernels(path.read_text(errors="replace"))
    if not found:
        sys.exit(f"error: {path} names no kernel; was it written by ncu --page raw --csv?")
    print("\n\n".join(map(describe, found)))


if __name__ == "__main__":
    main()

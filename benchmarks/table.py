"""The markdown table of a results file: python -m benchmarks.table benchmarks/results/h200.json"""

import json
import sys
from pathlib import Path


def table(path: Path) -> str:
    results = json.loads(path.read_text())
    about = results["machine"]
    lines = [
        f"{about['device']}, {about['threads']} CPU threads, torch {about['torch']}, tensors of {about['mib']} MiB:",
        "",
        "| op | pass | dtype | width | copy GB/s | ours | eager | compile |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        cells = [row["op"], row["pass"], row["dtype"], str(row["cols"]), f"{row['copy_gb_s']:.0f}"]
        cells += [f"{row['percent_of_copy'][name]:.0f}" for name in ("ours", "eager", "compile")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(Path(sys.argv[1])), end="")

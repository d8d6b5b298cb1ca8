"""Times accessor_mish for 4096 x 1024 elements on a GPU with CUDA events: the mean of 200 calls, after 20 untimed ones.

    python examples/accessor/benchmark.py

README.md runs this same program under Nsight Compute.
"""

import sys

import torch

ROWS, COLS, WARM_UP, RUNS = 4096, 1024, 20, 200


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit(
            "error: CUDA events need a GPU, and torch sees none; python -m examples.accessor.compare runs anywhere"
        )
    from accessor_mish import accessor_mish

    x = torch.randn(ROWS, COLS, device="cuda")
    for _ in range(WARM_UP):
        accessor_mish(x)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(RUNS):
        accessor_mish(x)
    end.record()
    torch.cuda.synchronize()
    print(f"{torch.cuda.get_device_name()}, {ROWS} x {COLS} float32: {start.elapsed_time(end) / RUNS:.4f} ms a call")


if __name__ == "__main__":
    main()

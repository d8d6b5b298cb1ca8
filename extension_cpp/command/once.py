"""Measures the time of one call on the CPU or on a GPU. The GPU's L2 cache is flushed before the call."""

import functools
import time
from collections.abc import Callable

import torch


def once_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@functools.cache
def _other_memory() -> torch.Tensor:
    return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")


def once_cuda(call: Callable[[], object], ahead: bool = True) -> float:
    _other_memory().zero_()  # flushes the L2 cache, in which the call would otherwise find a part of its input
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if ahead:  # the host launches the call during this wait, so that the events enclose device time alone
        torch.cuda._sleep(10_000_000)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3

"""Runs every op on a GPU with guard bytes around each tensor and each scratch buffer, to find writes out of bounds.

`python -m tests.guarded` prints each op, shape and dtype whose calls overwrote guard bytes. This is a program and not a
test, because PyTorch's allocator can only be replaced before the first allocation. compute-sanitizer finds more errors,
but takes hours.
"""

import ctypes
import functools
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from build_library import compiler
from tests.checks import as_tuple, leaves, maker, random_grad
from tests.opspec import OpSpec, Sample, all_specs

SOURCE = Path(__file__).parent / "c" / "guarded_allocator.c"
# (rows, columns) of x. The row counts are not multiples of the number of rows in a CTA or a chunk. The widths reach the
# kernels that sum over many rows, those that spread a wide row over a cluster, and those for few columns.
SHAPES = [(71, 33), (3001, 257), (515, 4096), (21, 50257), (70001, 3)]
SAMPLES = 3  # per shape; more would take too long, because this allocator takes 100 times as long as PyTorch's
DTYPES = [torch.float32, torch.bfloat16]


def load_allocator(folder: str) -> ctypes.CDLL:
    """Compiles guarded_allocator.c, makes it PyTorch's CUDA allocator, and returns its library."""
    library = Path(folder) / "guarded_allocator.so"
    subprocess.run(
        [*compiler("CC", "cc", "gcc"), "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library)], check=True
    )
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    ctypes.CDLL(loaded.pop(), mode=ctypes.RTLD_GLOBAL)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(str(library), "guarded_malloc", "guarded_free")
    torch.cuda.memory.change_current_allocator(allocator)
    return ctypes.CDLL(str(library))


def damaged_by(library: ctypes.CDLL, call: Callable[[], object]) -> int:
    """Returns how many blocks freed during the call have damaged guard bytes. Other blocks are not checked."""
    before = library.guarded_damaged()
    call()
    return int(library.guarded_damaged() - before)


def write_behind() -> None:
    """Writes one byte behind the end of a tensor. The caller tests that the guard bytes detect this write."""
    x = torch.empty(3, device="cuda")
    ctypes.CDLL(None).cudaMemset(ctypes.c_void_p(x.data_ptr() + x.nbytes), 0, ctypes.c_size_t(1))


def run_samples(spec: OpSpec, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Runs some samples forward and backward. They are made here, so that their tensors are freed on return."""
    for sample in itertools.islice(spec.sample_inputs(maker("cuda", dtype), shape), SAMPLES):
        forward_and_backward(spec, sample)


def forward_and_backward(spec: OpSpec, sample: Sample) -> None:
    outputs = [y for y in as_tuple(spec.function(*sample.args, **sample.kwargs)) if y.requires_grad]
    if inputs := leaves(sample):
        torch.autograd.grad(outputs, inputs, list(map(random_grad(), outputs)), allow_unused=True)


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("error: the guard bytes are for a GPU, and torch finds none here")
    with tempfile.TemporaryDirectory() as folder:
        library = load_allocator(folder)
        if damaged_by(library, write_behind) != 1:
            print("a byte behind a tensor was written, and the guard bytes did not show it")
            return 1
        failures = 0
        for spec, shape, dtype in itertools.product(all_specs(), SHAPES, DTYPES):
            if damaged := damaged_by(library, functools.partial(run_samples, spec, shape, dtype)):
                print(f"{spec.name} {shape} {dtype}: {damaged} blocks are damaged")
                failures += 1
        print(f"{len(all_specs())} ops")
        return failures > 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # C++'s exit would end PyTorch's threads and its replaced allocator, and may abort.
    os._exit(status)

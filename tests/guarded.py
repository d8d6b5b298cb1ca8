"""Runs every op on a GPU whose memory has guard bytes around each tensor and each piece of scratch memory.

`python -m tests.guarded` prints a line for each op, shape and dtype whose calls damaged guard bytes. This is a program,
because PyTorch's allocator can only be replaced before the first tensor. compute-sanitizer finds more, in hours.
"""

import ctypes
import functools
import itertools
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
# Row counts that are no multiple of the rows of a CTA or a chunk. The widths reach each kind of kernel: sums over many
# rows, wide rows in a cluster, and few columns.
SHAPES = [(71, 33), (3001, 257), (515, 4096), (21, 50257), (70001, 3)]
SAMPLES = 3  # samples per shape: an allocation takes a hundred times as long as with PyTorch's allocator
DTYPES = [torch.float32, torch.bfloat16]


def load_allocator(folder: str) -> ctypes.CDLL:
    """Makes PyTorch allocate with guarded_allocator.c."""
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
    """Returns how many freed blocks had damaged guard bytes during the call. Tensors that outlive it are not
    checked."""
    before = library.guarded_damaged()
    call()
    return int(library.guarded_damaged() - before)


def write_behind() -> None:
    """Writes one byte behind a tensor, to check that the guard bytes detect the write."""
    x = torch.empty(3, device="cuda")
    ctypes.CDLL(None).cudaMemset(ctypes.c_void_p(x.data_ptr() + x.nbytes), 0, ctypes.c_size_t(1))


def run_samples(spec: OpSpec, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Runs forward and backward of some samples, which are made here, so that their tensors are freed on return."""
    for sample in itertools.islice(spec.sample_inputs(maker("cuda", dtype), shape), SAMPLES):
        forward_and_backward(spec, sample)


def forward_and_backward(spec: OpSpec, sample: Sample) -> None:
    outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
    grad_out = random_grad()
    if inputs := leaves(sample):
        torch.autograd.grad(outputs, inputs, [grad_out(output) for output in outputs])


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
    sys.exit(main())

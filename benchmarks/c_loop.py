"""Runs a recurrence as a loop in C (c_loop.c), compiled with -O3 for this processor, as a peer of linear_recurrence."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from build_library import BuildError, compiler

NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16"}


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles the library once per process. The library stays mapped after its folder is deleted."""
    source = Path(__file__).with_suffix(".c")
    try:
        command = compiler("CC", "cc", "gcc")
    except BuildError as error:
        raise RuntimeError(str(error)) from error
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "c_loop.so")
        flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
        subprocess.run([*command, *flags, str(source), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


def recurrence(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Computes linear_recurrence for two-dimensional tensors, without gradients."""
    h = torch.empty_like(b)
    steps, lines = b.shape if dim == 0 else reversed(b.shape)
    function = getattr(library(), f"{'columns' if dim == 0 else 'rows'}_{NAMES[b.dtype]}")
    function(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, h)), ctypes.c_int64(lines), ctypes.c_int64(steps))
    return h

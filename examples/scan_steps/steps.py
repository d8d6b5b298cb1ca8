"""Makes the kernels of scan_steps.cu callable on tensors: nvcc makes a library, and ctypes calls it.

This is the shortest way from a kernel to a tensor, without PyTorch's headers and a build system. docs/scan.md explains
the kernels.
"""

import ctypes
import subprocess
from pathlib import Path

import torch
from torch import Tensor

import build_library

SOURCE = Path(__file__).resolve().with_name("scan_steps.cu")
STEPS = ("walk", "hillis_steele", "blelloch", "warp_shuffles", "block_carry", "look_back", "fixed_tree")


def build(folder: Path) -> Path | None:
    """Compiles the library for the GPUs in TORCH_CUDA_ARCH_LIST, and returns its path, or None if there is no nvcc."""
    nvcc = build_library.find_nvcc()
    if nvcc is None:
        return None
    architectures = [flag for name in build_library.architectures(nvcc) for flag in build_library.gencode(name)]
    library = folder / "libscan_steps.so"
    flags = ["-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", *architectures]
    subprocess.run([*nvcc, *flags, "-o", library, SOURCE], check=True)
    return library


class Scans:
    """Calls the kernels of docs/scan.md, one for each of STEPS, in a compiled library."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.scan_error.restype = ctypes.c_char_p
        self._library.scan_state_bytes.argtypes = [ctypes.c_int64] * 2
        self._library.scan_state_bytes.restype = ctypes.c_int64
        for step in STEPS:
            function = getattr(self._library, f"scan_{step}")
            function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p] * 2

    def __call__(self, step: str, x: Tensor) -> Tensor:
        """Computes ``torch.cumsum(x, 1)`` by one of STEPS, for a contiguous float32 ``x`` of shape (rows, n)."""
        if x.dim() != 2 or x.dtype != torch.float32 or not x.is_contiguous():
            found = f"{x.dtype}, {list(x.shape)}, strides {x.stride()}"
            raise RuntimeError(f"{step}: expected x to be float32, (rows, n) and contiguous, but got {found}")
        y = torch.empty_like(x)
        state = torch.empty(self._library.scan_state_bytes(*x.shape), dtype=torch.uint8, device=x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
        with torch.cuda.device_of(x):
            function = getattr(self._library, f"scan_{step}")
            error = function(x.data_ptr(), y.data_ptr(), *x.shape, state.data_ptr(), stream)
        if error:
            raise RuntimeError(f"{step}: {self._library.scan_error(error).decode()}")
        return y

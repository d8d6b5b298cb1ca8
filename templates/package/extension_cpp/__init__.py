"""PyTorch operators whose kernels are plain C (CPU) and CUDA C (GPU).

Importing this package loads one shared library, which registers the operators under torch.ops; the functions below call
them, with autograd and torch.compile.
"""

import ctypes
from pathlib import Path

import torch

__version__ = "0.1.0"  # and what the library was built for, as in a wheel's name: 0.1.0+cpu, 0.1.0+cu130

LIBRARY = Path(__file__).with_name("libextension_cpp.so")

try:
    torch.ops.load_library(LIBRARY)
    _schema_errors = ctypes.CDLL(str(LIBRARY)).extension_cpp_schema_errors
    _schema_errors.restype = ctypes.c_char_p
    if _said := _schema_errors().decode():
        raise ImportError(_said)
    _build_info = ctypes.CDLL(str(LIBRARY)).extension_cpp_build_info
    _build_info.restype = ctypes.c_char_p
    _cuda = _build_info().decode().split()[0].removeprefix("cuda=")  # "13.0" or "none"
    __version__ += "+cpu" if _cuda == "none" else f"+cu{_cuda.replace('.', '')}"
    # The operators must exist before these modules register fakes and gradients for them.
    from . import reference as reference
    from .ops import *  # noqa: F403  # ops.__all__ lists the names
    from .registration import nested as nested
except (OSError, AttributeError, RuntimeError) as error:
    # torch wraps the linker's words; the last two are what it says of an operator that is not in the library.
    raise ImportError(
        "extension_cpp's library is not built, does not fit this machine or is older than its sources: "
        f"{error.__cause__ or error}. In a checkout run: make build."
    ) from error

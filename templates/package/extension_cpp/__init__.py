"""PyTorch operators whose kernels are plain C (CPU) and CUDA C (GPU).

Importing this package loads one shared library, which registers the operators under torch.ops. The package's functions
call these operators and support autograd and torch.compile.
"""

import ctypes
import sys
from pathlib import Path

__version__ = "0.1.0"  # _load appends the library's CUDA version, as in the wheel's name: 0.1.0+cpu, 0.1.0+cu130

LIBRARY = Path(__file__).with_name("libextension_cpp.so")


def _load() -> str:
    """Loads the library, and returns the version suffix that says what it was built for, such as +cu130."""
    import torch

    torch.ops.load_library(LIBRARY)
    library = ctypes.CDLL(str(LIBRARY))
    library.extension_cpp_schema_errors.restype = ctypes.c_char_p
    if said := library.extension_cpp_schema_errors().decode():
        raise ImportError(said)
    library.extension_cpp_build_info.restype = ctypes.c_char_p
    cuda = library.extension_cpp_build_info().decode().split()[0].removeprefix("cuda=")  # "13.0" or "none"
    return "+cpu" if cuda == "none" else f"+cu{cuda.replace('.', '')}"


# `python -m extension_cpp` writes source files, and needs no library. While Python looks for the module
# that -m names, sys.argv[0] is "-m".
if sys.argv[:1] != ["-m"] or sys.orig_argv[-len(sys.argv)].removeprefix("-m") != "extension_cpp":
    try:
        __version__ += _load()
        # The operators must exist before these modules register fakes and gradients for them.
        from . import reference as reference
        from .ops import *  # noqa: F403  # ops.__all__ lists the names
        from .registration import nested as nested
    except (OSError, AttributeError, RuntimeError) as error:
        # torch wraps the linker's message. It raises AttributeError or RuntimeError if the library lacks an operator.
        raise ImportError(
            "extension_cpp's library is not built, does not fit this machine or is older than "
            f"its sources: {error.__cause__ or error}. In a checkout run: make build."
        ) from error

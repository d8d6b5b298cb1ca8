"""PyTorch operators whose kernels are plain C (CPU) and CUDA C (GPU).

Importing this package loads one shared library, which registers the operators as torch.ops.extension_cpp.*. The
package's functions call these operators and support autograd and torch.compile. `python -m extension_cpp info` says
what was built and what this machine has.
"""

import ctypes
import sys
from pathlib import Path

__version__ = "0.2.0"  # _tag appends the library's CUDA version, as in the wheel's name: 0.2.0+cpu, 0.2.0+cu130

if sys.version_info < (3, 10):  # noqa: UP036  # pip checks the version, but any Python can import a checkout
    raise ImportError(
        f"extension_cpp needs Python >= 3.10, and {sys.executable} is {sys.version_info[0]}.{sys.version_info[1]}."
    )

LIBRARY = Path(__file__).with_name("libextension_cpp.so")


def _load() -> None:
    """Loads the library, or raises an ImportError that says what to do."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"extension_cpp needs torch >= 2.10, and it cannot be imported ({error}): pip install torch."
        ) from error
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
        raise ImportError(
            f"extension_cpp needs torch >= 2.10, and torch {torch.__version__} is installed: pip install -U torch."
        )
    if not LIBRARY.exists():
        raise ImportError(f"extension_cpp is not built: {LIBRARY} does not exist. In a checkout run: make build.")
    try:
        torch.ops.load_library(LIBRARY)
    except OSError as error:
        # torch wraps the linker's message, which names the missing symbol or glibc version.
        reason = error.__cause__ or error
        raise ImportError(
            f"extension_cpp's library cannot be loaded: {reason}. Build it on this machine (in a checkout: make build)."
        ) from error
    schema_errors = getattr(ctypes.CDLL(str(LIBRARY)), "extension_cpp_schema_errors", None)  # not in an older library
    if schema_errors is not None:
        schema_errors.restype = ctypes.c_char_p
        if said := schema_errors().decode():
            raise ImportError(said)


def _build_info() -> str:
    """Returns the library's build information, which info.read_build parses. Importing info here would take longer."""
    function = ctypes.CDLL(str(LIBRARY)).extension_cpp_build_info
    function.restype = ctypes.c_char_p
    return function().decode()


def _tag(build_info: str) -> str:
    """Returns the version suffix, such as +cu130, that setup.py also gives to a wheel with this library."""
    cuda = build_info.split()[0].removeprefix("cuda=")  # "13.0" or "none"
    return "+cpu" if cuda == "none" else f"+cu{cuda.replace('.', '')}"


def _is_command() -> bool:
    """Returns whether Python imports this package in order to run `python -m extension_cpp`. While Python looks for the
    module that -m names, sys.argv[0] is "-m". sys.orig_argv has the module's name."""
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m") == "extension_cpp"


def _attach_distributed() -> None:
    from . import distributed as distributed


__all__ = ["nn", "reference"]
load_error: ImportError | None = None
# A command that only writes source files does not load torch and the library, because loading them takes seconds.
if not (_is_command() and sys.argv[1:2] in (["new"], ["remove"], ["new-package"])):
    try:
        _load()
        # The operators must exist before these modules register fakes and gradients for them.
        from . import after_import, nn, reference
        from . import layers as layers
        from . import ops as ops
        from .ops import *  # noqa: F403  # ops.__all__ lists the names
        from .registration import nested as nested

        __all__ += ops.__all__
        __version__ += _tag(_build_info())
        # The sharding rules are registered once the user imports torch.distributed.tensor. This package does not.
        after_import.after_import("torch.distributed.tensor", _attach_distributed)
    except (ImportError, AttributeError, RuntimeError) as error:
        # torch raises AttributeError or RuntimeError if a fake is registered for an operator that the library lacks.
        older = f"extension_cpp's library is older than its sources: {error}. In a checkout run: make build."
        load_error = error if isinstance(error, ImportError) else ImportError(older)
        # The commands of `python -m extension_cpp` print load_error themselves, in one line; `info` prints more.
        if not _is_command():
            raise load_error from error.__cause__

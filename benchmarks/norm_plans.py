"""Runs a norm's GPU kernel in each shape that it can have: each row of the table in csrc/rows/plan.h.

`python -m benchmarks --plans` times them beside the shape that the library picks. A shape is useful if some width is
5 % slower without it.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from extension_cpp import LIBRARY
from extension_cpp.command import info


@contextlib.contextmanager
def allowed(shape: int) -> Iterator[None]:
    """Lets the library pick only this row of the table in plan.h, in a block or in the calls of a function."""
    allow = ctypes.CDLL(str(LIBRARY)).extension_cpp_norm_allow  # one bit for each row
    allow(ctypes.c_uint64(1 << shape))
    try:
        yield
    finally:
        allow(ctypes.c_uint64(2**64 - 1))  # all rows


def shape_of(case: Any) -> int:
    """Returns the row of the table that the library picks for a run.Case, or -1 for the generic kernel."""
    dtype = case.dtype.partition("+")[0]
    return int(info.norm_plan(case.spec.name, dtype, case.rows, case.cols, case.step == "backward")["shape"])


def contenders(case: Any) -> dict[str, int]:
    """Returns the rows of the table that can run the case, by the names that they have in the results."""
    shapes = range(ctypes.CDLL(str(LIBRARY)).extension_cpp_norm_plan_shapes())
    return {f"plan {shape}": shape for shape in shapes if allowed(shape)(shape_of)(case) == shape}

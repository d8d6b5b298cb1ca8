"""Helpers that several families of ops share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..registration import checks


def is_int(dim: Any) -> bool:
    """Returns whether dim has __index__ and is not a bool of Python, NumPy or torch. PyTorch takes no bool as dim."""
    is_bool = isinstance(dim, bool) or str(getattr(dim, "dtype", "")).endswith("bool")
    return hasattr(dim, "__index__") and not is_bool


def as_dim(op: str, dim: Any) -> int:
    """Returns dim, or fails if dim is not an int. The operator itself would accept True as 1."""
    if type(dim) is not int and not is_int(dim):
        checks.fail(op, f"expected dim to be an int, but got {dim!r}")
    return dim


def check_dim(op: str, x: Tensor, dim: int) -> None:
    dims = max(x.dim(), 1)  # a 0-d tensor has the dimensions 0 and -1, as in PyTorch
    checks.check(op, -dims <= dim < dims, f"expected dim in [{-dims}, {dims - 1}], but got {dim}")


def fake_like(op: str, *names: str, along_dim: bool = False, hint: str = "") -> Callable[..., Tensor]:
    """Makes the fake of an operator whose first arguments are the tensors `names`. These tensors and the result have
    the shape and dtype of the last one. With along_dim, the next argument is one of their dimensions. `hint` is added
    to the message about a wrong dtype."""

    def fake(*args: Any) -> Tensor:
        *others, like = args[: len(names)]
        checks.check_dtype(op, names[-1], like, hint)
        for name, other in zip(names, others, strict=False):
            checks.check_like(op, name, other, names[-1], like)
        if along_dim:
            check_dim(op, like, args[len(names)])
        return torch.empty_like(like)

    return fake


def wide(x: Tensor) -> Tensor:
    """Returns x in the dtype in which the ops compute: float32, or float64 for a float64 x."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

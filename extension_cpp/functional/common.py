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


def fake_like(
    op: str, *names: str, like: str | None = None, results: int = 1, along_dim: bool = False, hint: str = ""
) -> Callable[..., Any]:
    """Makes the fake of an operator whose first arguments are the tensors `names`. These tensors and the results have
    the shape and dtype of the tensor `like`, by default the last one. With along_dim, the next argument is one of their
    dimensions. `hint` is added to the message about a wrong dtype."""
    like_name = like or names[-1]

    def fake(*args: Any) -> Any:
        others = dict(zip(names, args, strict=False))
        x = others.pop(like_name)
        checks.check_dtype(op, like_name, x, hint)
        for name, other in others.items():
            checks.check_like(op, name, other, like_name, x)
        if along_dim:
            check_dim(op, x, args[len(names)])
        made = [torch.empty_like(x) for _ in range(results)]
        return tuple(made) if results > 1 else made[0]

    return fake


def wide(x: Tensor) -> Tensor:
    """Returns x in the dtype in which the ops compute: float32, or float64 for a float64 x."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

"""Provides what the fakes of the norms need: the checks of csrc/norm/norm.cpp, and the tensors that it allocates."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..registration import checks


def norm_statistics(x: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """Makes an empty tensor with one number for each row, in a shape that broadcasts against x."""
    shape = [*x.shape[: x.dim() - len(normalized_shape)], *(1 for _ in normalized_shape)]
    return x.new_empty(shape, dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)


def norm_gradients(
    x: Tensor,
    normalized_shape: Sequence[int],
    weights: Sequence[Tensor | None],
    needs_x: bool,
    needs_weights: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Makes empty gradients of x and of the weights. A gradient that is not needed has no elements."""
    like = next((w for w in weights if w is not None), x)
    of_weights = (like.new_empty(list(normalized_shape) if needs else 0) for needs in needs_weights)
    return x.new_empty(x.shape if needs_x else 0), *of_weights


def check_weight(op: str, name: str, weight: Tensor, x: Tensor, normalized_shape: Sequence[int]) -> None:
    checks.check_same_or_float32(op, name, weight, "x", x)
    expected = f"expected {name} of shape {list(normalized_shape)}, normalized_shape"
    checks.check_sizes(op, weight.shape, normalized_shape, f"{expected}, but got {list(weight.shape)}")


def check_norm(
    op: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None = None
) -> None:
    """Makes the checks of check_inputs in csrc/norm/norm.cpp."""
    dims = len(normalized_shape)
    checks.check_dtype(op, "x", x)
    checks.check(op, dims > 0, "expected normalized_shape to have at least one dimension, but got []")
    expected = f"expected normalized_shape to be the last dimensions of x, of shape {list(x.shape)}"
    checks.check_sizes(op, x.shape[-dims:], normalized_shape, f"{expected}, but got {list(normalized_shape)}")
    if weight is not None:
        check_weight(op, "weight", weight, x, normalized_shape)
    if bias is not None:
        check_weight(op, "bias", bias, x, normalized_shape)
        if weight is not None:
            checks.check_same(op, "bias", bias, "weight", weight)


def check_dropout(op: str, p: float, seed: Tensor | None, x: Tensor) -> None:
    """Makes the checks of check_dropout in csrc/norm/norm.cpp."""
    checks.check_probability(op, p)
    if seed is not None:
        checks.check_seed(op, seed, x)
    checks.check(op, p == 0 or seed is not None, "expected a seed with p > 0, but got None")

"""What several operators share: options, fakes, and the checks of csrc/<op>/<op>.cpp in the same order and words."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import checks
from .functional.common import check_dim, is_int

# ---- muladd, activations, gates, reduce_sum, softmax and scans ----


def check_muladd_out(op: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    """The checks of muladd_out in csrc/muladd/muladd.cpp."""
    checks.check_dtype(op, "a", a)
    checks.check_like(op, "b", b, "a", a)
    checks.check_like(op, "out", out, "a", a)
    checks.check_writable(op, out)
    checks.check_no_partial_overlap(op, out, "a", a)
    checks.check_no_partial_overlap(op, out, "b", b)


def check_bias(op: str, x: Tensor, bias: Tensor) -> None:
    checks.check_dtype(op, "x", x)
    checks.check_same(op, "bias", bias, "x", x)
    checks.check(op, x.dim() > 0, "expected x to have at least one dimension, but got shape []")
    expected = f"expected bias of shape [{x.shape[-1]}], the last dimension of x"
    checks.check_sizes(op, bias.shape, x.shape[-1:], f"{expected}, but got {list(bias.shape)}")


def is_tanh(op: str, approximate: str) -> bool:
    """`approximate` as the operators take it: a bool, since the stable ABI leaks a string at each call."""
    if approximate not in ("none", "tanh"):
        checks.fail(op, f"expected approximate to be 'none' or 'tanh', but got {approximate!r}")
    return approximate == "tanh"


def check_gate(op: str, gate: Tensor, up: Tensor) -> None:
    checks.check_dtype(op, "gate", gate)
    checks.check_like(op, "up", up, "gate", gate)


def as_dims(dim: Any) -> tuple[int, ...] | None:
    """The dimensions as ints."""
    dims = dim if isinstance(dim, Sequence) or dim is None else (dim,)
    if not all(map(is_int, dims or ())):
        checks.fail("reduce_sum", f"expected dim to be an int, a sequence of ints or None, but got {dim!r}")
    return dims if dims is None else tuple(operator.index(d) for d in dims)


def reduced_dims(x: Tensor, dim: Sequence[int] | None) -> set[int]:
    """The dimensions that reduce_sum sums over, counted from the first."""
    return {d % x.dim() for d in dim} if dim and x.dim() else set(range(x.dim()))


def check_dims(x: Tensor, dim: Sequence[int] | None) -> None:
    dims, seen = max(x.dim(), 1), set[int]()  # a 0-d tensor has the dimensions 0 and -1, as in PyTorch
    for d in dim or ():
        checks.check("reduce_sum", -dims <= d < dims, f"expected dim in [{-dims}, {dims - 1}], but got {d}")
        checks.check("reduce_sum", d % dims not in seen, f"expected each dim once, but got {d % dims} twice")
        seen.add(d % dims)


def check_recurrence(op: str, a: Tensor, name: str, b: Tensor, h0: Tensor | None, dim: int) -> None:
    """check_recurrence of csrc/scan/scan.cpp."""
    checks.check_same(op, "a", a, name, b)
    expected = f"expected a of a shape that broadcasts to {list(b.shape)}, that of {name}"
    message = f"{expected}, but got {list(a.shape)}"
    checks.check(op, a.dim() <= b.dim(), message)
    for of_a, of_b in zip(reversed(a.shape), reversed(b.shape), strict=False):
        checks.check(op, (of_a == 1) | (of_a == of_b), message)  # | for sizes that torch.compile does not know
    check_dim(op, b, dim)
    if h0 is None:
        return
    checks.check_same(op, "h0", h0, name, b)
    lines = [size for d, size in enumerate(b.shape) if d != dim % b.dim()]
    expected = f"expected h0 of shape {lines}, that of {name} without dim"
    checks.check_sizes(op, h0.shape, lines, f"{expected}, but got {list(h0.shape)}")


# ---- rotary_embedding ----


def check_rotary(op: str, grad: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    q_name, k_name = f"{grad}q", f"{grad}k"
    checks.check_dtype(op, q_name, q)
    checks.check_same(op, k_name, k, q_name, q)
    checks.check_same_or_float32(op, "cos", cos, q_name, q)
    checks.check_same(op, "sin", sin, "cos", cos)
    shapes = "(tokens, width), (heads, tokens, width) or (batch, heads, tokens, width)"
    expected = f"expected {q_name} of shape {shapes}, but got {list(q.shape)}"
    checks.check(op, 2 <= q.dim() <= 4, expected)
    shape = ", ".join("*" if d == q.dim() - 3 else str(size) for d, size in enumerate(q.shape))
    expected = f"expected {k_name} of shape [{shape}] like {q_name}, with any number of heads, but got {list(k.shape)}"
    checks.check_sizes(op, k.shape, (*q.shape[:-3], *k.shape[-3:-2], *q.shape[-2:]), expected)
    batch, tokens, width = q.shape[0] if q.dim() == 4 else 1, q.shape[-2], q.shape[-1]
    batches = "1" if batch == 1 else f"1 or {batch}"
    rows = f"[{tokens}, rotated] or [{batches}, {tokens}, rotated]"
    expected = f"expected cos of shape {rows} for the tokens of {q_name}, but got {list(cos.shape)}"
    checks.check(op, 2 <= cos.dim() <= 3, expected)
    if cos.dim() == 3 and cos.shape[0] != 1:
        checks.check(op, cos.shape[0] == batch, expected)
    checks.check(op, cos.shape[-2] == tokens, expected)
    checks.check_shape(op, "sin", sin, "cos", cos)
    expected = f"expected cos to have an even number of columns, at most the {width} of {q_name}"
    checks.check(op, cos.shape[-1] % 2 == 0, f"{expected}, but got {cos.shape[-1]}")
    checks.check(op, cos.shape[-1] <= width, f"{expected}, but got {cos.shape[-1]}")

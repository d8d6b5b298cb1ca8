"""Rules for DTensors: how an operator's arguments may be sharded over a mesh, and how its results are then sharded.

A rule describes one dimension of the mesh. For each allowed sharding the rule yields the placements of the results, and
of the arguments that are not replicated. A placement is the dimension along which the tensor is sharded, PARTIAL (the
tensor is the sum of the processes' tensors) or None (each process has the whole tensor). Replicating all arguments is
always allowed. distributed/sharding.py registers the rules. This module does not import torch.distributed.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from ..registration.entries import PARTIAL, Call, Placement, Sharding
from . import linear_loss


def _alike(call: Call, d: int) -> dict[str, Placement]:
    """Returns the placement d for each argument that is a tensor, by the argument's name."""
    return {name: d for name, x in call.items() if hasattr(x, "tensor_meta")}


def _first(call: Call) -> Any:
    return next(iter(call.values()))


# ---- pointwise ----


def pointwise(call: Call) -> Iterator[Sharding]:
    for d in range(_first(call).ndim):
        yield [d] * 2, _alike(call, d)


def with_bias(call: Call) -> Iterator[Sharding]:
    last = call["x"].ndim - 1
    for d in range(last):
        yield [d], {"x": d}
    yield [last], {"x": last, "bias": 0}


def with_bias_backward(call: Call) -> Iterator[Sharding]:
    last = call["x"].ndim - 1
    for d in range(last + 1):
        grad_x = d if call["needs_grad_x"] else None
        grad_bias = PARTIAL if d < last else 0
        bias = {} if d < last else {"bias": 0}
        results = [grad_x, grad_bias if call["needs_grad_bias"] else None]
        yield results, {"grad_out": d, "x": d, **bias}


# ---- sums ----


def reduce_sum(call: Call) -> Iterator[Sharding]:
    x, dims = call["x"], call["dim"]
    reduced = {d % x.ndim for d in dims} if dims and x.ndim else set(range(x.ndim))
    for d in range(x.ndim):
        kept = d if call["keepdim"] else d - sum(other < d for other in reduced)
        yield [PARTIAL if d in reduced else kept], {"x": d}


# ---- rows ----


def lines(call: Call) -> Iterator[Sharding]:
    x = _first(call)
    for d in range(x.ndim):
        if d != call["dim"] % x.ndim:
            yield [d], _alike(call, d)


def linear_recurrence(call: Call) -> Iterator[Sharding]:
    h = call["b"] if "b" in call else call["h"]
    a, h0, dim = call["a"], call["h0"], call["dim"] % max(h.ndim, 1)
    for d in range(h.ndim):
        if d == dim:
            continue
        of_a, of_lines = d - (h.ndim - a.ndim), d - (d > dim)
        given: dict[str, Placement] = {name: d for name in ("grad_h", "b", "h") if name in call}
        if of_a >= 0 and a.shape[of_a] > 1:
            given["a"] = of_a
        if h0 is not None:
            given["h0"] = of_lines
        yield [d, d, None if h0 is None else of_lines], given


def _row_dims(call: Call, x: str) -> Iterable[int]:
    """Returns the dimensions of the rows, or none with dropout: its mask depends on positions in the whole tensor."""
    return () if call.get("p", 0) > 0 else range(call[x].ndim - len(call["normalized_shape"]))


def norm(call: Call) -> Iterator[Sharding]:
    for d in _row_dims(call, "x"):
        yield [d] * 4, {name: d for name in ("x", "residual") if name in call}


def norm_backward(call: Call) -> Iterator[Sharding]:
    x = "sum" if "sum" in call else "x"
    names = ("grad_out", "grad_sum", x, "mean", "rstd")
    for d in _row_dims(call, x):
        weights = [PARTIAL if call[f"needs_grad_{name}"] else None for name in ("weight", "bias") if name in call]
        grad_x = d if call["needs_grad_x"] or call.get("needs_grad_residual") else None
        # A norm that adds a residual has one more result, the gradient of x. It is empty, because without dropout x has
        # the same gradient as the residual.
        own = [None] if x == "sum" else []
        given = {name: d for name in names if call.get(name) is not None}
        yield [*own, grad_x, *weights], given


# ---- losses ----


def _loss_dims(call: Call) -> Iterator[tuple[int, int]]:
    """Yields each dimension of the logits other than that of the classes, with its number in the target."""
    dims = call["logits"].ndim
    for d in range(dims):
        if d != min(1, dims - 1):
            yield d, d if d == 0 else d - 1


def cross_entropy(call: Call) -> Iterator[Sharding]:
    if call["reduction"] == 1:  # "mean": sharded_loss.py computes the sum over all processes, and divides it itself
        return
    for d, row in _loss_dims(call):
        is_none = call["reduction"] == 0
        loss, total = (row, None) if is_none else (PARTIAL, PARTIAL)
        yield [loss, row, total], {"logits": d, "target": row}


def cross_entropy_backward(call: Call) -> Iterator[Sharding]:
    for d, row in _loss_dims(call):
        given: dict[str, Placement] = {"logits": d, "target": row, "lse": row}
        if call["reduction"] == 0:
            given["grad_out"] = row
        elif call["reduction"] == 2:  # backward with "sum" does not read the total
            given["total"] = PARTIAL
        yield [d], given


def token_log_probs(call: Call) -> Iterator[Sharding]:
    for d in range(call["logits"].ndim - 1):
        yield [d] * 3, _alike(call, d)


def _linear_gradients(call: Call, d: int, made: bool = True) -> list[Placement]:
    kinds: dict[str, Placement] = {"x": d, "weight": PARTIAL, "bias": PARTIAL}
    return [kind if made and call[f"needs_grad_{name}"] else None for name, kind in kinds.items()]


def linear_cross_entropy(call: Call) -> Iterator[Sharding]:
    if call["reduction"] == 1:
        return
    made = linear_loss.makes_gradients(call["x"].tensor_meta.dtype, call["reduction"])
    for d in range(call["x"].ndim - 1):
        loss = d if call["reduction"] == 0 else PARTIAL
        yield [loss, *_linear_gradients(call, d, made)], {"x": d, "target": d}


def linear_cross_entropy_backward(call: Call) -> Iterator[Sharding]:
    if call["reduction"] == 1:
        return
    made = linear_loss.makes_gradients(call["x"].tensor_meta.dtype, call["reduction"])
    for d in range(call["x"].ndim - 1):
        grad_out = {"grad_out": d} if call["reduction"] == 0 else {}
        names = ("grad_x", "grad_weight", "grad_bias")
        given = dict(zip(names, _linear_gradients(call, d, made), strict=True))
        yield _linear_gradients(call, d), {**grad_out, "x": d, "target": d, **given}


# ---- rotary_embedding ----


def rotary_embedding(call: Call) -> Iterator[Sharding]:
    (q_name, x), (k_name, _), *_ = call.items()
    cos, last = call["cos"], x.ndim - 1
    for d in range(last):
        given = {q_name: d, k_name: d}
        if d == last - 1:  # the dimension of the tokens
            given |= dict.fromkeys(("cos", "sin"), cos.ndim - 2)
        elif d == last - 3 and cos.ndim == 3 and cos.shape[0] == x.shape[0]:
            given |= dict.fromkeys(("cos", "sin"), 0)
        yield [d] * 2, given


def replicated(call: Call) -> Iterator[Sharding]:
    """Allows no sharding. It is the rule of dropout, whose mask depends on the positions in the whole tensor."""
    yield from ()

"""DTensors: how each operator's arguments may be sharded over a mesh, and how its results are then.

Importing this module registers a rule for every operator of the library; the package imports it once
torch.distributed.tensor is imported. A rule speaks of one dimension of the mesh; PyTorch combines them for several,
chooses the sharding that costs least to reach from the arguments' placements, and moves the data. All arguments
replicated is always allowed. Tensors are gathered if a rule does not allow their placement.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from .._namespace import NAMESPACE
from ..functional import linear_loss
from ..registration import checks
from ..registration.autograd import NO_GRAD, own_ops

# An operator's arguments by name, defaults included. A tensor is a DTensorSpec: shape, ndim, tensor_meta.dtype.
Call = dict[str, Any]
# The placements of the results, and of the arguments that are not replicated.
Sharding = tuple[Sequence[Placement], Mapping[str, Placement]]
Rule = Callable[[Call], Iterator[Sharding]]


def _alike(call: Call, shard: Placement) -> dict[str, Placement]:
    """The same placement for all tensors among the arguments."""
    return {name: shard for name, x in call.items() if hasattr(x, "tensor_meta")}


def _first(call: Call) -> Any:
    return next(iter(call.values()))


# ---- pointwise ----


def _pointwise(call: Call) -> Iterator[Sharding]:
    for d in range(_first(call).ndim):
        yield [Shard(d)] * 2, _alike(call, Shard(d))


def _with_bias(call: Call) -> Iterator[Sharding]:
    last = call["x"].ndim - 1
    for d in range(last):
        yield [Shard(d)], {"x": Shard(d)}
    yield [Shard(last)], {"x": Shard(last), "bias": Shard(0)}


def _with_bias_backward(call: Call) -> Iterator[Sharding]:
    last = call["x"].ndim - 1
    for d in range(last + 1):
        grad_x = Shard(d) if call["needs_grad_x"] else Replicate()
        grad_bias = Partial() if d < last else Shard(0)
        bias = {} if d < last else {"bias": Shard(0)}
        results = [grad_x, grad_bias if call["needs_grad_bias"] else Replicate()]
        yield results, {"grad_out": Shard(d), "x": Shard(d), **bias}


# ---- sums ----


def _reduce_sum(call: Call) -> Iterator[Sharding]:
    x, dims = call["x"], call["dim"]
    reduced = {d % x.ndim for d in dims} if dims and x.ndim else set(range(x.ndim))
    for d in range(x.ndim):
        kept = d if call["keepdim"] else d - sum(other < d for other in reduced)
        yield [Partial() if d in reduced else Shard(kept)], {"x": Shard(d)}


# ---- rows ----


def _softmax(call: Call) -> Iterator[Sharding]:
    x = _first(call)
    for d in range(x.ndim):
        if d != call["dim"] % x.ndim:
            yield [Shard(d)], _alike(call, Shard(d))


def _linear_recurrence(call: Call) -> Iterator[Sharding]:
    h = call["b"] if "b" in call else call["h"]
    a, h0, dim = call["a"], call["h0"], call["dim"] % max(h.ndim, 1)
    for d in range(h.ndim):
        if d == dim:
            continue
        of_a, of_lines = d - (h.ndim - a.ndim), Shard(d - (d > dim))
        given: dict[str, Placement] = {name: Shard(d) for name in ("grad_h", "b", "h") if name in call}
        if of_a >= 0 and a.shape[of_a] > 1:
            given["a"] = Shard(of_a)
        if h0 is not None:
            given["h0"] = of_lines
        yield [Shard(d), Shard(d), Replicate() if h0 is None else of_lines], given


def _row_dims(call: Call, x: str) -> Iterable[int]:
    """The dimensions of the rows; none if elements are dropped, because the mask depends on the whole tensor."""
    return () if call.get("p", 0) > 0 else range(call[x].ndim - len(call["normalized_shape"]))


def _norm(call: Call) -> Iterator[Sharding]:
    for d in _row_dims(call, "x"):
        yield [Shard(d)] * 4, {name: Shard(d) for name in ("x", "residual") if name in call}


def _norm_backward(call: Call) -> Iterator[Sharding]:
    x = "sum" if "sum" in call else "x"
    names = ("grad_out", "grad_sum", x, "mean", "rstd")
    for d in _row_dims(call, x):
        weights = [
            Partial() if call[f"needs_grad_{name}"] else Replicate() for name in ("weight", "bias") if name in call
        ]
        grad_x = Shard(d) if call["needs_grad_x"] or call.get("needs_grad_residual") else Replicate()
        # Without dropout the gradient of x is that of the residual, and has no room of its own.
        own = [Replicate()] if x == "sum" else []
        given = {name: Shard(d) for name in names if call.get(name) is not None}
        yield [*own, grad_x, *weights], given


# ---- losses ----


def _loss_dims(call: Call) -> Iterator[tuple[int, int]]:
    """The dimensions of the rows, in the logits and in the targets."""
    dims = call["logits"].ndim
    for d in range(dims):
        if d != min(1, dims - 1):
            yield d, d if d == 0 else d - 1


def _cross_entropy(call: Call) -> Iterator[Sharding]:
    if call["reduction"] == 1:  # sharded_loss.py calls the sum and divides: a mean of means is no mean
        return
    for d, row in _loss_dims(call):
        is_none = call["reduction"] == 0
        loss, total = (Shard(row), Replicate()) if is_none else (Partial(), Partial())
        yield [loss, Shard(row), total], {"logits": Shard(d), "target": Shard(row)}


def _cross_entropy_backward(call: Call) -> Iterator[Sharding]:
    for d, row in _loss_dims(call):
        given: dict[str, Placement] = {"logits": Shard(d), "target": Shard(row), "lse": Shard(row)}
        if call["reduction"] == 0:
            given["grad_out"] = Shard(row)
        elif call["reduction"] == 2:  # backward does not read it
            given["total"] = Partial()
        yield [Shard(d)], given


def _token_log_probs(call: Call) -> Iterator[Sharding]:
    for d in range(call["logits"].ndim - 1):
        yield [Shard(d)] * 3, _alike(call, Shard(d))


def _linear_gradients(call: Call, shard: Placement, made: bool = True) -> list[Placement]:
    kinds = {"x": shard, "weight": Partial(), "bias": Partial()}
    return [kind if made and call[f"needs_grad_{name}"] else Replicate() for name, kind in kinds.items()]


def _linear_cross_entropy(call: Call) -> Iterator[Sharding]:
    if call["reduction"] == 1:
        return
    made = linear_loss.makes_gradients(call["x"].tensor_meta.dtype, call["reduction"])
    for d in range(call["x"].ndim - 1):
        loss = Shard(d) if call["reduction"] == 0 else Partial()
        yield [loss, *_linear_gradients(call, Shard(d), made)], {"x": Shard(d), "target": Shard(d)}


def _linear_cross_entropy_backward(call: Call) -> Iterator[Sharding]:
    if call["reduction"] == 1:
        return
    made = linear_loss.makes_gradients(call["x"].tensor_meta.dtype, call["reduction"])
    for d in range(call["x"].ndim - 1):
        grad_out = {"grad_out": Shard(d)} if call["reduction"] == 0 else {}
        names = ("grad_x", "grad_weight", "grad_bias")
        given = dict(zip(names, _linear_gradients(call, Shard(d), made), strict=True))
        yield _linear_gradients(call, Shard(d)), {**grad_out, "x": Shard(d), "target": Shard(d), **given}


# ---- rotary_embedding ----


def _rotary_embedding(call: Call) -> Iterator[Sharding]:
    (q_name, x), (k_name, _), *_ = call.items()
    cos, last = call["cos"], x.ndim - 1
    for d in range(last):
        given = {q_name: Shard(d), k_name: Shard(d)}
        if d == last - 1:  # the dimension of the tokens
            given |= dict.fromkeys(("cos", "sin"), Shard(cos.ndim - 2))
        elif d == last - 3 and cos.ndim == 3 and cos.shape[0] == x.shape[0]:
            given |= dict.fromkeys(("cos", "sin"), Shard(0))
        yield [Shard(d)] * 2, given


# ---- all of them ----


def _replicated(call: Call) -> Iterator[Sharding]:
    """The rule of dropout, whose mask depends on the places in the whole tensor."""
    yield from ()


def _refuse(op: str, instead: str) -> Rule:
    def rule(call: Call) -> Iterator[Sharding]:
        checks.fail(op, f"expected no DTensor; {instead}")

    return rule


RULES: dict[str, Rule] = {
    "muladd": _pointwise,
    "muladd.out": _refuse("muladd", "leave out= away, or call it on to_local()"),
    "muladd_backward": _pointwise,
    "relu": _pointwise,
    "relu_backward": _pointwise,
    "mish": _pointwise,
    "mish_backward": _pointwise,
    "mish_double_backward": _pointwise,
    "silu": _pointwise,
    "silu_backward": _pointwise,
    "silu_double_backward": _pointwise,
    "gelu": _pointwise,
    "gelu_backward": _pointwise,
    "gelu_double_backward": _pointwise,
    "swiglu": _pointwise,
    "swiglu_backward": _pointwise,
    "geglu": _pointwise,
    "geglu_backward": _pointwise,
    "scale_bias_relu": _with_bias,
    "scale_bias_relu_backward": _with_bias_backward,
    "bias_gelu": _with_bias,
    "bias_gelu_backward": _with_bias_backward,
    "reduce_sum": _reduce_sum,
    "dropout": _replicated,
    "cumsum": _softmax,
    "logcumsumexp": _softmax,
    "logcumsumexp_backward": _softmax,
    "linear_recurrence": _linear_recurrence,
    "linear_recurrence_backward": _linear_recurrence,
    "softmax": _softmax,
    "softmax_backward": _softmax,
    "log_softmax": _softmax,
    "log_softmax_backward": _softmax,
    **dict.fromkeys(("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "layer_norm_dropout"), _norm),
    "layer_norm_backward": _norm_backward,
    "rms_norm_backward": _norm_backward,
    "add_layer_norm_backward": _norm_backward,
    "add_rms_norm_backward": _norm_backward,
    "layer_norm_dropout_backward": _norm_backward,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "token_log_probs": _token_log_probs,
    "token_log_probs_backward": _token_log_probs,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "rotary_embedding": _rotary_embedding,
    "rotary_embedding_backward": _rotary_embedding,
}


def _acceptable(op: Any, rule: Rule) -> Callable[..., Any]:
    """The rule as register_sharding takes it: lists of placements, of the results and of the arguments by position."""
    arguments, count = op._schema.arguments, len(op._schema.returns)

    def shardings(*args: Any, **keywords: Any) -> list[tuple[list[Placement | None], list[Placement | None]]]:
        call = {a.name: args[i] if i < len(args) else a.default_value for i, a in enumerate(arguments)} | keywords
        is_tensor = [hasattr(call[a.name], "tensor_meta") for a in arguments[: len(args)]]
        names = [a.name for a in arguments[: len(args)]]
        found: list[Sharding] = [([Replicate()] * count, {}), *rule(call)]
        return [
            (
                list(results[:count]),
                [
                    given.get(name, Replicate()) if tensor else None
                    for name, tensor in zip(names, is_tensor, strict=True)
                ],
            )
            for results, given in found
        ]

    return shardings


def register(op: Any, rule: Rule) -> None:
    register_sharding(op)(_acceptable(op, rule))
    # PyTorch caches the result of a rule by the tensors and the arguments from the first int on. Our rules also read
    # lists, bools, and which optional tensors are given.
    kinds = [str(argument.type) for argument in op._schema.arguments]
    first = next((i for i, kind in enumerate(kinds) if kind not in ("Tensor", "float")), len(kinds))
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    infos[op] = replace(infos[op], static_argnum=first)


def overloads() -> dict[str, Any]:
    """Every operator of the library, no-grad overloads included."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{NAMESPACE}::"):
            name = name.removeprefix(f"{NAMESPACE}::")
            packet, _, overload = name.partition(".")
            found[name] = getattr(getattr(own_ops, packet), overload or "default")
    return found


for _name, _op in overloads().items():
    if (_rule := RULES.get(_name.removesuffix(NO_GRAD))) is not None:
        register(_op, _rule)


# ---- what functions and autograd do on DTensors beside calling the operator; sharded_loss.py has the losses ----


def whole(x: DTensor) -> DTensor:
    """x in every process, with partial sums added up."""
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def on_mesh(grads: Sequence[Tensor | None], mesh: Any) -> tuple[Tensor | None, ...]:
    """Plain tensors, which every process holds whole, as replicated DTensors."""
    placements = [Replicate()] * mesh.ndim
    return tuple(
        DTensor.from_local(g, mesh, placements, run_check=False) if g is not None and not isinstance(g, DTensor) else g
        for g in grads
    )


def agreed(seed: Tensor, x: DTensor) -> Tensor:
    """One seed for all processes of x's mesh: the largest that they drew. Processes that were seeded alike keep
    theirs."""
    mesh = x.device_mesh
    return whole(DTensor.from_local(seed, mesh, [Partial("max")] * mesh.ndim, run_check=False))

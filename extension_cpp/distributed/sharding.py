"""Registers a sharding rule of each operator for PyTorch's DTensors. The operator's entry in ops.py names the rule.

Importing this module registers the rules; the package imports it once torch.distributed.tensor is imported. A rule
describes one dimension of the mesh. PyTorch combines rules for several dimensions, chooses the sharding that costs
least to reach from the arguments' placements, and moves the data. If no rule allows an argument's placement, PyTorch
gathers the argument.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from ..registration import checks
from ..registration.calls import overloads, without_suffix
from ..registration.entries import NONE, SHARDING, Call, Mark, Placement, Rule, Sharding


def _refuse(name: str) -> Rule:
    """Returns the rule of an operator marked NONE, which raises an error for DTensors."""
    instead = "leave out= away, or call it on to_local()" if name.endswith(".out") else "call it on to_local()"

    def rule(call: Call) -> Iterator[Sharding]:
        checks.fail(name.removesuffix(".out"), f"expected no DTensor; {instead}")

    return rule


def _as_torch(placement: Placement) -> Any:
    """Converts a placement of a rule to PyTorch's Replicate, Shard or Partial."""
    return Replicate() if placement is None else Shard(placement) if isinstance(placement, int) else Partial()


def _acceptable(op: Any, rule: Rule) -> Callable[..., Any]:
    """Converts a rule to a function for register_sharding. The function returns pairs of two lists: the placements of
    the results, and those of the arguments by position."""
    arguments, count = op._schema.arguments, len(op._schema.returns)

    def shardings(*args: Any, **keywords: Any) -> list[tuple[list[Any], list[Any]]]:
        call = {a.name: args[i] if i < len(args) else a.default_value for i, a in enumerate(arguments)} | keywords
        by_position = arguments[: len(args)]
        found: list[Sharding] = [([None] * count, {}), *rule(call)]
        return [
            (
                [_as_torch(placement) for placement in results[:count]],
                [_as_torch(given.get(a.name)) if hasattr(call[a.name], "tensor_meta") else None for a in by_position],
            )
            for results, given in found
        ]

    return shardings


def register(op: Any, rule: Rule) -> None:
    register_sharding(op)(_acceptable(op, rule))
    # PyTorch caches the result of a rule. The key has the tensors and, by default, the arguments from the first int on.
    # The rules here also read lists, bools, and which optional tensors are given, so the key must have those, too.
    kinds = [str(argument.type) for argument in op._schema.arguments]
    first = next((i for i, kind in enumerate(kinds) if kind not in ("Tensor", "float")), len(kinds))
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    infos[op] = replace(infos[op], static_argnum=first)


for _name, _op in overloads().items():
    _rule = SHARDING.get(without_suffix(_name), NONE)
    register(_op, _refuse(without_suffix(_name)) if isinstance(_rule, Mark) else _rule)


# ---- helpers of functions and autograd for DTensors; sharded_loss.py has the losses ----


def whole(x: DTensor) -> DTensor:
    """Replicates x: every process gets the whole tensor, with partial sums added up."""
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def on_mesh(grads: Sequence[Tensor | None], mesh: Any) -> tuple[Tensor | None, ...]:
    """Converts plain tensors, which every process holds as a whole, to replicated DTensors."""
    placements = [Replicate()] * mesh.ndim
    return tuple(
        DTensor.from_local(g, mesh, placements, run_check=False) if g is not None and not isinstance(g, DTensor) else g
        for g in grads
    )


def agreed(seed: Tensor, x: DTensor) -> Tensor:
    """Returns one seed for all processes of x's mesh, the largest that they drew. Equal seeds stay as they are."""
    mesh = x.device_mesh
    return whole(DTensor.from_local(seed, mesh, [Partial("max")] * mesh.ndim, run_check=False))

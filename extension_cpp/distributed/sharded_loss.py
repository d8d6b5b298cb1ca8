"""Implements the losses of DTensors.

With "mean" the sum of all processes' losses is divided by the sum of all their weights. The mean of the processes'
means would differ, if the sums of their weights differ.

If several processes share the classes (vocabulary-parallel), each runs cross_entropy on its own classes. Two
all-reduces of up to three numbers a row combine the results. The first computes the maximum of the log-sum-exps. The
second sums exp(lse - maximum), the target's logit and, for label smoothing, maximum - logit. Backward needs no
all-reduce: it calls the operator with the log-sum-exp of all classes. The operator requires that a row's target is one
of the classes that it gets. If another process has the target's class, this process passes class 0 as the target.
Backward then computes the gradient of class 0 again, without the target's term.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .. import _ops
from ..functional import linear_loss
from ..functional.linear_loss import Call
from ..functional.losses import LossOptions, check_loss, check_targets, refuse_weight_gradient, unevaluated_lse
from ..registration.calls import own_ops
from .sharding import on_mesh, whole

IGNORED = -1  # a target that is no class of any process


def cross_entropy(
    logits: DTensor, target: Any, weight: Any, reduction: int, options: LossOptions, float_loss: bool
) -> Tensor:
    class_dim = min(1, logits.ndim - 1)
    if any(placement.is_shard(class_dim) for placement in logits.placements):
        target, weight = _on_mesh_of_rows(logits, class_dim, target, weight)
        classes = classes_of(logits, class_dim)
        if classes is not None and (weight is None or options.label_smoothing == 0):
            given = target, weight, reduction, options, float_loss
            return _over_classes("cross_entropy", logits, class_dim, classes, *given)
    if reduction != 1:
        return _ops.cross_entropy(logits, target, weight, *options.around(reduction), float_loss)
    loss, _, total = own_ops.cross_entropy(logits, target, weight, *options.around(2), True)
    return _mean(loss, total, _loss_type(logits, float_loss))


def linear_cross_entropy(call: Call) -> Tensor:
    x: Any = call.x
    linear_weight, target, weight = call.linear_weight, call.target, call.weight
    if isinstance(linear_weight, DTensor) and (weight is None or call.label_smoothing == 0):
        classes = classes_of(linear_weight, 0)
        if classes is not None:
            logits = _logits_over_classes(x, linear_weight, call.linear_bias, classes.mesh_dim)
            class_dim = logits.ndim - 1
            target, weight = _on_mesh_of_rows(logits, class_dim, target, weight)
            given = target, weight, call.reduction, call.options, call.float_loss
            return _over_classes("linear_cross_entropy", logits, class_dim, classes, *given)
    if call.reduction != 1:
        return _ops.linear_cross_entropy(*call)
    loss = _ops.linear_cross_entropy(*call._replace(reduction=2, float_loss=True))
    with torch.no_grad():
        total = linear_loss.total_weight(target, linear_weight.shape[0], weight, call.ignore_index, loss)
    return _mean(loss, total, _loss_type(x, call.float_loss))


def _loss_type(like: DTensor, float_loss: bool) -> torch.dtype:
    is_float = float_loss or torch.is_autocast_enabled(like.device.type)
    return torch.promote_types(like.dtype, torch.float32) if is_float else like.dtype


def _mean(loss: Any, weights: Any, dtype: torch.dtype) -> Tensor:
    """Returns the sum of the losses divided by the sum of the targets' weights."""
    return (whole(loss) / whole(weights.sum())).to(dtype)


# ---- classes shared by several processes ----


@dataclass(frozen=True)
class Classes:
    """Holds the range of classes of which this process has the logits."""

    mesh: DeviceMesh
    mesh_dim: int  # the dimension of the mesh along which the classes are sharded
    first: int
    count: int  # number of classes of all processes

    def reduce(self, x: Tensor, op: str) -> Tensor:
        """Reduces x over the processes that share the classes. Each of them gets the maximum or the sum."""
        whole = [Replicate()] * self.mesh.ndim
        parts = [Partial(op) if d == self.mesh_dim else Replicate() for d in range(self.mesh.ndim)]
        return DTensor.from_local(x, self.mesh, parts, run_check=False).redistribute(placements=whole).to_local()


def classes_of(logits: DTensor, class_dim: int) -> Classes | None:
    """Returns this process's range of classes, or None unless exactly one dimension of the mesh shards the classes and
    each process has some of them."""
    placements, mesh = logits.placements, logits.device_mesh
    along = [d for d, placement in enumerate(placements) if placement.is_shard(class_dim)]
    if len(along) != 1 or not all(type(p) in (Shard, Replicate) for p in placements):
        return None
    count, step = logits.shape[class_dim], -(-logits.shape[class_dim] // mesh.shape[along[0]])
    if step * (mesh.shape[along[0]] - 1) >= count:
        return None
    return Classes(mesh, along[0], step * mesh.get_local_rank(along[0]), count)


class RowLosses(torch.autograd.Function):
    """Computes the float64 loss of each row of logits whose classes are sharded. The losses have the placements of the
    target. csrc/loss/loss.h has the formulas."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: DTensor,
        target: DTensor,  # placed like the rows
        weight: Tensor | None,  # weights of the classes of all processes; None with label_smoothing
        class_dim: int,
        classes: Classes,
        options: LossOptions,
    ) -> DTensor:
        label_smoothing, softcap = options.label_smoothing, options.softcap
        x, labels = _local_rows(logits, class_dim), target.to_local()
        if class_dim > 1:
            labels = labels.reshape(-1)
        dim = min(1, x.dim() - 1)
        is_ignored, is_class = labels == options.ignore_index, (labels >= 0) & (labels < classes.count)
        label = labels - classes.first
        is_here = (label >= 0) & (label < x.shape[dim]) & ~is_ignored
        label = label.where(is_here, 0)
        # With label_smoothing = 1 the operator's loss is the mean of lse - z_c over this process's classes c.
        local = options._replace(ignore_index=IGNORED, label_smoothing=float(label_smoothing > 0), z_loss=0.0)
        loss, saved, _ = own_ops.cross_entropy.default(x, label, None, *local.around(0), True)
        lse, rest = saved.double().unbind(-1)
        is_masked = lse == -torch.inf  # all logits of this process are -inf, so that rest and loss are NaN
        rest, loss = rest.masked_fill(is_masked, 0.0), loss.masked_fill(is_masked, 0.0)
        z = x.gather(dim, label.unsqueeze(dim)).squeeze(dim).double()
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        most = classes.reduce(lse, "max")
        sums = [torch.exp(lse - most + rest), z.where(is_here, 0.0)]
        if label_smoothing > 0:
            sums.append((loss - rest + (most - lse)) * x.shape[dim])
        exponentials, z_target, *distance = classes.reduce(torch.stack(sums), "sum")
        log_sum = exponentials.log()  # is added last below, because rounding would lose it beside a large `most`
        lse = most + log_sum
        losses = (1 - label_smoothing) * (most - z_target + log_sum) + options.z_loss * lse * lse
        if label_smoothing > 0:
            losses += label_smoothing * (distance[0] / classes.count + log_sum)
        factor = torch.ones_like(lse) if weight is None else weight.double()[labels.clamp(0, classes.count - 1)]
        factor = factor.where(is_class, torch.nan)
        statistics = z, unevaluated_lse(most, log_sum, loss.dtype), factor
        ctx.save_for_backward(logits, label.masked_fill(is_ignored, IGNORED), is_here, *statistics)
        ctx.class_dim, ctx.classes, ctx.options = class_dim, classes, options
        ctx.placements = target.placements
        return _placed((factor * losses).masked_fill(is_ignored, 0.0), target)

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]  # one result
        logits, label, is_here, z, saved, factor = ctx.saved_tensors
        options: LossOptions = ctx.options
        label_smoothing, z_loss, softcap = options.label_smoothing, options.z_loss, options.softcap
        x, count = _local_rows(logits, ctx.class_dim), ctx.classes.count
        dim, acc = min(1, x.dim() - 1), torch.promote_types(x.dtype, torch.float32)
        grad = grad_out.redistribute(placements=ctx.placements).to_local().reshape(factor.shape) * factor
        # The operator divides label_smoothing by the number of this process's classes, not of all classes.
        local = options._replace(ignore_index=IGNORED, label_smoothing=label_smoothing * x.shape[dim] / count)
        given = grad.to(acc), x, label, saved, grad.new_empty(0, dtype=acc), None
        grad_x = _ops.cross_entropy_backward(*given, *local.around(0))
        lse, rest = saved.double().unbind(-1)
        of_label = (1 + 2 * z_loss * (lse + rest)) * torch.exp(z - lse - rest) - label_smoothing / count
        of_label = grad * (of_label - (1 - label_smoothing) * is_here)
        if softcap is not None:
            of_label = of_label * (1 - (z / softcap) ** 2)
        of_label = of_label.masked_fill(label == IGNORED, 0.0).to(grad_x.dtype)
        grad_x.scatter_(dim, label.clamp(min=0).unsqueeze(dim), of_label.unsqueeze(dim))
        return _placed(grad_x, logits), *(None,) * 5


def _local_rows(logits: DTensor, class_dim: int) -> Tensor:
    """Returns this process's part of the logits, in the shape that cross_entropy accepts."""
    return logits.to_local().flatten(0, -2) if class_dim > 1 else logits.to_local()


def _placed(x: Tensor, like: DTensor) -> DTensor:
    """Makes a DTensor from this process's part x, with the shape and the placements of the DTensor `like`."""
    strides = torch.empty(like.shape, device="meta").stride()
    options: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": strides}
    return DTensor.from_local(x.view(like.to_local().shape), like.device_mesh, like.placements, **options)


def row_placements(logits: DTensor, class_dim: int) -> list[Any]:
    """Returns the placements of a tensor that has one number for each row of the logits, such as the target."""
    return [
        Replicate() if p.is_shard(class_dim) else Shard(p.dim - (p.dim > class_dim)) if type(p) is Shard else p
        for p in logits.placements
    ]


def _on_mesh_of_rows(logits: DTensor, class_dim: int, target: Tensor, weight: Tensor | None) -> tuple[Any, Any]:
    """Returns the target and the weight as DTensors. A target that is a plain tensor has this process's rows, as for
    PyTorch's loss_parallel. A weight that is a plain tensor has all classes."""
    mesh = logits.device_mesh
    if not isinstance(target, DTensor):
        target = DTensor.from_local(target, mesh, row_placements(logits, class_dim), run_check=False)
    (weight,) = on_mesh([weight], mesh)
    return target, weight


def _logits_over_classes(x: DTensor, weight: DTensor, bias: Tensor | None, mesh_dim: int) -> DTensor:
    """Computes x @ weight.T + bias. Each process computes the logits of the classes in its part of the weight."""
    last = x.ndim - 1
    rows = [
        Replicate() if d == mesh_dim or p.is_partial() or p.is_shard(last) else p for d, p in enumerate(x.placements)
    ]
    logits: Any = torch.nn.functional.linear(x.redistribute(placements=rows), weight, bias)
    return logits.redistribute(placements=[Shard(last) if d == mesh_dim else p for d, p in enumerate(rows)])


def _over_classes(
    op: str,
    logits: DTensor,
    class_dim: int,
    classes: Classes,
    target: DTensor,
    weight: DTensor | None,
    reduction: int,
    options: LossOptions,
    float_loss: bool,
) -> Tensor:
    """Computes the loss of logits whose classes are sharded."""
    refuse_weight_gradient(op, weight is not None and weight.requires_grad)
    target = target.redistribute(placements=row_placements(logits, class_dim))
    if not torch.compiler.is_compiling():  # torch.compile cannot trace the checks
        check_loss(op, logits, target, class_dim, weight, options)
        check_targets(op, target.to_local(), classes.count, options.ignore_index)
    local_weight = None if weight is None else whole(weight).to_local()
    losses: Any = RowLosses.apply(logits, target, local_weight, class_dim, classes, options)
    loss_type = _loss_type(logits, float_loss)
    if reduction == 1:
        with torch.no_grad():
            total = linear_loss.total_weight(target, classes.count, weight, options.ignore_index, losses)
        return _mean(losses.sum(), total, loss_type)
    return (losses.sum() if reduction == 2 else losses).to(loss_type)

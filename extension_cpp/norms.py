"""What the five norms share: the checks of csrc/norm/ in the same order and words, the fakes, and the derivative."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _ops, checks
from .autograd import Gradients

# ---- checks, and the tensors that the kernels allocate ----


def norm_statistics(x: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """An empty tensor with one number for each row, in a shape that broadcasts against x."""
    shape = [*x.shape[: x.dim() - len(normalized_shape)], *(1 for _ in normalized_shape)]
    return x.new_empty(shape, dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)


def norm_gradients(
    x: Tensor,
    normalized_shape: Sequence[int],
    weights: Sequence[Tensor | None],
    needs_x: bool,
    needs_weights: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Empty gradients of x and of the weights. A gradient that is not needed has no elements."""
    like = next((w for w in weights if w is not None), x)
    of_weights = (like.new_empty(list(normalized_shape) if needs else 0) for needs in needs_weights)
    return x.new_empty(x.shape if needs_x else 0), *of_weights


def check_weight(op: str, name: str, weight: Tensor, x: Tensor, normalized_shape: Sequence[int]) -> None:
    checks.check_device(op, name, weight, "x", x)
    half = x.dtype.itemsize < 4
    checks.check(
        op,
        weight.dtype == x.dtype or (half and weight.dtype == torch.float32),
        f"expected {name} to be {checks.dtype_name(x)} like x{' or float32' if half else ''}, "
        f"but got {checks.dtype_name(weight)}",
    )
    expected = f"expected {name} of shape {list(normalized_shape)}, normalized_shape"
    checks.check_sizes(op, weight.shape, normalized_shape, f"{expected}, but got {list(weight.shape)}")


def check_norm(
    op: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None = None
) -> None:
    """check_inputs of csrc/norm/norm.cpp."""
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


def check_norm_backward(
    op: str,
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    statistics: dict[str, Tensor],
    weight: Tensor | None,
    bias: Tensor | None = None,
) -> None:
    """The checks of norm_backward in csrc/norm/norm.cpp. `statistics` has the saved statistics by name."""
    check_norm(op, x, normalized_shape, weight, bias)
    checks.check_like(op, "grad_out", grad_out, "x", x)
    expected = norm_statistics(x, normalized_shape)
    for name, given in statistics.items():
        checks.check_device(op, name, given, "x", x)
        message = f"expected {name} as the forward returned it"
        checks.check(op, given.dtype == expected.dtype and given.is_contiguous(), message)
        checks.check(op, given.numel() == expected.numel(), message)


def check_dropout(op: str, p: float, seed: Tensor | None, x: Tensor) -> None:
    """check_dropout of csrc/norm/norm_fused.cpp."""
    checks.check_probability(op, p)
    if seed is not None:
        checks.check_seed(op, seed, x)
    checks.check(op, p == 0 or seed is not None, "expected a seed with p > 0, but got None")


# ---- fakes and derivative ----


class Norm:
    """The fakes of a norm and of its backward operator, and the norm's setup_context and backward.

    Both operators take the arguments of their schemas in csrc/norm/ by position. Those in brackets are there only if
    the norm adds a residual or drops elements:

        norm:      x, [residual], normalized_shape, *weights, eps, [p, seed]
        returns    out, [sum], *statistics
        backward:  grad_out, [grad_sum], x or sum, normalized_shape, *statistics, *weights, [p, seed], *needs_grad
        returns    the gradients of x, [residual], *weights

    Args:
        op: the name of the norm's operator.
        statistics: the names of the numbers for each row that backward reads. The last one is rstd.
        weights: the names of the parameters for each column. The first one is weight.
        adds: whether the norm adds a residual.
        drops: whether it drops elements.
    """

    def __init__(
        self, op: str, statistics: Sequence[str], weights: Sequence[str], *, adds: bool = False, drops: bool = False
    ) -> None:
        self.op, self.statistics, self.weights, self.adds, self.drops = op, statistics, weights, adds, drops
        self.backward_op = getattr(_ops, f"{op}_backward")
        self.differentiable = {"x": 0, "residual": 1} if adds else {"x": 0}  # the index of each argument
        self.differentiable |= {name: i for i, name in enumerate(weights, len(self.differentiable) + 1)}

    def fake(self, *inputs: Any) -> tuple[Tensor, ...]:
        x, residual, normalized_shape, weights, p, seed = self._split(inputs)
        check_norm(self.op, x, normalized_shape, *weights)
        if residual is not None:
            checks.check_like(self.op, "residual", residual, "x", x)
        check_dropout(self.op, p, seed, x)
        sums = [x.new_empty(x.shape)] if self.adds else []
        return x.new_empty(x.shape), *sums, *(norm_statistics(x, normalized_shape) for _ in self.statistics)

    def backward_fake(self, *inputs: Any) -> tuple[Tensor, ...]:
        grad_out, grad_sum, x, normalized_shape, statistics, weights, p, seed, needs = self._split_backward(inputs)
        op = f"{self.op}_backward"
        if grad_sum is not None:
            checks.check_like(op, "grad_sum", grad_sum, "sum", x)
        check_dropout(op, p, seed, x)
        check_norm_backward(
            op, grad_out, x, normalized_shape, dict(zip(self.statistics, statistics, strict=True)), *weights
        )
        if not self.adds:
            return norm_gradients(x, normalized_shape, weights, needs[0], needs[1:])
        needs_x, needs_residual, *needs_weights = needs
        grad_x = x.new_empty(x.shape if needs_x and p > 0 else 0)
        return grad_x, *norm_gradients(x, normalized_shape, weights, needs_x or needs_residual, needs_weights)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, ctx.normalized_shape, weights, ctx.p, seed = self._split(inputs)
        statistics = output[-len(self.statistics) :]
        ctx.save_for_backward(output[1] if self.adds else x, seed, *statistics, *weights)
        ctx.mark_non_differentiable(*statistics)
        ctx.set_materialize_grads(False)  # else autograd would allocate zeros as gradients of the statistics

    def backward(self, ctx: Any, grad_out: Tensor | None, *grads: Tensor | None) -> Gradients:
        x, seed, *saved = ctx.saved_tensors
        if grad_out is None:
            return _grads_of_sum_alone(ctx, grads[0], seed) if self.adds else {}
        grad_sum = grads[:1] if self.adds else ()
        dropout = (ctx.p, seed) if self.drops else ()
        needs = [ctx.needs_input_grad[i] for i in self.differentiable.values()]
        results = self.backward_op(grad_out, *grad_sum, x, ctx.normalized_shape, *saved, *dropout, *needs)
        gradients = dict(zip(self.differentiable, results, strict=True))
        if self.adds and ctx.p == 0:  # then one tensor is the gradient of both
            gradients["x"] = gradients["residual"]
        return gradients

    def backward_setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """The setup_context of the backward operator, for second_order.py."""
        grad_out, _, x, ctx.normalized_shape, statistics, weights, ctx.p, seed, ctx.needs = self._split_backward(inputs)
        ctx.save_for_backward(grad_out, x, statistics[-1], weights[0], seed)

    def _split(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """x, residual, normalized_shape, weights, p and seed."""
        x, residual, normalized_shape, *others = inputs if self.adds else (inputs[0], None, *inputs[1:])
        count = len(self.weights)
        p, seed = others[count + 1 :] if self.drops else (0.0, None)
        return x, residual, normalized_shape, others[:count], p, seed

    def _split_backward(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """grad_out, grad_sum, x or sum, normalized_shape, statistics, weights, p, seed and needs."""
        grad_out, grad_sum, x, normalized_shape, *others = inputs if self.adds else (inputs[0], None, *inputs[1:])
        first, last = len(self.statistics), len(self.statistics) + len(self.weights)
        p, seed, *needs = others[last:] if self.drops else (0.0, None, *others[last:])
        return grad_out, grad_sum, x, normalized_shape, others[:first], others[first:last], p, seed, needs


def _grads_of_sum_alone(ctx: Any, grad_sum: Tensor | None, seed: Tensor | None) -> Gradients:
    """The gradients of x and residual if only the sum was used, and not the norm."""
    grad_x = grad_sum
    if grad_sum is not None and seed is not None and ctx.p > 0 and ctx.needs_input_grad[0]:
        grad_x = _ops.dropout(grad_sum, ctx.p, seed)
    return {"x": grad_x, "residual": grad_sum}

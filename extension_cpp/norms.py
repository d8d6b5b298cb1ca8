"""What the five norms share: the checks of csrc/norm/ in the same order and words, the fakes, and the derivative."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _ops, checks
from .autograd import Gradients, own_ops

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
    checks.check_same_or_float32(op, name, weight, "x", x)
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
    """check_dropout of csrc/norm/norm.cpp."""
    checks.check_probability(op, p)
    if seed is not None:
        checks.check_seed(op, seed, x)
    checks.check(op, p == 0 or seed is not None, "expected a seed with p > 0, but got None")


# ---- fakes and derivative ----


class Norm:
    """The fakes of a norm and of its backward operator, and the norm's setup_context and backward.

    The names of the arguments in the two schemas say how the norms differ. Those in brackets are there only if the norm
    adds a residual or drops elements:

        norm:      x, [residual], normalized_shape, *weights, eps, [p, seed]
        returns    out, [sum], *statistics
        backward:  grad_out, [grad_sum], x or sum, normalized_shape, *statistics, *weights, [p, seed], *needs_grad
        returns    the gradients of x, [residual], *weights
    """

    def __init__(self, op: str) -> None:
        self.op, self.backward_op = op, getattr(_ops, f"{op}_backward")
        self.inputs, self.backward_inputs = _arguments(op), _arguments(f"{op}_backward")
        self.adds, self.drops = "residual" in self.inputs, "seed" in self.inputs
        self.x = "sum" if self.adds else "x"  # the name of the normalized tensor in backward
        self.weights = [name for name in ("weight", "bias") if name in self.inputs]
        self.statistics = [name for name in ("mean", "rstd") if name in self.backward_inputs]
        self.differentiable = [name for name in ("x", "residual", "weight", "bias") if name in self.inputs]
        # setup_context picks from the inputs and results what it saves, backward from `known` its operator's arguments.
        results = ["out", *(["sum"] if self.adds else []), *self.statistics]
        saved = [self.x, *self.statistics, *self.weights, *(["seed"] if self.drops else [])]
        self.saved_of = operator.itemgetter(*map([*self.inputs, *results].index, saved))
        known = [*(f"grad_{name}" for name in results), *saved, "normalized_shape", "p"]
        known += [f"needs_grad_{name}" for name in self.inputs]
        self.arguments_of = operator.itemgetter(*map(known.index, self.backward_inputs))

    def fake(self, *inputs: Any) -> tuple[Tensor, ...]:
        given = dict(zip(self.inputs, inputs, strict=True))
        x, normalized_shape = given["x"], given["normalized_shape"]
        check_norm(self.op, x, normalized_shape, *(given[name] for name in self.weights))
        if self.adds:
            checks.check_like(self.op, "residual", given["residual"], "x", x)
        if self.drops:
            check_dropout(self.op, given["p"], given["seed"], x)
        sums = [x.new_empty(x.shape)] if self.adds else []
        return x.new_empty(x.shape), *sums, *(norm_statistics(x, normalized_shape) for _ in self.statistics)

    def backward_fake(self, *inputs: Any) -> tuple[Tensor, ...]:
        op, given = f"{self.op}_backward", dict(zip(self.backward_inputs, inputs, strict=True))
        x, normalized_shape = given[self.x], given["normalized_shape"]
        weights = [given[name] for name in self.weights]
        if given.get("grad_sum") is not None:
            checks.check_like(op, "grad_sum", given["grad_sum"], "sum", x)
        if self.drops:
            check_dropout(op, given["p"], given["seed"], x)
        statistics: dict[str, Tensor] = {name: given[name] for name in self.statistics}
        check_norm_backward(op, given["grad_out"], x, normalized_shape, statistics, *weights)
        needs_x, *needs_weights = (given[f"needs_grad_{name}"] for name in self.differentiable)
        if not self.adds:
            return norm_gradients(x, normalized_shape, weights, needs_x, needs_weights)
        needs_residual, *needs_weights = needs_weights
        grad_x = x.new_empty(x.shape if needs_x and given["p"] > 0 else 0)
        return grad_x, *norm_gradients(x, normalized_shape, weights, needs_x or needs_residual, needs_weights)

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*self.saved_of((*inputs, *output)))
        ctx.normalized_shape = inputs[2 if self.adds else 1]
        ctx.p = inputs[-2] if self.drops else 0.0
        ctx.mark_non_differentiable(*output[2 if self.adds else 1 :])  # the statistics
        ctx.set_materialize_grads(False)  # else autograd would allocate zeros as gradients of the statistics

    def backward(self, ctx: Any, *grads: Tensor | None) -> Gradients:
        saved = ctx.saved_tensors
        if grads[0] is None:
            return _grads_of_sum_alone(ctx, grads[1], saved[-1]) if self.adds else {}
        known = (*grads, *saved, ctx.normalized_shape, ctx.p, *ctx.needs_input_grad)
        gradients = dict(zip(self.differentiable, self.backward_op(*self.arguments_of(known)), strict=True))
        if self.adds and ctx.p == 0:  # then one tensor is the gradient of both
            gradients["x"] = gradients["residual"]
        return gradients

    def backward_setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """The setup_context of the backward operator, for second_order.py."""
        given = dict(zip(self.backward_inputs, inputs, strict=True))
        names = "grad_out", self.x, "rstd", "weight", "seed"
        ctx.save_for_backward(*map(given.get, names))
        ctx.normalized_shape, ctx.p = given["normalized_shape"], given.get("p", 0.0)
        ctx.needs = [given[f"needs_grad_{name}"] for name in self.differentiable]


def _arguments(op: str) -> list[str]:
    return [argument.name for argument in getattr(own_ops, op).default._schema.arguments]


def _grads_of_sum_alone(ctx: Any, grad_sum: Tensor | None, seed: Tensor | None) -> Gradients:
    """The gradients of x and residual if only the sum was used, and not the norm."""
    grad_x = grad_sum
    if grad_sum is not None and seed is not None and ctx.p > 0 and ctx.needs_input_grad[0]:
        grad_x = _ops.dropout(grad_sum, ctx.p, seed)
    return {"x": grad_x, "residual": grad_sum}

"""Implements layer_norm and rms_norm, and their fusions with dropout and residual addition."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..registration import checks
from ..registration.autograd import Gradients
from ..registration.calls import own_ops
from . import dropout, norm_formulas


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalization over the last dimensions: ``(x - mean) / sqrt(variance + eps) * weight + bias``,
    with x = input.

    Args:
        input: shape (..., *normalized_shape). Rows of unit stride (a slice, a packed QKV) are read without a copy.
        normalized_shape: the last dimensions of ``x``, over which mean and (biased) variance are taken.
        weight: shape normalized_shape, on ``x``'s device, of ``x``'s dtype or, if ``x`` is half, float32; None: ones.
        bias: shape, device and dtype as for ``weight``; None: zeros.
        eps: added to the variance.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        RuntimeError: normalized_shape is empty or not the end of ``x``'s shape; ``weight`` or ``bias`` has another
            shape, dtype or device; or ``x`` is not floating point.

    Differentiable in ``x``, ``weight`` and ``bias``, to any order. Backward saves ``x`` and, for each row, a mean and a
    reciprocal standard deviation in float32 (float64: float64). The variance is summed around a number near the mean,
    in enough passes that no digits cancel. The weight gradients are summed over the rows in a fixed order.
    Batch-invariant: a row of the result has the same bits for any number of rows, provided that the row of ``x`` starts
    at the same offset from a multiple of 16 bytes. All rows do so if the size of a row is a multiple of 16 bytes. Under
    autocast on CUDA half inputs are cast to float32 and the result is float32, as in PyTorch; on the CPU nothing is
    cast. Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    return _ops.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Root mean square normalization over the last dimensions: ``x / sqrt(mean(x^2) + eps) * weight``, with x = input.

    Args:
        input, normalized_shape, weight: as for layer_norm.
        eps: added to the mean square; None: the machine epsilon of float32 (for float64 of float64), as for
            torch.nn.functional.rms_norm.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        RuntimeError: normalized_shape is empty or not the end of ``x``'s shape; ``weight`` has another shape, dtype or
            device; or ``x`` is not floating point.

    Differentiable in ``x`` and ``weight``, to any order. Backward saves ``x`` and, for each row, a reciprocal root mean
    square in float32 (float64: float64). The weight gradient is summed over the rows in a fixed order. Batch-invariant,
    as layer_norm is. Under autocast it does what PyTorch's rms_norm does: from torch 2.12 on, half inputs are cast to
    float32 on CUDA and the result is float32. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return _ops.rms_norm(input, normalized_shape, weight, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    p: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """Dropout, residual addition and layer normalization at once: ``s = residual + dropout(x, p)``, ``layer_norm(s)``.

    Args:
        x: shape (..., *normalized_shape). Rows of unit stride are read without a copy.
        residual: shape, dtype and device of ``x``.
        normalized_shape, weight, bias, eps: as for layer_norm.
        p: the probability that an element of ``x`` is dropped, from 0 to 1.
        training: False: nothing is dropped.

    Returns:
        ``layer_norm(s)`` and ``s``, contiguous tensors of ``x``'s shape and dtype. ``s`` is rounded once to its dtype,
        and the rounded ``s`` is normalized. Under autocast ``x`` and ``residual`` may differ in dtype; both are then
        cast to the dtype of ``residual + x``.

    Raises:
        RuntimeError: ``residual`` differs from ``x`` in shape, dtype or device, ``p`` is not between 0 and 1, or an
            argument is not what layer_norm takes.

    Differentiable in ``x``, ``residual``, ``weight`` and ``bias`` through both results, to any order. The mask is
    dropout's mask for the same seed, and is not stored: backward saves ``s``, two numbers for each row, and the seed.
    Without dropout one tensor is the gradient of both ``x`` and ``residual``. Both results are batch-invariant, as for
    layer_norm, except that the mask depends on the elements' positions in ``x``.
    """
    x, residual, p, seed = _branches("add_layer_norm", x, residual, p, training)
    return _ops.add_layer_norm(x, residual, normalized_shape, weight, bias, eps, p, seed)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    p: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """Dropout, residual addition and root mean square normalization at once: ``s = residual + dropout(x, p)``,
    ``rms_norm(s)``.

    Args:
        x, residual, p, training: as for add_layer_norm.
        normalized_shape, weight, eps: as for rms_norm.

    Returns:
        ``rms_norm(s)`` and ``s``, contiguous tensors of ``x``'s shape and dtype. Rounding and autocast are as for
        add_layer_norm.

    Raises:
        RuntimeError: ``residual`` differs from ``x`` in shape, dtype or device, ``p`` is not between 0 and 1, or an
            argument is not what rms_norm takes.

    Differentiable in ``x``, ``residual`` and ``weight`` through both results, to any order. Backward saves ``s``, one
    number for each row, and the seed. The mask, gradients without dropout and batch invariance are as for
    add_layer_norm.
    """
    x, residual, p, seed = _branches("add_rms_norm", x, residual, p, training)
    return _ops.add_rms_norm(x, residual, normalized_shape, weight, eps, p, seed)


def layer_norm_dropout(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    p: float = 0.5,
    training: bool = True,
) -> Tensor:
    """Layer normalization and dropout at once: ``dropout(layer_norm(x), p)``.

    Args:
        x, normalized_shape, weight, bias, eps: as for layer_norm.
        p: the probability that an element of the result is dropped, from 0 to 1.
        training: False: nothing is dropped.

    Returns:
        A contiguous tensor of ``x``'s shape and dtype.

    Raises:
        RuntimeError: ``p`` is not between 0 and 1, or an argument is not what layer_norm takes.

    Differentiable in ``x``, ``weight`` and ``bias``, to any order. The mask is dropout's mask for the same seed, and
    is not stored: backward saves ``x``, two numbers for each row, and the seed. Autocast is as for layer_norm.
    Batch-invariant, as layer_norm is, except that the mask depends on the elements' positions in ``x``.
    """
    checks.check_probability("layer_norm_dropout", p)
    checks.check_tensor("layer_norm_dropout", "x", x)
    if p == 0 or not training:
        return layer_norm(x, normalized_shape, weight, bias, eps)
    return _ops.layer_norm_dropout(x, normalized_shape, weight, bias, eps, p, dropout.draw_seed(x, p))


def _branches(
    op: str, x: Tensor, residual: Tensor, p: float, training: bool
) -> tuple[Tensor, Tensor, float, Tensor | None]:
    """Returns x and residual in one dtype, the p that applies, and the seed if p is not 0."""
    checks.check_probability(op, p)
    for name, tensor in (("x", x), ("residual", residual)):
        checks.check_tensor(op, name, tensor)
    p = p if training else 0.0
    x, residual = _in_one_dtype(x, residual)
    return x, residual, p, dropout.draw_seed(x, p) if p else None


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor has no dtype
def _in_one_dtype(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Casts x and residual to one dtype, because under autocast x is often half and residual float32. This is not an
    autocast rule: the norms also call it outside autocast, where it changes nothing."""
    if x.dtype is residual.dtype:
        return x, residual
    device = x.device.type
    # is_autocast_enabled raises an error for the device type meta, for which PyTorch has no autocast.
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.promote_types(x.dtype, residual.dtype)
        return x.to(dtype), residual.to(dtype)
    return x, residual


# ---- checks ----


def check_norm(
    op: str, x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None = None
) -> None:
    """Makes the checks of check_inputs in csrc/norm/norm.cpp."""
    dims = len(normalized_shape)
    checks.check_dtype(op, "x", x)
    checks.check(op, dims > 0, "expected normalized_shape to have at least one dimension, but got []")
    expected = f"expected normalized_shape to be the last dimensions of x, of shape {list(x.shape)}"
    checks.check_sizes(op, x.shape[-dims:], normalized_shape, f"{expected}, but got {list(normalized_shape)}")
    for name, each in (("weight", weight), ("bias", bias)):
        if each is not None:
            checks.check_same_or_float32(op, name, each, "x", x)
            expected = f"expected {name} of shape {list(normalized_shape)}, normalized_shape"
            checks.check_sizes(op, each.shape, normalized_shape, f"{expected}, but got {list(each.shape)}")
    if weight is not None and bias is not None:
        checks.check_same(op, "bias", bias, "weight", weight)


def check_dropout(op: str, p: float, seed: Tensor | None, x: Tensor) -> None:
    """Makes the checks of check_dropout in csrc/norm/norm.cpp."""
    checks.check_probability(op, p)
    if seed is not None:
        checks.check_seed(op, seed, x)
    checks.check(op, p == 0 or seed is not None, "expected a seed with p > 0, but got None")


# ---- fakes, derivatives and plain forms ----


def norm_statistics(x: Tensor, normalized_shape: Sequence[int]) -> Tensor:
    """Makes an empty tensor with one number for each row, in a shape that broadcasts against x."""
    shape = [*x.shape[: x.dim() - len(normalized_shape)], *(1 for _ in normalized_shape)]
    return x.new_empty(shape, dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)


class Norm:
    """Holds the functions that ops.py registers for a norm and its backward operator.

    The names of the arguments in the two schemas say how the norms differ. Arguments in brackets exist only if the norm
    adds a residual or drops elements:

        norm:      x, [residual], normalized_shape, *weights, eps, [p, seed]
        returns    out, [sum], *statistics
        backward:  grad_out, [grad_sum], x or sum, normalized_shape, *statistics, *weights, [p, seed], *needs_grad
        returns    the gradients of x, [residual], *weights
    """

    def __init__(self, op: str) -> None:
        self.op, self.backward_op = op, getattr(_ops, f"{op}_backward")
        schemas = [getattr(own_ops, name).default._schema for name in (op, f"{op}_backward")]
        self.inputs, self.backward_inputs = ([argument.name for argument in schema.arguments] for schema in schemas)
        self.adds, self.drops = "residual" in self.inputs, "seed" in self.inputs
        self.x = "sum" if self.adds else "x"  # the name of the normalized tensor in backward
        self.centered = "mean" in self.backward_inputs  # true for layer_norm, false for rms_norm
        self.weights = [name for name in ("weight", "bias") if name in self.inputs]
        self.statistics = [name for name in ("mean", "rstd") if name in self.backward_inputs]
        self.differentiable = [name for name in ("x", "residual", "weight", "bias") if name in self.inputs]
        # Picks the tensors that backward reads out of the inputs and results, in the order of the backward operator.
        results = ["out", *(["sum"] if self.adds else []), *self.statistics]
        saved = [self.x, *self.statistics, *self.weights, *(["seed"] if self.drops else [])]
        self.saved_of = operator.itemgetter(*map([*self.inputs, *results].index, saved))
        self.needs_of = operator.itemgetter(*map(self.inputs.index, self.differentiable))

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
        """Makes the checks of norm_backward in csrc/norm/norm.cpp."""
        op, given = f"{self.op}_backward", dict(zip(self.backward_inputs, inputs, strict=True))
        x, normalized_shape = given[self.x], given["normalized_shape"]
        weights = [given[name] for name in self.weights]
        if given.get("grad_sum") is not None:
            checks.check_like(op, "grad_sum", given["grad_sum"], "sum", x)
        if self.drops:
            check_dropout(op, given["p"], given["seed"], x)
        check_norm(op, x, normalized_shape, *weights)
        checks.check_like(op, "grad_out", given["grad_out"], "x", x)
        expected = norm_statistics(x, normalized_shape)
        for name in self.statistics:
            checks.check_device(op, name, given[name], "x", x)
            message = f"expected {name} as the forward returned it"
            checks.check(op, given[name].dtype == expected.dtype and given[name].is_contiguous(), message)
            checks.check(op, given[name].numel() == expected.numel(), message)
        # A gradient that is not needed has no elements.
        needs_x, *needs = (given[f"needs_grad_{name}"] for name in self.differentiable)
        gradients = []
        if self.adds:
            gradients.append(x.new_empty(x.shape if needs_x and given["p"] > 0 else 0))
            needs_x = needs.pop(0) or needs_x
        like = next((w for w in weights if w is not None), x)
        of_weights = (like.new_empty(list(normalized_shape) if need else 0) for need in needs)
        return *gradients, x.new_empty(x.shape if needs_x else 0), *of_weights

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*self.saved_of(inputs + output))
        ctx.normalized_shape = inputs[2 if self.adds else 1]
        ctx.p = inputs[-2] if self.drops else 0.0
        ctx.set_materialize_grads(False)  # otherwise autograd would allocate zeros as gradients of the statistics

    def backward(self, ctx: Any, *grads: Tensor | None) -> Gradients:
        saved = ctx.saved_tensors
        if grads[0] is None:  # the norm was not used, but perhaps the sum
            grad_x = grad_sum = grads[1] if self.adds else None
            if grad_sum is not None and ctx.p > 0 and ctx.needs_input_grad[0]:
                grad_x = _ops.dropout(grad_sum, ctx.p, saved[-1])
            return {"x": grad_x, "residual": grad_sum} if self.adds else {}
        others, mask = (saved[1:-1], (ctx.p, saved[-1])) if self.drops else (saved[1:], ())
        grads, needs = grads[: 2 if self.adds else 1], self.needs_of(ctx.needs_input_grad)
        found = self.backward_op(*grads, saved[0], ctx.normalized_shape, *others, *mask, *needs)
        gradients = dict(zip(self.differentiable, found, strict=True))
        if self.adds and ctx.p == 0:  # without dropout, x and residual have the same gradient
            gradients["x"] = gradients["residual"]
        return gradients

    def backward_setup_context(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Saves what the second derivative reads. It is the setup_context of the backward operator."""
        given = dict(zip(self.backward_inputs, inputs, strict=True))
        names = "grad_out", self.x, "rstd", "weight", "seed"
        ctx.save_for_backward(*map(given.get, names))
        ctx.normalized_shape, ctx.p = given["normalized_shape"], given.get("p", 0.0)
        ctx.needs = [given[f"needs_grad_{name}"] for name in self.differentiable]

    def second(self, ctx: Any, *grads: Tensor) -> Gradients:
        """Returns the gradients of the backward operator's arguments. Dropout is a symmetric linear map.

        A norm alone has grad_x = norm_backward(dropout(grad_out)). With s = sum, a norm that adds a residual has
        grad_residual = norm_backward(grad_out) + grad_sum and grad_x = dropout(grad_residual). So the gradient of
        grad_residual is grad_grad_residual + dropout(grad_grad_x). Without dropout grad_x is empty, and
        grad_grad_residual already has the sum of both.
        """
        grad_out, x, rstd, weight, seed = ctx.saved_tensors
        needs_x = ctx.needs[0]

        def drop(z: Tensor) -> Tensor:
            return _ops.dropout(z, ctx.p, seed) if ctx.p > 0 else z

        # None stands for each result that the backward operator did not compute.
        computed = [grad if need else None for grad, need in zip(grads, ctx.needs, strict=True)]
        if self.adds:
            total = grads[1] if needs_x or ctx.needs[1] else None
            if total is not None and needs_x and ctx.p > 0:
                total = total + drop(grads[0])
            computed = [total, *computed[2:]]
        else:
            grad_out = drop(grad_out)
        given = ctx.normalized_shape, grad_out, x, rstd, weight, computed, self.centered
        grad_grad_out, grad_x, grad_weight = norm_formulas.second_derivative(*given)
        if self.adds:
            return {"grad_out": grad_grad_out, "grad_sum": computed[0], "sum": grad_x, "weight": grad_weight}
        return {"grad_out": drop(grad_grad_out), "x": grad_x, "weight": grad_weight}

    def plain(self, *inputs: Any) -> tuple[Tensor, ...]:
        given = dict(zip(self.inputs, inputs, strict=True))
        x, p, seed = given["x"], given.get("p", 0.0), given.get("seed")
        if self.adds:
            x = given["residual"] + dropout.maybe_dropout_plain(x, p, seed)
        parameters = given["normalized_shape"], [given[name] for name in self.weights], given["eps"]
        y, mean, rstd = norm_formulas.forward(x, *parameters, self.centered)
        statistics = [mean, rstd] if self.centered else [rstd]
        if self.adds:
            return y, x, *statistics
        return dropout.maybe_dropout_plain(y, p, seed), *statistics

    def backward_plain(self, *inputs: Any) -> tuple[Tensor, ...]:
        given = dict(zip(self.backward_inputs, inputs, strict=True))
        grad_out, p, seed = given["grad_out"], given.get("p", 0.0), given.get("seed")
        needs_x, *needs = (given[f"needs_grad_{name}"] for name in self.differentiable)
        weights = [given[name] for name in self.weights]
        given_to_norm = given[self.x], given["normalized_shape"], given["rstd"], weights, self.centered
        if not self.adds:
            grad_out = dropout.maybe_dropout_plain(grad_out, p, seed)
            return norm_formulas.backward(grad_out, *given_to_norm, [needs_x, *needs])
        needs_residual, *needs = needs
        grad_s, *of_weights = norm_formulas.backward(grad_out, *given_to_norm, [needs_x or needs_residual, *needs])
        if given["grad_sum"] is not None and (needs_x or needs_residual):
            grad_s = grad_s + given["grad_sum"]
        # Without dropout grad_x is empty, because x then has the same gradient as residual.
        grad_x = dropout.maybe_dropout_plain(grad_s, p, seed) if needs_x and p > 0 else grad_s.new_empty(0)
        return grad_x, grad_s, *of_weights


LAYER_NORM, RMS_NORM, LAYER_NORM_DROPOUT = Norm("layer_norm"), Norm("rms_norm"), Norm("layer_norm_dropout")
ADD_LAYER_NORM, ADD_RMS_NORM = Norm("add_layer_norm"), Norm("add_rms_norm")

# Whether torch.rms_norm casts its inputs under autocast on CUDA, which it does from torch 2.12 on.
CASTS_RMS_NORM = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")

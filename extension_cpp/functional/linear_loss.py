"""linear_cross_entropy. Its kernels process the rows in chunks with at most 1 GiB of logits in memory.

For each chunk a matrix product computes the logits, cross_entropy_chunk overwrites them with their gradient, and two
matrix products compute the gradients of the input and of the weight. The products are PyTorch's (cuBLAS, oneDNN). So
forward computes the gradients, as if grad_out were 1, and backward only scales them.

Two cases differ. Without a reduction each row has its own grad_out. In float16 the gradient of the logits must be
multiplied by the scale of the loss before it is rounded. In both cases forward computes no gradient, and backward
computes the logits again.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..registration import autograd, checks
from ..registration.calls import is_recorded, own_ops
from .losses import (
    check_loss,
    check_loss_grad,
    check_reduction,
    check_statistic,
    cross_entropy_plain,
    loss_type,
    reduction_number,
    refuse_weight_gradient,
    save,
)

# The size of a chunk's logits. Products of few rows are slower (products of 1024 rows by an eighth, with 128256 classes
# on an H100), and each chunk after the first rounds the sum of the weight's gradient once more.
CHUNK_BYTES = 1 << 30
TILE = 128  # rows of a matrix product's tile
ALIGNMENT = 16  # bytes; if a row's logits are not a multiple of it, cuBLAS uses kernels with a sixth of the speed

Options = Sequence[Any]  # of cross_entropy: ignore_index, label_smoothing, z_loss, softcap


def linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """cross_entropy of ``x @ linear_weight.T + linear_bias``, with at most 1 GiB of these logits in memory.

    Args:
        x: shape (..., features).
        linear_weight: shape (C, features), dtype and device of ``x``.
        target: int64, shape (...): the class of each row.
        linear_bias: shape (C,), dtype and device of ``x``; None: zeros.
        weight, reduction, ignore_index, label_smoothing, z_loss, softcap: as for cross_entropy.

    Returns:
        The loss, of shape () or, with "none", of ``target``'s shape; of ``x``'s dtype, under autocast float32.

    Raises:
        RuntimeError: as for cross_entropy. On CUDA a target that is not a class makes NaN of the row's loss and
            gradient, and of the gradients of ``linear_weight`` and ``linear_bias``.

    Differentiable in ``x``, ``linear_weight`` and ``linear_bias``, once. The rows are processed in chunks of at most 1
    GiB of logits. If gradients are recorded, forward computes them as well and backward only scales them; with "none"
    and in float16 backward computes the logits again, beside their gradient. The gradient of the logits is rounded to
    ``x``'s dtype, as in eager PyTorch. Each chunk after the first rounds the sum for ``linear_weight`` once more. With
    n chunks of a half type and independent rows the rounding error of this gradient is about sqrt(1 + (n - 1) / 2)
    times eager's at most; where the sums of chunks cancel, it is larger. If a row of logits is not a multiple of 16
    bytes, a padded copy of ``linear_weight`` is in memory, too. Deterministic; on the CPU the matrix products may
    depend on the number of threads. Under autocast they have autocast's dtype. Source:
    torch.nn.functional.linear_cross_entropy (PyTorch 2.13).
    """
    options = ignore_index, label_smoothing, z_loss, softcap
    return _linear_cross_entropy(x, linear_weight, target, linear_bias, weight, reduction, *options, False)


def _linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    *options: Any,
) -> Tensor:
    """The operator, for DTensors the function of sharded_loss.py."""
    number = reduction_number("linear_cross_entropy", reduction)
    given = {"x": x, "linear_weight": linear_weight, "target": target}
    for name, tensor in (given if linear_bias is None else given | {"linear_bias": linear_bias}).items():
        checks.check_tensor("linear_cross_entropy", name, tensor)
    needs = tuple(_may_need_grad(t) for t in (x, linear_weight, linear_bias))
    function = autograd.distributed.sharded_loss if autograd.is_sharded(x) else _ops
    return function.linear_cross_entropy(x, linear_weight, target, linear_bias, weight, number, *options, *needs)


def float_linear_cross_entropy(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *options: Any
) -> Tensor:
    """linear_cross_entropy whose loss is float32 for half inputs, too: nn.convert gives it to language models."""
    ignore_index, reduction, softcap = options
    others = None, reduction, ignore_index, 0.0, 0.0, softcap, True
    return _linear_cross_entropy(x, linear_weight, target, linear_bias, *others)


def _may_need_grad(x: Tensor | None) -> bool:
    """Whether forward must compute the gradient of this argument. A recorded graph may be trained later, and inside
    torch.func's transforms requires_grad says nothing; there the answer is yes."""
    is_unknown = is_recorded() or torch._C._are_functorch_transforms_active()
    return x is not None and (is_unknown or x.requires_grad)


# ---- checks ----


def check_linear(
    op: str, x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *options: Any
) -> None:
    weight, reduction, _, *others = options
    checks.check_dtype(op, "x", x)
    checks.check(op, x.dim() > 0, "expected x to have at least one dimension, but got shape []")
    checks.check_same(op, "linear_weight", linear_weight, "x", x)
    shape = list(linear_weight.shape)
    expected = f"expected linear_weight of shape [classes, {x.shape[-1]}], the last dimension of x, but got {shape}"
    checks.check_sizes(op, shape, [shape[0] if shape else 0, x.shape[-1]], expected)
    if linear_bias is not None:
        checks.check_same(op, "linear_bias", linear_bias, "x", x)
        expected = f"expected linear_bias of shape [{shape[0]}], a number for each class"
        checks.check_sizes(op, linear_bias.shape, shape[:1], f"{expected}, but got {list(linear_bias.shape)}")
    check_reduction(op, reduction)
    # Logits of the right shape that take no memory: one element, expanded.
    logits = x.new_empty(1, dtype=x.dtype).expand(*x.shape[:-1], shape[0])
    check_loss(op, logits, target, -1, weight, *others)


def check_targets(op: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Their values, on the CPU alone: elsewhere this would wait for the device."""
    if target.device.type == "cpu":
        wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
        expected = f"expected target in [0, {classes - 1}] or ignore_index"
        checks.check(op, wrong.numel() == 0, f"{expected}, but got {wrong[0] if wrong.numel() else None}")


def check_linear_values(*args: Any) -> None:
    """The checks of the kernels: those of the fake and, on the CPU, that each target is a class."""
    op, (_, linear_weight, target, _, _, _, ignore_index, *_) = "linear_cross_entropy", args
    check_linear(op, *args[:10])
    check_targets(op, target, linear_weight.shape[0], ignore_index)


def check_linear_backward(grad_out: Tensor, *args: Any) -> None:
    given, made, options, needs = args[:5], args[5:8], args[8:13], args[13:]
    x, linear_weight, target, *_ = given
    reduction, *_ = options
    op = "linear_cross_entropy_backward"
    check_linear(op, *given, *options)
    check_loss_grad(op, "grad_out", grad_out, [] if reduction else target.shape, x)
    shapes = [x.shape, linear_weight.shape, linear_weight.shape[:1]]
    names = ("grad_x", "grad_weight", "grad_bias")
    is_made = makes_gradients(x.dtype, reduction)
    for name, grad, shape, need in zip(names, made, shapes, needs, strict=True):
        check_statistic(op, name, grad, shape if need and is_made else [0], x.dtype, x)


# ---- kernels ----


def chunks(rows: Tensor, width: int) -> Iterator[slice]:
    """Ranges of rows, of about equal length, whose logits take at most CHUNK_BYTES."""
    count = rows.shape[0]
    most = max(CHUNK_BYTES // (width * rows.element_size()), 1)
    parts = -(-count // most)
    step = min(-(-count // (parts * TILE)) * TILE, most) if parts else 1
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def total_weight(labels: Tensor, classes: int, weight: Tensor | None, ignore_index: int, like: Tensor) -> Tensor:
    """The sum of the targets' weights, the divisor of the mean. A target that is not a class adds nothing."""
    is_counted = (labels != ignore_index) & (labels >= 0) & (labels < classes)
    if weight is None:
        return is_counted.sum(dtype=like.dtype).view(1)
    return (weight.to(like.dtype)[labels.clamp(0, classes - 1)] * is_counted).sum().view(1)


def makes_gradients(dtype: torch.dtype, reduction: int) -> bool:
    """Whether forward computes the gradients; if not, backward computes the logits again."""
    return reduction > 0 and dtype is not torch.float16


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


class Logits:
    """Computes the logits of one chunk at a time, always in the same memory.

    The classes are padded until a row is a multiple of ALIGNMENT. The padding has weights of 0, and its logits are set
    to -inf: they add nothing to the sum of exponentials and have gradient 0. With smoothing, class weights or softcap
    they would have another gradient, so nothing is padded. Nor is anything padded for fewer than TILE rows, where the
    copy of the weights would take longest.
    """

    def __init__(
        self,
        rows: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        labels: Tensor,
        weight: Tensor | None,
        options: Options,
    ) -> None:
        ignore_index, label_smoothing, _, softcap = options
        self.rows, self.linear_weight, self.linear_bias, self.labels = rows, linear_weight, linear_bias, labels
        self.classes = linear_weight.shape[0]
        is_plain = weight is None and label_smoothing == 0 and softcap is None
        padding = -self.classes % (ALIGNMENT // rows.element_size())
        if padding and is_plain and rows.shape[0] >= TILE:
            self.linear_weight = torch.nn.functional.pad(linear_weight, (0, 0, 0, padding))
            if linear_bias is not None:
                self.linear_bias = torch.nn.functional.pad(linear_bias, (0, padding))
            # A target that points into the padding is not a class: it becomes an invalid one.
            is_meant = (labels < self.classes) | (labels == ignore_index)
            self.labels = labels.where(is_meant, torch.iinfo(torch.int64).max)
        width = self.linear_weight.shape[0]
        self.parts = list(chunks(rows, width))
        self.memory = rows.new_empty(self.parts[0].stop if self.parts else 0, width)

    def of(self, part: slice) -> Tensor:
        logits, weight = self.memory[: part.stop - part.start], self.linear_weight.t()
        if self.linear_bias is None:
            torch.mm(self.rows[part], weight, out=logits)
        else:
            torch.addmm(self.linear_bias, self.rows[part], weight, out=logits)
        logits[:, self.classes :] = -math.inf
        return logits


class Gradients:
    """The gradients of x (as rows), linear_weight and linear_bias, summed chunk by chunk; empty where not needed."""

    def __init__(self, chunk: Logits, linear_weight: Tensor, linear_bias: Tensor | None, needs: Sequence[bool]) -> None:
        rows = chunk.rows
        self.rows, self.padded_weight, self.classes = rows, chunk.linear_weight, chunk.classes
        self.needs_x, self.needs_weight, self.needs_bias = needs
        self.x = torch.empty_like(rows) if self.needs_x else rows.new_empty(0)
        self.weight = linear_weight.new_empty(linear_weight.shape if self.needs_weight else 0)
        if self.needs_weight and rows.shape[0] == 0:
            self.weight.zero_()
        acc = torch.promote_types(rows.dtype, torch.float32)
        self.bias_sum = rows.new_zeros(self.classes if self.needs_bias else 0, dtype=acc)
        self.bias_dtype = (linear_weight if linear_bias is None else linear_bias).dtype

    def add(self, part: slice, gradient: Tensor) -> None:
        """Adds what a chunk contributes. `gradient` is the gradient of its logits, with their padding."""
        if self.needs_bias:
            self.bias_sum += own_ops.reduce_sum_no_grad(gradient, (0,))[: self.classes]
        if self.needs_x:
            torch.mm(gradient, self.padded_weight, out=self.x[part])
        gradient = gradient[:, : self.classes]
        if self.needs_weight and part.start == 0:
            torch.mm(gradient.t(), self.rows[part], out=self.weight)
        elif self.needs_weight:
            self.weight.addmm_(gradient.t(), self.rows[part])

    def results(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.x.view(x.shape if self.needs_x else 0), self.weight, self.bias_sum.to(self.bias_dtype)


def forward(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    options: Options,
    float_loss: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ops = own_ops
    rows, labels = _rows(x), target.reshape(-1).contiguous()
    chunk = Logits(rows, linear_weight, linear_bias, labels, weight, options)
    gradients = Gradients(chunk, linear_weight, linear_bias, needs)
    losses = rows.new_empty(rows.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
    scale = losses.new_ones(1)
    if reduction == 1:
        scale = total_weight(labels, linear_weight.shape[0], weight, options[0], losses).reciprocal()
    for part in chunk.parts:
        logits = chunk.of(part)
        if any(needs):
            losses[part] = ops.cross_entropy_chunk(logits, chunk.labels[part], weight, *options, scale)
            gradients.add(part, logits)
        else:
            ignore_index, *others = options
            losses[part] = ops.cross_entropy_no_grad(logits, chunk.labels[part], weight, ignore_index, 0, *others, True)
    loss = losses.view(target.shape)
    if reduction > 0:
        loss = ops.reduce_sum_no_grad(losses)
    if reduction == 1:
        loss = loss * scale[0]
    return loss if float_loss else loss.to(x.dtype), *gradients.results(x)


def backward(
    grad_out: Tensor,
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: int,
    options: Options,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, if forward computed none."""
    ops, (ignore_index, *others) = own_ops, options
    rows, labels = _rows(x), target.reshape(-1).contiguous()
    grads = grad_out.reshape(-1)
    if reduction > 0:
        grads = grads.to(torch.promote_types(x.dtype, torch.float32))
        if reduction == 1:
            grads = grads / total_weight(labels, linear_weight.shape[0], weight, ignore_index, grads)
        grads = grads.expand(rows.shape[0])
    chunk = Logits(rows, linear_weight, linear_bias, labels, weight, options)
    gradients = Gradients(chunk, linear_weight, linear_bias, needs)
    for part in chunk.parts:
        logits = chunk.of(part)
        row_options = chunk.labels[part], weight, ignore_index, 0, *others
        _, lse, total = ops.cross_entropy.default(logits, *row_options, True)
        given = chunk.labels[part], lse, total, weight, ignore_index, 0, *others
        gradients.add(part, ops.cross_entropy_backward_no_grad(grads[part], logits, *given))
    return gradients.results(x)


def forward_kernel(*args: Any) -> tuple[Tensor, ...]:
    check_linear_values(*args)
    x, linear_weight, target, linear_bias, weight, reduction, *options, float_loss, _, _, _ = args
    needs = args[11:] if makes_gradients(x.dtype, reduction) else (False, False, False)
    return forward(x, linear_weight, target, linear_bias, weight, reduction, options, float_loss, needs)


def no_grad_kernel(*args: Any) -> Tensor:
    check_linear_values(*args)
    x, linear_weight, target, linear_bias, weight, reduction, *options, float_loss, _, _, _ = args
    none = (False, False, False)
    return forward(x, linear_weight, target, linear_bias, weight, reduction, options, float_loss, none)[0]


def backward_kernel(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    check_linear_backward(grad_out, *args)
    x, linear_weight, target, linear_bias, weight, *made, reduction, _, _, _, _, _, _, _ = args
    if makes_gradients(x.dtype, reduction):
        factor = grad_out.to(torch.promote_types(x.dtype, torch.float32))
        return tuple(own_ops.cross_entropy_scale(grad, factor) for grad in made)
    return backward(grad_out, x, linear_weight, target, linear_bias, weight, reduction, args[9:13], args[13:])


# ---- fakes, derivative, plain form and autocast ----


def empty_gradients(x: Tensor, linear_weight: Tensor, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """The results of the fakes. A gradient that is not needed has no elements."""
    needs_x, needs_weight, needs_bias = needs
    return (
        x.new_empty(x.shape if needs_x else 0),
        linear_weight.new_empty(linear_weight.shape if needs_weight else 0),
        linear_weight.new_empty(linear_weight.shape[:1] if needs_bias else 0),
    )


def linear_cross_entropy_fake(
    x: Tensor, linear_weight: Tensor, target: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options, float_loss, needs = args[:7], args[7], args[8:]
    _, _, reduction, *_ = options
    check_linear("linear_cross_entropy", x, linear_weight, target, *options)
    loss = x.new_empty([] if reduction else target.shape, dtype=loss_type(x) if float_loss else x.dtype)
    is_made = makes_gradients(x.dtype, reduction)
    return loss, *empty_gradients(x, linear_weight, needs if is_made else (False, False, False))


def linear_cross_entropy_backward_fake(grad_out: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_linear_backward(grad_out, *args)
    return empty_gradients(args[0], args[1], args[13:])


def linear_cross_entropy_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    refuse_weight_gradient("linear_cross_entropy", ctx.needs_input_grad[4])
    ctx.options, ctx.needs = inputs[5:10], inputs[11:]  # inputs[10] is float_loss
    save(ctx, [*inputs[:5], *output[1:]], output[1:])


def linear_cross_entropy_backward(ctx: Any, grad_out: Tensor | None, *_: None) -> autograd.Gradients:
    if grad_out is None:
        return {}
    grads = _ops.linear_cross_entropy_backward(grad_out, *ctx.saved_tensors, *ctx.options, *ctx.needs)
    names = ("x", "linear_weight", "linear_bias")
    return {name: grad for name, grad, need in zip(names, grads, ctx.needs, strict=True) if need}


def linear_cross_entropy_plain(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    weight, reduction, ignore_index, *options = args[:7]
    logits = torch.nn.functional.linear(x, linear_weight, linear_bias)
    flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = cross_entropy_plain(*flat, weight, ignore_index, reduction, *options)[0]
    # The gradients that forward returns as results are constants here.
    constants = [t if t is None else t.detach() for t in (x, linear_weight, target, linear_bias, weight)]
    with torch.no_grad():
        _, *made = own_ops.linear_cross_entropy(*constants, *args[1:])
    return loss.reshape([] if reduction else target.shape), *made


def linear_cross_entropy_autocast(device_type: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """x, linear_weight and linear_bias in autocast's dtype, except float64, and a float32 loss."""
    x, linear_weight, target, linear_bias, *others = args
    dtype = torch.get_autocast_dtype(device_type)
    x, linear_weight, linear_bias = (
        t if t is None or t.dtype is torch.float64 or not t.is_floating_point() else t.to(dtype)
        for t in (x, linear_weight, linear_bias)
    )
    others[6] = True  # float_loss
    return x, linear_weight, target, linear_bias, *others

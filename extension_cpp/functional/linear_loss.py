"""Implements linear_cross_entropy, whose kernels process the rows in chunks with at most 1 GiB of logits in memory.

For each chunk a matrix product computes the logits, cross_entropy_chunk overwrites them with their gradient, and two
matrix products compute the gradients of the input and of the weight. The products are PyTorch's (cuBLAS, oneDNN).
Forward computes these gradients as if grad_out were 1, and backward only scales them.

Two cases differ. Without a reduction each row has its own grad_out. In float16 the logits' gradient must be multiplied
by grad_out, which has the loss scale, before it is rounded. In both cases forward computes no gradient, and backward
computes the logits again.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _ops
from ..registration import autograd, checks
from ..registration.calls import is_recorded, own_ops
from . import losses

# The largest size of a chunk's logits. Smaller chunks would make the matrix products slower (by an eighth for 1024 rows
# and 128256 classes on an H100). Each chunk after the first rounds the sum of the weight's gradient once more.
CHUNK_BYTES = 1 << 30
TILE = 128  # rows of a matrix product's tile
ALIGNMENT = 16  # bytes; if the size of a row of logits is not a multiple, cuBLAS uses kernels with a sixth of the speed


class Call(NamedTuple):
    """The arguments of the operator linear_cross_entropy."""

    x: Tensor  # (..., features)
    linear_weight: Tensor  # (classes, features)
    target: Tensor
    linear_bias: Tensor | None
    weight: Tensor | None
    reduction: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    float_loss: bool  # whether the loss is float32 even for half inputs
    needs_grad_x: bool
    needs_grad_weight: bool  # of linear_weight
    needs_grad_bias: bool

    @property
    def options(self) -> losses.LossOptions:
        return losses.LossOptions(self.ignore_index, self.label_smoothing, self.z_loss, self.softcap)

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        return self.needs_grad_x, self.needs_grad_weight, self.needs_grad_bias

    @property
    def in_forward(self) -> "Call":
        """The call with those needs that forward fulfils: all or none."""
        return self if makes_gradients(self.x.dtype, self.reduction) else self.without_needs()

    def without_needs(self) -> "Call":
        return self._replace(needs_grad_x=False, needs_grad_weight=False, needs_grad_bias=False)

    def gradient_shapes(self) -> list[Sequence[int]]:
        """Returns the shapes of the gradients of x, linear_weight and linear_bias. An unneeded one has no elements."""
        shapes = self.x.shape, self.linear_weight.shape, self.linear_weight.shape[:1]
        return [shape if need else [0] for shape, need in zip(shapes, self.needs, strict=True)]

    def total_weight(self, like: Tensor) -> Tensor:
        labels, classes = self.target.reshape(-1), self.linear_weight.shape[0]
        return total_weight(labels, classes, self.weight, self.ignore_index, like)


def backward_call(*args: Any) -> tuple[Call, tuple[Tensor, ...]]:
    """Converts the arguments of linear_cross_entropy_backward after grad_out to a Call and the gradients of forward."""
    given = *args[:5], *args[8:-3], False, *args[-3:]
    return Call(*given), args[5:8]


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
        RuntimeError: as for cross_entropy. On CUDA a target that is not a class raises no error: the row's loss and
            gradient and the gradients of ``linear_weight`` and ``linear_bias`` are NaN.

    Differentiable in ``x``, ``linear_weight`` and ``linear_bias``, once. The rows are processed in chunks of at most 1
    GiB of logits. If gradients are recorded, forward computes them as well and backward only scales them; with "none"
    and in float16 backward computes the logits again, and their gradient takes the same memory once more. The gradient
    of the logits is rounded to ``x``'s dtype, as in eager PyTorch. Each chunk after the first rounds the gradient of
    ``linear_weight`` once more. With n chunks of a half type and independent rows the rounding error of this gradient
    is about sqrt(1 + (n - 1) / 2) times eager's at most; where the sums of chunks cancel, it is larger. If a row of
    logits is not a multiple of 16 bytes, a padded copy of ``linear_weight`` is in memory, too. Deterministic; on the
    CPU the matrix products may depend on the number of threads. Under autocast the matrix products are computed in
    autocast's dtype. Source: torch.nn.functional.linear_cross_entropy (PyTorch 2.13).
    """
    options = ignore_index, label_smoothing, z_loss, softcap
    return call_linear_cross_entropy(x, linear_weight, target, linear_bias, weight, reduction, options, False)


def call_linear_cross_entropy(
    x: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    options: tuple[int, float, float, float | None],
    float_loss: bool,
) -> Tensor:
    """Calls the operator or, for DTensors, the function of sharded_loss.py. With float_loss the loss is float32 even
    for half inputs, which nn.convert needs for language models."""
    number = losses.reduction_number("linear_cross_entropy", reduction)
    given = {"x": x, "linear_weight": linear_weight, "target": target}
    for name, tensor in (given if linear_bias is None else given | {"linear_bias": linear_bias}).items():
        checks.check_tensor("linear_cross_entropy", name, tensor)
    needs = _may_need_grad(x), _may_need_grad(linear_weight), _may_need_grad(linear_bias)
    call = Call(x, linear_weight, target, linear_bias, weight, number, *options, float_loss, *needs)
    if autograd.is_sharded(x):
        return autograd.distributed.sharded_loss.linear_cross_entropy(call)
    return _ops.linear_cross_entropy(*call)


def _may_need_grad(x: Tensor | None) -> bool:
    """Returns whether forward must compute the gradient of this argument. This is also true for a recorded graph, which
    may be trained later, and inside torch.func's transforms, where requires_grad says nothing."""
    is_unknown = is_recorded() or torch._C._are_functorch_transforms_active()
    return x is not None and (is_unknown or x.requires_grad)


# ---- checks ----


def check_linear(op: str, call: Call) -> None:
    x, linear_weight, linear_bias = call.x, call.linear_weight, call.linear_bias
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
    losses.check_reduction(op, call.reduction)
    # These logits have the right shape but take no memory, because they are one expanded element.
    logits = x.new_empty(1, dtype=x.dtype).expand(*x.shape[:-1], shape[0])
    losses.check_loss(op, logits, call.target, -1, call.weight, call.options)


def check_linear_backward(grad_out: Tensor, call: Call, made: Sequence[Tensor]) -> None:
    op, x = "linear_cross_entropy_backward", call.x
    check_linear(op, call)
    losses.check_loss_grad(op, "grad_out", grad_out, [] if call.reduction else call.target.shape, x)
    names = ("grad_x", "grad_weight", "grad_bias")
    for name, grad, shape in zip(names, made, call.in_forward.gradient_shapes(), strict=True):
        losses.check_statistic(op, name, grad, shape, x.dtype, x)


# ---- kernels ----


def chunks(rows: Tensor, width: int) -> Iterator[slice]:
    """Yields ranges of rows, of about equal length, whose logits take at most CHUNK_BYTES."""
    count = rows.shape[0]
    most = max(CHUNK_BYTES // (width * rows.element_size()), 1)
    parts = -(-count // most)
    step = min(-(-count // (parts * TILE)) * TILE, most) if parts else 1
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def total_weight(labels: Tensor, classes: int, weight: Tensor | None, ignore_index: int, like: Tensor) -> Tensor:
    """Returns the sum of the targets' weights, by which the mean divides. A target that is not a class adds nothing."""
    is_counted = (labels != ignore_index) & (labels >= 0) & (labels < classes)
    if weight is None:
        return is_counted.sum(dtype=like.dtype).view(1)
    return (weight.to(like.dtype)[labels.clamp(0, classes - 1)] * is_counted).sum().view(1)


def makes_gradients(dtype: torch.dtype, reduction: int) -> bool:
    """Returns whether forward computes the gradients. If not, backward computes the logits again."""
    return reduction > 0 and dtype is not torch.float16


class Logits:
    """Computes the logits of one chunk at a time, in the same memory, and sums the gradients over the chunks.

    Classes are added until the size of a row is a multiple of ALIGNMENT. These padding classes have weights of 0, and
    their logits are set to -inf: they add nothing to the sum of exponentials and have gradient 0. There is no padding
    with label smoothing, class weights or softcap, where a logit of -inf would give another result, and for fewer than
    TILE rows, where the padded copy of the weights would be slow beside the matrix product.
    """

    def __init__(self, call: Call) -> None:
        rows = call.x.reshape(math.prod(call.x.shape[:-1]), call.x.shape[-1]).contiguous()
        labels, linear_weight, linear_bias = call.target.reshape(-1).contiguous(), call.linear_weight, call.linear_bias
        self.rows, self.linear_weight, self.linear_bias, self.labels = rows, linear_weight, linear_bias, labels
        self.classes = linear_weight.shape[0]
        is_plain = call.weight is None and call.label_smoothing == 0 and call.softcap is None
        padding = -self.classes % (ALIGNMENT // rows.element_size())
        if padding and is_plain and rows.shape[0] >= TILE:
            self.linear_weight = torch.nn.functional.pad(linear_weight, (0, 0, 0, padding))
            if linear_bias is not None:
                self.linear_bias = torch.nn.functional.pad(linear_bias, (0, padding))
            # A target among the padding classes is not a class, so it is replaced by an index that is never valid.
            is_meant = (labels < self.classes) | (labels == call.ignore_index)
            self.labels = labels.where(is_meant, torch.iinfo(torch.int64).max)
        width = self.linear_weight.shape[0]
        self.parts = list(chunks(rows, width))
        self.memory = rows.new_empty(self.parts[0].stop if self.parts else 0, width)
        self.needs_x, self.needs_weight, self.needs_bias = call.needs  # the gradients that are not needed are empty
        self.grad_x = torch.empty_like(rows) if self.needs_x else rows.new_empty(0)
        self.grad_weight = linear_weight.new_empty(linear_weight.shape if self.needs_weight else 0)
        if self.needs_weight and not self.parts:
            self.grad_weight.zero_()
        self.grad_bias = rows.new_zeros(self.classes if self.needs_bias else 0, dtype=losses.loss_type(rows))

    def of(self, part: slice) -> Tensor:
        logits, weight = self.memory[: part.stop - part.start], self.linear_weight.t()
        if self.linear_bias is None:
            torch.mm(self.rows[part], weight, out=logits)
        else:
            torch.addmm(self.linear_bias, self.rows[part], weight, out=logits)
        logits[:, self.classes :] = -math.inf
        return logits

    def add(self, part: slice, gradient: Tensor) -> None:
        """Adds the contribution of a chunk. `gradient` is the gradient of the chunk's logits, padding included."""
        if self.needs_bias:
            self.grad_bias += own_ops.reduce_sum_no_grad(gradient, (0,))[: self.classes]
        if self.needs_x:
            torch.mm(gradient, self.linear_weight, out=self.grad_x[part])
        gradient = gradient[:, : self.classes]
        if self.needs_weight and part.start == 0:
            torch.mm(gradient.t(), self.rows[part], out=self.grad_weight)
        elif self.needs_weight:
            self.grad_weight.addmm_(gradient.t(), self.rows[part])

    def gradients(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.grad_x.view(x.shape if self.needs_x else 0), self.grad_weight, self.grad_bias.to(x.dtype)


def forward(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the loss and the gradients of x, linear_weight and linear_bias. Unneeded gradients are empty."""
    check_linear("linear_cross_entropy", call)
    losses.check_targets("linear_cross_entropy", call.target, call.linear_weight.shape[0], call.ignore_index)
    x, weight, options = call.x, call.weight, call.options
    chunk = Logits(call)
    row_losses = x.new_empty(chunk.rows.shape[0], dtype=losses.loss_type(x))
    scale = call.total_weight(row_losses).reciprocal() if call.reduction == 1 else row_losses.new_ones(1)
    for part in chunk.parts:
        logits, labels = chunk.of(part), chunk.labels[part]
        if any(call.needs):
            row_losses[part] = own_ops.cross_entropy_chunk(logits, labels, weight, *options, scale)
            chunk.add(part, logits)
        else:
            row_losses[part] = own_ops.cross_entropy_no_grad(logits, labels, weight, *options.around(0), True)
    loss = own_ops.reduce_sum_no_grad(row_losses) if call.reduction > 0 else row_losses.view(call.target.shape)
    if call.reduction == 1:
        loss = loss * scale[0]
    return loss if call.float_loss else loss.to(x.dtype), *chunk.gradients(x)


def backward(grad_out: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients, if forward computed none."""
    chunk = Logits(call)
    grads = grad_out.reshape(-1)
    if call.reduction > 0:
        grads = grads.to(losses.loss_type(call.x))
        if call.reduction == 1:
            grads = grads / call.total_weight(grads)
        grads = grads.expand(chunk.rows.shape[0])
    options = call.options.around(0)
    for part in chunk.parts:
        logits, labels = chunk.of(part), chunk.labels[part]
        _, lse, total = own_ops.cross_entropy.default(logits, labels, call.weight, *options, True)
        given = logits, labels, lse, total, call.weight
        chunk.add(part, own_ops.cross_entropy_backward_no_grad(grads[part], *given, *options))
    return chunk.gradients(call.x)


def forward_kernel(*args: Any) -> tuple[Tensor, ...]:
    return forward(Call(*args).in_forward)


def no_grad_kernel(*args: Any) -> Tensor:
    return forward(Call(*args).without_needs())[0]


def backward_kernel(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    call, made = backward_call(*args)
    check_linear_backward(grad_out, call, made)
    if not makes_gradients(call.x.dtype, call.reduction):
        return backward(grad_out, call)
    factor = grad_out.to(losses.loss_type(call.x))
    return tuple(own_ops.cross_entropy_scale(grad, factor) for grad in made)


# ---- fakes, derivative, plain form and autocast ----


def linear_cross_entropy_fake(*args: Any) -> tuple[Tensor, ...]:
    call = Call(*args)
    check_linear("linear_cross_entropy", call)
    dtype = losses.loss_type(call.x) if call.float_loss else call.x.dtype
    loss = call.x.new_empty([] if call.reduction else call.target.shape, dtype=dtype)
    return loss, *map(call.x.new_empty, call.in_forward.gradient_shapes())


def linear_cross_entropy_backward_fake(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    call, made = backward_call(*args)
    check_linear_backward(grad_out, call, made)
    return tuple(map(call.x.new_empty, call.gradient_shapes()))


def linear_cross_entropy_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    losses.refuse_weight_gradient("linear_cross_entropy", ctx.needs_input_grad[4])
    tensors, ctx.options, ctx.needs = inputs[:5], inputs[5:10], inputs[11:]  # as the fields of Call
    losses.save(ctx, *tensors, *output[1:])


def linear_cross_entropy_backward(ctx: Any, grad_out: Tensor | None, *_: None) -> autograd.Gradients:
    if grad_out is None:
        return {}
    grads = _ops.linear_cross_entropy_backward(grad_out, *ctx.saved_tensors, *ctx.options, *ctx.needs)
    names = ("x", "linear_weight", "linear_bias")
    return {name: grad for name, grad, need in zip(names, grads, ctx.needs, strict=True) if need}


def linear_cross_entropy_plain(*args: Any) -> tuple[Tensor, ...]:
    call = Call(*args)
    logits = torch.nn.functional.linear(call.x, call.linear_weight, call.linear_bias)
    logits, target = logits.reshape(-1, logits.shape[-1]), call.target.reshape(-1)
    options = call.options.around(call.reduction)
    loss, *_ = losses.cross_entropy_plain(logits, target, call.weight, *options, call.float_loss)
    # The operator also returns gradients as results. They have no derivative, so they are computed as constants here.
    constants = [t.detach() if isinstance(t, Tensor) else t for t in args]
    with torch.no_grad():
        _, *made = own_ops.linear_cross_entropy(*constants)
    return loss.reshape([] if call.reduction else call.target.shape), *made


def linear_cross_entropy_autocast(device_type: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts x, linear_weight and linear_bias to autocast's dtype, except float64, and asks for a float32 loss."""
    call, dtype = Call(*args), torch.get_autocast_dtype(device_type)

    def cast(t: Any) -> Any:
        return t if t is None or t.dtype is torch.float64 or not t.is_floating_point() else t.to(dtype)

    tensors = {"x": cast(call.x), "linear_weight": cast(call.linear_weight), "linear_bias": cast(call.linear_bias)}
    return call._replace(**tensors, float_loss=True)

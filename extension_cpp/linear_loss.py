"""The kernels of linear_cross_entropy. They process the rows in chunks with at most 1 GiB of logits in memory.

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

from .autograd import NO_GRAD, library_for, own_ops, qualified
from .checks import fail

# The size of a chunk's logits. Products of few rows are slower (products of 1024 rows by an eighth, with 128256 classes
# on an H100), and each chunk after the first rounds the sum of the weight's gradient once more.
CHUNK_BYTES = 1 << 30
TILE = 128  # rows of a matrix product's tile
ALIGNMENT = 16  # bytes; if a row's logits are not a multiple of it, cuBLAS uses kernels with a sixth of the speed

# The options of cross_entropy: ignore_index, label_smoothing, z_loss, softcap.
Options = tuple[int, float, float, float | None]


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


def empty_gradients(x: Tensor, linear_weight: Tensor, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """The results of the fakes. A gradient that is not needed has no elements."""
    needs_x, needs_weight, needs_bias = needs
    return (
        x.new_empty(x.shape if needs_x else 0),
        linear_weight.new_empty(linear_weight.shape if needs_weight else 0),
        linear_weight.new_empty(linear_weight.shape[:1] if needs_bias else 0),
    )


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


def _forward_kernel(*args: Any) -> tuple[Tensor, ...]:
    (
        x,
        linear_weight,
        target,
        linear_bias,
        weight,
        reduction,
        *options,
        float_loss,
        needs_x,
        needs_weight,
        needs_bias,
    ) = args
    needs = (needs_x, needs_weight, needs_bias) if makes_gradients(x.dtype, reduction) else (False, False, False)
    return forward(x, linear_weight, target, linear_bias, weight, reduction, _options(options), float_loss, needs)


def _no_grad_kernel(*args: Any) -> Tensor:
    x, linear_weight, target, linear_bias, weight, reduction, *options, float_loss, _, _, _ = args
    none = (False, False, False)
    return forward(x, linear_weight, target, linear_bias, weight, reduction, _options(options), float_loss, none)[0]


def _backward_kernel(grad_out: Tensor, *args: Any) -> tuple[Tensor, ...]:
    x, linear_weight, target, linear_bias, weight, *made, reduction, _, _, _, _, _, _, _ = args
    if makes_gradients(x.dtype, reduction):
        factor = grad_out.to(torch.promote_types(x.dtype, torch.float32))
        return tuple(own_ops.cross_entropy_scale(grad, factor) for grad in made)
    options, needs = _options(args[9:13]), args[13:]
    return backward(grad_out, x, linear_weight, target, linear_bias, weight, reduction, options, needs)


def _options(options: Sequence[Any]) -> Options:
    ignore_index, label_smoothing, z_loss, softcap = options
    return ignore_index, label_smoothing, z_loss, softcap


def check_memory(schema: Any, args: Sequence[Any]) -> None:
    """check_memory of common/shim/op.h. PyTorch's products of a tensor whose storage was freed may end the process."""
    for argument, x in zip(schema.arguments, args, strict=True):
        if isinstance(x, Tensor) and x.numel() > 0 and x.untyped_storage().nbytes() == 0:
            got = f"memory for its {x.numel()} elements, but got a storage of 0 bytes"
            fail(schema.name.split("::")[1].removesuffix(NO_GRAD), f"expected {argument.name} to have {got}")


def register(check: Any, check_backward: Any) -> None:
    """Registers the kernels on CPU and CUDA, each behind its check of the arguments."""
    kernels = {
        "linear_cross_entropy": (check, _forward_kernel),
        f"linear_cross_entropy{NO_GRAD}": (check, _no_grad_kernel),
        "linear_cross_entropy_backward": (check_backward, _backward_kernel),
        f"linear_cross_entropy_backward{NO_GRAD}": (check_backward, _backward_kernel),
    }
    for name, (check_arguments, kernel) in kernels.items():
        schema = getattr(own_ops, name).default._schema
        defaults = tuple(argument.default_value for argument in schema.arguments)

        def checked(
            *args: Any,
            check_arguments: Any = check_arguments,
            kernel: Any = kernel,
            defaults: Any = defaults,
            schema: Any = schema,
        ) -> Any:
            args = (*args, *defaults[len(args) :])  # the dispatcher leaves out trailing arguments with default values
            check_memory(schema, args)
            check_arguments(*args)
            with torch.no_grad():  # for a no-grad overload that is called by itself
                return kernel(*args)

        for key in ("CPU", "CUDA"):
            op = qualified(name)
            library_for(f"{key} {op}", op).impl(name, checked, key)

"""Implements rotary_embedding. Its plain form computes in float32 (float64 for float64 tensors)."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops, reference
from ..registration import checks
from ..registration.autograd import Gradients
from .common import wide


def rotary_embedding(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by the positions of their tokens, in one kernel: rotary position embedding.

    The first R elements of each row x are rotated in pairs (i, j), and the others are copied::

        y_i = cos_i * x_i - sin_i * x_j        j = i + R / 2, as for Llama, GPT-NeoX and Phi
        y_j = cos_j * x_j + sin_j * x_i        interleaved: i even, j = i + 1, as for GPT-J and Cohere

    Args:
        q: shape (T, D), (heads, T, D) or (B, heads, T, D).
        k: dtype, device and shape of ``q``; only the number of heads may differ.
        cos: shape (T, R), (1, T, R) or (B, T, R), with R even and at most D. Each rotated element has its own column,
            even if the two columns of a pair are equal. Of ``q``'s dtype or, if that is half, float32.
        sin: shape and dtype of ``cos``.
        interleaved: whether the two elements of a pair are neighbours.

    Returns:
        ``q`` and ``k`` rotated, with the shapes, dtypes and strides of ``torch.empty_like(q)`` and
        ``torch.empty_like(k)``.

    Raises:
        RuntimeError: an argument has another shape, dtype or device, R is odd or larger than D, or ``cos`` or ``sin``
            requires grad.

    Differentiable in ``q`` and ``k``, to any order; backward saves only ``cos`` and ``sin``. Rows of unit stride are
    read without a copy, such as the rows of ``qkv.view(B, T, 3, heads, D)[:, :, 0].transpose(1, 2)``. Batch-invariant.
    Sources: Su et al. 2021, arXiv:2104.09864; apply_rotary_pos_emb of Hugging Face transformers.
    """
    rotated = _ops.rotary_embedding(q, k, cos, sin, interleaved)
    return rotated[0], rotated[1]  # indexed, because under torch.fx both are one Proxy, which cannot be unpacked


def check_rotary(op: str, grad: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    q_name, k_name = f"{grad}q", f"{grad}k"
    checks.check_dtype(op, q_name, q)
    checks.check_same(op, k_name, k, q_name, q)
    checks.check_same_or_float32(op, "cos", cos, q_name, q)
    checks.check_same(op, "sin", sin, "cos", cos)
    shapes = "(tokens, width), (heads, tokens, width) or (batch, heads, tokens, width)"
    expected = f"expected {q_name} of shape {shapes}, but got {list(q.shape)}"
    checks.check(op, 2 <= q.dim() <= 4, expected)
    shape = ", ".join("*" if d == q.dim() - 3 else str(size) for d, size in enumerate(q.shape))
    expected = f"expected {k_name} of shape [{shape}] like {q_name}, with any number of heads, but got {list(k.shape)}"
    checks.check_sizes(op, k.shape, (*q.shape[:-3], *k.shape[-3:-2], *q.shape[-2:]), expected)
    batch, tokens, width = q.shape[0] if q.dim() == 4 else 1, q.shape[-2], q.shape[-1]
    batches = "1" if batch == 1 else f"1 or {batch}"
    rows = f"[{tokens}, rotated] or [{batches}, {tokens}, rotated]"
    expected = f"expected cos of shape {rows} for the tokens of {q_name}, but got {list(cos.shape)}"
    checks.check(op, 2 <= cos.dim() <= 3, expected)
    if cos.dim() == 3 and cos.shape[0] != 1:
        checks.check(op, cos.shape[0] == batch, expected)
    checks.check(op, cos.shape[-2] == tokens, expected)
    checks.check_shape(op, "sin", sin, "cos", cos)
    expected = f"expected cos to have an even number of columns, at most the {width} of {q_name}"
    checks.check(op, cos.shape[-1] % 2 == 0, f"{expected}, but got {cos.shape[-1]}")
    checks.check(op, cos.shape[-1] <= width, f"{expected}, but got {cos.shape[-1]}")


def rotary_embedding_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    check_rotary("rotary_embedding", "", q, k, cos, sin)
    return torch.empty_like(q), torch.empty_like(k)


def rotary_embedding_backward_fake(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    check_rotary("rotary_embedding_backward", "grad_", grad_q, grad_k, cos, sin)
    return torch.empty_like(grad_q), torch.empty_like(grad_k)


def rotary_embedding_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Saves cos and sin. It is the setup_context both of the operator and of its backward operator."""
    _, _, cos, sin, ctx.interleaved = inputs
    if any(ctx.needs_input_grad[2:4]):
        reason = "their derivative is not implemented"
        checks.fail("rotary_embedding", f"expected cos and sin not to require grad: {reason}")
    ctx.save_for_backward(cos, sin)


def rotary_embedding_backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Gradients:
    cos, sin = ctx.saved_tensors
    grad_q, grad_k = _ops.rotary_embedding_backward(grad_q, grad_k, cos, sin, ctx.interleaved)
    return {"q": grad_q, "k": grad_k}


def rotary_embedding_second(ctx: Any, grad_grad_q: Tensor, grad_grad_k: Tensor) -> Gradients:
    # The backward operator multiplies by the transposed rotation matrix. So its own backward is the forward operator.
    cos, sin = ctx.saved_tensors
    grad_q, grad_k = _ops.rotary_embedding(grad_grad_q, grad_grad_k, cos, sin, ctx.interleaved)
    return {"grad_q": grad_q, "grad_k": grad_k}


def rotary_embedding_plain(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    rotated_q, rotated_k = reference.rotary_embedding(*map(wide, (q, k, cos, sin)), interleaved=interleaved)
    return rotated_q.to(q.dtype), rotated_k.to(k.dtype)


def rotary_embedding_backward_plain(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    # In the transposed rotation each element of a pair has the other's sine, with the other sign.
    half = sin.shape[-1] // 2
    sin = -(sin.unflatten(-1, (half, 2)).flip(-1).flatten(-2) if interleaved else sin.roll(half, -1))
    return rotary_embedding_plain(grad_q, grad_k, cos, sin, interleaved)


def rotary_embedding_autocast(device_type: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts q and k to the wider of their two dtypes, and cos and sin to that dtype or, if it is half, to float32. This
    is PyTorch's type promotion, except that the results have the dtype of q and k even beside float32 cos and sin."""
    q, k, cos, sin, interleaved = args
    if not all(x.is_floating_point() for x in (q, k, cos, sin)):
        return args
    if q.dtype != k.dtype:
        dtype = torch.promote_types(q.dtype, k.dtype)
        q, k = q.to(dtype), k.to(dtype)
    if cos.dtype != q.dtype or sin.dtype != q.dtype:
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin = cos.to(dtype), sin.to(dtype)
    return q, k, cos, sin, interleaved

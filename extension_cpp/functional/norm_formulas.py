"""Computes the norms, their derivative and second derivative in plain tensor operations, over the last dimensions. The
arithmetic is float32 (float64 for float64 tensors)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .common import wide


def _dims(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _normalize(x: Tensor, dims: tuple[int, ...], rstd: Tensor, centered: bool) -> tuple[Tensor, Tensor]:
    """Returns xhat and rstd as functions of x, for layer_norm if `centered`, or else for rms_norm.

    The returned rstd has the values of the argument rstd, which forward computed, and is a function of x: 1 /
    sqrt(variance + c). The constant c, which is detached, is rstd^-2 - variance, which is eps but for rounding.
    """
    d = x - x.mean(dims, keepdim=True) if centered else x
    variance = d.square().mean(dims, keepdim=True)
    rstd = (variance + (rstd.pow(-2) - variance).detach()).rsqrt()
    return d * rstd, rstd


def _project(z: Tensor, xhat: Tensor, dims: tuple[int, ...], centered: bool) -> Tensor:
    """Computes z - mean(z) - xhat * mean(xhat * z). If z is xhat's gradient, rstd times the result is x's gradient."""
    return z - (z.mean(dims, keepdim=True) if centered else 0) - xhat * (xhat * z).mean(dims, keepdim=True)


def forward(
    x: Tensor, normalized_shape: Sequence[int], weights: Sequence[Tensor | None], eps: float | None, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dims, z, (weight, bias) = _dims(normalized_shape), wide(x), (*weights, None)[:2]
    mean = z.mean(dims, keepdim=True)
    d = z - mean if centered else z
    rstd = (d.square().mean(dims, keepdim=True) + (torch.finfo(z.dtype).eps if eps is None else eps)).rsqrt()
    y = d * rstd
    y = y if weight is None else y * wide(weight)
    y = y if bias is None else y + wide(bias)
    return y.to(x.dtype), mean.detach(), rstd.detach()


def backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weights: Sequence[Tensor | None],
    centered: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Returns the gradients of x, weight and bias. A gradient that is not needed is empty."""
    weight, like = weights[0], next((w for w in weights if w is not None), x)
    dims, g = _dims(normalized_shape), wide(grad_out)
    xhat, rstd = _normalize(wide(x), dims, rstd, centered)
    gw = g if weight is None else g * wide(weight)
    needs_x, *needs_weights = needs
    gradients = [(rstd * _project(gw, xhat, dims, centered)).to(x.dtype) if needs_x else x.new_empty(0)]
    for term, needed in zip((g * xhat, g), needs_weights, strict=False):
        total = term.sum_to_size(tuple(normalized_shape)).to(like.dtype)
        gradients.append(total if needed else like.new_empty(0))
    return tuple(gradients)


def second_derivative(
    normalized_shape: Sequence[int],
    grad_out: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    grads: Sequence[Tensor | None],
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the gradients of grad_out, x and weight through the backward of layer_norm, if `centered`, or rms_norm.

    They are the derivatives of <grad_grad_x, grad_x> + <grad_grad_weight, grad_weight> + <grad_grad_bias, grad_bias>.
    `grads` are grad_grad_x, grad_grad_weight and, for layer_norm, grad_grad_bias. One is None if the backward did not
    compute that gradient.

    With P the linear map of _project, grad_x is rstd * P(grad_out * weight), and P is symmetric. All operations are
    plain tensor operations on x, which autograd differentiates further.
    """
    grad_grad_x, grad_grad_weight, *grad_grad_bias = grads
    dims, dtype = _dims(normalized_shape), rstd.dtype
    g, v = grad_out.to(dtype), None if grad_grad_x is None else grad_grad_x.to(dtype)
    w = None if weight is None else weight.to(dtype)
    xhat, rstd = _normalize(x.to(dtype), dims, rstd, centered)

    def mean(z: Tensor) -> Tensor:
        return z.mean(dims, keepdim=True)

    def project(z: Tensor) -> Tensor:
        return _project(z, xhat, dims, centered)

    grad_grad_out, grad_x, grad_weight = torch.zeros_like(xhat), torch.zeros_like(xhat), None
    if v is not None:
        gw = g if w is None else g * w
        h = rstd * project(v)
        grad_grad_out = h if w is None else h * w
        grad_weight = None if w is None else (g * h).sum_to_size(w.shape)
        along = mean(v * gw) - (mean(v) * mean(gw) if centered else 0) - mean(xhat * v) * mean(xhat * gw)
        grad_x = -rstd.square() * (xhat * along + mean(xhat * gw) * project(v) + mean(xhat * v) * project(gw))
    if grad_grad_weight is not None:
        u = grad_grad_weight.to(dtype)
        grad_grad_out = grad_grad_out + u * xhat
        grad_x = grad_x + rstd * project(u * g)
    for term in grad_grad_bias:
        if term is not None:
            grad_grad_out = grad_grad_out + term.to(dtype)
    return (
        grad_grad_out.to(grad_out.dtype),
        grad_x.to(x.dtype),
        None if grad_weight is None or weight is None else grad_weight.to(weight.dtype),
    )

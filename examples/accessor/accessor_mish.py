"""Implements accessor_mish with ATen, PyTorch's C++ API. Importing this file compiles its two sources.

torch.utils.cpp_extension.load compiles them in a minute and caches the library, which fits only this version of torch.
Without a GPU the CUDA source is left out.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake
from torch.utils.cpp_extension import load

_folder = Path(__file__).resolve().parent
_sources = ["accessor_mish.cpp"]
if torch.cuda.is_available():
    _sources.append("accessor_mish_cuda.cu")
load(
    name="accessor_mish",
    sources=[str(_folder / source) for source in _sources],
    extra_cflags=["-O3"],
    extra_cuda_cflags=["-O3"],
    is_python_module=False,
)
_ops = torch.ops.accessor_mish


def reference(x: Tensor) -> Tensor:
    """Computes accessor_mish in plain PyTorch. It documents the op, and the op's test compares with it in float64."""
    return x * torch.tanh(torch.nn.functional.softplus(x))


def accessor_mish(x: Tensor) -> Tensor:
    """Mish: ``x * tanh(softplus(x))``.

    Args:
        x: shape (B, D), float32, any strides; on CUDA it spans fewer than 2^31 - 65536 elements.

    Returns:
        A contiguous tensor of ``x``'s shape.

    Raises:
        RuntimeError: ``x`` is not of shape (B, D) or not float32.

    Differentiable once; a second derivative raises. torch.library.register_autograd has no forward mode: torch.func.jvp
    gives zeros. Deterministic.
    """
    return _ops.forward(x)


@register_fake("accessor_mish::forward")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("accessor_mish::backward")
def _(grad_out: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_out: Tensor) -> Tensor:
    return _ops.backward(grad_out, *ctx.saved_tensors)


register_autograd("accessor_mish::forward", _backward, setup_context=_setup_context)


def _no_second_order(ctx: Any, grad: Tensor) -> None:
    raise RuntimeError("accessor_mish: the second derivative is not implemented")


register_autograd("accessor_mish::backward", _no_second_order)

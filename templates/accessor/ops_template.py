"""Implements kernel_template with accessors. Importing this file compiles its two sources.

torch.utils.cpp_extension.load compiles them in some seconds and caches the result. Without a GPU the CUDA source is
left out. The sources need only the stable ABI of torch 2.10, so that torch.ops.load_library can load the compiled
library into later versions of torch.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake
from torch.utils.cpp_extension import load

_folder = Path(__file__).resolve().parent
_stable = ["-O3", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DTORCH_STABLE_ONLY"]  # 2.10; no other header of torch
_sources = ["kernel_template.cpp"]
if torch.cuda.is_available():
    _sources.append("kernel_template_cuda.cu")
load(
    name="kernel_template",
    sources=[str(_folder / source) for source in _sources],
    extra_cflags=_stable,
    extra_cuda_cflags=[*_stable, "-DUSE_CUDA"],  # USE_CUDA declares the function that gives the current stream
    is_python_module=False,
)
_ops = torch.ops.kernel_template


def reference(x: Tensor) -> Tensor:
    """Computes kernel_template in plain PyTorch. The test compares the op with it in float64."""
    return x * x


def kernel_template(x: Tensor) -> Tensor:
    """The square of every element: ``x * x``.

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


@register_fake("kernel_template::forward")
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@register_fake("kernel_template::backward")
def _(grad_out: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_out: Tensor) -> Tensor:
    return _ops.backward(grad_out, *ctx.saved_tensors)


register_autograd("kernel_template::forward", _backward, setup_context=_setup_context)


def _no_second_order(ctx: Any, grad: Tensor) -> None:
    raise RuntimeError("kernel_template: the second derivative is not implemented")


register_autograd("kernel_template::backward", _no_second_order)

"""Other libraries' kernels for the same work on the GPU, if they are installed; on the CPU a loop in C (c_loop.py).

A peer is called with the op's arguments, which have the same meaning. The libraries differ in these points:
* Liger's RMSNorm rounds x * rstd to x's type before the weight unless casting_mode is gemma, and writes grad_x over
  grad_out unless in_place is False. Here it does neither, as the others.
* quack's LayerNorm has no autograd, so it is left out.
* Liger's gates write the gradients over gate and up in their backward pass: the same traffic, but the inputs are lost.
  Its geglu is the approximation by tanh.
* Liger's cross-entropy writes the gradient over the logits in its forward pass, so it is left out.
* accelerated-scan scans along the last dimension, whose length must be a power of two. Its import compiles it.
* PyTorch's associative_scan is no public function yet. Its kernel is made by torch.compile with dynamic=False, since
  there is none for dynamic shapes, and the gradients are those of examples/recurrent_text.py, two more kernels: its own
  backward needs the square of the length in memory.
* Liger's rotary embedding works in place if the heads of a token are neighbours in memory, as they are here. So each
  call rotates its inputs further, and reads and writes as many bytes as the others.
"""

import importlib
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from benchmarks import c_loop

# Libraries for the GPU, by name: the module to import, and the distribution that has its version.
LIBRARIES = {
    "liger": ("liger_kernel.ops", "liger_kernel"),
    "quack": ("quack", "quack-kernels"),
    "apex": ("apex.normalization.fused_layer_norm", "apex"),
    "accelerated_scan": ("accelerated_scan.warp", "accelerated-scan"),
    "associative_scan": ("torch._higher_order_ops.associative_scan", "torch"),
}


def _liger_layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, eps)


def _liger_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, _eps(eps), 0.0, "gemma", False)


def _quack_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    from quack import rmsnorm

    return rmsnorm(x, weight, eps=_eps(eps))


def _liger_add_rms_norm(
    x: Tensor, residual: Tensor, shape: Any, weight: Tensor, eps: float | None, p: float, seed: None
) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return LigerFusedAddRMSNormFunction.apply(x, residual, weight, _eps(eps), 0.0, "gemma", False)


def _quack_add_rms_norm(
    x: Tensor, residual: Tensor, shape: Any, weight: Tensor, eps: float | None, p: float, seed: None
) -> tuple[Tensor, Tensor]:
    from quack import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=_eps(eps), prenorm=True)


def _apex_layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction

    return FusedLayerNormAffineFunction.apply(x, weight, bias, torch.Size(shape), eps)


def _apex_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    from apex.normalization.fused_layer_norm import FusedRMSNormAffineFunction

    return FusedRMSNormAffineFunction.apply(x, weight, torch.Size(shape), _eps(eps))


def _liger_softmax(x: Tensor) -> Tensor:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply(x)


def _quack_softmax(x: Tensor) -> Tensor:
    from quack.softmax import softmax

    return softmax(x)


def _quack_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    from quack.cross_entropy import cross_entropy

    return cross_entropy(logits, target, reduction="mean")


def _liger_rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)


def _liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def _liger_geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


def _accelerated_scan(a: Tensor, b: Tensor, dim: int) -> Tensor:
    from accelerated_scan.warp import scan

    if a.dtype.itemsize == 2:  # which leaves the GPU unusable for all that follows
        raise NotImplementedError("an illegal memory access, in half types of 8192 steps")
    states: Tensor = scan(a[None], b[None])[0]
    return states


def _associative_scan(a: Tensor, b: Tensor, dim: int) -> Tensor:
    from examples.recurrent_text import AssociativeScan

    extra = 0 if dim == 0 else -1  # it scans the middle dimension of three
    states: Tensor = AssociativeScan.apply(a.unsqueeze(extra), b.unsqueeze(extra)).squeeze(extra)
    return states


def _eps(eps: float | None) -> float:
    """The default eps of rms_norm for float32 and the half types."""
    return torch.finfo(torch.float32).eps if eps is None else eps


PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "layer_norm": {"liger": _liger_layer_norm, "apex": _apex_layer_norm},
    "rms_norm": {"liger": _liger_rms_norm, "quack": _quack_rms_norm, "apex": _apex_rms_norm},
    "softmax": {"liger": _liger_softmax, "quack": _quack_softmax},
    "swiglu": {"liger": _liger_swiglu},
    "geglu_tanh": {"liger": _liger_geglu},
    "cross_entropy": {"quack": _quack_cross_entropy},
    "rotary_embedding": {"liger": _liger_rotary_embedding},
    "linear_recurrence": {
        "accelerated_scan": _accelerated_scan,
        "associative_scan": _associative_scan,
        "c_loop": c_loop.recurrence,
    },
    "linear_recurrence_columns": {"associative_scan": _associative_scan, "c_loop": c_loop.recurrence},
    "add_rms_norm_p0": {"liger": _liger_add_rms_norm, "quack": _quack_add_rms_norm},
}


FORWARD_ALONE = ("c_loop",)


def versions(device: str) -> dict[str, str | None]:
    """The version of each library; None if it cannot be imported here."""
    if device == "cpu":
        return {"c_loop": "-O3"}
    found: dict[str, str | None] = {}
    for name, (module, distribution) in LIBRARIES.items():
        try:
            importlib.import_module(module)
            found[name] = metadata.version(distribution)
        except Exception:  # the import of a library for another torch or GPU may raise any error
            found[name] = None
    return found


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the tensors in float32, with results in the first one's type."""

    def widen(one: Any) -> Any:
        return one.float() if isinstance(one, Tensor) and one.is_floating_point() else one

    def call(x: Tensor, *others: Any, **named: Any) -> Any:
        wide = {name: widen(one) for name, one in named.items()}
        outputs = function(widen(x), *map(widen, others), **wide)
        return tuple(y.to(x.dtype) for y in outputs) if isinstance(outputs, tuple) else outputs.to(x.dtype)

    return call

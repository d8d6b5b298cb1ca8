"""Calls other libraries' kernels for the same work: installed libraries on a GPU, a loop in C (c_loop.c) on the CPU.

A peer gets the arguments of this package's op, with the same meaning. The libraries differ in these points:
* Liger's RMSNorm rounds x * rstd to x's type before the weight unless casting_mode is gemma, and writes grad_x over
  grad_out unless in_place is False. Here it gets "gemma" and False, so that it does neither, like the other libraries.
* quack's LayerNorm is left out, because it has no autograd.
* Liger's gates write the gradients over gate and up in their backward pass. This moves as many bytes as new tensors
  would, but the inputs are lost; the judge gives each contender inputs of its own. Liger's geglu approximates GELU by
  tanh.
* Liger's cross-entropy is left out, because its forward pass writes the gradient over the logits.
* accelerated-scan scans along the last dimension, whose length must be a power of two. Importing it compiles it.
* PyTorch's associative_scan is not public yet. torch.compile makes its kernel with dynamic=False, because it makes none
  for dynamic shapes. Its own backward needs memory for the square of the length, so the gradients are computed as in
  examples/recurrent_text.py, with two more kernels.
* Liger's rotary embedding works in place if the heads of a token are adjacent in memory, as they are here. Each call
  rotates its inputs further, but reads and writes as many bytes as the other libraries.
"""

import contextlib
import ctypes
import functools
import importlib
import subprocess
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from build_library import command_in

# Libraries for the GPU, by name: the module to import, and the distribution that has its version.
LIBRARIES = {
    "liger": ("liger_kernel.ops", "liger_kernel"),
    "quack": ("quack", "quack-kernels"),
    "accelerated_scan": ("accelerated_scan.warp", "accelerated-scan"),
    "associative_scan": ("torch._higher_order_ops.associative_scan", "torch"),
}

C_NAMES = {torch.float32: "float", torch.bfloat16: "bfloat16"}  # in the names of c_loop.c's functions


@functools.cache
def _of(path: str) -> Any:
    """Imports what a path module.attribute names, only when a peer is called, because a library may be absent."""
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def liger(module: str, function: str, *arguments: Any) -> Any:
    return _of(f"liger_kernel.ops.{module}.Liger{function}Function").apply(*arguments)


def _accelerated_scan(a: Tensor, b: Tensor, dim: int) -> Tensor:
    if a.dtype.itemsize == 2:  # accelerated-scan would break all later calls on the GPU
        raise NotImplementedError("an illegal memory access, in half types of 8192 steps")
    return _of("accelerated_scan.warp.scan")(a[None], b[None])[0]


def _associative_scan(a: Tensor, b: Tensor, dim: int) -> Tensor:
    extra = 0 if dim == 0 else -1  # scans the middle dimension of three
    scan = _of("examples.recurrent_text.AssociativeScan").apply
    return scan(a.unsqueeze(extra), b.unsqueeze(extra)).squeeze(extra)


@functools.cache
def _c_loop_library() -> ctypes.CDLL:
    """Compiles c_loop.c once per process. The library stays mapped after its folder is deleted."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "c_loop.so")
        words = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(Path(__file__).with_name("c_loop.c"))]
        subprocess.run([*(command_in("CC") or ["cc"]), *words, "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


def c_loop(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """Computes linear_recurrence for two-dimensional tensors by a loop in C, without gradients."""
    h = torch.empty_like(b)
    steps, lines = b.shape if dim == 0 else reversed(b.shape)
    function = getattr(_c_loop_library(), f"{'columns' if dim == 0 else 'rows'}_{C_NAMES[b.dtype]}")
    function(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, h)), ctypes.c_int64(lines), ctypes.c_int64(steps))
    return h


def _eps(eps: float | None) -> float:
    """Returns the default eps of rms_norm for float32 and the half types."""
    return torch.finfo(torch.float32).eps if eps is None else eps


# Each peer is called with the op's arguments, in their order.
PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "layer_norm": {
        "liger": lambda x, shape, weight, bias, eps=1e-5: liger("layer_norm", "LayerNorm", x, weight, bias, eps)
    },
    "rms_norm": {
        "liger": lambda x, shape, weight, eps=None: liger(
            "rms_norm", "RMSNorm", x, weight, _eps(eps), 0.0, "gemma", False
        ),
        "quack": lambda x, shape, weight, eps=None: _of("quack.rmsnorm")(x, weight, eps=_eps(eps)),
    },
    "add_rms_norm_p0": {
        "liger": lambda x, residual, shape, weight, eps, p, seed: liger(
            "fused_add_rms_norm", "FusedAddRMSNorm", x, residual, weight, _eps(eps), 0.0, "gemma", False
        ),
        "quack": lambda x, residual, shape, weight, eps, p, seed: _of("quack.rmsnorm")(
            x, weight, residual=residual, eps=_eps(eps), prenorm=True
        ),
    },
    "softmax": {"liger": lambda x: liger("softmax", "Softmax", x), "quack": lambda x: _of("quack.softmax.softmax")(x)},
    "swiglu": {"liger": lambda gate, up: liger("swiglu", "SiLUMul", gate, up)},
    "geglu_tanh": {"liger": lambda gate, up, approximate: liger("geglu", "GELUMul", gate, up)},
    "cross_entropy": {"quack": lambda x, target: _of("quack.cross_entropy.cross_entropy")(x, target, reduction="mean")},
    "rotary_embedding": {"liger": lambda q, k, cos, sin: liger("rope", "Rope", q, k, cos, sin)},
    "linear_recurrence": {
        "accelerated_scan": _accelerated_scan,
        "associative_scan": _associative_scan,
        "c_loop": c_loop,
    },
    "linear_recurrence_columns": {"associative_scan": _associative_scan, "c_loop": c_loop},
}


@functools.cache
def versions(device: str) -> dict[str, str | None]:
    """Returns the version of each library, or None if it cannot be imported here."""
    if device == "cpu":
        return {"c_loop": "-O3"}
    found: dict[str, str | None] = dict.fromkeys(LIBRARIES)
    for name, (module, distribution) in LIBRARIES.items():
        with contextlib.suppress(Exception):  # the import of a library for another torch or GPU may raise any error
            importlib.import_module(module)
            found[name] = metadata.version(distribution)
    return found


def in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function to run on float32 tensors and to return results in the dtype of the first one."""

    def widen(one: Any) -> Any:
        return one.float() if isinstance(one, Tensor) and one.is_floating_point() else one

    def call(x: Tensor, *others: Any, **named: Any) -> Any:
        outputs = function(widen(x), *map(widen, others), **{name: widen(one) for name, one in named.items()})
        return tuple(y.to(x.dtype) for y in outputs) if isinstance(outputs, tuple) else outputs.to(x.dtype)

    return call

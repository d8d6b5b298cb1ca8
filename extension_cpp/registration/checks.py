"""Provides the checks of csrc/common/shim/op.h, with its conditions, order and messages, for fakes.

If a fake accepted what the kernel does not accept, torch.export would succeed, and running the exported program fail.
Conditions go through torch._check, which also takes symbolic sizes.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fail(op: str, message: str) -> NoReturn:
    raise RuntimeError(f"extension_cpp::{op}: {message}")


def check(op: str, condition: Any, message: str) -> None:
    """Fails unless the condition, a bool or a SymBool, holds."""
    torch._check(condition, lambda: f"extension_cpp::{op}: {message}")


def dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def check_tensor(op: str, name: str, x: Any) -> None:
    """Fails unless x is a tensor, or stands for one as torch.fx's Proxy does."""
    if not hasattr(x, "__torch_function__"):
        kind = "None" if x is None else f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")
        hint = "; torch.from_numpy makes a tensor of it" if kind == "numpy.ndarray" else ""
        fail(op, f"expected {name} to be a tensor, but got {kind}{hint}")


def check_dense(op: str, name: str, x: Any) -> None:
    """Fails if x is sparse, quantized, of mkldnn's layout or nested but not jagged. No kernel takes such tensors."""
    if not isinstance(x, Tensor) or x.layout == torch.jagged:
        return
    if x.is_nested:
        fail(op, f"expected {name} to be dense or jagged, but got a nested tensor with layout=torch.strided")
    if x.is_quantized:
        fail(op, f"expected {name} to be dense, but got a quantized tensor; x.dequantize() gives a dense one")
    if x.layout != torch.strided:
        fail(op, f"expected {name} to be dense, but got layout {x.layout}; x.to_dense() gives a dense tensor")


def check_tensors(schema: Any, args: Sequence[Any]) -> None:
    """Makes check_tensor and check_dense for each argument that is a tensor or a list of tensors in the schema.

    It runs after a call of an operator has failed. PyTorch's own messages for these mistakes have many lines, and some
    of the messages name no argument.
    """
    for argument, value in zip(schema.arguments, args, strict=False):
        kind, op = str(argument.type), schema.name.split("::")[1]
        if kind == "Tensor" or (kind == "Optional[Tensor]" and value is not None):
            check_tensor(op, argument.name, value)
            check_dense(op, argument.name, value)
        elif kind == "List[Tensor]":
            expected = f"expected {argument.name} to be a list of tensors"
            check(op, isinstance(value, list | tuple), f"{expected}, but got {type(value).__name__}")
            for i, x in enumerate(value):
                check_tensor(op, f"{argument.name}[{i}]", x)
                check_dense(op, f"{argument.name}[{i}]", x)


def check_sizes(op: str, sizes: Sequence[Any], expected: Sequence[Any], message: str) -> None:
    """Fails unless the sizes are equal. They are compared one by one, because symbolic sizes compare to a SymBool."""
    check(op, len(sizes) == len(expected), message)
    for size, other in zip(sizes, expected, strict=True):
        check(op, size == other, message)


def check_dtype(op: str, name: str, x: Tensor, hint: str = "") -> None:
    expected = f"expected {name} to be float64, float32, bfloat16 or float16"
    check(op, x.dtype in DTYPES, f"{expected}, but got {dtype_name(x)}{hint}")


def check_device(op: str, name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    check(op, x.device == like.device, f"expected {name} on {like.device} like {like_name}, but got {x.device}")


def check_same(op: str, name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    check_device(op, name, x, like_name, like)
    expected = f"expected {name} to be {dtype_name(like)} like {like_name}"
    check(op, x.dtype == like.dtype, f"{expected}, but got {dtype_name(x)}")


def check_same_or_float32(op: str, name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    check_device(op, name, x, like_name, like)
    is_half = like.dtype.itemsize < 4
    expected = f"expected {name} to be {dtype_name(like)} like {like_name}{' or float32' if is_half else ''}"
    fits = x.dtype == like.dtype or (is_half and x.dtype == torch.float32)
    check(op, fits, f"{expected}, but got {dtype_name(x)}")
    check_dtype(op, name, x)


def check_shape(op: str, name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    expected = f"expected {name} of shape {list(like.shape)} like {like_name}"
    check_sizes(op, x.shape, like.shape, f"{expected}, but got {list(x.shape)}")


def check_like(op: str, name: str, x: Tensor, like_name: str, like: Tensor) -> None:
    """Makes check_same, then check_shape."""
    check_same(op, name, x, like_name, like)
    check_shape(op, name, x, like_name, like)


def check_probability(op: str, p: float) -> None:
    if not 0 <= p <= 1:
        fail(op, f"expected p to be between 0 and 1, but got {p:g}")


def check_seed(op: str, seed: Tensor, x: Tensor) -> None:
    check_device(op, "seed", seed, "x", x)
    check(op, seed.dtype == torch.int64, f"expected seed to be int64, but got {dtype_name(seed)}")
    check(op, seed.numel() == 1, f"expected seed to have one element, but got shape {list(seed.shape)}")


def check_writable(op: str, name: str, x: Tensor) -> None:
    for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1:
            check(op, stride != 0, f"expected {name} without internal overlap, but got stride 0 in dimension {d}")


def check_no_partial_overlap(op: str, written_name: str, written: Tensor, name: str, x: Tensor) -> None:
    """Fails if two dense tensors in one storage share some elements but are not the same tensor."""
    if written.untyped_storage()._cdata != x.untyped_storage()._cdata or not (is_dense(written) and is_dense(x)):
        return
    begin, other = (each.storage_offset() * each.element_size() for each in (written, x))
    apart = begin >= other + x.numel() * x.element_size() or other >= begin + written.numel() * written.element_size()
    same = begin == other and written.stride() == x.stride()
    message = f"expected {written_name} to be {name} itself or to share no memory with it, but they overlap in part"
    check(op, written.numel() == 0 or apart or same, message)


def is_dense(x: Tensor) -> bool:
    """Returns whether x is dense, which means that torch.empty_like keeps its strides."""
    return torch.empty_like(x).stride() == x.stride()

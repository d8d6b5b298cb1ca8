"""What autocast casts, where that is not one dtype for all tensors.

A rule takes the device type and an operator's arguments by position, defaults included, and returns the arguments with
which the operator is called.
"""

import functools
from typing import Any

import torch


def linear_recurrence(device_type: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All tensors in the widest of their dtypes, as for PyTorch's operators that promote. Or as they are, if one is of
    integers: the operator refuses it.
    """
    *tensors, dim, reverse = args
    dtypes = [x.dtype for x in tensors if x is not None]
    if not all(dtype.is_floating_point for dtype in dtypes):
        return args
    dtype = functools.reduce(torch.promote_types, dtypes)
    return *(x if x is None else x.to(dtype) for x in tensors), dim, reverse


def rotary_embedding(device_type: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """q and k in the wider of their dtypes; cos and sin in that dtype or, beside a half type, in float32.

    This is type promotion, except that the results keep the dtype of q and k.
    """
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

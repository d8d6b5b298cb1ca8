"""Helpers of the modules of extension_cpp.nn."""

from typing import NoReturn

import torch
from torch import Tensor

from .registration import checks


def takes(*tensors: object) -> bool:
    """Returns whether the ops accept the dtype, layout and device of each tensor. For other tensors (complex, sparse,
    quantized) a module here does what torch.nn's does. Objects that are not tensors, such as proxies of torch.fx, count
    as accepted."""
    for x in tensors:
        if isinstance(x, Tensor) and not (
            x.dtype in checks.DTYPES
            and x.layout is (torch.jagged if x.is_nested else torch.strided)
            and (x.is_cuda or x.is_cpu or x.is_meta)  # faster than x.device.type, which makes a string
        ):
            return False
    return True


class NotScriptable:
    """Makes torch.jit.script raise an error that names alternatives. The error of TorchScript's compiler would only
    name Python code that the compiler does not support."""

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"extension_cpp.nn: torch.jit.script cannot compile {type(self).__name__}, whose forward is Python code "
            "that chooses between operators; use torch.export or torch.jit.trace, or, for a converted model, "
            "extension_cpp.nn.revert first"
        )

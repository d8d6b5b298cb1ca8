"""extension_cpp.nn as users know it: the modules, and convert and revert, which put them into a model and out again."""

from extension_cpp.convert import Converted, convert, revert
from extension_cpp.modules import (
    GELU,
    AddLayerNorm,
    AddRMSNorm,
    CrossEntropyLoss,
    Dropout,
    GeGLU,
    LayerNorm,
    LinearCrossEntropyLoss,
    LogSoftmax,
    Mish,
    ReLU,
    RMSNorm,
    ScaleBiasReLU,
    SiLU,
    Softmax,
    SwiGLU,
)

__all__ = [
    "GELU",
    "AddLayerNorm",
    "AddRMSNorm",
    "Converted",
    "CrossEntropyLoss",
    "Dropout",
    "GeGLU",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "LogSoftmax",
    "Mish",
    "RMSNorm",
    "ReLU",
    "ScaleBiasReLU",
    "SiLU",
    "Softmax",
    "SwiGLU",
    "convert",
    "revert",
]

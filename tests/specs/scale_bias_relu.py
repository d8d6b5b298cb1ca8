import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample

# Exact in every dtype. The mask changes where x * scale + bias changes sign, and a rounded scale would move that point.
SCALE = 0.75


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape), make(shape[-1:]), SCALE))
        yield Sample((make(shape), make(shape[-1:])))


def error_inputs(device):
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    op = "extension_cpp::scale_bias_relu: expected"
    yield ErrorSample((x.int(), bias.int()), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cfloat(), bias), f"{op} x to be float64, float32, bfloat16 or float16, but got complex64")
    yield ErrorSample((x, bias.double()), f"{op} bias to be float32 like x, but got float64")
    yield ErrorSample((x, bias[:2]), f"{op} bias of shape [3], the last dimension of x, but got [2]")
    yield ErrorSample((x, x), f"{op} bias of shape [3], the last dimension of x, but got [2, 3]")
    yield ErrorSample((x[0, 0], bias), f"{op} x to have at least one dimension, but got shape []")
    if device != "cpu":
        yield ErrorSample((x, bias.cpu()), f"{op} bias on {x.device} like x, but got cpu")
        yield ErrorSample((x.cpu(), bias), f"{op} bias on cpu like x, but got {x.device}")


SPEC = OpSpec(
    name="scale_bias_relu",
    function=extension_cpp.scale_bias_relu,
    reference=extension_cpp.reference.scale_bias_relu,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=lambda sample: sample.args[0].numel() // max(sample.args[1].numel(), 1),  # terms of the bias gradient
    bench=Bench(
        lambda make, shape: Sample((make(shape), make(shape[-1:]), SCALE)), forward=2, backward=3, operations=(3, 6)
    ),
    keeps_strides=True,
    launches=(1, 2),
)

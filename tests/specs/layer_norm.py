import math

import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape), shape[-1:], make(shape[-1:]), make(shape[-1:])))
        if 0 not in shape:
            yield Sample((make(shape), shape[-2:], None, None, 1e-3))
        if len(shape) > 1 and 0 < math.prod(shape) <= 64:
            yield Sample((make(shape), shape[-2:], make(shape[-2:]), make(shape[-2:]), 1e-3))


def in_steps(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """layer_norm in elementary operations: PyTorch's own has wrong second derivatives under jvp and vmap."""
    dims = tuple(range(-len(normalized_shape), 0))
    d = x - x.mean(dims, keepdim=True)
    y = d * (d.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def terms(sample):
    """grad_x is a difference of terms of up to |grad_out * weight| * rstd, and |grad_out| is at most 2."""
    x, normalized_shape, weight, _, eps = (*sample.args, 1e-5)[:5]
    if x.numel() == 0:
        return 0.0
    dims = tuple(range(-len(normalized_shape), 0))
    rstd = (x.detach().double().var(dims, correction=0) + eps).rsqrt().nan_to_num(0.0)
    return 2 * rstd.max().item() * (1.0 if weight is None else weight.detach().abs().nan_to_num(0.0, 0.0).max().item())


def reduction(sample):
    """The columns, which the sums of a row add up, or the rows, which the weight gradients add up."""
    cols = math.prod(next(arg for arg in sample.args if isinstance(arg, tuple)))
    return max(cols, sample.args[0].numel() // max(cols, 1))


def error_inputs(device):
    x, w = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    half = x.bfloat16()
    op = "extension_cpp::layer_norm: expected"
    yield ErrorSample((x.int(), (3,)), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x, ()), f"{op} normalized_shape to have at least one dimension, but got []")
    last = f"{op} normalized_shape to be the last dimensions of x, of shape [2, 3], but got"
    yield ErrorSample((x, (2,)), f"{last} [2]")
    yield ErrorSample((x, (1, 2, 3)), f"{last} [1, 2, 3]")
    yield ErrorSample((x, (3,), w[:2]), f"{op} weight of shape [3], normalized_shape, but got [2]")
    yield ErrorSample((x, (3,), x), f"{op} weight of shape [3], normalized_shape, but got [2, 3]")
    yield ErrorSample((x, (2, 3), x, w), f"{op} bias of shape [2, 3], normalized_shape, but got [3]")
    yield ErrorSample((x, (3,), w.double()), f"{op} weight to be float32 like x, but got float64")
    yield ErrorSample((x.double(), (3,), w), f"{op} weight to be float64 like x, but got float32")
    yield ErrorSample((half, (3,), w.half()), f"{op} weight to be bfloat16 like x or float32, but got float16")
    yield ErrorSample((half, (3,), w, w.bfloat16()), f"{op} bias to be float32 like weight, but got bfloat16")
    if device != "cpu":
        yield ErrorSample((x, (3,), w.cpu()), f"{op} weight on {x.device} like x, but got cpu")
        yield ErrorSample((x, (3,), w, w.cpu()), f"{op} bias on {x.device} like x, but got cpu")


SPEC = OpSpec(
    name="layer_norm",
    function=extension_cpp.layer_norm,
    reference=extension_cpp.reference.layer_norm,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=reduction,
    bench=Bench(
        lambda make, shape: Sample((make(shape), shape[-1:], make(shape[-1:]), make(shape[-1:]))),
        forward=2,
        backward=3,
        operations=(7, 14),
    ),
    keeps_strides=False,
    terms=terms,
    in_steps=in_steps,
    launches=(1, 2),
    float_weights=True,
)

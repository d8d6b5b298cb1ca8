import math

import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample
from tests.specs import layer_norm

EPS = 1e-6  # explicit: the default depends on the dtype, and the reference runs in float64


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape), shape[-1:], make(shape[-1:]), EPS))
        if 0 not in shape:
            yield Sample((make(shape), shape[-2:], None, EPS))
        if len(shape) > 1 and 0 < math.prod(shape) <= 64:
            yield Sample((make(shape), shape[-2:], make(shape[-2:]), EPS))


def terms(sample):
    """grad_x is a difference of terms of up to |grad_out * weight| * rstd, and |grad_out| is at most 2."""
    x, normalized_shape, weight, eps = sample.args
    if x.numel() == 0:
        return 0.0
    dims = tuple(range(-len(normalized_shape), 0))
    rstd = (x.detach().double().square().mean(dims) + eps).rsqrt().nan_to_num(0.0)
    return 2 * rstd.max().item() * (1.0 if weight is None else weight.detach().abs().nan_to_num(0.0, 0.0).max().item())


def error_inputs(device):
    x, w = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    half = x.bfloat16()
    op = "extension_cpp::rms_norm: expected"
    yield ErrorSample((x.bool(), (3,)), f"{op} x to be float64, float32, bfloat16 or float16, but got bool")
    yield ErrorSample((x, ()), f"{op} normalized_shape to have at least one dimension, but got []")
    last = f"{op} normalized_shape to be the last dimensions of x, of shape [2, 3], but got"
    yield ErrorSample((x, (2,)), f"{last} [2]")
    yield ErrorSample((x, (1, 2, 3)), f"{last} [1, 2, 3]")
    yield ErrorSample((x, (3,), w[:2]), f"{op} weight of shape [3], normalized_shape, but got [2]")
    yield ErrorSample((x, (3,), w.double()), f"{op} weight to be float32 like x, but got float64")
    yield ErrorSample((half, (3,), w.half()), f"{op} weight to be bfloat16 like x or float32, but got float16")
    if device != "cpu":
        yield ErrorSample((x, (3,), w.cpu()), f"{op} weight on {x.device} like x, but got cpu")


SPEC = OpSpec(
    name="rms_norm",
    function=extension_cpp.rms_norm,
    reference=extension_cpp.reference.rms_norm,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=layer_norm.reduction,
    bench=Bench(
        lambda make, shape: Sample((make(shape), shape[-1:], make(shape[-1:]), EPS)),
        forward=2,
        backward=3,
        operations=(4, 9),
    ),
    keeps_strides=False,
    terms=terms,
    launches=(1, 2),
    float_weights=True,
)

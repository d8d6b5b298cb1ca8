import math

import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample, Terms
from tests.specs.layer_norm import C, dims_of, norm_terms

EPS = 1e-6  # explicit, because the default depends on the dtype, and the reference runs in float64


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape), shape[-1:], make(shape[-1:]), EPS))
        if 0 not in shape:
            yield Sample((make(shape), shape[-2:], None, EPS))
        if len(shape) > 1 and 0 < math.prod(shape) <= 64:
            yield Sample((make(shape), shape[-2:], make(shape[-2:]), EPS))


def terms(call):
    x, normalized_shape, weight, eps = call.sample.args
    result, gx, gweight, _ = norm_terms(
        call, x, dims_of(normalized_shape), weight, None, eps, call.grads[0], center=False
    )
    return [Terms(result, C)], {0: Terms(gx, C), 2: Terms(gweight, C)}


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


def with_options(make, shape, chosen):
    x, over = make(shape), shape[-2:] if "normalized_shape" in chosen else shape[-1:]
    weight = make(over) if "weight" in chosen else None
    return Sample((x, over, weight, chosen.get("eps", EPS)))


SPEC = OpSpec(
    name="rms_norm",
    options=Options({"normalized_shape": (True,), "weight": (True,), "eps": (0.5,)}, with_options),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample((make(shape), shape[-1:], make(shape[-1:]), EPS)),
        forward=2,
        backward=3,
        operations=(4, 9),
    ),
    keeps_strides=False,
    terms=terms,
    launches=(1, 2),
    least_rank=1,
    float_weights=True,
)

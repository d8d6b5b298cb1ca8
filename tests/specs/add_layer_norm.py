"""The operator, which takes the seed as an argument. tests/test_fused_norm.py tests the function that draws it."""

from functools import partial

import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample
from tests.specs import layer_norm
from tests.specs.dropout import seed_of


def sample_inputs(make, shape):
    if len(shape) > 0:
        x, w = make(shape), shape[-1:]
        yield Sample((x, make(shape), w, make(w), make(w), 1e-5, 0.3, seed_of(x.device)))
        if 0 not in shape:
            yield Sample((make(shape), make(shape), shape[-2:], None, None, 1e-3, 0.0, None))


def terms(sample):
    """layer_norm's terms for the sum s, plus the gradient of s itself, which is at most 2; scaled by 1 / (1 - p) like
    x's gradient."""
    x, residual, normalized_shape, weight, bias, eps, p, seed = sample.args
    s = residual.detach().double() + extension_cpp.reference.dropout(x.detach().double(), p, seed=seed)
    return (2 + layer_norm.terms(Sample((s, normalized_shape, weight, bias, eps)))) / (1 - p)


def in_steps(x, residual, normalized_shape, weight, bias, eps, p, seed):
    s = residual + extension_cpp.reference.dropout(x, p, seed=seed)
    return layer_norm.in_steps(s, normalized_shape, weight, bias, eps), s


def error_inputs(device):
    x, w, seed = torch.ones(2, 3, device=device), torch.ones(3, device=device), seed_of(device)
    op = "extension_cpp::add_layer_norm: expected"

    def call(x=x, residual=x, shape=(3,), w=w, b=None, p=0.5, seed=seed):
        return (x, residual, shape, w, b, 1e-5, p, seed)

    yield ErrorSample(call(x.int()), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample(call(shape=()), f"{op} normalized_shape to have at least one dimension, but got []")
    yield ErrorSample(call(w=w[:2]), f"{op} weight of shape [3], normalized_shape, but got [2]")
    yield ErrorSample(call(b=w.double()), f"{op} bias to be float32 like x, but got float64")
    yield ErrorSample(call(residual=x[:1]), f"{op} residual of shape [2, 3] like x, but got [1, 3]")
    yield ErrorSample(call(residual=x.double()), f"{op} residual to be float32 like x, but got float64")
    yield ErrorSample(call(p=1.5), f"{op} p to be between 0 and 1, but got 1.5")
    yield ErrorSample(call(seed=None), f"{op} a seed with p > 0, but got None")
    yield ErrorSample(call(seed=seed.float()), f"{op} seed to be int64, but got float32")
    yield ErrorSample(call(seed=seed.expand(3)), f"{op} seed to have one element, but got shape [3]")
    if device != "cpu":
        yield ErrorSample(call(residual=x.cpu()), f"{op} residual on {x.device} like x, but got cpu")
        yield ErrorSample(call(seed=seed.cpu()), f"{op} seed on {x.device} like x, but got cpu")


def bench_sample(make, shape, p=0.1):
    x, w = make(shape), shape[-1:]
    return Sample((x, make(shape), w, make(w), make(w), 1e-5, p, seed_of(x.device) if p else None))


def stock(x, residual, normalized_shape, weight, bias, eps, p, seed):
    s = residual + torch.nn.functional.dropout(x, p)
    return torch.nn.functional.layer_norm(s, normalized_shape, weight, bias, eps), s


def stock_p0(x, residual, normalized_shape, weight, bias, eps, p, seed):
    s = residual + x
    return torch.nn.functional.layer_norm(s, normalized_shape, weight, bias, eps), s


SPEC = OpSpec(
    name="add_layer_norm",
    function=extension_cpp.ops._ops.add_layer_norm,
    reference=lambda *args: extension_cpp.reference.add_layer_norm(*args[:7], seed=args[7]),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=layer_norm.SPEC.reduction,
    bench=Bench(bench_sample, forward=4, backward=5, stock=stock, operations=(9, 16)),
    keeps_strides=False,
    positional=True,
    terms=terms,
    in_steps=in_steps,
    launches=(1, 2),
    float_weights=True,
    variants={"p0": Bench(partial(bench_sample, p=0.0), forward=4, backward=4, stock=stock_p0, operations=(8, 15))},
)

"""Specifies the op, which gets a seed. tests/test_fused_norm.py tests the public function, which draws the seed."""

from functools import partial

import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample
from tests.specs import rms_norm
from tests.specs.add_layer_norm import from_saved, sum_and_norm_terms
from tests.specs.dropout import seed_of

EPS = rms_norm.EPS


def sample_inputs(make, shape):
    if len(shape) > 0:
        x, w = make(shape), shape[-1:]
        yield Sample((x, make(shape), w, make(w), EPS, 0.3, seed_of(x.device)))
        if 0 not in shape:
            yield Sample((make(shape), make(shape), shape[-2:], None, EPS, 0.0, None))


def terms(call):
    normalized_shape, weight, *others = call.sample.args[2:]
    outputs, gradients = sum_and_norm_terms(call, normalized_shape, weight, None, *others, center=False)
    return outputs, dict(zip((0, 1, 3), gradients[:3], strict=True))


def error_inputs(device):
    x, w, seed = torch.ones(2, 3, device=device), torch.ones(3, device=device), seed_of(device)
    op = "extension_cpp::add_rms_norm: expected"

    def call(x=x, residual=x, shape=(3,), w=w, p=0.5, seed=seed):
        return (x, residual, shape, w, None, p, seed)

    yield ErrorSample(call(x.bool()), f"{op} x to be float64, float32, bfloat16 or float16, but got bool")
    yield ErrorSample(call(w=w[:2]), f"{op} weight of shape [3], normalized_shape, but got [2]")
    yield ErrorSample(call(residual=x[:, :2]), f"{op} residual of shape [2, 3] like x, but got [2, 2]")
    yield ErrorSample(call(residual=x.half()), f"{op} residual to be float32 like x, but got float16")
    yield ErrorSample(call(p=-1.0), f"{op} p to be between 0 and 1, but got -1")
    yield ErrorSample(call(seed=None), f"{op} a seed with p > 0, but got None")
    yield ErrorSample(call(seed=seed.int()), f"{op} seed to be int64, but got int32")
    if device != "cpu":
        yield ErrorSample(call(residual=x.cpu()), f"{op} residual on {x.device} like x, but got cpu")


def bench_sample(make, shape, p=0.1):
    x, w = make(shape), shape[-1:]
    return Sample((x, make(shape), w, make(w), EPS, p, seed_of(x.device) if p else None))


def stock(x, residual, normalized_shape, weight, eps, p, seed):
    s = residual + torch.nn.functional.dropout(x, p)
    return torch.nn.functional.rms_norm(s, normalized_shape, weight, eps), s


def stock_p0(x, residual, normalized_shape, weight, eps, p, seed):
    s = residual + x
    return torch.nn.functional.rms_norm(s, normalized_shape, weight, eps), s


def with_options(make, shape, chosen):
    x, *others = rms_norm.with_options(make, shape, chosen).args
    p = chosen.get("p", 0.0)
    return Sample((x, make(shape), *others, p, seed_of(x.device) if p else None))


SPEC = OpSpec(
    name="add_rms_norm",
    options=Options({**rms_norm.SPEC.options.values, "p": (0.3,)}, with_options),
    function=extension_cpp._ops.add_rms_norm,
    reference=lambda *args: extension_cpp.reference.add_rms_norm(*args[:6], seed=args[6]),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(bench_sample, forward=4, backward=5, stock=stock, operations=(6, 11)),
    keeps_strides=False,
    positional=True,
    terms=terms,
    from_saved=from_saved(extension_cpp.reference.rms_norm),
    launches=(1, 2),
    least_rank=1,
    float_weights=True,
    variants={"p0": Bench(partial(bench_sample, p=0.0), forward=4, backward=4, stock=stock_p0, operations=(5, 10))},
)

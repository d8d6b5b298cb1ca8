"""Specifies the op, which gets a seed. tests/test_fused_norm.py tests the public function, which draws the seed."""

import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample, Terms
from tests.specs import layer_norm
from tests.specs.add_layer_norm import kept
from tests.specs.dropout import seed_of
from tests.specs.layer_norm import C, dims_of, norm_terms


def sample_inputs(make, shape):
    if len(shape) > 0:
        x, w = make(shape), shape[-1:]
        yield Sample((x, w, make(w), make(w), 1e-5, 0.3, seed_of(x.device)))
        if 0 not in shape:
            yield Sample((x, shape[-2:], None, None, 1e-3, 0.5, seed_of(x.device, 77)))


def terms(call):
    x, normalized_shape, weight, bias, eps, p, seed = call.sample.args
    keep = kept(x, p, seed)
    given = call, x, dims_of(normalized_shape), weight, bias, eps, keep * call.grads[0]
    result, *gradients = norm_terms(*given, center=True)
    return [Terms(keep * result, C)], dict(zip((0, 2, 3), (Terms(size, C) for size in gradients), strict=True))


def in_steps(x, normalized_shape, weight, bias, eps, p, seed):
    return extension_cpp.reference.dropout(layer_norm.in_steps(x, normalized_shape, weight, bias, eps), p, seed=seed)


def error_inputs(device):
    x, w, seed = torch.ones(2, 3, device=device), torch.ones(3, device=device), seed_of(device)
    op = "extension_cpp::layer_norm_dropout: expected"

    def call(x=x, shape=(3,), w=w, p=0.5, seed=seed):
        return (x, shape, w, None, 1e-5, p, seed)

    yield ErrorSample(call(x.int()), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample(call(w=w[:2]), f"{op} weight of shape [3], normalized_shape, but got [2]")
    yield ErrorSample(call(p=2.0), f"{op} p to be between 0 and 1, but got 2")
    yield ErrorSample(call(seed=None), f"{op} a seed with p > 0, but got None")
    yield ErrorSample(call(seed=seed.int()), f"{op} seed to be int64, but got int32")
    if device != "cpu":
        yield ErrorSample(call(seed=seed.cpu()), f"{op} seed on {x.device} like x, but got cpu")


def bench_sample(make, shape):
    x, w = make(shape), shape[-1:]
    return Sample((x, w, make(w), make(w), 1e-5, 0.1, seed_of(x.device)))


def stock(x, normalized_shape, weight, bias, eps, p, seed):
    return torch.nn.functional.dropout(torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps), p)


def with_options(make, shape, chosen):
    x, *others = layer_norm.with_options(make, shape, chosen).args
    p = chosen.get("p", 0.0)
    return Sample((x, *others, p, seed_of(x.device) if p else None))


SPEC = OpSpec(
    name="layer_norm_dropout",
    options=Options({**layer_norm.SPEC.options.values, "p": (0.3,)}, with_options),
    function=extension_cpp._ops.layer_norm_dropout,
    reference=lambda *args: extension_cpp.reference.layer_norm_dropout(*args[:6], seed=args[6]),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(bench_sample, forward=2, backward=3, stock=stock, operations=(8, 15)),
    keeps_strides=False,
    positional=True,
    terms=terms,
    in_steps=in_steps,
    launches=(1, 2),
    least_rank=1,
    float_weights=True,
)

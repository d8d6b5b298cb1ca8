"""Specifies the op, which gets a seed. tests/test_fused_norm.py tests the public function, which draws the seed."""

import functools

import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample, Terms
from tests.specs import layer_norm
from tests.specs.dropout import seed_of
from tests.specs.layer_norm import C, dims_of, norm_terms


def sample_inputs(make, shape):
    if len(shape) > 0:
        x, w = make(shape), shape[-1:]
        yield Sample((x, make(shape), w, make(w), make(w), 1e-5, 0.3, seed_of(x.device)))
        if 0 not in shape:
            yield Sample((make(shape), make(shape), shape[-2:], None, None, 1e-3, 0.0, None))


def kept(x, p, seed):
    """Returns the factors of dropout: 0 or 1 / (1 - p)."""
    return extension_cpp.reference.dropout(torch.ones_like(x), p, seed=seed)


def sum_and_norm_terms(call, normalized_shape, weight, bias, eps, p, seed, center):
    """Bounds the rounding errors of s = residual + dropout(x), of a norm of s, and of the gradients of all inputs.

    The norm reads the rounded s, so that the rounding of s changes the norm's results, too.
    """
    x, residual, s, keep = *call.sample.args[:2], call.outputs[1], kept(call.sample.args[0], p, seed)
    size_of_sum = (x * keep).abs() + residual.abs()
    given = call, s, dims_of(normalized_shape), weight, bias, eps, call.grads[0], center
    result, gs, *others = norm_terms(*given)
    moves = norm_terms(*given, moved=call.rounding(s) + 3 * call.eps * size_of_sum)
    gs = gs + call.grads[1].abs()
    gradients = Terms(keep * gs, C, keep * moves[1]), Terms(gs, C, moves[1]), Terms(others[0], C, moves[2])
    return [Terms(result, C, moves[0]), Terms(size_of_sum, 3)], (*gradients, Terms(others[1], C))


def terms(call):
    outputs, gradients = sum_and_norm_terms(call, *call.sample.args[2:], center=True)
    return outputs, dict(zip((0, 1, 3, 4), gradients, strict=True))


def from_saved(norm):
    """Returns a function that computes the norm and its gradients from the rounded sum that the op returned."""

    def of(call):
        x, residual, *others, p, seed = call.sample.args
        s = call.outputs[1].clone().requires_grad_()
        with torch.enable_grad():
            y = norm(s, *others)
        tensors = [s, *(other for other in others if isinstance(other, torch.Tensor) and other.requires_grad)]
        gs, *gradients = torch.autograd.grad(y, tensors, call.grads[0])
        gs = gs + call.grads[1]
        drop = functools.partial(extension_cpp.reference.dropout, p=p, seed=seed)
        of_inputs = [g for g, leaf in ((drop(gs), x), (gs, residual)) if leaf.requires_grad]
        return (y.detach(), residual + drop(x)), [*of_inputs, *gradients]

    return of


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


def with_options(make, shape, chosen):
    x, *others = layer_norm.with_options(make, shape, chosen).args
    p = chosen.get("p", 0.0)
    return Sample((x, make(shape), *others, p, seed_of(x.device) if p else None))


SPEC = OpSpec(
    name="add_layer_norm",
    options=Options({**layer_norm.SPEC.options.values, "p": (0.3,)}, with_options),
    function=extension_cpp._ops.add_layer_norm,
    reference=lambda *args: extension_cpp.reference.add_layer_norm(*args[:7], seed=args[7]),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(bench_sample, forward=4, backward=5, stock=stock, operations=(9, 16)),
    keeps_strides=False,
    positional=True,
    terms=terms,
    from_saved=from_saved(extension_cpp.reference.layer_norm),
    in_steps=in_steps,
    launches=(1, 2),
    least_rank=1,
    float_weights=True,
    variants={
        "p0": Bench(functools.partial(bench_sample, p=0.0), forward=4, backward=4, stock=stock_p0, operations=(8, 15))
    },
)

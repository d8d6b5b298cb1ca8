import math

import torch

from tests.judge import LARGE, zero_for_nan
from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample, Terms

# How often a norm rounds: its mean and variance (trees of up to 2^21 columns), x - mean, rstd, and the products.
C = 16


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape), shape[-1:], make(shape[-1:]), make(shape[-1:])))
        if 0 not in shape:
            yield Sample((make(shape), shape[-2:], None, None, 1e-3))
        if len(shape) > 1 and 0 < math.prod(shape) <= 64:
            yield Sample((make(shape), shape[-2:], make(shape[-2:]), make(shape[-2:]), 1e-3))


def in_steps(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Computes layer_norm in elementary operations. PyTorch's own has wrong second derivatives under jvp and vmap."""
    dims = tuple(range(-len(normalized_shape), 0))
    d = x - x.mean(dims, keepdim=True)
    y = d * (d.square().mean(dims, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def norm_terms(call, x, dims, weight, bias, eps, g, center, moved=None):
    """Returns the sizes of a norm's result and of its gradients in x, weight and bias, where g is grad_out.

    With `moved`, returns their changes where each element of x changes by `moved`. y is the result without weight and
    bias. Each element of x changes the mean and rstd, and with them the whole row. Where the squares of a row
    overflow, rstd is 0, as in PyTorch.
    """
    w = x.new_ones(()) if weight is None else weight

    def average(x):
        return x.mean(dims, keepdim=True)

    def with_mean(x, sign):
        """Returns x + sign * (the mean of x) if the norm subtracts a mean, and else x."""
        return x + sign * average(x) if center else x

    d = with_mean(x, -1)
    rstd = (average(d.square()) + eps).rsqrt()
    y, gw = d * rstd, g * w
    plain = rstd * (with_mean(gw, -1) - y * average(gw * y))
    own = moved is None
    # m bounds the change of x. If `own`, it is the op's rounding, in eps, which for a subnormal x is that of
    # call.least.
    m = x.abs() + call.least if own else moved.clamp(max=LARGE)
    relative = own + zero_for_nan(rstd * average(y.abs() * m))  # the relative change of rstd
    y_moves = rstd * with_mean(m, 1) + y.abs() * relative
    result = (w * y_moves).abs()
    gx = rstd * (y_moves * average(gw * y).abs() + y.abs() * average(gw.abs() * y_moves)) + relative * plain.abs()
    gweight = zero_for_nan(g.abs() * y_moves)
    overflows = d.square().sum(dims, keepdim=True) > torch.finfo(call.computed).max
    if not own:
        overflows |= moved.amax(dims, keepdim=True) == torch.inf
    lost = torch.where(overflows, torch.inf, 0)
    if own:
        result = result if bias is None else result + bias.abs()
        gx = gx + rstd * (with_mean(gw.abs(), 1) + y.abs() * average((gw * y).abs()))
        # In a row of equal values, y is only the rounding error of the mean. This product of two errors then matters.
        gx = gx + call.eps * rstd * y_moves * average(gw.abs() * y_moves)
        gweight = gweight + zero_for_nan((g * y).abs())
    sums = (each.sum_to_size(w.shape) for each in (gweight + lost, g.abs() if own else torch.zeros_like(g)))
    return result + lost, gx + lost, *sums


def dims_of(normalized_shape):
    return tuple(range(-len(normalized_shape), 0))


def terms(call):
    x, normalized_shape, weight, bias, eps = (*call.sample.args, *(None, None, 1e-5)[len(call.sample.args) - 2 :])
    result, *gradients = norm_terms(call, x, dims_of(normalized_shape), weight, bias, eps, call.grads[0], center=True)
    return [Terms(result, C)], dict(zip((0, 2, 3), (Terms(size, C) for size in gradients), strict=True))


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


def with_options(make, shape, chosen):
    x, over = make(shape), shape[-2:] if "normalized_shape" in chosen else shape[-1:]
    weight = make(over) if "weight" in chosen else None
    return Sample((x, over, weight, make(over) if "bias" in chosen else None, chosen.get("eps", 1e-5)))


SPEC = OpSpec(
    name="layer_norm",
    options=Options({"normalized_shape": (True,), "weight": (True,), "bias": (True,), "eps": (0.5,)}, with_options),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
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
    least_rank=1,
    float_weights=True,
)

import math

import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample

LONGEST = 1100  # the reference here is a loop


def step_by_step(x, dim):
    """torch.logcumsumexp without its gradient, which takes logarithms of gradients and loses their digits."""
    if x.dim() == 0:
        return x * 1
    results = []
    for step in x.unbind(dim):
        results.append(torch.logaddexp(results[-1], step) if results else step)
    return torch.stack(results, dim) if results else x * 1


def sample_inputs(make, shape):
    if len(shape) == 0 or shape[-1] <= LONGEST:
        yield Sample((make(shape), -1))
    if len(shape) > 1 and shape[0] <= LONGEST:
        yield Sample((make(shape), 0))
    if len(shape) > 2:
        yield Sample((make(shape), -2))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::logcumsumexp: expected"
    yield ErrorSample((x.int(), 0), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x, 2), f"{op} dim in [-2, 1], but got 2")
    yield ErrorSample((x, -3), f"{op} dim in [-2, 1], but got -3")
    yield ErrorSample((x[0, 0], 1), f"{op} dim in [-1, 0], but got 1")


def reduction(sample):
    x, dim = sample.args
    return x.shape[dim] if x.dim() else 1


def terms(sample):
    """Backward reads the rounded result y, as torch does, so that exp(x_k - y_j) is wrong by a factor of exp(eps * y),
    and for numbers far from 0 by as much as the number of terms. A gradient is a sum of them over j, for some x_k a
    large one. Divided by what the battery multiplies with."""
    x, eps = sample.args[0].detach().double(), torch.finfo(sample.args[0].dtype).eps
    if x.numel() == 0:
        return 0.0
    size = torch.where(x.abs() < torch.inf, x.abs(), 0).max().item()
    dim, most = sample.args[1], max(reduction(sample), 1)
    later = -torch.logcumsumexp(x, dim).flip(dim)
    sums = torch.exp(x + torch.logcumsumexp(later, dim).flip(dim)) if x.dim() else torch.ones(())
    off = math.expm1(min(size * eps, 100.0)) * sums.nan_to_num(1.0).max().item()
    return 2 * min(off, most) / (4 * eps * most**0.5)


SPEC = OpSpec(
    name="logcumsumexp",
    function=extension_cpp.logcumsumexp,
    reference=step_by_step,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=reduction,
    bench=Bench(
        lambda make, shape: Sample((make(shape), -1)),
        forward=2,
        backward=4,
        stock=torch.logcumsumexp,
        operations=(4, 5),
    ),
    keeps_strides=True,
    launches=(1, 1),
    second_order=False,
    terms=terms,
    variants={
        "columns": Bench(lambda make, shape: Sample((make(shape), 0)), forward=2, backward=4, stock=torch.logcumsumexp)
    },
)

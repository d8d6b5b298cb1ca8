import torch

from tests import loops
from tests.judge import LARGE
from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms

LONGEST = 1100  # elements along dim, because the reference is a slow loop


def step_by_step(x, dim):
    """Computes torch.logcumsumexp in a loop. torch's own gradient takes logarithms of gradients and loses digits."""
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


def weighted(x, y, g, dim):
    """Returns the gradient sum_{j >= k} g_j exp(x_k - y_j) of x_k, computed from y as the op returned it."""
    x, y, totals = (each.movedim(dim, 0).detach().contiguous() for each in (x, y, g.clone()))
    decays = torch.exp(y[:-1] - y[1:]).unbind()
    later, *earlier = totals.unbind()[::-1]
    for total, decay in zip(earlier, decays[::-1], strict=True):
        later = total.addcmul_(decay, later)
    return (torch.exp(x - y) * totals).movedim(0, dim)


def terms(call):
    """Bounds the rounding errors. A result is the largest element so far plus the logarithm of a sum. exp multiplies
    the rounding error of its argument, and a weight in the gradient is a product of exponentials."""
    (x, dim), (y,), (g,) = call.sample.args, call.outputs, call.grads
    c = call.c_of_exp
    if x.numel() == 0 or x.dim() == 0:
        return [Terms(x.abs(), c)], {0: Terms(g.abs(), c)}
    x, y = (each.clamp(-LARGE, LARGE) for each in (x, y))  # inf - inf would be NaN
    steps = torch.arange(1, x.shape[dim] + 1, device=x.device, dtype=x.dtype)
    size = y.abs() + x.cummax(dim).values.abs() + (2 + steps.log()).view([-1] + [1] * (x.dim() - 1)).movedim(0, dim)
    y_moves = call.rounding(y) + c * call.eps * size
    gradient = weighted(x, y, g.abs() * (1 + y.abs()), dim) + x.abs() * weighted(x, y, g.abs(), dim)
    moves = weighted(x, y, g.abs() * torch.expm1(y_moves.clamp(max=300)), dim)
    later = (g.abs().movedim(dim, 0).flip(0).cumsum(0)).flip(0).movedim(0, dim)
    return [Terms(size, c)], {0: Terms(gradient, c, moves, rounded=call.least * later)}  # if exponentials are 0


def from_saved(call):
    (x, dim), (y,), (g,) = call.sample.args, call.outputs, call.grads
    exact = loops.logcumsumexp(x, dim).detach()
    return (exact,), [g if x.numel() == 0 or x.dim() == 0 else weighted(x, y, g, dim)]


SPEC = OpSpec(
    name="logcumsumexp",
    reference=step_by_step,
    by_hand=loops.logcumsumexp,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
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
    from_saved=from_saved,
    variants={
        "columns": Bench(lambda make, shape: Sample((make(shape), 0)), forward=2, backward=4, stock=torch.logcumsumexp)
    },
)

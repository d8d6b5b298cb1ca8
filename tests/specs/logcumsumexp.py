import torch

import extension_cpp
from tests import loops
from tests.opspec import Bench, ErrorSample, OpSpec, Sample

LONGEST = 1100  # the reference is a slow loop


def step_by_step(x, dim):
    """torch.logcumsumexp as a loop. torch's own gradient takes logarithms of gradients and loses their digits."""
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


def gradient(x, y, dim):
    """2 sum_{j >= k} exp(x_k - y_j): the gradient for the largest grad_out, 2, computed from this y."""
    y = y.movedim(dim, 0)
    totals = torch.full_like(y, 2.0)
    decays = torch.exp(y[:-1] - y[1:]).unbind()
    later, *earlier = totals.unbind()[::-1]
    for total, decay in zip(earlier, decays[::-1], strict=True):
        later = total.addcmul_(decay, later)
    return torch.exp(x.movedim(dim, 0) - y) * totals


def gradient_terms(sample):
    """Backward, like torch's, reads the rounded result y. The change of the gradient by that rounding, doubled, and
    divided by the factor with which the battery multiplies terms. If y's rounding error exceeds 1, the change may be as
    large as the number of terms."""
    x, dim = sample.args
    if x.numel() == 0 or x.dim() == 0:
        return 0.0
    # In float64 the reference itself rounds y. So the change is computed in float32, and counts in units of eps.
    dtype = torch.float32 if x.dtype is torch.float64 else x.dtype
    exact = x.detach().double()
    if exact.abs().nan_to_num(0.0, 0.0).max().item() * torch.finfo(dtype).eps > 1:
        most = 2.0 * reduction(sample)
    else:
        y = torch.logcumsumexp(exact, dim)
        change = gradient(exact, y.to(dtype).double(), dim) - gradient(exact, y, dim)
        most = change.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return 2 * most / (4 * torch.finfo(dtype).eps * reduction(sample) ** 0.5)


SPEC = OpSpec(
    name="logcumsumexp",
    function=extension_cpp.logcumsumexp,
    reference=step_by_step,
    by_hand=loops.logcumsumexp,
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
    gradient_terms=gradient_terms,
    variants={
        "columns": Bench(lambda make, shape: Sample((make(shape), 0)), forward=2, backward=4, stock=torch.logcumsumexp)
    },
)

import torch

import extension_cpp
from tests import loops
from tests.opspec import Bench, ErrorSample, OpSpec, Sample

LONGEST = 1100  # the reference is a slow loop; tests/test_scan.py has longer lines


def factors(make, shape):
    """A tensor of make with values between 0 and 1. The sigmoid is applied to its whole memory, so that any layout
    works."""
    a = make(shape)
    memory = torch.empty(0, dtype=a.dtype, device=a.device).set_(a.untyped_storage())
    memory.sigmoid_()
    return a


def sample_inputs(make, shape):
    if len(shape) == 0:
        yield Sample((factors(make, shape), make(shape), make(shape)), {"dim": -1})
        return
    if shape[-1] <= LONGEST:
        yield Sample((factors(make, shape), make(shape)), {"dim": -1})
    if len(shape) == 1 or shape[-2] > LONGEST:
        return
    without = (*shape[:-2], shape[-1])
    yield Sample((factors(make, shape), make(shape), make(without)), {"reverse": True})
    yield Sample((factors(make, shape[-1:]), make(shape), make(without)))
    if shape[-1] <= LONGEST:
        yield Sample((factors(make, (*shape[:-1], 1)), make(shape), make(shape[:-1])), {"dim": -1, "reverse": True})


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::linear_recurrence: expected"
    dtypes = "b to be float64, float32, bfloat16 or float16"
    yield ErrorSample((x.int(), x.int()), f"{op} {dtypes}, but got int32")
    yield ErrorSample((x, x.cfloat()), f"{op} {dtypes}, but got complex64")
    yield ErrorSample((x.double(), x), f"{op} a to be float32 like b, but got float64")
    yield ErrorSample((x, x, x[0].double()), f"{op} h0 to be float32 like b, but got float64")
    shape = f"{op} a of a shape that broadcasts to [2, 3], that of b, but got"
    yield ErrorSample((x[:, :2], x), f"{shape} [2, 2]")
    yield ErrorSample((x[None], x), f"{shape} [1, 2, 3]")
    yield ErrorSample((x, x[0]), f"{op} a of a shape that broadcasts to [3], that of b, but got [2, 3]")
    h0 = f"{op} h0 of shape [3], that of b without dim, but got"
    yield ErrorSample((x, x, x[0, :2]), f"{h0} [2]")
    yield ErrorSample((x, x, x), f"{h0} [2, 3]")
    yield ErrorSample((x, x), f"{op} dim in [-2, 1], but got 2", {"dim": 2})
    yield ErrorSample((x[0], x[0]), f"{op} dim in [-1, 0], but got -2")
    if device != "cpu":
        yield ErrorSample((x.cpu(), x), f"{op} a on {x.device} like b, but got cpu")
        yield ErrorSample((x, x, x[0].cpu()), f"{op} h0 on {x.device} like b, but got cpu")


def reduction(sample):
    a, b = sample.args[:2]
    return max(b.numel() // max(a.numel(), 1), 1)


SPEC = OpSpec(
    name="linear_recurrence",
    function=extension_cpp.linear_recurrence,
    reference=extension_cpp.reference.linear_recurrence,
    by_hand=loops.linear_recurrence,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=reduction,
    bench=Bench(
        lambda make, shape: Sample((factors(make, shape), make(shape)), {"dim": -1}),
        forward=3,
        backward=5,
        operations=(2, 3),
    ),
    keeps_strides=False,  # the result has the strides of b, the second input
    launches=(1, 1),
    # Each step rounds, and a tree rounds partial results. Below the smallest normal number the error is absolute.
    terms=lambda sample: 4 * torch.finfo(sample.args[0].dtype).smallest_normal,
    infinities_may_be_nan=True,
    variants={
        "columns": Bench(
            lambda make, shape: Sample((factors(make, shape), make(shape)), {"dim": 0}), forward=3, backward=5
        )
    },
)

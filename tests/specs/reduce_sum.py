import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample, Terms


def sample_inputs(make, shape):
    yield Sample((make(shape),))
    yield Sample((make(shape), ()), {"keepdim": True})
    if len(shape) == 0:
        yield Sample((make(shape), -1))
        return
    yield Sample((make(shape), -1))
    yield Sample((make(shape), 0), {"keepdim": True})
    if len(shape) > 2:
        yield Sample((make(shape), 1))
        yield Sample((make(shape), (0, -1)))
        yield Sample((make(shape), (1, 0)), {"keepdim": True})
    if len(shape) > 3:
        yield Sample((make(shape), (-3, -1)))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::reduce_sum: expected"
    yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cfloat(), 0), f"{op} x to be float64, float32, bfloat16 or float16, but got complex64")
    yield ErrorSample((x, 2), f"{op} dim in [-2, 1], but got 2")
    yield ErrorSample((x, (0, -3)), f"{op} dim in [-2, 1], but got -3")
    yield ErrorSample((x[0, 0], 1), f"{op} dim in [-1, 0], but got 1")
    for dim in (True, (0, False), 1.0, "1"):
        yield ErrorSample((x, dim), f"{op} dim to be an int, a sequence of ints or None, but got {dim!r}")
    yield ErrorSample((x, (1, 1)), f"{op} each dim once, but got 1 twice")
    yield ErrorSample((x, (1, 0, -1)), f"{op} each dim once, but got 1 twice")


def terms(call):
    """Bounds the rounding errors of a sum in lanes and a tree over the lanes. The gradient is a copy of grad_out."""
    (x, *_), (g,) = call.sample.args, call.grads
    size = extension_cpp.reference.reduce_sum(x.abs(), *call.sample.args[1:], **call.sample.kwargs)
    return [Terms(size, 8)], {0: Terms(g.abs().sum() * 0, 0)}


def with_options(make, shape, chosen):
    options = dict(chosen)
    dim = options.pop("dim", None)
    return Sample((make(shape), dim), options)


SPEC = OpSpec(
    name="reduce_sum",
    options=Options({"dim": (0, -1, (1, 0)), "keepdim": (True,)}, with_options),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: Sample((make(shape), -1)), forward=1, backward=0, operations=(1, 0)),
    keeps_strides=False,
    terms=terms,
    # One kernel for a sum over the last dimension, and two if there are too few sums to fill the GPU (reduce_sum.cpp).
    launches=(1, 0),
)

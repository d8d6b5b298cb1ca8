import torch

import extension_cpp
from tests.judge import rounded_sums
from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample


def sample_inputs(make, shape):
    yield Sample((make(shape), -1))
    yield Sample((make(shape), -1), {"exclusive": True})
    if len(shape) > 1:
        yield Sample((make(shape), 0))
        yield Sample((make(shape), 0), {"exclusive": True, "reverse": True})
    else:
        yield Sample((make(shape), 0), {"reverse": True})
    if len(shape) > 2:
        yield Sample((make(shape), -2), {"reverse": True})


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::cumsum: expected"
    dtypes = "x to be float64, float32, bfloat16 or float16"
    yield ErrorSample((x.int(), 0), f"{op} {dtypes}, but got int32; torch.cumsum takes others")
    yield ErrorSample((x.cfloat(), 0), f"{op} {dtypes}, but got complex64; torch.cumsum takes others")
    yield ErrorSample((x, 2), f"{op} dim in [-2, 1], but got 2")
    yield ErrorSample((x, -3), f"{op} dim in [-2, 1], but got -3")
    yield ErrorSample((x[0, 0], 1), f"{op} dim in [-1, 0], but got 1")


def with_options(make, shape, chosen):
    options = {"dim": -1, **chosen}
    return Sample((make(shape), options.pop("dim")), options)


SPEC = OpSpec(
    name="cumsum",
    options=Options({"dim": (0,), "exclusive": (True,), "reverse": (True,)}, with_options),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: Sample((make(shape), -1)), forward=2, backward=2, operations=(1, 1)),
    keeps_strides=True,
    terms=rounded_sums(extension_cpp.reference.cumsum, 8),
    launches=(1, 1),
    variants={"columns": Bench(lambda make, shape: Sample((make(shape), 0)), forward=2, backward=2)},
)

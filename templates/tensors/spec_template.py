import torch

import extension_cpp
from tests.judge import rounded_sums
from tests.opspec import Bench, ErrorSample, OpSpec, Sample


def sample_inputs(make, shape):
    shapes = (shape, shape[1:])  # two tensors of different sizes
    yield Sample(([make(each) for each in shapes], [make(each) for each in shapes]))


def error_inputs(device):
    x, y = torch.ones(2, 3, device=device), torch.ones(4, device=device)
    op = "extension_cpp::kernel_template: expected"
    dtypes = "float64, float32, bfloat16 or float16"
    yield ErrorSample(([x.int(), y], [x, y]), f"{op} xs[0] to be {dtypes}, but got int32")
    yield ErrorSample(([x, y.double()], [x, y]), f"{op} xs[1] to be float32 like xs[0], but got float64")
    yield ErrorSample(([x, y], [x, y.half()]), f"{op} ys[1] to be float32 like xs[0], but got float16")
    yield ErrorSample(([x, y], [x, y[:1]]), f"{op} ys[1] of shape [4] like xs[1], but got [1]")
    yield ErrorSample(([x, y], [x]), f"{op} ys to have as many tensors as xs, 2, but got 1")
    yield ErrorSample(([], [x]), f"{op} ys to have as many tensors as xs, 0, but got 1")
    if device != "cpu":
        yield ErrorSample(([x, y.cpu()], [x, y]), f"{op} xs[1] on {x.device} like xs[0], but got cpu")


def bench(make, shape):
    return Sample(([make(shape), make(shape)], [make(shape), make(shape)]))


SPEC = OpSpec(
    name="kernel_template",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(bench, forward=6, backward=10, flat=True),
    keeps_strides=True,
    launches=(1, 1),
    lists=("xs", "ys"),
    terms=rounded_sums(extension_cpp.reference.kernel_template, 1),  # each is a product
)

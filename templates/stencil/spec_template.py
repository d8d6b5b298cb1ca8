import torch

import extension_cpp
from tests.judge import of_absolute_values
from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms


def sample_inputs(make, shape):
    if len(shape) >= 2:
        channels = shape[-2]
        yield Sample((make(shape), make((channels, 4)), make((channels,))))
        yield Sample((make(shape), make((channels, 10))))


def error_inputs(device):
    x, weight, bias = torch.ones(2, 3, 5, device=device), torch.ones(3, 4, device=device), torch.ones(3, device=device)
    op = "extension_cpp::kernel_template: expected"
    yield ErrorSample((x.int(), weight), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x[0, 0], weight), f"{op} x to have at least 2 dimensions, but got shape [5]")
    yield ErrorSample((x, weight.double()), f"{op} weight to be float32 like x, but got float64")
    yield ErrorSample((x, weight[:2]), f"{op} weight of shape [3, taps], but got [2, 4]")
    yield ErrorSample((x, weight, bias.double()), f"{op} bias to be float32 like x, but got float64")
    yield ErrorSample((x, weight, bias[:2]), f"{op} bias of shape [3], dimension 1 of x, but got [2]")
    if device != "cpu":
        yield ErrorSample((x, weight.cpu()), f"{op} weight on {x.device} like x, but got cpu")
        yield ErrorSample((x, weight, bias.cpu()), f"{op} bias on {x.device} like x, but got cpu")


def terms(call):
    """Bounds the rounding errors. A result adds up to 11 products one by one. A gradient of weight adds the steps of a
    row in 32 sums or more, whose rounding errors are random. Each product in this gradient may be denormal."""
    x, weight = call.sample.args[:2]
    sizes = of_absolute_values(extension_cpp.reference.kernel_template, call)
    sizes.gradients[1] += x.numel() / max(len(weight), 1) * call.least
    return [Terms(sizes.outputs[0], 6)], {place: Terms(size, 8) for place, size in enumerate(sizes.gradients)}


SPEC = OpSpec(
    name="kernel_template",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: next(sample_inputs(make, shape)), forward=2, backward=3),
    keeps_strides=False,
    launches=(1, 2),
    least_rank=2,
    second_order=False,
    terms=terms,
)

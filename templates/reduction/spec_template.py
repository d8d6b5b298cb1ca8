import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape), make(shape[-1:])))
        yield Sample((make(shape), make(shape[-1:]), 0.5))


def terms(sample):
    """grad_x is a difference of terms of up to |grad_out * weight| * rstd, and |grad_out| is at most 2."""
    x, weight, *eps = sample.args
    if x.numel() == 0:
        return 0.0
    rstd = (x.detach().double().square().mean(-1) + (eps[0] if eps else 1e-6)).rsqrt().nan_to_num(0.0)
    return 2 * rstd.max().item() * weight.detach().abs().nan_to_num(0.0, 0.0).max().item()


def reduction(sample):
    """The number of terms in a sum: the columns for the result, the rows for the weight's gradient."""
    x, weight = sample.args[:2]
    return max(weight.numel(), x.numel() // max(weight.numel(), 1))


def error_inputs(device):
    x, weight = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    op = "extension_cpp::kernel_template: expected"
    yield ErrorSample((x.int(), weight), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x, weight.double()), f"{op} weight to be float32 like x, but got float64")
    yield ErrorSample((x, weight[:2]), f"{op} weight of shape [3], the last dimension of x, but got [2]")
    yield ErrorSample((x, x), f"{op} weight of shape [3], the last dimension of x, but got [2, 3]")
    yield ErrorSample((x[0, 0], weight), f"{op} x to have at least one dimension, but got shape []")
    if device != "cpu":
        yield ErrorSample((x, weight.cpu()), f"{op} weight on {x.device} like x, but got cpu")
        yield ErrorSample((x.cpu(), weight), f"{op} weight on cpu like x, but got {x.device}")


SPEC = OpSpec(
    name="kernel_template",
    function=extension_cpp.kernel_template,
    reference=extension_cpp.reference.kernel_template,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=reduction,
    bench=Bench(lambda make, shape: Sample((make(shape), make(shape[-1:]))), forward=2, backward=3),
    keeps_strides=False,
    launches=(1, 2),
    second_order=False,
    terms=terms,
)

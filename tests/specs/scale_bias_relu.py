import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms

# This scale is exact in every dtype. A rounded scale would move the point where x * scale + bias changes sign.
SCALE = 0.75


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape), make(shape[-1:]), SCALE))
        yield Sample((make(shape), make(shape[-1:])))


def error_inputs(device):
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    op = "extension_cpp::scale_bias_relu: expected"
    yield ErrorSample((x.int(), bias.int()), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cfloat(), bias), f"{op} x to be float64, float32, bfloat16 or float16, but got complex64")
    yield ErrorSample((x, bias.double()), f"{op} bias to be float32 like x, but got float64")
    yield ErrorSample((x, bias[:2]), f"{op} bias of shape [3], the last dimension of x, but got [2]")
    yield ErrorSample((x, x), f"{op} bias of shape [3], the last dimension of x, but got [2, 3]")
    yield ErrorSample((x[0, 0], bias), f"{op} x to have at least one dimension, but got shape []")
    if device != "cpu":
        yield ErrorSample((x, bias.cpu()), f"{op} bias on {x.device} like x, but got cpu")
        yield ErrorSample((x.cpu(), bias), f"{op} bias on cpu like x, but got {x.device}")


def terms(call):
    """Bounds the rounding errors of a product and a sum. If these cancel up to rounding, relu's mask may be 0 or 1."""
    x, bias, scale = (*call.sample.args, 1.0)[:3]
    (g,) = call.grads
    size = (x * scale).abs() + bias.abs()
    is_either = (x * scale + bias).abs() <= 2 * call.eps * (size + call.least)
    of_bias = Terms(sum_rows(g.abs()), 8, rounded=sum_rows(torch.where(is_either, g.abs(), 0)))
    return [Terms(size, 2)], {
        0: Terms((g * scale).abs(), 2, rounded=torch.where(is_either, (g * scale).abs(), 0)),
        1: of_bias,
    }


def sum_rows(x):
    """Sums x over all dimensions but the last."""
    return x.reshape(-1, x.shape[-1]).sum(0) if x.numel() else x.new_zeros(x.shape[-1:])


SPEC = OpSpec(
    name="scale_bias_relu",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample((make(shape), make(shape[-1:]), SCALE)), forward=2, backward=3, operations=(3, 6)
    ),
    keeps_strides=True,
    terms=terms,
    launches=(1, 2),
    least_rank=1,
)

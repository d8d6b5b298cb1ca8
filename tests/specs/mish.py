import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms


def sample_inputs(make, shape):
    yield Sample((make(shape),))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::mish: expected"
    yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cdouble(),), f"{op} x to be float64, float32, bfloat16 or float16, but got complex128")


def terms(call):
    """Bounds the rounding errors of y = x n / (n + 2) with n = e^x (e^x + 2). exp multiplies the rounding error of its
    argument x. This error matters less where n is large beside 2."""
    (x,), (y,), (g,) = call.sample.args, call.outputs, call.grads
    tanh, sigmoid = torch.tanh(torch.nn.functional.softplus(x)), torch.sigmoid(x)
    steep = 1 + torch.where(sigmoid < 1, x.abs() * torch.sigmoid(-x), 0)  # where sigmoid is 1, n is large: y is x
    derivative = tanh + (x * sigmoid * (1 - tanh * tanh)).abs()
    rounded = call.least * (x.abs() + 1)  # for exponentials that underflow to 0
    gradient = Terms((g * derivative).abs() * steep, 16, rounded=g.abs() * rounded)
    return [Terms(y.abs() * steep, 8, rounded=rounded)], {0: gradient}


SPEC = OpSpec(
    name="mish",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: Sample((make(shape),)), forward=2, backward=3, flat=True, operations=(6, 13)),
    keeps_strides=True,
    terms=terms,
    launches=(1, 1),
)

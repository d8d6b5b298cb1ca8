import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms


def sample_inputs(make, shape):
    yield Sample((make(shape),))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::silu: expected"
    yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cdouble(),), f"{op} x to be float64, float32, bfloat16 or float16, but got complex128")


def steepness(x):
    """Returns the factor by which the sigmoid's rounding errors grow, because exp multiplies the error of x."""
    return 1 + x.abs() * torch.sigmoid(-x)


def silu_terms(x):
    """Returns the sizes that bound the rounding errors of silu(x) and of its derivative s(x) + x s(x) s(-x)."""
    s = torch.sigmoid(x)
    return (x * s).abs() * steepness(x), (s + (x * s).abs() * torch.sigmoid(-x)) * steepness(x)


def terms(call):
    (x,), (g,) = call.sample.args, call.grads
    value, derivative = silu_terms(x)
    rounded = call.least * (x.abs() + 1)  # for exponentials that underflow to 0
    return [Terms(value, 8, rounded=rounded)], {0: Terms(g.abs() * derivative, 8, rounded=g.abs() * rounded)}


SPEC = OpSpec(
    name="silu",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample((make(shape),)),
        forward=2,
        backward=3,
        flat=True,
        stock=torch.nn.functional.silu,
        operations=(4, 8),
    ),
    keeps_strides=True,
    launches=(1, 1),
    terms=terms,
)

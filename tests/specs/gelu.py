import math

import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms


def sample_inputs(make, shape):
    yield Sample((make(shape),))
    yield Sample((make(shape), "tanh"))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::gelu: expected"
    yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cfloat(), "tanh"), f"{op} x to be float64, float32, bfloat16 or float16, but got complex64")
    yield ErrorSample((x, "erf"), f"{op} approximate to be 'none' or 'tanh', but got 'erf'")


def gelu_terms(x, approximate="none"):
    """Returns the sizes that bound the rounding errors of gelu(x), of its derivative and of its second derivative.

    Each has a factor exp(-x^2 / 2), or with "tanh" the exponential of a polynomial in x. exp multiplies the rounding
    error of its argument.
    """
    if approximate == "none":
        density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        phi, tail = (torch.special.erfc(-z / math.sqrt(2)) / 2 for z in (x, -x.abs()))
        value = (x * phi).abs() + (x * x * x * tail).abs()
        return value, phi + (x * x) * tail + (x * density).abs() * (1 + x * x), density * (2 + x * x) * (1 + x * x)
    k = math.sqrt(2 / math.pi)
    u, du = 2 * k * (x + 0.044715 * x**3), 2 * k * (1 + 3 * 0.044715 * x * x)
    phi, tail = torch.sigmoid(u), torch.sigmoid(-u.abs())
    bell = tail * (1 - tail)
    value = (x * phi).abs() + (x * u * tail).abs()
    second = 2 * du * bell + (x * du * du * bell).abs() + (x * 2 * k * 6 * 0.044715 * x * bell).abs()
    return value, phi + u.abs() * tail + (x * du * bell).abs() * (1 + u.abs()), second * (1 + u.abs())


def c_of_derivative(call):
    """Returns the error of the derivative's roundings, in eps. A term contains 1 - tanh^2, which from |x| = 5 on
    (float64: 7) is below eps, with an error of eps / 2. x du/dx, up to 30 (float64: 80), multiplies this error."""
    return 64 if call.dtype is torch.float64 else 16


def terms(call):
    (x, *approximate), (g,) = call.sample.args, call.grads
    value, derivative, _ = gelu_terms(x, *approximate)
    rounded = call.least * (1 + x * x)  # for exponentials that underflow to 0
    return [Terms(value, 8, rounded=rounded)], {
        0: Terms(g.abs() * derivative, c_of_derivative(call), rounded=g.abs() * rounded)
    }


SPEC = OpSpec(
    name="gelu",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample((make(shape),)),
        forward=2,
        backward=3,
        flat=True,
        stock=torch.nn.functional.gelu,
        operations=(17, 21),
    ),
    variants={
        "tanh": Bench(
            lambda make, shape: Sample((make(shape), "tanh")),
            forward=2,
            backward=3,
            flat=True,
            stock=lambda x, approximate: torch.nn.functional.gelu(x, approximate=approximate),
            operations=(8, 15),
        )
    },
    keeps_strides=True,
    launches=(1, 1),
    terms=terms,
)

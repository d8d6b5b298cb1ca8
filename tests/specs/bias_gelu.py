import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms
from tests.specs.gelu import c_of_derivative, gelu_terms
from tests.specs.scale_bias_relu import sum_rows


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape), make(shape[-1:])))
        yield Sample((make(shape), make(shape[-1:]), "tanh"))


def error_inputs(device):
    x, bias = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    op = "extension_cpp::bias_gelu: expected"
    yield ErrorSample((x.int(), bias.int()), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cfloat(), bias), f"{op} x to be float64, float32, bfloat16 or float16, but got complex64")
    yield ErrorSample((x, bias.double()), f"{op} bias to be float32 like x, but got float64")
    yield ErrorSample((x, bias[:2]), f"{op} bias of shape [3], the last dimension of x, but got [2]")
    yield ErrorSample((x, x), f"{op} bias of shape [3], the last dimension of x, but got [2, 3]")
    yield ErrorSample((x[0, 0], bias), f"{op} x to have at least one dimension, but got shape []")
    yield ErrorSample((x, bias, "erf"), f"{op} approximate to be 'none' or 'tanh', but got 'erf'")
    if device != "cpu":
        yield ErrorSample((x, bias.cpu()), f"{op} bias on {x.device} like x, but got cpu")
        yield ErrorSample((x.cpu(), bias), f"{op} bias on cpu like x, but got {x.device}")


def terms(call):
    """Bounds the rounding errors of gelu at x + bias, and the change of the result because this sum is rounded."""
    (x, bias, *approximate), (g,) = call.sample.args, call.grads
    value, derivative, second = gelu_terms(x + bias, *approximate)
    moved = x.abs() + bias.abs()
    gradient = g.abs() * (derivative + second * moved)
    rounded = call.least * (1 + moved * moved)  # for exponentials that underflow to 0
    c = c_of_derivative(call)
    gradients = {0: Terms(gradient, c, rounded=g.abs() * rounded)}
    gradients |= {1: Terms(sum_rows(gradient), c, rounded=sum_rows(g.abs() * rounded))}
    return [Terms(value + derivative * moved, 8, rounded=rounded)], gradients


def stock(x, bias, approximate="none"):
    return torch.nn.functional.gelu(x + bias, approximate=approximate)


SPEC = OpSpec(
    name="bias_gelu",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample((make(shape), make(shape[-1:]))),
        forward=2,
        backward=3,
        stock=stock,
        operations=(18, 23),
    ),
    variants={
        "tanh": Bench(
            lambda make, shape: Sample((make(shape), make(shape[-1:]), "tanh")),
            forward=2,
            backward=3,
            stock=stock,
            operations=(9, 17),
        )
    },
    keeps_strides=True,
    launches=(1, 2),
    least_rank=1,
    terms=terms,
)

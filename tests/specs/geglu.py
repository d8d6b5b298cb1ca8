import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms
from tests.specs.gelu import c_of_derivative, gelu_terms


def sample_inputs(make, shape):
    yield Sample((make(shape), make(shape)))
    yield Sample((make(shape), make(shape), "tanh"))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::geglu: expected"
    yield ErrorSample((x.int(), x.int()), f"{op} gate to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cfloat(), x), f"{op} gate to be float64, float32, bfloat16 or float16, but got complex64")
    yield ErrorSample((x, x.double()), f"{op} up to be float32 like gate, but got float64")
    yield ErrorSample((x, x[:, :2]), f"{op} up of shape [2, 3] like gate, but got [2, 2]")
    yield ErrorSample((x, x[0]), f"{op} up of shape [2, 3] like gate, but got [3]")
    yield ErrorSample((x, x, "erf"), f"{op} approximate to be 'none' or 'tanh', but got 'erf'")
    if device != "cpu":
        yield ErrorSample((x, x.cpu()), f"{op} up on {x.device} like gate, but got cpu")
        yield ErrorSample((x.cpu(), x), f"{op} up on cpu like gate, but got {x.device}")


def halves(make, shape, *approximate):
    """Makes gate and up as the halves of one packed tensor, as in a model."""
    packed = make((*shape[:-1], 2 * shape[-1])).detach()
    gate, up = (half.requires_grad_() for half in packed.chunk(2, -1))
    return Sample((gate, up, *approximate))


def terms(call):
    (gate, up, *approximate), (g,) = call.sample.args, call.grads
    value, derivative, _ = gelu_terms(gate, *approximate)
    rounded = call.least * (1 + gate * gate)  # for exponentials that underflow to 0
    gradients = {0: Terms((g * up).abs() * derivative, c_of_derivative(call), rounded=(g * up).abs() * rounded)}
    gradients |= {1: Terms(g.abs() * value, 8, rounded=g.abs() * rounded)}
    return [Terms(up.abs() * value, 8, rounded=up.abs() * rounded)], gradients


def stock(gate, up, approximate="none"):
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


SPEC = OpSpec(
    name="geglu",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample((make(shape), make(shape))),
        forward=3,
        backward=5,
        flat=True,
        stock=stock,
        operations=(18, 25),
    ),
    variants={
        "packed": Bench(halves, forward=3, backward=5, stock=stock, operations=(18, 25)),
        "tanh": Bench(
            lambda make, shape: Sample((make(shape), make(shape), "tanh")),
            forward=3,
            backward=5,
            flat=True,
            stock=stock,
            operations=(9, 19),
        ),
    },
    keeps_strides=True,
    launches=(1, 1),
    terms=terms,
)

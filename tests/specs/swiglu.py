import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms
from tests.specs.silu import silu_terms


def sample_inputs(make, shape):
    yield Sample((make(shape), make(shape)))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::swiglu: expected"
    yield ErrorSample((x.int(), x.int()), f"{op} gate to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cfloat(), x), f"{op} gate to be float64, float32, bfloat16 or float16, but got complex64")
    yield ErrorSample((x, x.double()), f"{op} up to be float32 like gate, but got float64")
    yield ErrorSample((x, x[:, :2]), f"{op} up of shape [2, 3] like gate, but got [2, 2]")
    yield ErrorSample((x, x[0]), f"{op} up of shape [2, 3] like gate, but got [3]")
    if device != "cpu":
        yield ErrorSample((x, x.cpu()), f"{op} up on {x.device} like gate, but got cpu")
        yield ErrorSample((x.cpu(), x), f"{op} up on cpu like gate, but got {x.device}")


def halves(make, shape):
    """Makes gate and up as the halves of one packed tensor, as in a model."""
    packed = make((*shape[:-1], 2 * shape[-1])).detach()
    gate, up = (half.requires_grad_() for half in packed.chunk(2, -1))
    return Sample((gate, up))


def terms(call):
    (gate, up), (g,) = call.sample.args, call.grads
    value, derivative = silu_terms(gate)
    rounded = call.least * (gate.abs() + 1)  # for exponentials that underflow to 0
    gradients = {0: Terms((g * up).abs() * derivative, 8, rounded=(g * up).abs() * rounded)}
    gradients |= {1: Terms(g.abs() * value, 8, rounded=g.abs() * rounded)}
    return [Terms(up.abs() * value, 8, rounded=up.abs() * rounded)], gradients


SPEC = OpSpec(
    name="swiglu",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    terms=terms,
    bench=Bench(
        lambda make, shape: Sample((make(shape), make(shape))),
        forward=3,
        backward=5,
        flat=True,
        stock=lambda gate, up: torch.nn.functional.silu(gate) * up,
        operations=(5, 12),
    ),
    variants={
        "packed": Bench(halves, forward=3, backward=5, operations=(5, 12)),
    },
    keeps_strides=True,
    launches=(1, 1),
)

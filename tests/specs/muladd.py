import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms


def sample_inputs(make, shape):
    yield Sample((make(shape), make(shape), 0.5))


def error_inputs(device):
    a = torch.ones(2, 3, device=device)
    op = "extension_cpp::muladd: expected"
    yield ErrorSample((a.int(), a.int(), 1.0), f"{op} a to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((a.cfloat(), a, 1.0), f"{op} a to be float64, float32, bfloat16 or float16, but got complex64")
    yield ErrorSample((a, a.double(), 1.0), f"{op} b to be float32 like a, but got float64")
    yield ErrorSample((a, a[:, :2], 1.0), f"{op} b of shape [2, 3] like a, but got [2, 2]")
    yield ErrorSample((a, a[0], 1.0), f"{op} b of shape [2, 3] like a, but got [3]")
    if device != "cpu":
        yield ErrorSample((a, a.cpu(), 1.0), f"{op} b on {a.device} like a, but got cpu")
        yield ErrorSample((a.cpu(), a, 1.0), f"{op} b on cpu like a, but got {a.device}")
        yield ErrorSample((a, a, 1.0), f"{op} out on {a.device} like a, but got cpu", {"out": a.cpu()})
    buffer = torch.ones(7, device=device)
    flat = buffer[:6].view(2, 3)
    errors = {
        "out of shape [2, 3] like a, but got [3]": a[0].clone(),
        "out to be float32 like a, but got float64": a.double(),
        "out to be a itself or to share no memory with it, but they overlap in part": buffer[1:].view(2, 3),
        "out without internal overlap, but got stride 0 in dimension 0": torch.ones(3, device=device).expand(2, 3),
    }
    for message, out in errors.items():
        yield ErrorSample((flat, a, 1.0), f"{op} {message}", {"out": out})
    message = "functions with out=... arguments don't support automatic differentiation, but one of the arguments"
    trained = a.clone().requires_grad_()
    for call in ((a, a, a.clone().requires_grad_()), (trained, a, a.clone()), (a, trained, a.clone())):
        yield ErrorSample((*call[:2], 1.0), f"extension_cpp::muladd.out: {message} requires grad.", {"out": call[2]})


def terms(call):
    """Bounds the rounding errors of one product and one sum."""
    a, b, c = call.sample.args
    (g,) = call.grads
    return [Terms((a * b).abs() + abs(c), 2)], {0: Terms((g * b).abs(), 2), 1: Terms((g * a).abs(), 2)}


SPEC = OpSpec(
    name="muladd",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample((make(shape), make(shape), 0.5)), forward=3, backward=5, flat=True, operations=(2, 2)
    ),
    keeps_strides=True,
    terms=terms,
    launches=(1, 1),
)

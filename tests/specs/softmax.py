import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample


def sample_inputs(make, shape):
    yield Sample((make(shape),))
    if len(shape) > 1:
        yield Sample((make(shape), 0))
    if len(shape) > 2:
        yield Sample((make(shape), -2))


def error_inputs(name):
    def of(device):
        x = torch.ones(2, 3, device=device)
        op = f"extension_cpp::{name}: expected"
        yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
        yield ErrorSample((x, 2), f"{op} dim in [-2, 1], but got 2")
        yield ErrorSample((x, -3), f"{op} dim in [-2, 1], but got -3")
        yield ErrorSample((x[0, 0], 1), f"{op} dim in [-1, 0], but got 1")

    return of


def reduction(sample):
    x, dim = sample.args[0], sample.args[1] if len(sample.args) > 1 else -1
    return x.shape[dim] if x.dim() else 1


def terms(sample):
    """The terms that cancel in a gradient: at most a probability times 2, the largest number of random_grad."""
    x, *dim = sample.args
    p = torch.softmax(x.detach().double(), *(dim or [-1])).nan_to_num(0.0)
    return 2 * p.max().item() if p.numel() else 0.0


def spec(name, function, reference, operations):
    return OpSpec(
        name=name,
        function=function,
        reference=reference,
        sample_inputs=sample_inputs,
        error_inputs=error_inputs(name),
        reduction=reduction,
        bench=Bench(lambda make, shape: Sample((make(shape),)), forward=2, backward=3, operations=operations),
        keeps_strides=True,
        launches=(1, 1),
        terms=terms,
        variants={"columns": Bench(lambda make, shape: Sample((make(shape), 0)), forward=2, backward=3)},
    )


SPEC = spec("softmax", extension_cpp.softmax, extension_cpp.reference.softmax, (5, 4))

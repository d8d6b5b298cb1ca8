import math

import torch

import extension_cpp
from tests.checks import largest
from tests.opspec import Bench, ErrorSample, OpSpec, Sample


def sample_inputs(make, shape):
    yield Sample((make(shape),))
    yield Sample((make(shape), "tanh"))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::gelu: expected"
    yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cfloat(), "tanh"), f"{op} x to be float64, float32, bfloat16 or float16, but got complex64")
    yield ErrorSample((x, "erf"), f"{op} approximate to be 'none' or 'tanh', but got 'erf'")


def terms(sample):
    """The derivative is a sum of two terms that cancel near its zero. One of them is x times the normal density, which
    is returned here for the largest |grad_out|, 2."""
    x = sample.args[0].detach().double()
    return 2 * largest((x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)).nan_to_num())


SPEC = OpSpec(
    name="gelu",
    function=extension_cpp.gelu,
    reference=extension_cpp.reference.gelu,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=lambda sample: 1,
    bench=Bench(lambda make, shape: Sample((make(shape),)), forward=2, backward=3, flat=True, operations=(17, 21)),
    variants={
        "tanh": Bench(
            lambda make, shape: Sample((make(shape), "tanh")), forward=2, backward=3, flat=True, operations=(8, 15)
        )
    },
    keeps_strides=True,
    launches=(1, 1),
    terms=terms,
)

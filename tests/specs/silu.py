import torch

import extension_cpp
from tests.checks import largest
from tests.opspec import Bench, ErrorSample, OpSpec, Sample


def sample_inputs(make, shape):
    yield Sample((make(shape),))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::silu: expected"
    yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cdouble(),), f"{op} x to be float64, float32, bfloat16 or float16, but got complex128")


def terms(sample):
    """The derivative is a sum of two terms that cancel near its zero. One of them is x s(x) (1 - s(x)), which is
    returned here for the largest |grad_out|, 2."""
    x = sample.args[0].detach().double()
    return 2 * largest((x * torch.sigmoid(x) * torch.sigmoid(-x)).nan_to_num())


SPEC = OpSpec(
    name="silu",
    function=extension_cpp.silu,
    reference=extension_cpp.reference.silu,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=lambda sample: 1,
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

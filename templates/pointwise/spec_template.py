import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample


def sample_inputs(make, shape):
    yield Sample((make(shape),))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::kernel_template: expected"
    yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cdouble(),), f"{op} x to be float64, float32, bfloat16 or float16, but got complex128")


SPEC = OpSpec(
    name="kernel_template",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: Sample((make(shape),)), forward=2, backward=3, flat=True),
    keeps_strides=True,
    launches=(1, 1),
)

import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape),))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::kernel_template: expected"
    yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x[0, 0],), f"{op} x to have at least one dimension, but got shape []")


SPEC = OpSpec(
    name="kernel_template",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: Sample((make(shape),)), forward=1, backward=2),
    keeps_strides=False,
    launches=(1, 1),
    least_rank=1,
)

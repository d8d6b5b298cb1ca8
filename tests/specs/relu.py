import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms


def sample_inputs(make, shape):
    yield Sample((make(shape),))


def error_inputs(device):
    x = torch.ones(2, 3, device=device)
    op = "extension_cpp::relu: expected"
    yield ErrorSample((x.int(),), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x.cdouble(),), f"{op} x to be float64, float32, bfloat16 or float16, but got complex128")


def terms(call):
    """Allows no rounding error, because relu only copies numbers."""
    return [Terms(call.outputs[0].abs(), 0)], {0: Terms(call.grads[0].abs(), 0)}


SPEC = OpSpec(
    name="relu",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: Sample((make(shape),)), forward=2, backward=3, flat=True, operations=(1, 1)),
    keeps_strides=True,
    terms=terms,
    launches=(1, 1),
)

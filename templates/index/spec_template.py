import torch

import extension_cpp
from tests.judge import rounded_sums
from tests.opspec import Bench, ErrorSample, OpSpec, Sample, indices_below


def sample_inputs(make, shape):
    if len(shape) > 0:
        for count in (shape[0], 2 * shape[0] + 1):
            x = make(shape)
            # The rows come in any order: some occur several times, and others do not.
            index = indices_below((count if len(x) else 0,), len(x), seed=0)
            yield Sample((x, index.to(x.device)))


def error_inputs(device):
    x, index = torch.ones(2, 3, device=device), torch.tensor([1, 0, 1], device=device)
    op = "extension_cpp::kernel_template: expected"
    yield ErrorSample((x.int(), index), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x[0, 0], index), f"{op} x to have at least one dimension, but got shape []")
    yield ErrorSample((x, index.int()), f"{op} index to be int64, but got int32")
    yield ErrorSample((x, index[None]), f"{op} index of shape [count], but got [1, 3]")
    if device != "cpu":
        yield ErrorSample((x, index.cpu()), f"{op} index on {x.device} like x, but got cpu")


SPEC = OpSpec(
    name="kernel_template",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: next(sample_inputs(make, shape)), forward=2, backward=2, by_lines=False),
    keeps_strides=False,
    launches=(1, 1),
    least_rank=1,
    terms=rounded_sums(extension_cpp.reference.kernel_template, 1),  # the gradient is added in float64 and rounded once
    exact=(0,),
    # With `positional`, tests/battery leaves out its test of huge tensors, which would cut x and keep `index`.
    positional=True,  # test_kernel_template.py has a test of huge tensors instead
)

import torch

import extension_cpp
from tests.judge import rounded_sums
from tests.opspec import Bench, ErrorSample, OpSpec, Sample, indices_below


def sample_inputs(make, shape):
    if len(shape) == 0:
        return
    x, rows = make(shape), shape[0]
    # Segments of any length, some without rows, and rows before and after all segments.
    yield Sample((x, indices_below((rows // 3 + 2,), rows + 1, seed=0).sort().values.to(x.device)))
    yield Sample((make(shape), torch.tensor([0, rows], device=x.device)))


def error_inputs(device):
    x, offsets = torch.ones(4, 3, device=device), torch.tensor([0, 1, 4], device=device)
    op = "extension_cpp::kernel_template: expected"
    yield ErrorSample((x.int(), offsets), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x[0, 0], offsets), f"{op} x to have at least one dimension, but got shape []")
    yield ErrorSample((x, offsets.int()), f"{op} offsets to be int64, but got int32")
    yield ErrorSample((x, offsets[None]), f"{op} offsets of shape [borders], but got [1, 3]")
    yield ErrorSample((x, offsets[:0]), f"{op} offsets to have at least one number, but got shape [0]")
    if device != "cpu":
        yield ErrorSample((x, offsets.cpu()), f"{op} offsets on {x.device} like x, but got cpu")


def bench(make, shape):
    """Makes segments of four rows."""
    x = make(shape)
    return Sample((x, torch.arange(0, shape[0] + 4, 4).clamp(max=shape[0]).to(x.device)))


SPEC = OpSpec(
    name="kernel_template",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(bench, forward=1.25, backward=1.25, by_lines=False),
    keeps_strides=False,
    launches=(1, 1),
    least_rank=1,
    terms=rounded_sums(extension_cpp.reference.kernel_template, 1),  # a float64 sum that is rounded once, or a copy
    # With `positional`, tests/battery leaves out its test of huge tensors, which would cut x and keep `offsets`.
    positional=True,  # test_kernel_template.py has a test of huge tensors instead
)

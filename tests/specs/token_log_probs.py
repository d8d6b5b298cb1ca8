import math

import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample
from tests.specs.cross_entropy import targets


def sample_inputs(make, shape):
    if not shape or shape[-1] == 0:
        return
    for temperature in ((), (0.5,)):
        logits = make(shape)
        yield Sample((logits, targets(shape[-1], shape[:-1], logits.device), *temperature))


def error_inputs(device):
    x, t = torch.ones(2, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    op = "extension_cpp::token_log_probs: expected"
    dtypes = "float64, float32, bfloat16 or float16"
    yield ErrorSample((x.int(), t), f"{op} logits to be {dtypes}, but got int32")
    yield ErrorSample((x[0, 0], t[0]), f"{op} logits to have at least one dimension, but got shape []")
    yield ErrorSample((x[:, :0], t), f"{op} at least one class, but got logits of shape [2, 0]")
    yield ErrorSample((x, t.int()), f"{op} target to be int64, class indices, but got int32")
    yield ErrorSample((x, t[:1]), f"{op} target of shape [2], that of logits without the classes, but got [1]")
    for temperature in (0.0, -1.0):
        message = f"{op} temperature to be positive, but got {temperature:g}"
        yield ErrorSample((x, t, temperature), message)


SPEC = OpSpec(
    name="token_log_probs",
    function=extension_cpp.token_log_probs,
    reference=extension_cpp.reference.token_log_probs,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=lambda sample: sample.args[0].shape[-1],
    bench=Bench(
        lambda make, shape: Sample(((x := make(shape)), targets(shape[-1], shape[:-1], x.device))),
        forward=1,
        backward=2,
        operations=(6, 8),
    ),
    keeps_strides=False,
    launches=(1, 1),
    second_order=False,
    terms=lambda sample: math.log(sample.args[0].shape[-1]) + 1,  # log_p and p, whose products sum to the entropy
    float_results=True,
)

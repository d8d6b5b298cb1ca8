"""Specifies the op, which gets a seed. tests/test_dropout.py tests the public function, which draws the seed."""

import functools

import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms

PHILOX = extension_cpp.reference.philox


@functools.lru_cache(maxsize=64)
def known_philox(seed, numel, device):
    return PHILOX(torch.tensor([seed], device=device), numel)


def philox(seed, numel):
    """Caches Philox bits by seed and size, because they take most of a reference's time and all samples share a seed.
    Tensors made under a torch.func transform or a dispatch mode are not cached, because they are invalid outside."""
    if torch.compiler.is_compiling() or type(seed) is not torch.Tensor:
        return PHILOX(seed, numel)
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._len_torch_dispatch_stack() > 0:
        return PHILOX(seed, numel)
    return known_philox(seed.item(), numel, seed.device)


extension_cpp.reference.philox = philox


def seed_of(device, seed=0x0123_4567_89AB_CDEF):
    return torch.tensor([seed], device=device)


def sample_inputs(make, shape):
    x = make(shape)
    yield Sample((x, 0.3, seed_of(x.device)))


def error_inputs(device):
    x, seed = torch.ones(2, 3, device=device), seed_of(device)
    op = "extension_cpp::dropout: expected"
    yield ErrorSample((x.int(), 0.5, seed), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x, 1.5, seed), f"{op} p to be between 0 and 1, but got 1.5")
    yield ErrorSample((x, -0.1, seed), f"{op} p to be between 0 and 1, but got -0.1")
    yield ErrorSample((x, float("nan"), seed), f"{op} p to be between 0 and 1, but got nan")
    yield ErrorSample((x, 0.5, seed.int()), f"{op} seed to be int64, but got int32")
    yield ErrorSample((x, 0.5, seed.expand(2)), f"{op} seed to have one element, but got shape [2]")
    if device != "cpu":
        yield ErrorSample((x, 0.5, seed.cpu()), f"{op} seed on {x.device} like x, but got cpu")


def terms(call):
    """Bounds the rounding errors of the scale 1 / (1 - p) and of one product."""
    _, p, seed = call.sample.args
    gradient = extension_cpp.reference.dropout(call.grads[0], p, seed=seed)
    return [Terms(call.outputs[0].abs(), 2)], {0: Terms(gradient.abs(), 2)}


def bench_sample(make, shape):
    x = make(shape)
    return Sample((x, 0.1, seed_of(x.device)))


SPEC = OpSpec(
    name="dropout",
    function=lambda x, p, seed: extension_cpp._ops.dropout(x, p, seed),
    reference=lambda x, p, seed: extension_cpp.reference.dropout(x, p, seed=seed),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        bench_sample,
        forward=2,
        backward=2,
        flat=True,
        operations=(1, 1),
        stock=lambda x, p, seed: torch.nn.functional.dropout(x, p),
    ),
    keeps_strides=False,
    terms=terms,
    positional=True,
    launches=(1, 1),
)

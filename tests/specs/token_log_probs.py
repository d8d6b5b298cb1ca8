import torch

from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms
from tests.specs.cross_entropy import targets
from tests.specs.softmax import product


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


def terms(call):
    """Bounds the rounding errors. exp multiplies the error of x / temperature. The entropy is lse - sum p z."""
    (x, target, *temperature), (of_log_p, of_entropy) = call.sample.args, (g.abs().unsqueeze(-1) for g in call.grads)
    z = x / (temperature or [1.0])[0]
    lse, p = torch.logsumexp(z, -1, keepdim=True), torch.softmax(z, -1)
    distance = (z - z.amax(-1, keepdim=True)).abs()
    average = product(p, distance).sum(-1, keepdim=True)
    lse_size = lse.abs() + 1 + average
    log_p, t = z - lse, target.unsqueeze(-1)
    entropy = 1 + product(p, distance * (1 + distance + average)).sum(-1) + (lse - z.amax(-1, keepdim=True)).squeeze(-1)
    relative = 1 + log_p.abs() + z.abs() + average + lse.abs()
    hit = torch.zeros_like(x).scatter(-1, t, 1.0)
    from_entropy = of_entropy * product(p, log_p.abs() + entropy.unsqueeze(-1))
    gradient = of_log_p * (hit + product(p, relative)) + product(from_entropy, relative)
    gradient = gradient / (temperature or [1.0])[0]
    outputs = (z.gather(-1, t).abs() + lse_size).squeeze(-1), entropy
    rounded = (
        call.least * (of_log_p + of_entropy * (1 + log_p.abs() + entropy.unsqueeze(-1))) / (temperature or [1.0])[0]
    )
    c = call.c_of_exp
    return [Terms(size, c) for size in outputs], {0: Terms(gradient, c, rounded=rounded)}


SPEC = OpSpec(
    name="token_log_probs",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample(((x := make(shape)), targets(shape[-1], shape[:-1], x.device))),
        forward=1,
        backward=2,
        operations=(6, 8),
    ),
    keeps_strides=False,
    launches=(1, 1),
    least_rank=1,
    second_order=False,
    terms=terms,
    float_results=True,
)

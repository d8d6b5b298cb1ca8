import torch

import extension_cpp
from tests.opspec import Bench, ErrorSample, OpSpec, Sample


def targets(classes, shape, device):
    """Random class indices, the same for every dtype."""
    return torch.randint(classes, tuple(shape), generator=torch.Generator().manual_seed(7), device="cpu").to(device)


def sample_inputs(make, shape):
    class_dim = min(1, len(shape) - 1)
    if not shape or shape[class_dim] == 0:
        return
    classes, rows = shape[class_dim], (*shape[:class_dim], *shape[class_dim + 1 :])
    for options in (
        {},
        {"reduction": "none", "ignore_index": min(1, classes - 1), "z_loss": 0.01},
        {"reduction": "sum", "label_smoothing": 0.25, "softcap": 5.0},
        {"label_smoothing": 0.125, "ignore_index": 0, "weight": True},
    ):
        logits = make(shape)
        if options.get("weight"):  # without requires_grad: class weights have no derivative
            options = {**options, "weight": make((classes,)).detach().abs() + 0.5}
        yield Sample((logits, targets(classes, rows, logits.device)), options)


def error_inputs(device):
    x, t = torch.ones(2, 3, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    op = "extension_cpp::cross_entropy: expected"
    dtypes = "float64, float32, bfloat16 or float16"
    yield ErrorSample((x.int(), t), f"{op} logits to be {dtypes}, but got int32")
    yield ErrorSample((x[0, 0], t[0]), f"{op} logits to have at least one dimension, but got shape []")
    yield ErrorSample((x[:, :0], t), f"{op} at least one class, but got logits of shape [2, 0]")
    yield ErrorSample((x, t.int()), f"{op} target to be int64, class indices, but got int32")
    yield ErrorSample((x, x), f"{op} target to be int64, class indices, but got float32")
    yield ErrorSample((x, t[:1]), f"{op} target of shape [2], that of logits without the classes, but got [1]")
    yield ErrorSample((x, t, x[0].double()), f"{op} weight to be float32 like logits, but got float64")
    yield ErrorSample(
        (x.bfloat16(), t, x[0].half()), f"{op} weight to be bfloat16 like logits or float32, but got float16"
    )
    yield ErrorSample((x, t, x[0, :2]), f"{op} weight of shape [3], a number for each class, but got [2]")
    for s in (-0.5, 1.5):
        yield ErrorSample((x, t), f"{op} label_smoothing to be between 0 and 1, but got {s}", {"label_smoothing": s})
    for z_loss in (float("nan"), float("-inf")):
        yield ErrorSample((x, t), f"{op} z_loss to be finite, but got {z_loss:g}", {"z_loss": z_loss})
    for softcap in (0.0, float("inf"), float("nan"), 1e39, 1e-40):
        message = f"{op} softcap to be None or a positive normal number of float32, but got {softcap:g}"
        yield ErrorSample((x, t), message, {"softcap": softcap})
    message = f"{op} softcap to be None or a positive normal number of float64, but got 1e-310"
    yield ErrorSample((x.double(), t), message, {"softcap": 1e-310})
    yield ErrorSample((x, t), f"{op} reduction to be 'none', 'mean' or 'sum', but got 'max'", {"reduction": "max"})
    message = f"{op} weight not to require grad: the derivative of the class weights is not implemented"
    yield ErrorSample((x, t, x[0].clone().requires_grad_()), message)


def reduction(sample):
    logits = sample.args[0]
    is_none = sample.kwargs.get("reduction") == "none"
    return max(logits.shape[min(1, logits.dim() - 1)] if is_none else logits.numel(), 1)


def terms(sample):
    """A gradient is a difference of probabilities of at most 1; a mean divides it by the number of rows."""
    logits = sample.args[0]
    rows = max(logits.numel() // logits.shape[min(1, logits.dim() - 1)], 1)
    return 1.0 if "reduction" in sample.kwargs else 1.0 / rows


SPEC = OpSpec(
    name="cross_entropy",
    function=extension_cpp.cross_entropy,
    reference=extension_cpp.reference.cross_entropy,
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    reduction=reduction,
    bench=Bench(
        lambda make, shape: Sample(((x := make(shape)), targets(shape[1], shape[:1], x.device))),
        forward=1,
        backward=2,
        operations=(4, 4),
    ),
    keeps_strides=False,
    launches=(2, 1),  # forward: one kernel for the rows, one for the sum over them
    second_order=False,
    terms=terms,
)

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample, Terms
from tests.specs.softmax import product


def targets(classes, shape, device):
    """Returns random class indices, which are the same for every dtype."""
    return torch.randint(classes, tuple(shape), generator=torch.Generator().manual_seed(7), device="cpu").to(device)


def class_weight(make, classes):
    """Returns class weights that do not require grad, because the op refuses weights that require grad."""
    return make((classes,)).detach().abs() + 0.5


# Some rows have the target 1, which ignore_index ignores. The softcap is so small that most random logits exceed it.
LOSS_OPTIONS = {
    "ignore_index": (1,),
    "reduction": ("none", "sum"),
    "label_smoothing": (0.25,),
    "z_loss": (0.1,),
    "softcap": (1.0,),
}


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
        if options.get("weight"):
            options = {**options, "weight": class_weight(make, classes)}
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


@dataclass
class LossTerms:
    """Holds the sizes (see Terms) of the loss and of the logits' gradient. `loss_moves` and `gradient_moves` are their
    changes if each logit changes by `moved`."""

    loss: Tensor
    gradient: Tensor
    loss_moves: Tensor
    gradient_moves: Tensor


def loss_terms(
    call,
    x,
    target,
    grad,
    moved,
    weight=None,
    ignore_index=-100,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    softcap=None,
):
    """Bounds the rounding errors of a row's loss w_t ((1 - s) (lse - z_t) + z_loss lse^2) + s/n sum_c w_c (lse - z_c).

    z is x or softcap tanh(x / softcap), whose derivative 1 - tanh^2 is a difference. p = exp(z - lse) multiplies the
    rounding error of z - lse. A logit that changes by 1 or more may change p by up to 1.
    """
    classes = min(1, x.dim() - 1)

    def total(each):
        return each.sum(classes, keepdim=True)

    tanh = torch.zeros_like(x) if softcap is None else torch.tanh(x / softcap)
    z, z_rounds = (x, 0.0) if softcap is None else (softcap * tanh, (softcap * tanh).abs())
    lse, p = torch.logsumexp(z, classes, keepdim=True), torch.softmax(z, classes)
    distance = (z - z.amax(classes, keepdim=True)).abs() + z_rounds
    average = total(product(p, distance))
    most = moved.amax(classes, keepdim=True)
    lse_moves = torch.where(most < 1, total(product(p, moved)), most)

    is_counted = (target != ignore_index).unsqueeze(classes)
    t = torch.where(is_counted, target.unsqueeze(classes), 0)
    w = x.new_ones(x.shape[classes]) if weight is None else weight
    of_target = torch.where(is_counted, w[t], 0)
    w = w.view([-1] + [1] * (x.dim() - 1 - classes))
    smooth = torch.where(is_counted, label_smoothing / x.shape[classes], 0)
    z_weight = abs(z_loss) * of_target

    def loss(of_z, of_lse):
        rows = product(of_target, (1 - label_smoothing) * (of_z.gather(classes, t) + of_lse))
        rows = rows + product(z_weight, 2 * lse.abs() * of_lse)
        return rows + product(smooth, total(w * (of_z + of_lse)))

    pull = (1 - label_smoothing) * of_target + smooth * w.sum() + 2 * z_weight * lse.abs()
    # In float64 the reference subtracts lse rounded to one number, and the op subtracts lse as two numbers. The
    # difference is a rounding of lse.
    relative = 1 + (z - lse).abs() + z_rounds + average + (lse.abs() if call.dtype is torch.float64 else 0.0)
    lse_size = lse.abs() + 1 + average
    gradient = product(p, pull * relative) + product(z_weight * p, 2 * lse_size)
    hit = torch.zeros_like(x).scatter(classes, t, 1.0)
    slopes = gradient + (1 - label_smoothing) * of_target * hit + smooth * w
    together = moved + lse_moves
    moves = torch.where(together < 1, p * torch.expm1(together.clamp(max=1)), 1)
    moves = torch.where(together < torch.inf, pull * moves + 2 * z_weight * p * lse_moves, torch.inf)
    if softcap is not None:  # the slope is at most 1, and changes by up to 2 / softcap times the logit's change
        bend = (2 / softcap * moved).clamp(max=1)
        moves = torch.where(moves < torch.inf, moves * (1 - tanh * tanh + bend), torch.inf) + slopes * bend

    rows = loss(z.abs(), lse_size) + z_weight * lse.square()
    overflows = is_counted & (total(torch.zeros_like(x) + w) * (1 + rows) > torch.finfo(call.computed).max)
    rows = torch.where(overflows, torch.inf, rows)
    divisor = of_target.sum() if reduction == "mean" else 1.0
    grad = (grad.unsqueeze(classes) if reduction == "none" else grad).abs() / divisor
    results = [
        each.squeeze(classes) if reduction == "none" else each.sum() / divisor
        for each in (rows, loss(moved, lse_moves))
    ]
    # `zeros` bounds the error where exponentials underflow to 0.
    zeros = call.least * (pull + 1) * grad
    return LossTerms(results[0], slopes * grad * (1 + tanh * tanh), results[1], moves * grad + zeros)


def terms(call):
    (x, target), options = call.sample.args[:2], call.sample.kwargs
    found = loss_terms(call, x, target, call.grads[0], torch.zeros_like(x), **options)
    c = call.c_of_exp
    if call.dtype is torch.float64:  # the op adds rows one by one, and the reference adds classes one by one
        c += (target.numel() + x.numel() // max(target.numel(), 1)) / 2
    return [Terms(found.loss, c)], {0: Terms(found.gradient, c, rounded=found.gradient_moves)}


def with_options(make, shape, chosen):
    class_dim = min(1, len(shape) - 1)
    logits, rows = make(shape), (*shape[:class_dim], *shape[class_dim + 1 :])
    options = dict(chosen)
    if "weight" in options:
        options["weight"] = class_weight(make, shape[class_dim])
    return Sample((logits, targets(shape[class_dim], rows, logits.device)), options)


SPEC = OpSpec(
    name="cross_entropy",
    options=Options({"weight": (True,), **LOSS_OPTIONS}, with_options),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample(((x := make(shape)), targets(shape[1], shape[:1], x.device))),
        forward=1,
        backward=2,
        stock=torch.nn.functional.cross_entropy,
        operations=(4, 4),
    ),
    keeps_strides=False,
    launches=(2, 1),  # forward: one kernel for the rows, and one for the sum over the rows
    least_rank=1,
    second_order=False,
    terms=terms,
)

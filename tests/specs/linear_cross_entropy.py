import torch

from tests.judge import LARGE
from tests.opspec import Bench, ErrorSample, OpSpec, Options, Sample, Terms
from tests.specs.cross_entropy import LOSS_OPTIONS, class_weight, loss_terms, targets

CLASSES = 11


def sample_inputs(make, shape):
    if not shape:
        return
    for options in (
        {},
        {"reduction": "none", "ignore_index": 1, "z_loss": 0.01},
        {"reduction": "sum", "label_smoothing": 0.25, "softcap": 5.0, "bias": True, "weight": True},
    ):
        x, linear_weight = make(shape), make((CLASSES, shape[-1]))
        linear_bias = make((CLASSES,)) if options.pop("bias", False) else None
        if options.get("weight"):
            options = {**options, "weight": class_weight(make, CLASSES)}
        yield Sample((x, linear_weight, targets(CLASSES, shape[:-1], x.device), linear_bias), options)


def error_inputs(device):
    x, w = torch.ones(2, 3, device=device), torch.ones(5, 3, device=device)
    t = torch.zeros(2, dtype=torch.int64, device=device)
    op = "extension_cpp::linear_cross_entropy: expected"
    dtypes = "float64, float32, bfloat16 or float16"
    yield ErrorSample((x.int(), w, t), f"{op} x to be {dtypes}, but got int32")
    yield ErrorSample((x[0, 0], w, t[0]), f"{op} x to have at least one dimension, but got shape []")
    yield ErrorSample((x, w.double(), t), f"{op} linear_weight to be float32 like x, but got float64")
    shape = "linear_weight of shape [classes, 3], the last dimension of x, but got"
    yield ErrorSample((x, w[:, :2], t), f"{op} {shape} [5, 2]")
    yield ErrorSample((x, w[0], t), f"{op} {shape} [3]")
    yield ErrorSample((x, w[:0], t), f"{op} at least one class, but got logits of shape [2, 0]")
    yield ErrorSample((x, w, t.int()), f"{op} target to be int64, class indices, but got int32")
    yield ErrorSample((x, w, t[:1]), f"{op} target of shape [2], that of logits without the classes, but got [1]")
    yield ErrorSample((x, w, t, w[:, 0].half()), f"{op} linear_bias to be float32 like x, but got float16")
    yield ErrorSample((x, w, t, w[0]), f"{op} linear_bias of shape [5], a number for each class, but got [3]")
    yield ErrorSample((x, w, t, None, w[0]), f"{op} weight of shape [5], a number for each class, but got [3]")
    yield ErrorSample((x, w, t), f"{op} z_loss to be finite, but got nan", {"z_loss": float("nan")})
    message = f"{op} softcap to be None or a positive normal number of float32, but got 0"
    yield ErrorSample((x, w, t), message, {"softcap": 0.0})
    message = f"{op} label_smoothing to be between 0 and 1, but got 2"
    yield ErrorSample((x, w, t), message, {"label_smoothing": 2.0})
    message = f"{op} reduction to be 'none', 'mean' or 'sum', but got 'max'"
    yield ErrorSample((x, w, t), message, {"reduction": "max"})
    message = f"{op} weight not to require grad: the derivative of the class weights is not implemented"
    yield ErrorSample((x, w, t, None, w[:, 0].clone().requires_grad_()), message)


def terms(call):
    """Bounds the rounding errors. PyTorch's matrix products round the logits and their gradients to the dtype of the
    call. On a GPU they also round parts of their sums, and flush denormal numbers of half types to 0."""
    (x, weight, target, bias), options = (*call.sample.args, None)[:4], call.sample.kwargs
    rows, c = x.reshape(target.numel(), x.shape[-1]), call.c_of_exp
    logits = torch.nn.functional.linear(rows, weight, bias)
    size = torch.nn.functional.linear(rows.abs(), weight.abs(), None if bias is None else bias.abs())
    moved = 2 * call.rounding(logits) + c * call.eps * size.nan_to_num(0.0, 0.0)
    grad = call.grads[0].reshape(-1) if options.get("reduction") == "none" else call.grads[0]
    found = loss_terms(call, logits, target.reshape(-1), grad, moved, **options)
    of_logits, moves = found.gradient, found.gradient_moves + call.rounding(found.gradient)
    shape = call.outputs[0].shape

    def through(matrix):
        """Returns the gradients of x and linear_weight if `matrix` is the gradient of the logits."""
        return (matrix @ weight.abs()).view(x.shape), matrix.t() @ rows.abs()

    sizes = *through(of_logits), of_logits.sum(0)
    most = of_logits.nan_to_num(0.0).amax() if moves.numel() else 0.0
    zeros = call.least * (weight.shape[0] + rows.shape[0]) * (1 + most)
    lost = torch.where(moves.amax(1) < torch.inf, 0, torch.inf)  # rows with a logit that overflows
    gx, gweight = through(moves.clamp(max=LARGE))
    rounds = gx + lost.view(*x.shape[:-1], 1) + zeros, gweight + lost.sum() + zeros, moves.sum(0) + zeros
    gradients = {i: Terms(a, c, rounded=b) for i, a, b in zip((0, 1, 3), sizes, rounds, strict=True)}
    return [Terms(found.loss.view(shape), c, rounded=found.loss_moves.view(shape))], gradients


def with_options(make, shape, chosen):
    x, linear_weight, options = make(shape), make((CLASSES, shape[-1])), dict(chosen)
    linear_bias = make((CLASSES,)) if options.pop("linear_bias", False) else None
    if "weight" in options:
        options["weight"] = class_weight(make, CLASSES)
    return Sample((x, linear_weight, targets(CLASSES, shape[:-1], x.device), linear_bias), options)


SPEC = OpSpec(
    name="linear_cross_entropy",
    options=Options({"linear_bias": (True,), "weight": (True,), **LOSS_OPTIONS}, with_options),
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(
        lambda make, shape: Sample(
            ((x := make(shape)), make((shape[1], shape[1])), targets(shape[1], shape[:1], x.device))
        ),
        forward=1,
        backward=1,
    ),
    keeps_strides=False,
    launches=(0, 0),
    least_rank=1,
    second_order=False,
    terms=terms,
    unseen=10,  # hidden where softcap logits and their gradients are rounded to a half type and 11 classes are summed
    has_products=True,
)

import torch

from tests.opspec import COMPUTED, Bench, ErrorSample, OpSpec, Options, Sample, Terms


def sample_inputs(make, shape):
    if len(shape) > 0:
        yield Sample((make(shape), make(shape[-1:])))
        yield Sample((make(shape), None, 0.5, True))


def with_options(make, shape, chosen):
    x, weight = make(shape), make(shape[-1:])
    return Sample((x, chosen.get("weight", weight), chosen.get("eps", 1e-6), chosen.get("return_rstd", False)))


def error_inputs(device):
    x, weight = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    op = "extension_cpp::kernel_template: expected"
    yield ErrorSample((x.int(), weight), f"{op} x to be float64, float32, bfloat16 or float16, but got int32")
    yield ErrorSample((x, weight.double()), f"{op} weight to be float32 like x, but got float64")
    yield ErrorSample((x, weight[:2]), f"{op} weight of shape [3], the last dimension of x, but got [2]")
    yield ErrorSample((x, x), f"{op} weight of shape [3], the last dimension of x, but got [2, 3]")
    yield ErrorSample((x[0, 0], weight), f"{op} x to have at least one dimension, but got shape []")
    if device != "cpu":
        yield ErrorSample((x, weight.cpu()), f"{op} weight on {x.device} like x, but got cpu")
        yield ErrorSample((x.cpu(), weight), f"{op} weight on cpu like x, but got {x.device}")


def terms(call):
    """Bounds the rounding errors. A row is added in 32 lanes, and rstd has half of the sum's relative error. A row
    whose squares overflow may have any result. `lost` bounds the error of products below the smallest normal number."""
    x, weight, *others = call.sample.args
    weight = x.new_ones(x.shape[-1]) if weight is None else weight
    squares = x.square()
    rstd = (squares.mean(-1, keepdim=True) + (others[0] if others else 1e-6)).rsqrt()
    over = torch.where(squares.sum(-1, keepdim=True) > torch.finfo(call.computed).max, torch.inf, 0.0)
    xhat, grad, lost = (x * rstd).abs(), call.grads[0].abs(), 4 * call.least * call.eps
    g = grad * weight.abs()
    outputs = [Terms(xhat * weight.abs() + over, 8, rounded=lost), Terms(rstd + over, 8)][: len(call.outputs)]
    grad_x = rstd * (g + xhat * (g * xhat).mean(-1, keepdim=True)) + over
    grad_weight = (grad * xhat + over).reshape(-1, x.shape[-1]).sum(0)
    return outputs, {0: Terms(grad_x, 8, rounded=lost * rstd), 1: Terms(grad_weight, 8, rounded=lost)}


SPEC = OpSpec(
    name="kernel_template",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: Sample((make(shape), make(shape[-1:]))), forward=2, backward=3),
    keeps_strides=False,
    launches=(1, 2),
    least_rank=1,
    second_order=False,
    terms=terms,
    result_dtypes=(None, COMPUTED),
    options=Options({"weight": (None,), "eps": (0.5,), "return_rstd": (True,)}, with_options),
)

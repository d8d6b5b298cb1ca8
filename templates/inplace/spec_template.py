import torch

import extension_cpp
from tests.generated import options
from tests.opspec import Bench, ErrorSample, OpSpec, Sample, Terms


def sample_inputs(make, shape):
    yield Sample((make(shape), make(shape), make(shape), 0.5, 0.5))
    yield Sample((make(shape), make(shape), make(shape), 0.25))


def error_inputs(device):
    param, grad, momentum = (torch.ones(2, 3, device=device) for _ in range(3))
    op = "extension_cpp::kernel_template: expected"
    dtypes = "float64, float32, bfloat16 or float16"
    yield ErrorSample((param.int(), grad, momentum, 0.5), f"{op} param to be {dtypes}, but got int32")
    yield ErrorSample((param, grad.double(), momentum, 0.5), f"{op} grad to be float32 like param, but got float64")
    yield ErrorSample((param, grad[:1], momentum, 0.5), f"{op} grad of shape [2, 3] like param, but got [1, 3]")
    yield ErrorSample((param, grad, momentum[0], 0.5), f"{op} momentum of shape [2, 3] like param, but got [3]")
    shared = f"{op} param without internal overlap, but got stride 0 in dimension 0"
    yield ErrorSample((param[:1].expand(2, 3), grad, momentum, 0.5), shared)
    memory, outs = torch.ones(7, device=device), (torch.ones_like(param), torch.ones_like(param))
    for out, message in [
        ((outs[0][0], outs[1]), "param_out of shape [2, 3] like param, but got [3]"),
        ((outs[0], outs[1].half()), "momentum_out to be float32 like param, but got float16"),
        ((outs[0][:1].expand(2, 3), outs[1]), "param_out without internal overlap, but got stride 0 in dimension 0"),
    ]:
        yield ErrorSample((param, grad, momentum, 0.5), f"{op} {message}", {"out": out})
    shared = f"{op} param_out to be grad itself or to share no memory with it, but they overlap in part"
    out = (memory[1:].view(2, 3), outs[1])
    yield ErrorSample((param, memory[:-1].view(2, 3), momentum, 0.5), shared, {"out": out})
    refused = "don't support automatic differentiation, but one of the arguments requires grad."
    message = f"extension_cpp::kernel_template.out: functions with out=... arguments {refused}"
    yield ErrorSample((param, grad.clone().requires_grad_(), momentum, 0.5), message, {"out": outs})
    if device != "cpu":
        yield ErrorSample((param, grad.cpu(), momentum, 0.5), f"{op} grad on {param.device} like param, but got cpu")


def terms(call):
    """Bounds the rounding errors, 3 eps: two products, two sums, lr and beta are rounded, by half an eps each."""
    param, grad, momentum, lr, *beta = call.sample.args
    size = (beta[0] if beta else 0.9) * momentum.abs() + grad.abs()
    return [Terms(param.abs() + lr * size, 3), Terms(size, 3)], {}


SPEC = OpSpec(
    name="kernel_template",
    sample_inputs=sample_inputs,
    error_inputs=error_inputs,
    bench=Bench(lambda make, shape: next(sample_inputs(make, shape)), forward=5, backward=0, flat=True),
    keeps_strides=False,
    launches=(1, 0),
    second_order=False,
    differentiable=False,
    mutates=("param", "momentum"),
    terms=terms,
    options=options(extension_cpp.kernel_template, sample_inputs, {"lr": (0.0, 0.25), "beta": (0.0, 0.9)}),
)

"""Implements kernel_template: the public function, and the functions that ops.py registers."""

from torch import Tensor

from ..registration import checks
from ..registration.calls import call
from ..registration.match import FLOATING, SAME, Match


def kernel_template(
    param: Tensor,
    grad: Tensor,
    momentum: Tensor,
    lr: float,
    beta: float = 0.9,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """A step of gradient descent with momentum, in place: ``momentum = beta * momentum + grad``, then ``param -= lr *
    momentum``.

    Args:
        param: any shape and strides; it is written if there is no ``out``.
        grad: shape, dtype and device of ``param``.
        momentum: shape, dtype and device of ``param``; it is written if there is no ``out``.
        lr: the step's length for each unit of momentum.
        beta: how much of the former momentum stays.
        out: where to write the new ``param`` and ``momentum`` instead: two tensors of ``param``'s shape, dtype and
            device, of any strides. Each may be an input itself.

    Returns:
        ``out``; None if there is none.

    Raises:
        RuntimeError: ``grad``, ``momentum`` or a tensor of ``out`` differs from ``param`` in shape, dtype or device, or
            the dtype is not floating point; elements of a tensor that is written share memory, or it shares a part of
            its memory with another tensor; an argument requires grad while gradients are recorded.

    Not differentiable: call it under ``torch.no_grad()``. It increases the version counters of the tensors that it
    writes, so that a backward which saved their former values raises.
    """
    if out is None:
        call("kernel_template", param, grad, momentum, lr, beta)
        return None
    call("kernel_template.out", param, grad, momentum, lr, beta, param_out=out[0], momentum_out=out[1])
    return out


def _check_inputs(param: Tensor, grad: Tensor, momentum: Tensor) -> Match:
    match = Match("kernel_template")
    match("param", param, FLOATING)
    match("grad", grad, SAME, "like param")
    match("momentum", momentum, SAME, "like param")
    return match


def kernel_template_fake(param: Tensor, grad: Tensor, momentum: Tensor, lr: float, beta: float = 0.9) -> None:
    op = _check_inputs(param, grad, momentum).op
    checks.check_writable(op, "param", param)
    checks.check_writable(op, "momentum", momentum)
    checks.check_no_partial_overlap(op, "param", param, "grad", grad)
    checks.check_no_partial_overlap(op, "param", param, "momentum", momentum)
    checks.check_no_partial_overlap(op, "momentum", momentum, "grad", grad)


def kernel_template_out_fake(
    param: Tensor,
    grad: Tensor,
    momentum: Tensor,
    lr: float,
    beta: float = 0.9,
    *,
    param_out: Tensor,
    momentum_out: Tensor,
) -> None:
    match = _check_inputs(param, grad, momentum)
    for name, out in {"param_out": param_out, "momentum_out": momentum_out}.items():
        match(name, out, SAME, "like param")
        checks.check_writable(match.op, name, out)
        for other, x in {"param": param, "grad": grad, "momentum": momentum}.items():
            checks.check_no_partial_overlap(match.op, name, out, other, x)
    checks.check_no_partial_overlap(match.op, "momentum_out", momentum_out, "param_out", param_out)

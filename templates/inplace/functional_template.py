"""kernel_template: the public function, and what ops.py registers for its operator."""

from torch import Tensor

from ..registration import checks
from ..registration.calls import call
from ..registration.match import FLOATING, SAME, Match


def kernel_template(param: Tensor, grad: Tensor, momentum: Tensor, lr: float, beta: float = 0.9) -> None:
    """A step of gradient descent with momentum, in place: ``momentum = beta * momentum + grad``, then ``param -= lr *
    momentum``.

    Args:
        param: any shape and strides; it is written.
        grad: shape, dtype and device of ``param``.
        momentum: the same; it is written.
        lr: the step's length for each unit of momentum.
        beta: how much of the former momentum stays.

    Raises:
        RuntimeError: ``grad`` or ``momentum`` differs from ``param`` in shape, dtype or device, or the dtype is not
            floating point; elements of ``param`` or ``momentum`` share memory, or two tensors share a part of theirs;
            an argument requires grad while gradients are recorded.

    Not differentiable: call it under ``torch.no_grad()``. It counts a version of what it writes, so that a backward
    which saved the former numbers raises.
    """
    call("kernel_template", param, grad, momentum, lr, beta)


def kernel_template_fake(param: Tensor, grad: Tensor, momentum: Tensor, lr: float, beta: float = 0.9) -> None:
    op = "kernel_template"
    match = Match(op)
    match("param", param, FLOATING)
    match("grad", grad, SAME, "like param")
    match("momentum", momentum, SAME, "like param")
    checks.check_writable(op, "param", param)
    checks.check_writable(op, "momentum", momentum)
    checks.check_no_partial_overlap(op, "param", param, "grad", grad)
    checks.check_no_partial_overlap(op, "param", param, "momentum", momentum)
    checks.check_no_partial_overlap(op, "momentum", momentum, "grad", grad)

"""Implements the gates swiglu and geglu."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..registration import checks
from ..registration.autograd import Gradients
from .common import fake_like
from .pointwise import gelu_backward_plain, gelu_plain, is_tanh, silu_backward_plain


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The SwiGLU gate: ``silu(gate) * up``.

    Args:
        gate: any shape.
        up: shape, dtype and device of ``gate``. ``gate`` and ``up`` may be the halves of one packed tensor,
            ``packed.chunk(2, -1)``: forward and backward read them without a copy.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(gate)``. It is rounded to a half dtype once.

    Raises:
        RuntimeError: ``up`` differs from ``gate`` in shape, dtype or device, or a dtype is not floating point.

    Differentiable twice; a third derivative raises. Backward saves only ``gate`` and ``up``. Source: Shazeer 2020,
    arXiv:2002.05202.
    """
    return _ops.swiglu(gate, up)


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """The GeGLU gate: ``gelu(gate, approximate) * up``.

    Args:
        gate, up: as for swiglu.
        approximate: "none" or "tanh", as for gelu.

    Returns:
        A tensor with the shape, dtype and strides of ``torch.empty_like(gate)``. It is rounded to a half dtype once.

    Raises:
        RuntimeError: ``up`` differs from ``gate`` in shape, dtype or device, a dtype is not floating point, or
            ``approximate`` is neither "none" nor "tanh".

    Differentiable twice; a third derivative raises. Backward saves only ``gate`` and ``up``. Source: Shazeer 2020,
    arXiv:2002.05202.
    """
    return _ops.geglu(gate, up, is_tanh("geglu", approximate))


class Gate:
    """Holds the functions that ops.py registers for a gate and its backward operator. The gate's operator takes (gate,
    up, *options) and returns activation(gate) * up."""

    def __init__(self, op: str, activation: str, plain: Callable[..., Tensor], backward: Callable[..., Tensor]) -> None:
        self.activation_plain, self.activation_backward_plain = plain, backward
        self.op, self.gated, self.backward_op = op, getattr(_ops, op), getattr(_ops, f"{op}_backward")
        self.fake = fake_like(op, "gate", "up", like="gate")
        self.of_activation = getattr(_ops, f"{activation}_backward")  # maps (g, gate) to g * a'(gate)
        self.second_of_activation = getattr(_ops, f"{activation}_double_backward")  # for p, g, gate: p * g * a''(gate)

    def backward_fake(self, grad_out: Tensor, gate: Tensor, up: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        checks.check_dtype(f"{self.op}_backward", "gate", gate)
        checks.check_like(f"{self.op}_backward", "up", up, "gate", gate)
        checks.check_like(f"{self.op}_backward", "grad_out", grad_out, "gate", gate)
        return torch.empty_like(gate), torch.empty_like(gate)

    def backward(self, ctx: Any, grad_out: Tensor) -> Gradients:
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = self.backward_op(grad_out, gate, up, *ctx.options)
        return {"gate": grad_gate, "up": grad_up}

    def second(self, ctx: Any, p: Tensor, q: Tensor) -> Gradients:
        """Returns the gradients of the backward operator, where p and q are grad_grad_gate and grad_grad_up.

        With an activation a, the backward operator returns grad_gate = grad_out * up * a'(gate) and grad_up = grad_out
        * a(gate). The gradients are

            of grad_out: p * up * a'(gate) + q * a(gate)
            of gate: p * grad_out * up * a''(gate) + q * grad_out * a'(gate)
            of up: p * grad_out * a'(gate)
        """
        grad_out, gate, up = ctx.saved_tensors
        p_up, backward, options = p * up, self.of_activation, ctx.options
        return {
            "grad_out": backward(p_up, gate, *options) + self.gated(gate, q, *options),
            "gate": self.second_of_activation(p_up, grad_out, gate, *options) + backward(q * grad_out, gate, *options),
            "up": backward(p * grad_out, gate, *options),
        }

    def plain(self, gate: Tensor, up: Tensor, *options: Any) -> Tensor:
        return self.activation_plain(gate, *options) * up

    def backward_plain(self, grad_out: Tensor, gate: Tensor, up: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        of_gate = self.activation_backward_plain(grad_out * up, gate, *options)
        return of_gate, grad_out * self.activation_plain(gate, *options)


SWIGLU = Gate("swiglu", "silu", torch.nn.functional.silu, silu_backward_plain)
GEGLU = Gate("geglu", "gelu", gelu_plain, gelu_backward_plain)

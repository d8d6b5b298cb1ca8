"""Second derivatives that are made of other operators, for which no kernel exists."""

from collections.abc import Callable

from torch import Tensor


def of_gate(
    grad_grad_gate: Tensor,
    grad_grad_up: Tensor,
    grad_out: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    gated: Callable[[Tensor, Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], Tensor],
    double_backward: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of grad_out, gate and up through a gate's backward operator.

    With an activation a the operator gives grad_gate = grad_out * up * a'(gate) and grad_up = grad_out * a(gate). With
    p and q for grad_grad_gate and grad_grad_up:

        of grad_out: p * up * a'(gate) + q * a(gate)
        of gate: p * grad_out * up * a''(gate) + q * grad_out * a'(gate)
        of up: p * grad_out * a'(gate)

    Args:
        gated: ``gated(gate, up)`` is a(gate) * up.
        backward: ``backward(g, gate)`` is g * a'(gate).
        double_backward: ``double_backward(p, g, gate)`` is p * g * a''(gate).
    """
    p_up = grad_grad_gate * up
    of_grad_out = backward(p_up, gate) + gated(gate, grad_grad_up)
    of_gate = double_backward(p_up, grad_out, gate) + backward(grad_grad_up * grad_out, gate)
    return of_grad_out, of_gate, backward(grad_grad_gate * grad_out, gate)

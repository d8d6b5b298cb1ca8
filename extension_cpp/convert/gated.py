"""Computes gated products for nn.convert, alone or together with the linear layer that takes the product."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops, ops
from .. import modules as nn
from ..registration.calls import is_recorded
from .activations import KNOWN, activation
from .formulas import can_be_joined, context_of
from .model_loss import must_run

_linear, _linear_forward = torch.nn.functional.linear, torch.nn.Linear.forward  # saved before anyone can patch them


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor has no dtype
def gated(gate: Tensor, up: Tensor, function: str, results: tuple[str, ...]) -> Tensor:
    """Computes ``activation(gate) * up``, by one kernel if the result then has the dtype that the original returns."""
    if can_be_joined(gate, up, results):
        return _product(gate, up, function)
    return activation(gate, function, results) * up


def _product(gate: Tensor, up: Tensor, function: str) -> Tensor:
    known = KNOWN[function]
    return getattr(ops, known.gated)(gate, up, **known.options)


def can_make_again(linear: Any, gate: Any, up: Any, results: tuple[str, ...]) -> bool:
    """Returns whether GatedLinear computes what `linear` computes from the product, and saves less for backward.

    `linear` must be an unchanged torch.nn.Linear. The result is False while a graph records the call, because a
    compiler itself decides what to recompute, under autocast, and for a weight that needs no gradient, for which
    PyTorch does not save the product.
    """
    if torch.compiler.is_compiling() or is_recorded() or torch._C._are_functorch_transforms_active():
        return False
    if type(linear) is not torch.nn.Linear or must_run(linear) is not None:
        return False
    if torch.nn.functional.linear is not _linear or torch.nn.Linear.forward is not _linear_forward:
        return False
    tensors = [gate, up, linear.weight, *([] if linear.bias is None else [linear.bias])]
    if any(type(each) not in (Tensor, torch.nn.Parameter) for each in tensors):
        return False
    if not torch.is_grad_enabled() or not linear.weight.requires_grad:
        return False
    if gate.is_nested or not nn.takes(gate, up):
        return False
    return context_of(gate) == 0 and can_be_joined(gate, up, results)


class GatedLinear(torch.autograd.Function):
    """Computes ``linear(act(gate) * up, weight, bias)``, and saves gate, up and weight for backward.

    PyTorch would also save the product, for the weight's gradient. The product is a third of what a gated MLP saves.
    Backward computes it again from gate and up, in a small part of the time of a matrix product.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, function: str) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.function = function
        return torch.nn.functional.linear(_product(gate, up, function), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needs_gate, needs_up, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad_out.reshape(-1, grad_out.shape[-1])
        grad_gate = grad_up = grad_weight = grad_bias = None
        if needs_weight:
            grad_weight = rows.t() @ _product(gate, up, ctx.function).reshape(-1, weight.shape[1])
        if needs_bias:
            grad_bias = rows.sum(0)
        if needs_gate or needs_up:
            known = KNOWN[ctx.function]
            product_backward = getattr(_ops, f"{known.gated}_backward")
            grad_gate, grad_up = product_backward(grad_out @ weight, gate, up, *known.backward_options)
        return grad_gate, grad_up, grad_weight, grad_bias, None

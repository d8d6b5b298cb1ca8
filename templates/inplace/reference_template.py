"""Defines every op in plain PyTorch, with the op's signature. The tests compare the ops with these in float64."""

from torch import Tensor


def kernel_template(param: Tensor, grad: Tensor, momentum: Tensor, lr: float, beta: float = 0.9) -> None:
    momentum.copy_(beta * momentum + grad)
    param.copy_(param - lr * momentum)

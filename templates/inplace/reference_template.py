from torch import Tensor


def kernel_template(param: Tensor, grad: Tensor, momentum: Tensor, lr: float, beta: float = 0.9) -> None:
    momentum.copy_(beta * momentum + grad)
    param.copy_(param - lr * momentum)

"""Implements dropout, and the seed and mask that norms with dropout share with it."""

from typing import Any

import torch
from torch import Tensor

from .. import _ops
from ..registration import autograd, checks
from ..registration.autograd import Gradients
from ..registration.calls import own_ops


def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """Zeroes each element with probability ``p`` and scales the others by ``1 / (1 - p)``.

    Args:
        input: called ``x`` here, any shape.
        p: the probability, from 0 to 1, rounded to a multiple of 2^-32.
        training: False: returns ``x``.

    Returns:
        A contiguous tensor of ``x``'s shape; ``x`` itself if ``p`` is 0 or not ``training``. A dropped element is 0,
        even if ``x`` is NaN or infinite there.

    Raises:
        RuntimeError: ``p`` is not between 0 and 1, or the dtype is not floating point.

    Differentiable, to any order. The mask is not stored. Backward computes it again, from a seed and the elements'
    indices in ``x``. A seed gives the same mask on CPU and CUDA, and for every dtype, layout and number of threads.
    PyTorch's generator on ``x``'s device draws the seed, so torch.manual_seed decides it, checkpointing gets the same
    mask again, and a CUDA graph draws a new seed at every replay. Under torch.compile Inductor draws the seed, which is
    eager's seed if torch._inductor.config.fallback_random is set. Elements 2k and 2k + 1 share a random word: the
    probability that both are dropped is within 2^-16 of p^2. Sources: Srivastava et al. 2014, JMLR 15; Philox 4x32-7 of
    Salmon et al. 2011.
    """
    checks.check_probability("dropout", p)
    checks.check_tensor("dropout", "x", input)
    if p == 0 or not training:
        return input
    return _ops.dropout(input, p, draw_seed(input, p))


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor has no device
def draw_seed(x: Tensor, p: float) -> Tensor:
    """Draws the seed of dropout's mask for x: one number on x's device, so that the seed is not copied from the host.
    Other modules must call dropout.draw_seed and not import the name, because torch.fx replaces the name only here."""
    if p == 1:  # every element is dropped, whatever the seed is
        seed = torch.zeros(1, dtype=torch.int64, device=x.device)
    else:
        seed = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=x.device)
    return autograd.distributed.agreed(seed, x) if autograd.is_sharded(x) else seed


def dropout_fake(x: Tensor, p: float, seed: Tensor) -> Tensor:
    checks.check_dtype("dropout", "x", x)
    checks.check_probability("dropout", p)
    checks.check_seed("dropout", seed, x)
    return x.new_empty(x.shape)


def dropout_setup_context(ctx: Any, inputs: tuple[Tensor, float, Tensor], output: Tensor) -> None:
    _, ctx.p, seed = inputs
    ctx.save_for_backward(seed)


def dropout_backward(ctx: Any, grad_out: Tensor) -> Gradients:
    (seed,) = ctx.saved_tensors
    return {"x": _ops.dropout(grad_out, ctx.p, seed)}


def dropout_plain(x: Tensor, p: float, seed: Tensor) -> Tensor:
    factors = own_ops.dropout_no_grad(torch.ones_like(x.detach()), p, seed)
    return torch.where(factors == 0, 0, x * factors)


def maybe_dropout_plain(x: Tensor, p: float, seed: Tensor | None) -> Tensor:
    return x if seed is None or p == 0 else dropout_plain(x, p, seed)

"""Tests sums, entropies and gradients of rows and columns of many chunks, whose exact values are known."""

import math

import pytest
import torch

import extension_cpp
from tests.battery import every_dtype

WIDTH = 20_000  # columns, which kernels process in three chunks


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("falling", [False, True])
@every_dtype
def test_entropy_of_a_rising_row(dtype: torch.dtype, falling: bool, temperature: float, device: str) -> None:
    """Log-probabilities z - lse and entropies lse - sum(p z) are right for a long row of logits from 0 to 9, rising or
    falling. They are differences of numbers near 16, whose float32 spacing is 2^-19. Half types add twice the error of
    their exponential, 2.8e-6. In float64 the reference rounds, too. The reference gets the logits after rounding to
    `dtype`."""
    row = torch.linspace(0, 9, WIDTH, dtype=torch.float64)
    logits = (row.flip(0) if falling else row).to(dtype)
    log_p = (logits.double() / temperature).log_softmax(0)
    entropy = -(log_p.exp() * log_p).sum().item()
    if temperature == 1.0:
        assert math.isclose(entropy, 8.705, abs_tol=0.05 if dtype.itemsize == 2 else 5e-4)
    target = torch.tensor([0, WIDTH - 1], device=device)
    log_probs, entropies = extension_cpp.token_log_probs(logits.to(device).expand(2, -1), target, temperature)
    atol = 2**-46 if dtype is torch.float64 else 2**-19 if dtype is torch.float32 else 2**-17
    exact = torch.stack([log_p[0], log_p[-1]]).to(device)
    torch.testing.assert_close(log_probs.double(), exact, rtol=0, atol=atol)
    torch.testing.assert_close(entropies.double(), exact.new_full((2,), entropy), rtol=0, atol=atol)


def test_cumsum_of_long_columns(device: str) -> None:
    """cumsum along columns of 200,000 positive terms has a relative error of at most 1e-6: 6e-8 for rounding the
    result, and the roundings of a tree of additions. Adding the terms one by one in float32 would give an error of 1e-4
    at the end."""
    x = torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = x.double().cumsum(0).to(device)
    for reverse in (False, True):
        y = extension_cpp.cumsum((x.flip(0) if reverse else x).to(device), 0, reverse=reverse).double()
        error = ((y.flip(0) if reverse else y) - exact) / exact
        assert error.abs().max() <= 1e-6


def test_log_softmax_backward_of_long_columns(device: str) -> None:
    """Gradients of softmax and log_softmax along 300,000 terms of one sign have an error of at most 1e-6, relative to
    the sum of the absolute values of their terms. On a GPU the bound is 32 eps: a thread adds 600 terms one by one,
    with about sqrt(600) roundings, and a tree adds the threads' sums."""
    allowed = 1e-6 if device == "cpu" else 32 * torch.finfo(torch.float32).eps
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.rand(300_000, 16, generator=generator).to(device) for _ in range(2))
    p = x.double().softmax(0)
    total = g.double().sum(0)
    for function, exact, size in (
        (extension_cpp.log_softmax, g - p * total, g + p * total),
        (extension_cpp.softmax, p * (g - (p * g).sum(0)), p * (g + (p * g).sum(0))),
    ):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(leaf, 0), leaf, g)
        assert ((grad.double() - exact).abs() <= allowed * size).all()

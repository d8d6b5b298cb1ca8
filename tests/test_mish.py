"""Tests both tails of mish and its derivatives: on the left exp underflows, on the right formulas could overflow."""

import math

import pytest
import torch

import extension_cpp

# On the left exp(x) is subnormal or 0 in float32, but x exp(x) may be normal. On the right powers of e^x overflow.
ENDS = [-3e38, -1e38, -1e4, -150.0, -110.5, -104.0, -95.0, -90.0, -87.5, -30.0, 15.0, 19.9, 20.5, 45.0, 89.0, 1e4, 3e38]


def exact(x: float) -> tuple[float, float, float]:
    """Returns mish, mish' and mish'' in double, by asymptotic formulas whose error is below 1e-12 in these tails."""
    if x > 14:
        return x, 1 + (4 * x - 2) * math.exp(-2 * x), (8 - 8 * x) * math.exp(-2 * x)
    e = math.exp(x)
    return x * e, (1 + x) * e, (2 + x) * e


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ends(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor(ENDS, dtype=dtype, device=device, requires_grad=True)
    value = extension_cpp.mish(x)
    (first,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    eps = torch.finfo(dtype).eps
    for i, at in enumerate(x.double().tolist()):
        for name, tensor, expected in zip(("mish", "mish'", "mish''"), (value, first, second), exact(at), strict=True):
            got = tensor[i].item()
            # The bound is 16 roundings, and 4 times the smallest bfloat16 number. Derivatives also get 2e-15, because
            # above 20 they are computed as exactly 1 and 0.
            bound = 16 * eps * abs(expected) + 4 * 2.0**-133 + (2e-15 if name != "mish" else 0.0)
            assert abs(got - expected) <= bound, f"{name}({at}) = {got}, expected {expected}"

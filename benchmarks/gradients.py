"""Judges the bfloat16 gradients of a model or a loss by those in float32 or float64.

Two figures are computed for each gradient g and its exact value e: the distance |g - e| / |e|, and the scale <g, e> /
<e, e> - 1. A contender may have twice the stock model's distance, and a scale twice as far from 0 as the stock model's.
Contender and stock model make similar roundings in another order, so that their errors have the same size: on models of
16 and 24 layers, a contender's distance was at most 1.3 times the stock model's. The errors of a gradient's elements
are nearly independent and hardly change the scale. The scale therefore shows that a gradient is 1.05 times too large,
even if the distance would allow that. Neither bound is below two roundings to bfloat16.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FLOOR = 2 * torch.finfo(torch.bfloat16).eps
FACTOR = 2
# The largest distance that the stock model's gradients may have. Twice this distance, which contenders may have, must
# stay below 1, the distance of a gradient of zeros.
STOCK = 0.4


@dataclass(frozen=True)
class Error:
    distance: float
    scale: float


Errors = dict[str, Error]  # by the names of the gradients


def error(gradient: Tensor | None, exact: Tensor, by_lines: bool = False) -> Error:
    """Returns the error of a gradient. A missing gradient counts as zeros. With `by_lines` each line along the first of
    several dimensions is compared on its own, and the largest distance and the largest scale are returned."""
    if gradient is None:
        return Error(1.0, -1.0)
    if gradient.shape != exact.shape:
        return Error(math.inf, math.inf)
    count = len(exact) if by_lines and exact.dim() > 1 else 1
    got, exact = gradient.to(exact.dtype).reshape(count, -1), exact.reshape(count, -1)
    sizes = exact.norm(dim=1, keepdim=True)
    is_zero, sizes = sizes == 0, torch.where(sizes == 0, 1, sizes)
    distances = (got - exact).norm(dim=1, keepdim=True) / sizes
    distances = torch.where(is_zero & (distances > 0), math.inf, distances)
    scales = torch.where(is_zero, 0, ((got / sizes) * (exact / sizes)).sum(1, keepdim=True) - 1)
    return Error(distances.max().item(), scales.flatten()[scales.abs().argmax()].item())


def errors(gradients: Mapping[str, Tensor | None], exact: Mapping[str, Tensor]) -> Errors:
    return {name: error(gradients[name], each) for name, each in exact.items()}


def wrong(found: Errors, stock: Errors, floor: float = FLOOR, what: str = "the gradient of ") -> str | None:
    """Describes the first gradient whose error exceeds its bound, or returns None. The stock model's own gradients may
    be STOCK off."""
    for name, each in found.items():
        if found == stock and not each.distance <= STOCK:
            return f"{what}{name} is {each.distance:.3g} off, of at most {STOCK}"
        for figure in ("distance", "scale"):
            value, bound = getattr(each, figure), max(FACTOR * abs(getattr(stock[name], figure)), floor)
            if not abs(value) <= bound:
                return f"{what}{name} has a {figure} of {value:.3g}, of at most {bound:.3g}"
    return None

"""Recognises functions that rotate queries and keys, by calling them on test inputs, as a part of nn.convert."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops, reference
from ..modules import takes
from .formulas import EPS, HALF, Unfit, gradients_agree, outside_modes


class Rotary(NamedTuple):
    """The variant of rotary_embedding that function(q, k, cos, sin, **options) computes, and the inputs it takes."""

    layouts: tuple[str, ...]  # keys of LAYOUTS, one for each number of dimensions that the function takes
    interleaved: bool
    repeats: bool  # only the first half of cos's and sin's columns is used, each for two adjacent columns of q (GLM)
    is_partial: bool  # cos and sin may have fewer columns than q and k
    takes_float: bool  # if q and k are half, cos and sin may be float32, and the results are half


# For each layout: the number of dimensions of q and k, the two dimensions that are swapped for the op, the dimension of
# the tokens, and the number of dimensions of cos and sin.
LAYOUTS = {
    "batch, heads, tokens": (4, None, 2, 3),
    "batch, tokens, heads": (4, (1, 2), 1, 3),
    "tokens, heads": (3, (0, 1), 0, 2),
}


def rotate(function: Any, rotary: Rotary, *args: Any, **options: Any) -> Any:
    """Calls the op if its results are those of the function, or else (other shapes or dtypes) the function itself."""
    q, *others, cos, sin = args
    (k,) = others or (q,)
    for layout in rotary.layouts:
        if _takes(rotary, layout, q, k, cos, sin):
            results = _rotate(rotary, layout, q, k, cos, sin, ops.rotary_embedding if others else _alone)
            return results if others else results[0]
    return function(*args, **options)


def _alone(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Calls the op for one tensor, with a k that has no heads."""
    return ops.rotary_embedding(q, k[..., :0, :, :], cos, sin, interleaved=interleaved)


def in_pairs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function of q, k, cos and sin that calls a function of x, cos and sin for q and for k."""
    return lambda q, k, cos, sin, **options: (function(q, cos, sin, **options), function(k, cos, sin, **options))


def _takes(rotary: Rotary, layout: str, q: Any, k: Any, cos: Any, sin: Any) -> bool:
    tensors = q, k, cos, sin
    if not all(isinstance(each, Tensor) and takes(each) for each in tensors) or torch.jit.is_tracing():
        return False
    dims, _, tokens, table_dims = LAYOUTS[layout]
    if q.dim() != dims or k.dim() != dims or cos.dim() != table_dims or cos.shape != sin.shape:
        return False
    if q.dtype is not k.dtype or cos.dtype is not sin.dtype or cos.requires_grad or sin.requires_grad:
        return False
    if cos.dtype is not q.dtype and not (rotary.takes_float and q.dtype in HALF and cos.dtype is torch.float32):
        return False
    width, rotated = q.shape[-1], cos.shape[-1]
    if rotated % 2 or rotated > width or k.shape[-1] != width or not (rotary.is_partial or rotated == width):
        return False
    if q.shape[tokens] != cos.shape[-2] or k.shape[tokens] != cos.shape[-2]:
        return False
    return dims == 3 or (q.shape[0] == k.shape[0] and cos.shape[0] in (1, q.shape[0]))


def _rotate(
    rotary: Rotary, layout: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, op: Any
) -> tuple[Tensor, Tensor]:
    swapped = LAYOUTS[layout][1]
    if rotary.repeats:
        cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, -1) for table in (cos, sin))
    if swapped is None:
        return op(q, k, cos, sin, interleaved=rotary.interleaved)
    q, k = op(q.transpose(*swapped), k.transpose(*swapped), cos, sin, interleaved=rotary.interleaved)
    return q.transpose(*swapped), k.transpose(*swapped)


# ---- recognising rotary functions ----


@outside_modes()
def recognise(rotation: Callable[..., Any], options: dict[str, Any]) -> Rotary:
    """Returns the variant that a function of q, k, cos, sin computes, found by calling the function on test inputs."""

    def function(*inputs: Tensor) -> Any:
        return rotation(*inputs, **options)

    for interleaved, repeats in ((False, False), (True, False), (True, True)):
        rotary = Rotary((), interleaved, repeats, False, False)
        # The comparison is in float32, because some functions compute in float32 even for float64 inputs.
        layouts = tuple(layout for layout in LAYOUTS if _agrees(function, rotary, layout, torch.float32))
        if layouts:
            break
    else:
        raise Unfit("computes something else than rotary_embedding")

    def agrees(*args: Any) -> bool:
        return all(_agrees(function, rotary, layout, *args) for layout in layouts)

    if not all(_gradients_agree(function, rotary, layout) for layout in layouts):
        raise Unfit("computes rotary_embedding, but its gradients are others")
    for dtype in HALF:
        if not agrees(dtype):
            raise Unfit(f"computes rotary_embedding, but in {dtype} it is further from it than roundings explain")
    is_partial, takes_float = agrees(torch.float32, None, 4), all(agrees(dtype, torch.float32) for dtype in HALF)
    return Rotary(layouts, interleaved, repeats, is_partial, takes_float)


def _probe(layout: str, dtype: torch.dtype, tables: torch.dtype, rotated: int) -> list[Tensor]:
    """Makes q, k, cos and sin for a test call. All sizes differ, and so do all columns of cos and sin."""
    generator = torch.Generator().manual_seed(0)
    dims, swapped, *_ = LAYOUTS[layout]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = draw(2, 3, 5, 8), draw(2, 4, 5, 8)
    cos, sin = draw(2, 5, rotated), draw(2, 5, rotated)
    if dims == 3:
        q, k, cos, sin = q[0], k[0], cos[0], sin[0]
    if swapped is not None:
        q, k = q.transpose(*swapped), k.transpose(*swapped)
    return [q.to(dtype), k.to(dtype), cos.to(tables), sin.to(tables)]


def _call(function: Callable[..., Any], inputs: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Calls the function. Returns None if it raises, or its results do not have the shapes and dtypes of q and k."""
    try:
        with torch.random.fork_rng(devices=[]):
            results = function(*inputs)
    except Exception:  # unknown code may raise anything, and then it does not compute our formula
        return None
    if not isinstance(results, (tuple, list)) or not all(isinstance(y, Tensor) for y in results):
        return None
    forms = [[(each.shape, each.dtype) for each in tensors] for tensors in (results, inputs[:2])]
    return (results[0], results[1]) if forms[0] == forms[1] else None


def _agrees(
    function: Any, rotary: Rotary, layout: str, dtype: torch.dtype, tables: torch.dtype | None = None, rotated: int = 8
) -> bool:
    """Returns whether a function computes the formula, which is computed in float64. If cos and sin have a batch
    dimension, the function is also called with one batch element of them for all of q and k.

    The function rounds two products and a sum. Each rounding is half an eps of at most |x cos| + |x sin|.
    """
    with torch.no_grad():
        for batch in (slice(None), slice(1)) if LAYOUTS[layout][0] == 4 else (slice(None),):
            q, k, cos, sin = _probe(layout, dtype, tables or dtype, rotated)
            inputs = [q, k, cos[batch], sin[batch]]
            found = _call(function, [each.clone() for each in inputs])
            if found is None:
                return False
            q, k, cos, sin = (each.double() for each in inputs)
            exact = _rotate(rotary, layout, q, k, cos, sin, reference.rotary_embedding)
            bound = 4 * EPS[dtype] * max(q.abs().max(), k.abs().max()) * max(cos.abs().max(), sin.abs().max())
            if not all(bool(((got.double() - y).abs() <= bound).all()) for got, y in zip(found, exact, strict=True)):
                return False
    return True


def _gradients_agree(function: Callable[..., Any], rotary: Rotary, layout: str) -> bool:
    """Returns whether the gradients of q and k are the formula's, within about 100 eps. A missing term is of size 1."""
    q, k, cos, sin = _probe(layout, torch.float32, torch.float32, 8)
    inputs = [q.requires_grad_(), k.requires_grad_()]
    found = _call(function, [q * 1, k * 1, cos.clone(), sin.clone()])
    exact = _rotate(rotary, layout, q, k, cos, sin, reference.rotary_embedding)
    return found is not None and gradients_agree(found, inputs, exact, inputs, 1e-5)

"""Defines the activations that nn.convert knows, and recognises modules that compute them on test inputs (probes)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import modules as nn
from .. import ops, reference
from .formulas import DTYPES, EPS, Unfit, gradients_agree, result_dtype, run, twin_of, with_results


class Known(NamedTuple):
    """An activation for which this package has an op, alone and in a gated product."""

    function: str  # names the op, the function in torch.nn.functional, and the formula in reference.py
    gated: str  # the op for activation(gate) * up
    module: type[torch.nn.Module]  # the module of torch.nn; the names in `options` are also attributes of it
    options: dict[str, Any]  # keyword arguments of function, gated and module
    backward_options: tuple[bool, ...] = ()  # the arguments of `gated`'s backward operator for `options`


# The activations by their names in Converted.changed. The name is `function` for PyTorch's default options. A new
# activation needs only an entry here.
TANH = " with approximate='tanh'"
KNOWN = {
    "silu": Known("silu", "swiglu", nn.SiLU, {}),
    "gelu": Known("gelu", "geglu", nn.GELU, {"approximate": "none"}, (False,)),
    f"gelu{TANH}": Known("gelu", "geglu", nn.GELU, {"approximate": "tanh"}, (True,)),
}


def name_of_product(name: str) -> str:
    """Returns the name in Converted.changed of the gated product whose activation has this name."""
    return name.replace(KNOWN[name].function, KNOWN[name].gated)


class Activation(NamedTuple):
    """The activation that a module computes for each element."""

    function: str  # a key of KNOWN
    input: str  # the name of forward's argument
    results: tuple[str, ...]  # the dtype rule (a key of formulas.RESULTS) in each context

    def __call__(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        return activation(x, self.function, self.results)

    def __str__(self) -> str:
        return self.function


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor has no dtype
def activation(x: Tensor, function: str, results: tuple[str, ...]) -> Tensor:
    dtype, known = result_dtype(results, x), KNOWN[function]
    op = getattr(ops, known.function)
    if dtype is x.dtype:
        return op(x, **known.options)
    return op(x.to(torch.promote_types(x.dtype, dtype)), **known.options).to(dtype)


def _exact(function: str, x: Tensor) -> Tensor:
    known = KNOWN[function]
    return getattr(reference, known.function)(x, **known.options)


def may_be_activation(module: torch.nn.Module) -> bool:
    held = (*module._parameters.values(), *module._buffers.values(), *module._modules.values())
    return all(each is None for each in held)


def is_asked_for(module: torch.nn.Module) -> bool:
    """Returns whether ``left`` must say why this module is not changed, because its class looks like an activation."""
    name = type(module).__name__.lower()
    is_torchs = isinstance(module, tuple(getattr(torch.nn, known.module.__name__) for known in KNOWN.values()))
    return is_torchs or (may_be_activation(module) and any(known.function in name for known in KNOWN.values()))


def recognise(module: torch.nn.Module, input: str) -> Activation:
    """Returns the activation that a module computes, found by running the module on test inputs."""
    if getattr(module, "inplace", False):
        raise Unfit("it works in place, which the op could only copy")
    for function in KNOWN:
        if not _agrees(module, function, torch.float64):
            continue
        for dtype in DTYPES:
            if not _agrees(module, function, dtype):
                raise Unfit(f"it computes {function}, but in {dtype} it is further from it than roundings explain")
        if not _gradients_agree(module, function):
            raise Unfit(f"it computes {function}, but its gradients are others")
        return Activation(function, input, with_results(module, function, 64))
    raise Unfit(f"it computes none of {', '.join(KNOWN)}")


# The relative error allowed in float64, because some activations (FastGELUActivation) have constants of about ten
# digits. gelu and its tanh form differ by 1e-4, which is far more.
CONSTANTS = 1e-9


def _agrees(module: torch.nn.Module, function: str, dtype: torch.dtype) -> bool:
    """Returns whether a module in `dtype` computes the function, in training and evaluation, on 1 to 4 dimensions.

    The exact result is computed in float64. The bound is 8 eps of the input, not of the result, because many gelus
    compute x * (1 + tanh(...)), where 1 + tanh cancels. Half of the bound is for roundings of half an eps each: those
    of the sum and of two products, and four in the polynomial, which tanh's slope reduces to 0.45 of one. The other
    half is for the errors of PyTorch's functions.
    """
    dense = torch.linspace(-30, 30, 2403, dtype=torch.float64)
    x = torch.cat([dense, torch.tensor([-1e4, -1e-3, 0.0, 1e-3, 1e4], dtype=torch.float64)]).to(dtype)
    exact = _exact(function, x.double())
    bound = max(8 * EPS[dtype], CONSTANTS) * x.double().abs() + torch.finfo(dtype).tiny
    if dtype is torch.float16:
        bound += EPS[dtype] * torch.finfo(dtype).tiny  # the rounding of subnormal products
    for training, shape in ((True, (-1,)), (False, (2, -1)), (True, (2, 2, -1)), (False, (2, 2, 1, -1))):
        with torch.no_grad():
            y = run(twin_of(module, [], training=training), x.reshape(shape))
        if y is None or y.dtype is not dtype or not bool(((y.double().flatten() - exact).abs() <= bound).all()):
            return False
    return True


def _gradients_agree(module: torch.nn.Module, function: str) -> bool:
    for training in (True, False):
        x = torch.linspace(-30, 30, 601, dtype=torch.float64, requires_grad=True)
        y = run(twin_of(module, [], training=training), x * 1)
        if not gradients_agree([y], [x], [_exact(function, x)], [x], 30 * CONSTANTS):
            return False
    return True

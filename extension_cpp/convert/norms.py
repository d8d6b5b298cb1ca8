"""Recognises norms over the last dimension by running modules on test inputs (probes), as a part of nn.convert."""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from . import formulas
from .formulas import EPS, HALF, Unfit, parameters_of


class Options(NamedTuple):
    """The arguments with which an op computes a norm module at one call."""

    shape: Any  # the normalized shape; None means the last dimension
    weight: Tensor | None
    bias: Tensor | None
    centered: bool  # True: layer_norm, False: rms_norm
    offset: int  # a number added to the weight
    eps: Any
    results: tuple[str, ...]  # the dtype rule (a key of formulas.RESULTS) in each context


class Norm(NamedTuple):
    """The formula of a norm over the last dimension: xhat * (offset + weight) + bias."""

    centered: bool  # as in Options
    offset: int
    eps: str  # name of the attribute with eps; `weight` and `bias` also name attributes
    weight: str | None
    bias: str | None
    input: str  # the name of forward's argument
    results: tuple[str, ...]

    def __call__(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        return norm(x, self.options(module))

    def options(self, module: torch.nn.Module) -> Options:
        weight: Tensor | None = getattr(module, self.weight) if self.weight else None
        bias: Tensor | None = getattr(module, self.bias) if self.bias else None
        return Options(None, weight, bias, self.centered, self.offset, getattr(module, self.eps), self.results)

    def __str__(self) -> str:
        function = "layer_norm" if self.centered else "rms_norm"
        return f"{function} with {self.offset} + {self.weight}" if self.offset else function


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor has no dtype
def norm(x: Tensor, options: Options) -> Tensor:
    dtype = formulas.result_dtype(options.results, x, options.weight)
    if dtype is not x.dtype:
        x = x.to(torch.promote_types(x.dtype, dtype))
    op: Any = ops.layer_norm if options.centered else ops.rms_norm
    y = op(x, *_arguments(x, options))
    return y if dtype is y.dtype else y.to(dtype)


def add_norm(x: Tensor, residual: Tensor, p: float, training: bool, options: Options) -> tuple[Tensor, Tensor] | None:
    """Computes the norm of ``s = residual + dropout(x, p)``, and ``s``, by one kernel. Returns None if the kernel does
    not accept both tensors, or if a separate addition and norm would give results of other dtypes."""
    is_plain = x.dtype is torch.float32 or formulas.context_of(x) == 0  # autocast casts other dtypes
    if not is_plain or not formulas.can_be_joined(x, residual, options.results, options.weight):
        return None
    op: Any = ops.add_layer_norm if options.centered else ops.add_rms_norm
    return op(x, residual, *_arguments(x, options), p, training)


def _arguments(x: Tensor, options: Options) -> tuple[Any, ...]:
    """Returns the arguments of the op after x, in dtypes that the op accepts beside x."""
    shape, weight, bias, centered, offset, eps, _ = options
    if shape is None:
        shape = formulas.shape_of(x if weight is None else weight)[-1:]
    arithmetic = torch.float64 if x.dtype is torch.float64 else torch.float32
    if weight is not None and offset:
        weight = offset + weight.to(arithmetic)
    if weight is not None and weight.dtype != x.dtype:
        weight, bias = weight.to(arithmetic), None if bias is None else bias.to(arithmetic)
    return (shape, weight, bias, eps) if centered else (shape, weight, eps)


# ---- recognising them ----


def recognise(module: torch.nn.Module, input: str) -> Norm:
    """Returns the formula that a module computes, found by running the module on test inputs."""
    names, shapes = list(parameters_of(module)), {tuple(p.shape) for p in parameters_of(module).values()}
    classes = type(module).__mro__[: type(module).__mro__.index(torch.nn.Module)]
    held = {name for each in (module, *classes) for name, value in vars(each).items() if isinstance(value, float)}
    floats = sorted(held, key=lambda name: ("eps" not in name, name))
    if any(buffer is not None for buffer in module._buffers.values()):
        raise Unfit("it has buffers")
    for name, value in vars(module).items():
        if any(isinstance(x, Tensor) for x in torch.utils._pytree.tree_leaves(value)) and name != "_parameters":
            raise Unfit(f"its {name} is a tensor and neither a parameter nor a buffer")
    if any(0 in shape for shape in shapes):
        raise Unfit("its parameters are empty, as sharding leaves them; convert the model before it is sharded")
    if len(names) > 2 or len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise Unfit("it has other parameters than a weight and a bias over the last dimension")
    if not floats:
        raise Unfit("none of its attributes is a number that could be eps")
    weight, bias = (*names, None, None)[:2]
    width = next(iter(shapes))[0] if shapes else 64
    if width < 2:
        raise Unfit("its rows are too short to tell what it computes")
    for eps, centered, offset in itertools.product(floats, (False, True), (0, 1)):
        if (offset and weight is None) or (bias is not None and not centered):
            continue
        formula = Norm(centered, offset, eps, weight, bias, input, ())
        if any(
            all(_agrees(module, formula, width, torch.float32, dims, training=training) for dims in (2, 3, 4))
            for training in (True, False)
        ):
            break
    else:
        raise Unfit("it computes neither layer_norm nor rms_norm over the last dimension")
    _check(module, formula, width, floats)
    return formula._replace(results=formulas.with_results(module, formula, width))


def _check(module: torch.nn.Module, formula: Norm, width: int, floats: list[str]) -> None:
    """Raises Unfit if a module computes the formula only in training or in evaluation, only in float32, only for its
    present attributes, or with other gradients."""
    for training in (True, False):
        mode = {"training": training}
        if not _agrees(module, formula, width, torch.float32, 3, **mode):
            raise Unfit(f"it computes {formula} in {'evaluation' if training else 'training'} only")
        if not _gradients_agree(module, formula, width, **mode):
            raise Unfit(f"it computes {formula}, but its gradients are others")
        for name in floats:
            other = {name: 1.5 * getattr(module, name) + (0.0 if getattr(module, name) else 0.25)}
            if not _agrees(module, formula, width, torch.float32, 3, **mode, **other):
                raise Unfit(f"it computes {formula}, but what it does with its {name} is something else")
        for dtype in HALF:
            if not _agrees(module, formula, width, dtype, 3, **mode):
                raise Unfit(f"it computes {formula}, but in {dtype} it is further from it than roundings explain")


def _probe(formula: Norm, eps: float, width: int, dtype: torch.dtype, dims: int) -> list[Tensor]:
    """Makes a weight, a bias, and rows with mean 0, with mean 3, and so small that eps matters."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((6, width), generator=generator, dtype=torch.float64)
    rows[2:4] += 3
    rows[4:] *= abs(eps) ** 0.5
    weights = [torch.randn(width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
    x = rows.to(dtype).reshape((6, width) if dims == 2 else (2, *(1,) * (dims - 3), 3, width))
    return [x, *weights[: (formula.weight is not None) + (formula.bias is not None)]]


def _exact(formula: Norm, eps: float, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Computes the formula in plain tensor operations."""
    xhat = x - (x.mean(-1, keepdim=True) if formula.centered else 0)
    xhat = xhat * (xhat.square().mean(-1, keepdim=True) + eps).rsqrt()
    scaled = xhat if weight is None else xhat * (formula.offset + weight)
    return scaled if bias is None else scaled + bias


def _agrees(
    module: torch.nn.Module, formula: Norm, width: int, dtype: torch.dtype, dims: int, **attributes: Any
) -> bool:
    """Returns whether a module with these attributes changed gives the formula's values, computed in float64.

    In float32 the bound covers sums of up to 2^16 squares that are added in a tree, and x - mean (16 to 20 roundings of
    half an eps each). In half types it covers the roundings of xhat, a product, the result and the row's statistics.
    """
    eps = attributes.get(formula.eps, getattr(module, formula.eps))
    x, *parameters = _probe(formula, eps, width, dtype, dims)
    with torch.no_grad():
        y = formulas.run(formulas.twin_of(module, parameters, **attributes), x.clone())
        if y is None:
            return False
        exact = _exact(formula, eps, x.double(), *(parameter.double() for parameter in parameters))
        bound = (16 if dtype is torch.float32 else 4) * EPS[dtype] * exact.abs().max()
        return bool((y.double() - exact).abs().max() <= bound)


def _gradients_agree(module: torch.nn.Module, formula: Norm, width: int, **attributes: Any) -> bool:
    """Returns whether a module's gradients are the formula's. The bound, 1e-3 of the row's largest gradient, is far
    above the rounding errors, which are about 100 eps of it, and far below a missing term."""
    eps = getattr(module, formula.eps)
    x, *parameters = _probe(formula, eps, width, torch.float32, 2)
    leaves = [each.double().requires_grad_() for each in (x, *parameters)]
    twin, x = formulas.twin_of(module, parameters, **attributes), x.clone().requires_grad_()
    y = formulas.run(twin, x * 1)  # forward may write into its input, which PyTorch forbids for a leaf
    inputs = [x, *parameters_of(twin).values()]
    return formulas.gradients_agree([y], inputs, [_exact(formula, eps, *leaves)], leaves, 1e-3)

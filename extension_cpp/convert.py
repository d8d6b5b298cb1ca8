"""nn.convert: an existing model over this package's ops, in place.

A module is converted by changing its class, so that it stays the same object with the same parameters, buffers, hooks
and training state, wherever in the model and under however many names it is registered.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from extension_cpp import info, nn, ops

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALF)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


class Converted(NamedTuple):
    """What convert did, by the modules' names in the model ("" is the model itself)."""

    changed: dict[str, str]  # the function that it calls now
    left: dict[str, str]  # why


def convert(model: torch.nn.Module) -> Converted:
    """Makes a model's norms and dropouts run on this package's ops, in place.

    Changed are torch.nn.LayerNorm, RMSNorm and Dropout (whose masks are others then, from the same seed), and every
    other module that computes what layer_norm or rms_norm computes over the last dimension, as the RMSNorm classes of
    Hugging Face models do: those are run on a probe, and compared with the formulas, with weight and with 1 + weight
    (Gemma), in float32 and the half types, whatever they are called. They stay instances of their class, and return
    the dtype that they returned. Parameters (shared ones stay shared), their dtypes, buffers, hooks, training state,
    state_dict and repr are as before; a second call changes nothing.

    Inside, the arithmetic is float32 (float64: float64), rounded once. A class that rounds to half before it multiplies
    by the weight (Llama's) rounds twice, so in half types the two differ by up to 1.5 eps of each element; one that
    computes in float32 even for float64 inputs differs there by float32's rounding.

    Args:
        model: any module, compiled, on any device and dtype, also on meta; it may be a norm itself.

    Returns:
        Two dicts by module name, the first name of one that has several: ``changed``, the function that each module
        calls now, and ``left``, a sentence for each norm or dropout that was left as it was. The latter are those that
        compute something else, take more than the input, are parametrized, TorchScript, or had their forward replaced
        on the instance; in-place dropouts, which the op could only copy, and subclasses of Dropout; and those whose
        parameters are of a dtype, device or tensor class that the ops do not take.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.

    What torch.compile compiled before is dropped if anything changed (torch.compiler.reset), as it holds the old code.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"extension_cpp.nn.convert: expected model to be a torch.nn.Module, but got {type(model)}")
    result = Converted({}, {})
    ours = (nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.AddLayerNorm, nn.AddRMSNorm, _FormulaNorm)
    for name, module in model.named_modules():
        if isinstance(module, ours) or not _may_be_norm(module):
            continue
        found = _obstacle(module) or _class_for(module)
        if isinstance(found, type):
            module.__class__ = found
            result.changed[name] = _function(found)
        elif (_called_norm(module) or isinstance(module, torch.nn.Dropout)) and ".parametrizations." not in f".{name}":
            result.left[name] = f"{_class_name(module)}: {found}"
    if result.changed and "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    return result


def _class_name(module: torch.nn.Module) -> str:
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _called_norm(module: torch.nn.Module) -> bool:
    """Whether people would ask why it was left."""
    return isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)) or "norm" in _class_name(module).lower()


def _may_be_norm(module: torch.nn.Module) -> bool:
    """Whether to look closer: what has no modules inside, and torch's own even so (a parametrization is one)."""
    return not module._modules or isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm))


def _parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _obstacle(module: torch.nn.Module) -> str | None:
    """What forbids to change this module, whatever it computes."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript; convert the model before it is scripted"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized; convert the model before the parametrization is registered"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    for name, parameter in _parameters(module).items():
        if type(parameter) not in (torch.nn.Parameter, Tensor):
            return f"its {name} is a {type(parameter).__name__}, not a plain tensor"
        if parameter.dtype not in DTYPES:
            return f"its {name} is {parameter.dtype}, not float64, float32, bfloat16 or float16"
        if parameter.device.type not in ("cpu", "cuda", "meta"):
            return f"its {name} is on {parameter.device}, and the ops run on CPU and CUDA"
        if parameter.is_cuda and not _has_cuda():
            return f"its {name} is on {parameter.device}, and this build has no CUDA kernels"
    return None


@functools.cache
def _has_cuda() -> bool:
    build = info.read_build()
    return build is not None and build.cuda is not None


def _class_for(module: torch.nn.Module) -> type | str:
    """The class that runs the module on our ops, or why there is none."""
    if type(module) is torch.nn.LayerNorm:
        return nn.LayerNorm
    if type(module) is torch.nn.RMSNorm:
        return nn.RMSNorm
    if isinstance(module, torch.nn.Dropout):
        if type(module) is not torch.nn.Dropout:
            return "a subclass of torch.nn.Dropout, and what it draws cannot be compared"
        return "it works in place, which the op could only copy" if module.inplace else nn.Dropout
    with torch.device("cpu"):  # the caller's may be meta
        formula = _recognise(module)
    original: type = type(module)
    return formula if isinstance(formula, str) else _formula_class(original, formula)


def _function(converted: type) -> str:
    if issubclass(converted, _FormulaNorm):
        return str(converted.formula)
    return {nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm", nn.Dropout: "dropout"}[converted]


# ---- modules that compute a known formula ----


class Formula(NamedTuple):
    """What a norm over the last dimension computes: xhat * (offset + weight) + bias."""

    centered: bool  # layer_norm, else rms_norm
    offset: int
    eps: str  # the names of the attributes
    weight: str | None
    bias: str | None
    result: str  # a key of RESULTS

    def __call__(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        weight: Tensor | None = getattr(module, self.weight) if self.weight else None
        bias: Tensor | None = getattr(module, self.bias) if self.bias else None
        dtype = RESULTS[self.result](x.dtype, x.dtype if weight is None else weight.dtype)
        x = x.to(torch.promote_types(x.dtype, dtype))
        arithmetic = torch.float64 if x.dtype is torch.float64 else torch.float32
        if weight is not None and self.offset:
            weight = self.offset + weight.to(arithmetic)
        if weight is not None and weight.dtype != x.dtype:
            weight, bias = weight.to(arithmetic), None if bias is None else bias.to(arithmetic)
        eps = getattr(module, self.eps)
        if self.centered:
            return ops.layer_norm(x, x.shape[-1:], weight, bias, eps).to(dtype)
        return ops.rms_norm(x, x.shape[-1:], weight, eps).to(dtype)

    def __str__(self) -> str:
        function = "layer_norm" if self.centered else "rms_norm"
        return f"{function} with {self.offset} + {self.weight}" if self.offset else function


# The dtype of the result, of x's dtype and the weight's.
RESULTS = {
    "x": lambda x, weight: x,
    "promoted": lambda x, weight: torch.promote_types(x, weight),
    "half weight": lambda x, weight: weight if weight in HALF else torch.promote_types(x, weight),  # T5
}


class _FormulaNorm:
    """Put before a module's class, it computes that class's formula by our ops."""

    formula: ClassVar[Formula]
    original: ClassVar[type]

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)  # type: ignore[arg-type]  # the class it is mixed into has the rest

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles and copies without the class, which no module holds: it is made again."""
        return _blank, (self.original, self.formula), *super().__reduce_ex__(protocol)[2:]


@functools.cache
def _formula_class(original: type, formula: Formula) -> type:
    """A subclass of both, of the original's name: models look for "RMSNorm" in it to initialize weights."""
    names = {"__module__": __name__, "__doc__": original.__doc__, "original": original, "formula": formula}
    return type(original.__name__, (_FormulaNorm, original), names)


def _blank(original: type, formula: Formula) -> torch.nn.Module:
    return object.__new__(_formula_class(original, formula))


# ---- recognising them ----


def _recognise(module: torch.nn.Module) -> Formula | str:
    """The formula that a module computes, found by running it on probes, or why it is none."""
    names, shapes = list(_parameters(module)), {tuple(p.shape) for p in _parameters(module).values()}
    floats = sorted((name for name, value in vars(module).items() if isinstance(value, float)), key=_not_called_eps)
    try:
        taken = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return "its forward has no signature"
    if len(taken) != 1 or taken[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return f"its forward takes ({', '.join(map(str, taken))}), not the input alone"
    if any(buffer is not None for buffer in module._buffers.values()):
        return "it has buffers"
    if len(names) > 2 or len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        return "it has other parameters than a weight and a bias over the last dimension"
    if not floats:
        return "none of its attributes is a number that could be eps"
    weight, bias = (*names, None, None)[:2]
    width = next(iter(shapes))[0] if shapes else 64
    if width < 2:
        return "its rows are too short to tell what it computes"
    for centered, offset, eps in (
        (centered, offset, eps) for eps in floats for centered in (False, True) for offset in (0, 1)
    ):
        if (offset and weight is None) or (bias is not None and not centered):
            continue
        formula = Formula(centered, offset, eps, weight, bias, "x")
        if all(_agrees(module, formula, width, torch.float32, dims) for dims in (2, 3, 4)):
            break
    else:
        return "it computes neither layer_norm nor rms_norm over the last dimension"
    for dtype in HALF:
        if not _agrees(module, formula, width, dtype, 3):
            return f"it computes {formula}, but in {dtype} it is further from it than roundings of the result explain"
    results = list(_result_dtypes(module, width))
    for rule, dtype_of in RESULTS.items():
        if all(dtype_of(x, w) == result for x, w, result in results):
            return formula._replace(result=rule)
    return f"it computes {formula}, with results of dtypes that follow no known rule"


def _not_called_eps(name: str) -> bool:
    return "eps" not in name


def _run(module: torch.nn.Module, x: Tensor, parameters: list[Tensor]) -> Tensor | None:
    """Runs the class's forward with other parameters, without hooks; None if it raises."""
    twin = copy.copy(module)
    names = _parameters(module)
    held = {name: None for name in module._parameters}
    twin._parameters = {**held, **dict(zip(names, map(torch.nn.Parameter, parameters), strict=True))}
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
            y = twin.forward(x)
    except Exception:  # whatever a stranger's code raises: it is not our formula
        return None
    return y if isinstance(y, Tensor) and y.shape == x.shape and y.device == x.device else None


def _agrees(module: torch.nn.Module, formula: Formula, width: int, dtype: torch.dtype, dims: int) -> bool:
    """Compares with the formula in float64, on rows of spread 1, of mean 3, and so small that eps counts.

    The bound in float32 is that of sums of up to 2^16 squares, added in a tree, and of x - mean at that mean (16 to 20
    roundings, half an eps each); in half, of an xhat, a product and a result rounded, and a row's statistics.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((6, width), generator=generator, dtype=torch.float64)
    eps = getattr(module, formula.eps)
    rows[2:4] += 3
    rows[4:] *= abs(eps) ** 0.5
    weight, bias = (torch.randn(width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    x = rows.to(dtype).reshape((6, width) if dims == 2 else (2, *(1,) * (dims - 3), 3, width))
    y = _run(module, x.clone(), [weight, bias][: len(_parameters(module))])
    if y is None:
        return False
    exact = x.double() - (x.double().mean(-1, keepdim=True) if formula.centered else 0)
    exact = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    exact = exact * (formula.offset + weight.double()) if formula.weight else exact
    exact = exact + bias.double() if formula.bias else exact
    bound = (16 if dtype is torch.float32 else 4) * EPS[dtype] * exact.abs().max()
    return bool((y.double() - exact).abs().max() <= bound)


def _result_dtypes(module: torch.nn.Module, width: int) -> Iterator[tuple[torch.dtype, torch.dtype, torch.dtype]]:
    """x's dtype, the parameters' and the result's, for all that the module takes."""
    count = len(_parameters(module))
    for x in DTYPES:
        for weight in DTYPES if count else (x,):
            y = _run(module, torch.ones(2, 3, width, dtype=x), [torch.ones(width, dtype=weight)] * count)
            if y is not None:
                yield x, weight, y.dtype

"""Provides helpers of nn.convert: classes that compute a known formula, functions that run modules on test inputs."""

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from .. import modules as nn
from ..command import info

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALF)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


class Unfit(Exception):
    """Raised if something cannot be changed. The message is the part of a sentence that says why. functools.cache does
    not cache exceptions, so that a cached function that raised Unfit runs again at the next call."""


# Rules for the dtype of a module's result, as functions of x's dtype, the weight's dtype and the device type.
RESULTS = {
    "x": lambda x, weight, device: x,
    "promoted": lambda x, weight, device: torch.promote_types(x, weight),
    "half weight": lambda x, weight, device: weight if weight in HALF else torch.promote_types(x, weight),  # T5
    # Two rules under autocast: PyTorch's layer_norm, and norms that cast the input to autocast's dtype (Nemotron).
    "float32 at least": lambda x, weight, device: torch.promote_types(x, torch.float32),
    "autocast": lambda x, weight, device: x if x is torch.float64 else torch.get_autocast_dtype(device),
}

# The contexts in which PyTorch has different dtype rules: without autocast, and under autocast for a device type.
CONTEXTS = ("", "cpu", "cuda")


def context_of(x: Tensor) -> int:
    """Returns the index in CONTEXTS of the rules that apply to x now."""
    if not torch._C._is_any_autocast_enabled():  # a fast test: to ask for x's device takes longer
        return 0
    device = x.device.type
    return CONTEXTS.index(device) if device in CONTEXTS and torch.is_autocast_enabled(device) else 0


def result_dtype(results: tuple[str, ...], x: Tensor, weight: Tensor | None = None) -> torch.dtype:
    """Returns the dtype that a module's result has in the current context."""
    rule = results[context_of(x)]
    if rule == "x":
        return x.dtype
    return RESULTS[rule](x.dtype, x.dtype if weight is None else weight.dtype, x.device.type)


def shape_of(x: Tensor) -> Sequence[int]:
    if not torch.jit.is_tracing():
        return x.shape
    with warnings.catch_warnings():  # sizes are tensors while torch.jit traces
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return [int(size) for size in x.shape]


def can_be_joined(a: Tensor, b: Tensor, results: tuple[str, ...], weight: Tensor | None = None) -> bool:
    """Returns whether one kernel accepts both tensors, and its result has the dtype that the original would return."""
    same = a.dtype is b.dtype and a.device == b.device and shape_of(a) == shape_of(b)
    return same and result_dtype(results, a, weight) is a.dtype


class Generated(type):
    """The metaclass of the classes that convert makes. Instances and subclasses of the original class also count as
    instances and subclasses of the generated class. Tools such as FSDP's policies take the class of one layer to find
    all layers, of which convert may have changed only some."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Reads only the __mro__, because torch.compile cannot trace the check of `type`. issubclass would also recurse
        without end for an abstract class, whose check asks its subclasses. A subclass of a generated class does not
        accept instances of the original class."""
        original = vars(cls).get("original")
        return cls in subclass.__mro__ or (original in cls.__bases__ and original in subclass.__mro__)


def generated_class(base: type, original: type, names: dict[str, Any]) -> type:
    """Makes a subclass of `base` and the original, with the original's names, which tools and models look for."""
    kind = type(original)
    kept = {name: getattr(original, name) for name in ("__doc__", "__module__", "__qualname__")}
    try:
        metaclass = Generated if kind is type else type(kind.__name__, (Generated, kind), {})
        return metaclass(original.__name__, (base, original), {**kept, "original": original, **names})
    except Exception as error:  # raised by the original class's metaclass, or a class of it, or __init_subclass__
        raise Unfit(f"its class cannot be subclassed ({error})") from error


class GeneratedModule(nn.NotScriptable):
    """The base class of the classes that convert puts in front of a module's class."""

    original: ClassVar[type]
    made_by: ClassVar[tuple[Any, ...]]  # the function that made the class, and its arguments, the first the original

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies the module without its generated class, which loading makes again."""
        if not is_generated(type(self)):  # a subclass made elsewhere, with its own way to pickle
            return super().__reduce_ex__(protocol)
        return blank, type(self).made_by, *super().__reduce_ex__(protocol)[2:]


def blank(make: Any, original: type, *arguments: Any) -> torch.nn.Module:
    """Makes an instance of a generated class, without attributes."""
    try:
        return object.__new__(make(original, *arguments))
    except Unfit as reason:
        raise RuntimeError(
            f"extension_cpp.nn.convert: a converted {original.__name__} cannot be loaded here, since {reason}"
        ) from None


def is_generated(kind: type) -> bool:
    """Returns whether convert made this class itself, and not a subclass of such a class."""
    return GeneratedModule in kind.__bases__[0].__bases__


class FormulaModule(GeneratedModule):
    """Computes the formula of a module's class with this package's ops."""

    formula: ClassVar[Any]  # an Activation or a Norm


def is_formula_class(kind: type) -> bool:
    """Returns whether formula_class made this class."""
    return kind.__bases__[0] is FormulaModule


@functools.cache
def formula_class(original: type, formula: Any) -> type:
    x, namespace = formula.input, {"takes": nn.takes}  # callers may pass forward's argument by the original's name
    # Dynamo of torch 2.10 does not call a named tuple, only its methods.
    call = f"self.formula.__call__(self, {x}) if takes({x}) else self.original.forward(self, {x})"
    exec(f"def forward(self, {x}):\n    return {call}", namespace)
    made_by = formula_class, original, formula
    names = {"formula": formula, "forward": namespace["forward"], "made_by": made_by}
    return generated_class(FormulaModule, original, names)


# ---- which modules may be changed ----

SHARDING = "fully_shard, parallelize_module or distribute_module"  # these replace parameters by DTensors


def obstacle_of(module: torch.nn.Module) -> str | None:
    """Returns why this module must not be changed, whatever it computes, or None if it may be changed."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript, which cannot call the ops' functions; convert the model and export or trace it"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized; convert the model before the parametrization is registered"
    forward: Any = vars(module).get("forward")
    is_bound = getattr(forward, "__self__", None) is module
    if forward is not None and not (is_bound and forward.__func__ is type(module).forward):
        return "its forward was replaced on the instance"
    tensors = parameters_of(module)
    if isinstance(module, torch.nn.CrossEntropyLoss) and module.weight is not None:
        tensors["weight"] = module.weight
    for name, parameter in tensors.items():
        if type(parameter) not in (torch.nn.Parameter, Tensor, FakeTensor):
            reason = f"its {name} is a {type(parameter).__name__}, not a plain tensor"
            return f"{reason}; convert the model before {SHARDING}" if "DTensor" in reason else reason
        if parameter.dtype not in DTYPES:
            return f"its {name} is {parameter.dtype}, not float64, float32, bfloat16 or float16"
        if parameter.device.type not in ("cpu", "cuda", "meta"):
            return f"its {name} is on {parameter.device}, and the ops run on CPU and CUDA"
        if parameter.is_cuda and info.read_build().cuda is None:
            return f"its {name} is on {parameter.device}, and this build has no CUDA kernels"
    return None


# ---- running modules on probes ----


def parameters_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def twin_of(module: torch.nn.Module, parameters: list[Tensor], **attributes: Any) -> torch.nn.Module:
    """Makes a module of the same class with other parameters and attributes, whose forward runs without hooks."""
    twin = copy.copy(module)
    vars(twin).pop("forward", None)
    given = dict(zip(parameters_of(module), map(torch.nn.Parameter, parameters), strict=True))
    twin._parameters = {**dict.fromkeys(module._parameters), **given}
    vars(twin).update(attributes)
    return twin


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Switches off the caller's modes, as a context or a decorator, so that modules compute what they would in a new
    process. What convert learns and caches must not depend on the modes of its caller."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        while torch._C._len_torch_function_stack():  # a default device is a function mode, too
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        for mode in (torch.inference_mode(False), torch.enable_grad(), autocast("")):
            stack.enter_context(mode)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        torch.set_default_dtype(torch.float32)
        torch.set_deterministic_debug_mode("default")
        yield


@contextlib.contextmanager
def autocast(device: str) -> Iterator[None]:
    """Enables autocast, with PyTorch's default dtypes, for one device type, which may be missing, or for none ("")."""
    with contextlib.ExitStack() as stack:
        for each, dtype in (("cpu", torch.bfloat16), ("cuda", torch.float16)):
            stack.callback(torch.set_autocast_enabled, each, torch.is_autocast_enabled(each))
            stack.callback(torch.set_autocast_dtype, each, torch.get_autocast_dtype(each))
            torch.set_autocast_enabled(each, each == device)
            torch.set_autocast_dtype(each, dtype)
        yield


def run(twin: torch.nn.Module, x: Tensor, context: str = "") -> Tensor | None:
    """Runs the forward of a module's class. Returns None if it raises, or returns another shape or device than x's."""
    try:
        with autocast(context), torch.random.fork_rng(devices=[]):
            y = twin.forward(x)
    except Exception:  # unknown code may raise anything, and then it does not compute our formula
        return None
    return y if isinstance(y, Tensor) and y.shape == x.shape and y.device == x.device else None


def gradients_agree(
    found: Any, inputs: Sequence[Tensor], exact: Sequence[Tensor], exact_inputs: Sequence[Tensor], bound: float
) -> bool:
    """Returns whether the results of unknown code have the gradients of the exact results, within `bound` of the
    largest gradient in each row. They differ if the code detaches a term. The gradients of the results are 1 or -1, so
    that no element counts less than another."""
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator).sign().to(y.dtype) for y in exact]
    try:
        got = torch.autograd.grad(found, inputs, [grad.to(y.dtype) for grad, y in zip(grads, found, strict=True)])
    except Exception:  # unknown code may raise anything, and a result or an input may have no gradient
        return False
    wanted = torch.autograd.grad(exact, exact_inputs, grads)
    return all(
        bool(((a - b).abs().amax(-1) <= bound * b.abs().amax(-1)).all()) for a, b in zip(got, wanted, strict=True)
    )


def _result_dtypes(
    module: torch.nn.Module, width: int, context: str
) -> dict[tuple[torch.dtype, torch.dtype], torch.dtype]:
    """Returns the result's dtype for each pair of dtypes of x and of the parameters that the module accepts. For CUDA
    the tensors are fake: they have dtypes and need no GPU."""
    count, found = len(parameters_of(module)), {}
    with torch.no_grad(), FakeTensorMode() if context == "cuda" else contextlib.nullcontext():
        device = context or "cpu"
        for x in DTYPES:
            for weight in DTYPES if count else (x,):
                parameters = [torch.ones(width, dtype=weight, device=device)] * count
                y = run(twin_of(module, parameters), torch.ones(2, 3, width, dtype=x, device=device), context)
                if y is not None:
                    found[x, weight] = y.dtype
    return found


def with_results(module: torch.nn.Module, formula: object, width: int) -> tuple[str, ...]:
    """Returns for each of CONTEXTS the rule (a key of RESULTS) that the dtypes of a module's results follow."""
    probed = {context: _result_dtypes(module, width, context) for context in CONTEXTS}
    found = []
    for context, dtypes in probed.items():
        results = {given: y for given, y in dtypes.items() if given in probed[""] or torch.float64 not in given}
        device = context or "cpu"
        rules = (rule for rule, of in RESULTS.items() if all(of(*given, device) == y for given, y in results.items()))
        rule = next(rules, None)
        if rule is None or not results:
            where = f" under autocast on {context}" if context else ""
            raise Unfit(f"it computes {formula}, with results of dtypes that follow no known rule{where}")
        found.append(rule)
    return tuple(found)

"""nn.convert: an existing model over this package's ops, in place, and nn.revert: back.

A module is converted by changing its class, so that it stays the same object with the same parameters, buffers, hooks
and training state, wherever in the model and under however many names it is registered.
"""

import contextlib
import copy
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from extension_cpp import convert_loss, info, nn, ops

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALF)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


class Converted(NamedTuple):
    """What convert or revert did, by the modules' names in the model ("" is the model itself)."""

    changed: dict[str, str]  # the function that it calls now; by revert, its class
    left: dict[str, str]  # why


def convert(model: torch.nn.Module, loss: str = "logits") -> Converted:
    """Makes a model's norms, dropouts, softmaxes and losses run on this package's ops, in place.

    Changed are torch.nn.LayerNorm, RMSNorm, Dropout (whose masks are others then, from the same seed), Softmax,
    LogSoftmax and CrossEntropyLoss, and every other module that computes what layer_norm or rms_norm computes over the
    last dimension, as the RMSNorm classes of Hugging Face models do: those are run on probes, and compared with the
    formulas, with weight and with 1 + weight (Gemma), in float32 and the half types, in training and evaluation,
    gradients too, whatever they are called. They stay instances of their class, take their input by the name that it
    had, and return the dtype that they returned, under autocast, too. Parameters (shared ones stay shared), their
    dtypes, buffers, hooks, training state, state_dict and repr are as before; a second call changes nothing, and revert
    undoes it.

    Changed is the loss of Hugging Face's causal language models, too, where ``loss_function`` is ForCausalLMLoss: it is
    computed from the logits as they are, without a float32 copy, and is float32. With ``loss="linear"`` it is computed
    from the hidden states by linear_cross_entropy, and there are no logits: **where labels are given, the result's
    ``logits`` are None**. Without labels, with ``return_dict=False``, and where something was put on the output layer
    later (LoRA, a hook, a loss_function), forward makes logits as before. Losses have no second derivative.

    Inside, the arithmetic is float32 (float64: float64), rounded once. A class that rounds to half before it multiplies
    by the weight (Llama's) rounds twice, so in half types the two differ by up to 1.5 eps of each element; one that
    computes in float32 even for float64 inputs differs there by float32's rounding.

    Args:
        model: any module, compiled, on any device and dtype, also on meta; it may be a norm itself.
        loss: "logits" or "linear": from what a causal language model's loss is computed. "linear" keeps the scale and
            the softcap of the logits (Granite, Cohere, Gemma) that the model has at the time of this call.

    Returns:
        Two dicts by module name, the first name of one that has several: ``changed``, the function that each module
        calls now, and ``left``, a sentence for each of the kinds above that was left as it was. The latter are those
        that compute something else, take more than the input, are parametrized, TorchScript, or had their forward
        replaced on the instance; in-place dropouts, which the op could only copy, softmaxes without a dimension, and
        subclasses of Dropout, Softmax, LogSoftmax and CrossEntropyLoss; those whose parameters are of a dtype, device
        or tensor class that the ops do not take, or are empty, as sharding leaves them; and models that compute their
        loss without loss_function. A model that cannot have the linear loss is in both: it gets the loss of "logits".
        No module is changed before all are decided.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.
        ValueError: ``loss`` is neither "logits" nor "linear".

    What torch.compile compiled before is dropped if anything changed (torch.compiler.reset), as it holds the old code.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"extension_cpp.nn.convert: expected model to be a torch.nn.Module, but got {type(model)}")
    if loss not in ("logits", "linear"):
        raise ValueError(f"extension_cpp.nn.convert: expected loss to be 'logits' or 'linear', but got {loss!r}")
    result = Converted({}, {})
    ours = (*_replacements().values(), nn.AddLayerNorm, nn.AddRMSNorm, _FormulaNorm)
    classes: list[tuple[str, torch.nn.Module, type]] = []
    losses: list[tuple[str, torch.nn.Module, convert_loss.Plan | None]] = []
    recognised: dict[Any, Formula | str] = {}
    for name, module in model.named_modules():
        if convert_loss.is_causal_lm(module):
            is_replaced, plan, reason = convert_loss.decide(module, loss == "linear", _obstacle)
            if is_replaced or plan is not None:
                losses.append((name, module, plan))
            if reason is not None:
                result.left[name] = f"{_class_name(module)}: {reason}"
        if isinstance(module, ours) or not _may_be_norm(module):
            continue
        found = _obstacle(module) or _class_for(module, recognised)
        if isinstance(found, type):
            classes.append((name, module, found))
        elif _is_asked_for(module) and ".parametrizations." not in f".{name}":
            result.left[name] = f"{_class_name(module)}: {found}"
    for name, module, plan in losses:
        convert_loss.apply(module, plan)
        result.changed[name] = "cross_entropy" if plan is None else "linear_cross_entropy"
        if plan is not None:
            result.changed[f"{name}.{plan.head}".lstrip(".")] = "linear_cross_entropy"
    for name, module, found in classes:
        vars(module).pop("forward", None)  # its class's own, which would stand before the new class's
        module.__class__ = found
        result.changed[name] = _function(found)
    _forget_what_was_compiled(result)
    return result


def revert(model: torch.nn.Module) -> Converted:
    """Undoes convert, in place: every converted module has its class again, and every model its loss.

    Args:
        model: any module; it may be a norm itself.

    Returns:
        Two dicts by module name: ``changed``, the class that each module has again, and ``left``, a sentence for each
        that something else put a class of its own on top of. Modules that were made as extension_cpp.nn.LayerNorm,
        RMSNorm, Dropout, Softmax, LogSoftmax or CrossEntropyLoss become torch.nn's, but for a loss with ``z_loss`` or
        ``softcap``, which is left; the others of extension_cpp.nn have no class to go back to.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"extension_cpp.nn.revert: expected model to be a torch.nn.Module, but got {type(model)}")
    result = Converted({}, {})
    for name, module in model.named_modules():
        original = _original(type(module))
        if isinstance(module, nn.CrossEntropyLoss) and module.extends_torch():
            result.left[name] = f"{_class_name(module)}: torch.nn.CrossEntropyLoss has no z_loss and no softcap"
        elif original is not None:
            vars(module).pop("received", None)  # an output layer's, None between calls
            module.__class__ = original
            result.changed[name] = original.__name__
        elif isinstance(module, (_FormulaNorm, convert_loss.LinearLossModel, convert_loss.Head)):
            result.left[name] = f"{_class_name(module)}: a class was put on top of the converted one; take it off first"
        if convert_loss.restore(module):
            result.changed[name] = _class_name(module)
    _forget_what_was_compiled(result)
    return result


def _replacements() -> dict[type, type]:
    """The classes of torch.nn that have one of the same name in extension_cpp.nn."""
    names = ("LayerNorm", "RMSNorm", "Dropout", "Softmax", "LogSoftmax", "CrossEntropyLoss")
    return {getattr(torch.nn, name): getattr(nn, name) for name in names}


def _original(converted: type) -> type | None:
    """The class that a converted module had."""
    if issubclass(converted, _FormulaNorm) and converted.__bases__[0] is _FormulaNorm:
        return converted.original
    for original, ours in _replacements().items():
        if converted is ours:
            return original
    return convert_loss.original_class(converted)


def _forget_what_was_compiled(result: Converted) -> None:
    if result.changed and "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _class_name(module: Any) -> str:
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def _called_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)) or "norm" in _class_name(module).lower()


# Recognised by their class alone, and reported where they are left.
KINDS = (torch.nn.Dropout, torch.nn.Softmax, torch.nn.LogSoftmax, torch.nn.CrossEntropyLoss)


def _is_asked_for(module: torch.nn.Module) -> bool:
    """Whether people would ask why it was left."""
    return isinstance(module, KINDS) or _called_norm(module)


def _may_be_norm(module: torch.nn.Module) -> bool:
    """Whether to look closer: what has no modules inside, and torch's own even so (a parametrization is one)."""
    return not module._modules or isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm))


def _parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def _obstacle(module: torch.nn.Module) -> str | None:
    """What forbids to change this module, whatever it computes."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is TorchScript, which cannot call the ops' functions; convert the model and export or trace it"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized; convert the model before the parametrization is registered"
    if _is_replaced(module):
        return "its forward was replaced on the instance"
    tensors = _parameters(module)
    if isinstance(module, torch.nn.CrossEntropyLoss) and module.weight is not None:
        tensors["weight"] = module.weight
    for name, parameter in tensors.items():
        if type(parameter) not in (torch.nn.Parameter, Tensor):
            return f"its {name} is a {type(parameter).__name__}, not a plain tensor"
        if parameter.dtype not in DTYPES:
            return f"its {name} is {parameter.dtype}, not float64, float32, bfloat16 or float16"
        if parameter.device.type not in ("cpu", "cuda", "meta"):
            return f"its {name} is on {parameter.device}, and the ops run on CPU and CUDA"
        if parameter.is_cuda and not _has_cuda():
            return f"its {name} is on {parameter.device}, and this build has no CUDA kernels"
    return None


def _is_replaced(module: torch.nn.Module) -> bool:
    """Whether the instance has a forward that is not its class's, as `module.forward = module.forward` leaves."""
    forward = vars(module).get("forward")
    own = isinstance(forward, types.MethodType) and forward.__self__ is module
    return forward is not None and not (own and forward.__func__ is type(module).forward)


@functools.cache
def _has_cuda() -> bool:
    build = info.read_build()
    return build is not None and build.cuda is not None


def _class_for(module: torch.nn.Module, recognised: dict[Any, "Formula | str"]) -> type | str:
    """The class that runs the module on our ops, or why there is none."""
    if type(module) is torch.nn.LayerNorm:
        return nn.LayerNorm
    if type(module) is torch.nn.RMSNorm:
        return nn.RMSNorm
    if isinstance(module, KINDS):
        return _class_by_kind(module)
    state = _plain_state(module)
    formula = recognised.get(state) if state is not None else None
    if formula is None:
        with torch.device("cpu"):  # the caller's may be meta
            formula = recognised[state] = _recognise(module)
    if isinstance(formula, str):
        return formula
    original: type = type(module)
    try:
        return _formula_class(original, formula)
    except Exception as error:  # of its metaclass or its __init_subclass__
        return f"it computes {formula}, but its class cannot be subclassed ({error})"


def _class_by_kind(module: torch.nn.Module) -> type | str:
    """The same for one of KINDS."""
    if type(module) not in KINDS:
        base = next(kind.__name__ for kind in KINDS if isinstance(module, kind))
        does = "draws" if base == "Dropout" else "computes"
        return f"a subclass of torch.nn.{base}, and what it {does} cannot be compared"
    if isinstance(module, torch.nn.Dropout) and module.inplace:
        return "it works in place, which the op could only copy"
    if isinstance(module, (torch.nn.Softmax, torch.nn.LogSoftmax)) and module.dim is None:
        return "its dim is None, so PyTorch chooses it by the input's number of dimensions"
    return _replacements()[type(module)]


def _plain_state(module: torch.nn.Module) -> Any:
    """All that decides what a module computes, but for its parameters' values; None where that cannot be compared."""
    own = {name: value for name, value in vars(module).items() if name not in vars(torch.nn.Module())}
    if any(not isinstance(value, (bool, int, float, str, type(None))) for value in own.values()):
        return None
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in _parameters(module).items())
    buffers = any(buffer is not None for buffer in module._buffers.values())
    return type(module), shapes, buffers, tuple((name, type(value), value) for name, value in sorted(own.items()))


def _function(converted: type) -> str:
    if issubclass(converted, _FormulaNorm):
        return str(converted.formula)
    functions = "layer_norm", "rms_norm", "dropout", "softmax", "log_softmax", "cross_entropy"
    return dict(zip(_replacements().values(), functions, strict=True))[converted]


# ---- modules that compute a known formula ----


class Formula(NamedTuple):
    """What a norm over the last dimension computes: xhat * (offset + weight) + bias."""

    centered: bool  # layer_norm, else rms_norm
    offset: int
    eps: str  # the names of the attributes
    weight: str | None
    bias: str | None
    input: str  # the name of forward's argument
    results: tuple[str, ...]  # keys of RESULTS, one for each of CONTEXTS

    def __call__(self, module: torch.nn.Module, x: Tensor) -> Tensor:
        weight: Tensor | None = getattr(module, self.weight) if self.weight else None
        bias: Tensor | None = getattr(module, self.bias) if self.bias else None
        return _norm(x, weight, bias, self.centered, self.offset, getattr(module, self.eps), self.results)

    def __str__(self) -> str:
        function = "layer_norm" if self.centered else "rms_norm"
        return f"{function} with {self.offset} + {self.weight}" if self.offset else function


# The dtype of the result, of x's dtype, the weight's and the device type.
RESULTS = {
    "x": lambda x, weight, device: x,
    "promoted": lambda x, weight, device: torch.promote_types(x, weight),
    "half weight": lambda x, weight, device: weight if weight in HALF else torch.promote_types(x, weight),  # T5
    # Under autocast: PyTorch's layer_norm, and what casts its input to autocast's dtype (Nemotron).
    "float32 at least": lambda x, weight, device: torch.promote_types(x, torch.float32),
    "autocast": lambda x, weight, device: x if x is torch.float64 else torch.get_autocast_dtype(device),
}

# Where PyTorch's rules for dtypes differ: without autocast, and under that of a device type.
CONTEXTS = ("", "cpu", "cuda")


def _context(device: str) -> int:
    """The index in CONTEXTS of the rules that hold now."""
    return CONTEXTS.index(device) if device in CONTEXTS and torch.is_autocast_enabled(device) else 0


@torch.fx.wrap  # torch.fx records the call: it knows no dtypes
def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    centered: bool,
    offset: int,
    eps: float,
    results: tuple[str, ...],
) -> Tensor:
    device = x.device.type
    dtype = RESULTS[results[_context(device)]](x.dtype, x.dtype if weight is None else weight.dtype, device)
    x = x.to(torch.promote_types(x.dtype, dtype))
    arithmetic = torch.float64 if x.dtype is torch.float64 else torch.float32
    shape = _row_shape(x if weight is None else weight)
    if weight is not None and offset:
        weight = offset + weight.to(arithmetic)
    if weight is not None and weight.dtype != x.dtype:
        weight, bias = weight.to(arithmetic), None if bias is None else bias.to(arithmetic)
    if centered:
        return ops.layer_norm(x, shape, weight, bias, eps).to(dtype)
    return ops.rms_norm(x, shape, weight, eps).to(dtype)


def _row_shape(x: Tensor) -> Any:
    if not torch.jit.is_tracing():
        return x.shape[-1:]
    with warnings.catch_warnings():  # sizes are tensors there; a norm's width is a constant
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        return [int(x.shape[-1])]


class _FormulaNorm:
    """Put before a module's class, it computes that class's formula by our ops."""

    formula: ClassVar[Formula]
    original: ClassVar[type]

    def __prepare_scriptable__(self) -> NoReturn:
        nn.refuse_script(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles and copies without the class, which no module holds: it is made again."""
        if _original(type(self)) is None:  # a class on top, which pickles as classes do
            return super().__reduce_ex__(protocol)
        return _blank, (self.original, self.formula), *super().__reduce_ex__(protocol)[2:]


@functools.cache
def _formula_class(original: type, formula: Formula) -> type:
    """A subclass of both, of the original's name: models look for "RMSNorm" in it to initialize weights."""
    names = {"__module__": __name__, "__doc__": original.__doc__, "original": original, "formula": formula}
    names["forward"] = _forward_of(formula.input)
    return type(original.__name__, (_FormulaNorm, original), names)


def _forward_of(name: str) -> Any:
    """A forward whose argument has the name that the original's has, since it may be called by it."""
    namespace: dict[str, Any] = {}
    exec(f"def forward(self, {name}):\n    return self.formula(self, {name})", namespace)
    return namespace["forward"]


def _blank(original: type, formula: Formula) -> torch.nn.Module:
    return object.__new__(_formula_class(original, formula))


# ---- recognising them ----


def _recognise(module: torch.nn.Module) -> Formula | str:
    """The formula that a module computes, found by running it on probes, or why it is none."""
    names, shapes = list(_parameters(module)), {tuple(p.shape) for p in _parameters(module).values()}
    floats = sorted(_float_attributes(module), key=_not_called_eps)
    try:
        taken = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return "its forward has no signature"
    if len(taken) != 1 or taken[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return f"its forward takes ({', '.join(map(str, taken))}), not the input alone"
    if any(buffer is not None for buffer in module._buffers.values()):
        return "it has buffers"
    for name, value in vars(module).items():
        if any(isinstance(x, Tensor) for x in torch.utils._pytree.tree_leaves(value)) and name != "_parameters":
            return f"its {name} is a tensor and neither a parameter nor a buffer"
    if any(0 in shape for shape in shapes):
        return "its parameters are empty, as sharding leaves them; convert the model before it is sharded"
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
        formula = Formula(centered, offset, eps, weight, bias, taken[0].name, ())
        if any(
            all(_agrees(module, formula, width, torch.float32, dims, training=training) for dims in (2, 3, 4))
            for training in (True, False)
        ):
            break
    else:
        return "it computes neither layer_norm nor rms_norm over the last dimension"
    return _difference(module, formula, width, floats) or _with_results(module, formula, width)


def _float_attributes(module: torch.nn.Module) -> set[str]:
    """Names of the instance's own and of its classes' numbers with a fraction."""
    classes = type(module).__mro__[: type(module).__mro__.index(torch.nn.Module)]
    return {name for each in (module, *classes) for name, value in vars(each).items() if isinstance(value, float)}


def _difference(module: torch.nn.Module, formula: Formula, width: int, floats: list[str]) -> str | None:
    """What else the module does than the formula that it computes in one mode, or None."""
    for training in (True, False):
        mode = {"training": training}
        if not _agrees(module, formula, width, torch.float32, 3, **mode):
            return f"it computes {formula} in {'evaluation' if training else 'training'} only"
        if not _gradients_agree(module, formula, width, **mode):
            return f"it computes {formula}, but its gradients are others"
        for name in floats:
            other = {name: 1.5 * getattr(module, name) + (0.0 if getattr(module, name) else 0.25)}
            if not _agrees(module, formula, width, torch.float32, 3, **mode, **other):
                return f"it computes {formula}, but what it does with its {name} is something else"
        for dtype in HALF:
            if not _agrees(module, formula, width, dtype, 3, **mode):
                return f"it computes {formula}, but in {dtype} it is further from it than roundings explain"
    return None


def _with_results(module: torch.nn.Module, formula: Formula, width: int) -> Formula | str:
    """The formula with the rules for its results' dtypes, or why there is none."""
    taken = {(x, weight) for x, weight, _ in _result_dtypes(module, width, "")}
    found = []
    for context in CONTEXTS:
        results = [
            (x, weight, result)
            for x, weight, result in _result_dtypes(module, width, context)
            if (x, weight) in taken or (context and torch.float64 not in (x, weight))
        ]
        device = context or "cpu"
        rules = (rule for rule, of in RESULTS.items() if all(of(x, w, device) == result for x, w, result in results))
        rule = next(rules, None)
        if rule is None or not results:
            where = f" under autocast on {context}" if context else ""
            return f"it computes {formula}, with results of dtypes that follow no known rule{where}"
        found.append(rule)
    return formula._replace(results=tuple(found))


def _not_called_eps(name: str) -> tuple[bool, str]:
    return "eps" not in name, name


def _twin(module: torch.nn.Module, parameters: list[Tensor], **attributes: Any) -> torch.nn.Module:
    """A module of its class with other parameters and attributes, and without hooks."""
    twin = copy.copy(module)
    vars(twin).pop("forward", None)
    names = _parameters(module)
    held = {name: None for name in module._parameters}
    twin._parameters = {**held, **dict(zip(names, map(torch.nn.Parameter, parameters), strict=True))}
    vars(twin).update(attributes)
    return twin


@contextlib.contextmanager
def _autocast(device: str) -> Iterator[None]:
    """Autocast of a device type alone, "": none; on a machine without the device, too."""
    before = {each: torch.is_autocast_enabled(each) for each in ("cpu", "cuda")}
    try:
        for each in before:
            torch.set_autocast_enabled(each, each == device)
        yield
    finally:
        for each, enabled in before.items():
            torch.set_autocast_enabled(each, enabled)


def _run(twin: torch.nn.Module, x: Tensor, context: str = "") -> Tensor | None:
    """Runs the class's forward; None if it raises."""
    try:
        with _autocast(context), torch.random.fork_rng(devices=[]):
            y = twin.forward(x)
    except Exception:  # whatever a stranger's code raises: it is not our formula
        return None
    return y if isinstance(y, Tensor) and y.shape == x.shape and y.device == x.device else None


def _probe(formula: Formula, eps: float, width: int, dtype: torch.dtype, dims: int) -> list[Tensor]:
    """Rows of spread 1, of mean 3, and so small that eps counts; a weight and a bias."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((6, width), generator=generator, dtype=torch.float64)
    rows[2:4] += 3
    rows[4:] *= abs(eps) ** 0.5
    weights = [torch.randn(width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)]
    x = rows.to(dtype).reshape((6, width) if dims == 2 else (2, *(1,) * (dims - 3), 3, width))
    return [x, *weights[: (formula.weight is not None) + (formula.bias is not None)]]


def _exact(formula: Formula, eps: float, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The formula in plain tensor operations."""
    xhat = x - (x.mean(-1, keepdim=True) if formula.centered else 0)
    xhat = xhat * (xhat.square().mean(-1, keepdim=True) + eps).rsqrt()
    scaled = xhat if weight is None else xhat * (formula.offset + weight)
    return scaled if bias is None else scaled + bias


def _agrees(
    module: torch.nn.Module, formula: Formula, width: int, dtype: torch.dtype, dims: int, **attributes: Any
) -> bool:
    """Compares with the formula in float64, with some of the module's attributes changed.

    The bound in float32 is that of sums of up to 2^16 squares, added in a tree, and of x - mean at that mean (16 to 20
    roundings, half an eps each); in half, of an xhat, a product and a result rounded, and a row's statistics.
    """
    eps = attributes.get(formula.eps, getattr(module, formula.eps))
    x, *parameters = _probe(formula, eps, width, dtype, dims)
    with torch.no_grad():
        y = _run(_twin(module, parameters, **attributes), x.clone())
        if y is None:
            return False
        exact = _exact(formula, eps, x.double(), *(parameter.double() for parameter in parameters))
        bound = (16 if dtype is torch.float32 else 4) * EPS[dtype] * exact.abs().max()
        return bool((y.double() - exact).abs().max() <= bound)


def _gradients_agree(module: torch.nn.Module, formula: Formula, width: int, **attributes: Any) -> bool:
    """Compares the gradients with the formula's, row by row: statistics or a weight that are detached show here.

    The bound is far from rounding, some 100 eps of a row, and far from a missing term, which is as large as the others.
    """
    eps = getattr(module, formula.eps)
    x, *parameters = _probe(formula, eps, width, torch.float32, 2)
    leaves = [each.double().requires_grad_() for each in (x, *parameters)]
    grad_out = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    with torch.enable_grad():
        wanted = torch.autograd.grad(_exact(formula, eps, *leaves), leaves, grad_out.double())
        twin, x = _twin(module, parameters, **attributes), x.clone().requires_grad_()
        y = _run(twin, x * 1)  # not a leaf, which forward could not change in place
        if y is None or not y.requires_grad:
            return False
        own = [x, *_parameters(twin).values()]
        try:
            got = torch.autograd.grad(y, own, grad_out.to(y.dtype), allow_unused=True)
        except Exception:  # of a stranger's backward
            return False
    return all(
        a is not None and bool(((a.double() - b).abs().amax(-1) <= 1e-3 * b.abs().amax(-1)).all())
        for a, b in zip(got, wanted, strict=True)
    )


def _result_dtypes(
    module: torch.nn.Module, width: int, context: str
) -> Iterator[tuple[torch.dtype, torch.dtype, torch.dtype]]:
    """x's dtype, the parameters' and the result's, for all that the module takes there.

    The tensors of CUDA's are fake: they know the dtypes, and need no GPU.
    """
    count = len(_parameters(module))
    with torch.no_grad(), FakeTensorMode() if context == "cuda" else contextlib.nullcontext():
        device = context or "cpu"
        for x in DTYPES:
            for weight in DTYPES if count else (x,):
                parameters = [torch.ones(width, dtype=weight, device=device)] * count
                y = _run(_twin(module, parameters), torch.ones(2, 3, width, dtype=x, device=device), context)
                if y is not None:
                    yield x, weight, y.dtype

"""Implements nn.convert, which makes an existing model call this package's ops, and nn.revert, which undoes it.

A module is converted by changing its class. It stays the same object with the same parameters, buffers, hooks and
training state, in all places and under all names in which it is registered.
"""

import functools
import inspect
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from .. import modules as nn
from . import activations, formulas, forwards, model_loss, norms
from .activations import KNOWN
from .formulas import Unfit, obstacle_of, parameters_of


class Converted(NamedTuple):
    """What convert or revert did, by the names of the modules in the model ("" is the model itself)."""

    changed: dict[str, str]  # for convert, the function that the module calls now; for revert, its class
    left: dict[str, str]  # the reason why the module was not changed


@formulas.outside_modes()
def convert(
    model: torch.nn.Module,
    loss: str = "logits",
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    dry_run: bool = False,
) -> Converted:
    """Makes a transformer run on this package's ops, in place: every module that can call an op calls it.

    These are changed, and ``changed`` says which function each of them calls:

    * torch.nn.LayerNorm, RMSNorm, SiLU, GELU, Dropout (with other masks from the same seed), Softmax, LogSoftmax and
      CrossEntropyLoss.
    * Every other module that computes layer_norm or rms_norm over the last dimension, or silu or gelu, whatever its
      class is called. Many classes of Hugging Face models do. Such a module is run on test inputs, and its results and
      gradients are compared with the formulas, in float32 and the half types, in training and evaluation. The formulas
      of norms have a weight, or 1 + weight as in Gemma.
    * Gated MLPs, ``act(gate) * up`` (swiglu, geglu), where act is such an activation or torch.nn.functional's silu or
      gelu. The linear layers around the product, packed or not, are called as before. If the product goes straight into
      a plain torch.nn.Linear in the same expression, the product is not saved for backward, which computes it again.
      The results have the same bits, and the MLP's saved tensors take a third less memory.
    * Attention modules whose forward calls a function with "rotary" or "rope" in its name with q, k, cos and sin, or
      with x, cos and sin (rotary_embedding). That function is run on test inputs, too. Calls with other arguments do
      not change.
    * Modules that normalize a residual sum, ``s = residual + dropout(x)`` and ``norm(s)`` (add_layer_norm,
      add_rms_norm). There torch.nn.functional.dropout gets another mask, too.
    * The losses of Hugging Face's causal language models; see below.

    Gated MLPs, attention modules and modules with a residual sum get a new forward: a copy of the original's source in
    which these places call the ops. At each call the new forward looks at its arguments and modules. With a hook on the
    norm, another module in the norm's place (LoRA, sharding), inputs of several dtypes (autocast) or shapes that an op
    does not take, it does what the original forward did.

    All modules stay instances of their class, take their input by the same name, and return the same dtype, also under
    autocast. Parameters (shared ones stay shared), their dtypes, buffers, hooks, training state, state_dict and repr do
    not change. A second call changes nothing, and revert undoes the first.

    In Hugging Face's causal language models whose ``loss_function`` is ForCausalLMLoss, the loss is changed as well. It
    is computed from the logits without a float32 copy of them, and is float32. With ``loss="linear"``
    linear_cross_entropy computes the loss from the hidden states, and there are no logits: **if labels are given, the
    result's ``logits`` are None**. Forward computes logits as before without labels, with ``return_dict=False``, and if
    something was put on the output layer later (LoRA, a hook, a loss_function). Losses have no second derivative.

    The ops compute in float32 (float64: float64) and round once. A model that is written in several operations rounds
    in each of them. In half types the result of a norm that rounds before it multiplies by the weight (Llama's) differs
    from the op's by up to 1.5 eps of each element. The result of a class that computes in float32 even for float64
    inputs differs by float32's rounding.

    Args:
        model: any module, compiled or not, on any device and of any dtype, also on meta. It may be a norm itself.
        loss: "logits" or "linear": what the loss of a causal language model is computed from. "linear" uses the scale
            and the softcap of the logits (Granite, Cohere, Gemma) that the model has at the time of this call.
        only, skip: ``only`` says what to change, and nothing else is changed; ``skip`` says what not to change. Both
            take functions as ``changed`` names them ("dropout"), and patterns of module names as for fnmatch
            ("lm_head", "model.layers.0.*"). The fused functions need the simple ones: add_rms_norm replaces a norm that
            is changed to rms_norm, and swiglu needs a silu module that is changed.
        dry_run: return what would be changed, and change nothing.

    Returns:
        Two dicts by module name; a module with several names has its first. ``changed`` has the function that each
        module calls now. ``left`` has a sentence for each norm, activation, dropout, softmax, loss and rotary function
        that was not changed. These are modules that

        * compute something else (QuickGELU, rotary embedding by sections or of complex numbers), take more than the
          input, or call the rotary function with other arguments;
        * are parametrized or TorchScript, or had their forward replaced on the instance;
        * are dropouts and activations that work in place, which the op could only copy, or softmaxes without a
          dimension;
        * are of a subclass of Dropout, Softmax, LogSoftmax or CrossEntropyLoss;
        * have parameters of a dtype, device or tensor class that the ops do not take, or empty ones, as after sharding;
        * are models that compute their loss without loss_function.

        A model that cannot have the linear loss is in both dicts: it gets the loss of "logits". Modules whose forward
        has no source, or is a closure, are not changed and not named. All decisions are made before the first module is
        changed.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.
        ValueError: ``loss`` is neither "logits" nor "linear"; or ``only`` or ``skip`` has a word that is neither a
            function nor matches a module's name.

    Dropouts draw other masks than PyTorch's from the same seed; ``skip="dropout"`` keeps PyTorch's. If anything
    changed, the results of torch.compile are dropped (torch.compiler.reset), because they have the old code.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"extension_cpp.nn.convert: expected model to be a torch.nn.Module, but got {type(model)}")
    if loss not in ("logits", "linear"):
        raise ValueError(f"extension_cpp.nn.convert: expected loss to be 'logits' or 'linear', but got {loss!r}")
    choice, result = Choice(only, skip, model), Converted({}, {})
    losses = _losses(choice, loss == "linear", result)
    classes = _replaced(choice, result)
    classes |= _rewritten(choice, classes, result)
    if dry_run:
        return result
    for module, plan in losses:
        model_loss.apply(module, plan)
    for module, kind in classes.items():
        vars(module).pop("forward", None)  # the instance's own forward would hide that of the new class
        module.__class__ = kind
    _forget_what_was_compiled(result)
    return result


# This package's modules that replace the modules of torch.nn with the same name, and the function that each one calls.
FUNCTIONS: dict[type, str] = {
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    **{known.module: known.function for known in KNOWN.values()},
    nn.Dropout: "dropout",
    nn.Softmax: "softmax",
    nn.LogSoftmax: "log_softmax",
    nn.CrossEntropyLoss: "cross_entropy",
}
# The names of functions in Converted.changed, without suffixes such as " with approximate='tanh'".
NAMES = *dict.fromkeys(FUNCTIONS.values()), *dict.fromkeys(known.gated for known in KNOWN.values())
NAMES += "add_layer_norm", "add_rms_norm", "rotary_embedding", "linear_cross_entropy"


class Choice:
    """Decides by ``only`` and ``skip`` of convert which modules of a model may change, and has them by name."""

    def __init__(self, only: Iterable[str] | None, skip: Iterable[str], model: torch.nn.Module) -> None:
        self.only = None if only is None else _items("only", only, model)
        self.skip = _items("skip", skip, model)
        self.modules = {name: module for name, module in model.named_modules() if self.may_change(name)}

    def may_change(self, name: str) -> bool:
        """Returns whether ``only`` and ``skip`` may allow a change of the module with this name, whatever it calls."""
        if any(fnmatchcase(name, item) for item in self.skip if item not in NAMES):
            return False
        return self.only is None or any(item in NAMES or fnmatchcase(name, item) for item in self.only)

    def wants(self, name: str, function: str) -> bool:
        """Returns whether ``only`` and ``skip`` allow that the module with this name calls the function."""

        def named(items: list[str]) -> bool:
            return any(item == function if item in NAMES else fnmatchcase(name, item) for item in items)

        function = function.split(" ")[0]
        return (self.only is None or named(self.only)) and not named(self.skip)


def _items(argument: str, items: Iterable[str], model: torch.nn.Module) -> list[str]:
    """Returns the items as a list. Raises ValueError if an item is neither a function nor matches a module's name."""
    listed = [items] if isinstance(items, str) else list(items)
    names = [name for name, _ in model.named_modules()]
    for item in listed:
        if item not in NAMES and not any(fnmatchcase(name, item) for name in names):
            raise ValueError(
                f"extension_cpp.nn.convert: expected {argument} to hold functions ({', '.join(NAMES)}) or patterns "
                f"of module names, but '{item}' is neither"
            )
    return listed


def _losses(choice: Choice, is_linear: bool, result: Converted) -> list[tuple[torch.nn.Module, model_loss.Plan | None]]:
    """Returns the models whose loss is replaced, each with the Plan of its linear loss or None. Extends `result`."""
    losses = []
    for name, module in choice.modules.items():
        if not model_loss.is_causal_lm(module):
            continue
        is_replaced, plan, reason = model_loss.decide(module, is_linear)
        names = [name] if plan is None else [name, f"{name}.{plan.head}".lstrip(".")]
        function = "cross_entropy" if plan is None else "linear_cross_entropy"
        if is_replaced and all(choice.wants(each, function) for each in names):
            losses.append((module, plan))
            result.changed.update(dict.fromkeys(names, function))
        if reason is not None:
            result.left[name] = f"{_class_name(module)}: {reason}"
    return losses


def _replaced(choice: Choice, result: Converted) -> dict[torch.nn.Module, type]:
    """Returns the new class of each module that as a whole computes a known function. Adds the names to `result`."""
    classes: dict[torch.nn.Module, type] = {}
    recognised: dict[Any, Any] = {}  # maps a module's _plain_state to its formula, or the reason why it has none
    for name, module in choice.modules.items():
        # Only torch.nn's norms may have child modules (parametrizations) and still compute a known formula.
        if isinstance(module, OURS) or (module._modules and not isinstance(module, NORMS)):
            continue
        try:
            kind: Any = _class_for(module, recognised)
        except Unfit as reason:
            is_like_ours = isinstance(module, (*KINDS, *NORMS)) or "norm" in _class_name(module).lower()
            is_asked_for = is_like_ours or activations.is_asked_for(module)  # its class looks like a known one
            if is_asked_for and ".parametrizations." not in f".{name}":
                result.left[name] = f"{_class_name(module)}: {reason}"
            continue
        function = str(kind.formula) if formulas.is_formula_class(kind) else FUNCTIONS[kind]
        if choice.wants(name, function):
            classes[module] = kind
            result.changed[name] = function
    return classes


def _rewritten(choice: Choice, classes: dict[torch.nn.Module, type], result: Converted) -> dict[torch.nn.Module, type]:
    """Returns the new class of each module whose forward is rewritten. `classes` has the new classes of the modules
    that as a whole are replaced. Adds the names of the rewritten modules to `result`."""
    changes = {}
    for name, module in choice.modules.items():
        if module in classes or not module._modules or isinstance(module, OURS):
            continue
        if model_loss.is_model(module) or obstacle_of(module) is not None:
            continue
        made, functions, reasons = forwards.decide(
            module, lambda child: classes.get(child, type(child)), functools.partial(choice.wants, name)
        )
        if made is not None:
            changes[module] = made
            result.changed[name] = functions
        if reasons:
            result.left[name] = f"{_class_name(module)}: {'; '.join(reasons)}"
    return changes


def revert(model: torch.nn.Module) -> Converted:
    """Undoes convert, in place: every converted module gets its original class back, and every model its loss.

    Args:
        model: any module; it may be a norm itself.

    Returns:
        Two dicts by module name. ``changed`` has the class that each module has again. ``left`` has a sentence for each
        converted module whose class something else has changed since. Modules that were created as
        extension_cpp.nn.LayerNorm, RMSNorm, SiLU, GELU, Dropout, Softmax, LogSoftmax or CrossEntropyLoss become those
        of torch.nn, except a loss with ``z_loss`` or ``softcap``, which is in ``left``. Other modules of
        extension_cpp.nn have no class to go back to.

    Raises:
        TypeError: ``model`` is not a torch.nn.Module.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"extension_cpp.nn.revert: expected model to be a torch.nn.Module, but got {type(model)}")
    result = Converted({}, {})
    for name, module in model.named_modules():
        kind: Any = type(module)
        original = torch.nn.Linear if kind is model_loss.Head else ORIGINALS.get(kind)
        if formulas.is_generated(kind):
            original = kind.original
        if isinstance(module, nn.CrossEntropyLoss) and module.extends_torch():
            result.left[name] = f"{_class_name(module)}: torch.nn.CrossEntropyLoss has no z_loss and no softcap"
        elif original is not None:
            vars(module).pop("received", None)  # a converted output layer has this attribute, None between calls
            module.__class__ = original
            result.changed[name] = original.__name__
        elif isinstance(module, (formulas.GeneratedModule, model_loss.Head)):
            result.left[name] = f"{_class_name(module)}: a class was put on top of the converted one; take it off first"
        if model_loss.restore(module):
            result.changed[name] = _class_name(module)
    _forget_what_was_compiled(result)
    return result


ORIGINALS: dict[type, type] = {kind: getattr(torch.nn, kind.__name__) for kind in FUNCTIONS}
REPLACEMENTS = {original: kind for kind, original in ORIGINALS.items()}
OURS = *FUNCTIONS, nn.AddLayerNorm, nn.AddRMSNorm, nn.SwiGLU, formulas.GeneratedModule


def _forget_what_was_compiled(result: Converted) -> None:
    if result.changed and "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _class_name(module: Any) -> str:
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm)

# Modules that are recognised by their class alone. Converted.left reports those that are not changed.
KINDS = (torch.nn.Dropout, torch.nn.Softmax, torch.nn.LogSoftmax, torch.nn.CrossEntropyLoss)


def _class_for(module: torch.nn.Module, recognised: dict[Any, Any]) -> type:
    """Returns the new class, with which the module calls this package's ops. Raises Unfit if there is none."""
    if obstacle := obstacle_of(module):
        raise Unfit(obstacle)
    if isinstance(module, KINDS) and type(module) not in KINDS:
        base = next(kind.__name__ for kind in KINDS if isinstance(module, kind))
        does = "draws" if base == "Dropout" else "computes"
        raise Unfit(f"a subclass of torch.nn.{base}, and what it {does} cannot be compared")
    if isinstance(module, torch.nn.Dropout) and module.inplace:
        raise Unfit("it works in place, which the op could only copy")
    if isinstance(module, (torch.nn.Softmax, torch.nn.LogSoftmax)) and module.dim is None:
        raise Unfit("its dim is None, so PyTorch chooses it by the input's number of dimensions")
    if type(module) in REPLACEMENTS and not getattr(module, "inplace", False):
        return REPLACEMENTS[type(module)]
    state = _plain_state(module)
    formula = recognised.get(state) if state is not None else None
    if formula is None:
        try:
            formula = _recognise(module)
        except Unfit as reason:
            formula = reason
        recognised[state] = formula
    if isinstance(formula, Unfit):
        raise formula
    original: type = type(module)
    try:
        return formulas.formula_class(original, formula)
    except Unfit as reason:
        raise Unfit(f"it computes {formula}, but {reason}") from None


def _recognise(module: torch.nn.Module) -> activations.Activation | norms.Norm:
    """Returns the activation or norm that a module computes. Raises Unfit if it computes neither."""
    try:
        taken = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError) as error:
        raise Unfit("its forward has no signature") from error
    if len(taken) != 1 or taken[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise Unfit(f"its forward takes ({', '.join(map(str, taken))}), not the input alone")
    if activations.may_be_activation(module):
        try:
            return activations.recognise(module, taken[0].name)
        except Unfit:
            if activations.is_asked_for(module):
                raise
    return norms.recognise(module, taken[0].name)


def _plain_state(module: torch.nn.Module) -> Any:
    """Returns a key of all that may decide which formula a module computes, or None if an attribute cannot be a key."""
    own = {name: value for name, value in vars(module).items() if name not in vars(torch.nn.Module())}
    if any(not isinstance(value, (bool, int, float, str, type(None))) for value in own.values()):
        return None
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in parameters_of(module).items())
    buffers = any(buffer is not None for buffer in module._buffers.values())
    return type(module), shapes, buffers, tuple((name, type(value), value) for name, value in sorted(own.items()))

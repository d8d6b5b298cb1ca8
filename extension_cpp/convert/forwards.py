"""Replaces the forward of modules with gated products, residual additions or rotary embedding, as a part of nn.convert.

rewriter.py finds these in the source of a forward, and makes a copy that calls the methods below. At each call a method
looks at its arguments. If a kernel computes what the original code would compute, the method runs the kernel. If not (a
hook on the norm, another module in the norm's place, other dtypes or shapes), it does what the original code did.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import _ops, ops
from .. import modules as nn
from ..registration.calls import is_recorded
from . import rotary_forms, sources
from .activations import KNOWN, Activation, activation, name_of_product
from .formulas import CONTEXTS, GeneratedModule, Unfit, can_be_joined, context_of, generated_class, is_formula_class
from .model_loss import must_run
from .norms import Norm, Options, add_norm
from .rewriter import FUNCTIONAL_DROPOUT, Site
from .rotary_forms import Rotary

AS_INPUT = ("x",) * len(CONTEXTS)
_linear, _linear_forward = torch.nn.functional.linear, torch.nn.Linear.forward  # saved before anyone can patch them


class RewrittenModule(GeneratedModule):
    """The base class of modules with a rewritten forward, which calls the methods of this class."""

    rotaries: ClassVar[tuple[tuple[Site, Any, Rotary], ...]]  # the site, function and Rotary of each recognised call

    def _extension_cpp_gated(self, act: Any, gate: Any, up: Any) -> Any:
        """Computes ``act(gate) * up``."""
        function, results = _activation(act)
        if function and isinstance(gate, Tensor) and isinstance(up, Tensor) and nn.takes(gate, up):
            return gated(gate, up, function, results)
        if isinstance(act, str):
            act = functools.partial(getattr(torch.nn.functional, KNOWN[act].function), **KNOWN[act].options)
        return act(gate) * up

    def _extension_cpp_gated_linear(self, linear: Any, act: Any, gate: Any, up: Any) -> Any:
        """Computes ``linear(act(gate) * up)``."""
        function, results = _activation(act)
        if function and can_make_again(linear, gate, up, results):
            return GatedLinear.apply(gate, up, linear.weight, linear.bias, function)
        return linear(self._extension_cpp_gated(act, gate, up))

    def _extension_cpp_add_norm(self, norm: Any, x: Any, residual: Any, dropout: Any = None) -> Any:
        """Computes ``norm(s)`` and ``s = residual + dropout(x)``."""
        p, training = 0.0, False
        if isinstance(dropout, tuple):
            p, training = dropout
        elif dropout is not None:
            if type(dropout) is nn.Dropout and not dropout.inplace and must_run(dropout) is None:
                p, training = dropout.p, dropout.training
            else:
                x = dropout(x)
        options = _norm(norm)
        if options is not None and isinstance(x, Tensor) and isinstance(residual, Tensor) and nn.takes(x, residual):
            joined = add_norm(x, residual, p, training, options)
            if joined is not None:
                return joined
        if p and training:
            x = ops.dropout(x, p, True) if nn.takes(x) else torch.nn.functional.dropout(x, p, True)
        total = residual + x
        return norm(total), total

    def _extension_cpp_rotary(self, function: Any, *args: Any, **options: Any) -> Any:
        """Computes ``function(*args, **options)``, where args are q, k, cos and sin, or x, cos and sin."""
        for site, known, rotary in self.rotaries:
            if function is known and len(args) == site.arguments and options == dict(site.options):
                return rotary_forms.rotate(function, rotary, *args, **options)
        return function(*args, **options)


def _norm(norm: Any) -> Options | None:
    """Returns the options with which an op computes a norm module, or None if the module itself must be called."""
    if must_run(norm) is not None:
        return None
    if type(norm) is nn.LayerNorm:
        return Options(norm.normalized_shape, norm.weight, norm.bias, True, 0, norm.eps, AS_INPUT)
    if type(norm) is nn.RMSNorm:
        return Options(norm.normalized_shape, norm.weight, None, False, 0, norm.eps, AS_INPUT)
    return norm.formula.options(norm) if is_formula_class(type(norm)) else None


def _activation(act: Any) -> tuple[str, tuple[str, ...]]:
    """Returns the key of an activation in KNOWN and the rules for its results' dtypes. The key is "" if the activation
    module itself must be called."""
    if isinstance(act, str):
        return act, AS_INPUT
    if must_run(act) is not None:
        return "", ()
    if is_formula_class(type(act)):
        return act.formula.function, act.formula.results
    for name, known in KNOWN.items():
        if type(act) is known.module and all(getattr(act, each) == value for each, value in known.options.items()):
            return name, AS_INPUT
    return "", ()


@functools.cache
def rewritten_class(original: type, sites: frozenset[Site]) -> type:
    """Makes a subclass of RewrittenModule and the original, with the signature of the original's forward, which
    transformers reads."""
    forward = sources.rewritten(original.forward, sites)  # type: ignore[attr-defined]  # a module's
    rotaries = []
    for site in sites:
        if site.kind == "rotary":
            with contextlib.suppress(Unfit):
                function = function_of(original, site)
                rotaries.append((site, function, rotary_of(function, site.options, site.arguments)))
    names = {"forward": forward, "rotaries": tuple(rotaries), "made_by": (rewritten_class, original, sites)}
    return generated_class(RewrittenModule, original, names)


# ---- gated products ----


@torch.fx.wrap  # torch.fx does not trace into this function, because a traced tensor has no dtype
def gated(gate: Tensor, up: Tensor, function: str, results: tuple[str, ...]) -> Tensor:
    """Computes ``activation(gate) * up``, by one kernel if the result then has the dtype that the original returns."""
    if can_be_joined(gate, up, results):
        return _product(gate, up, function)
    return activation(gate, function, results) * up


def _product(gate: Tensor, up: Tensor, function: str) -> Tensor:
    known = KNOWN[function]
    return getattr(ops, known.gated)(gate, up, **known.options)


def can_make_again(linear: Any, gate: Any, up: Any, results: tuple[str, ...]) -> bool:
    """Returns whether GatedLinear computes what `linear` computes from the product, and saves less for backward.

    `linear` must be an unchanged torch.nn.Linear. The result is False while a graph records the call, because a
    compiler itself decides what to recompute, under autocast, and for a weight that needs no gradient, for which
    PyTorch does not save the product.
    """
    if torch.compiler.is_compiling() or is_recorded() or torch._C._are_functorch_transforms_active():
        return False
    if type(linear) is not torch.nn.Linear or must_run(linear) is not None:
        return False
    if torch.nn.functional.linear is not _linear or torch.nn.Linear.forward is not _linear_forward:
        return False
    tensors = [gate, up, linear.weight, *([] if linear.bias is None else [linear.bias])]
    if any(type(each) not in (Tensor, torch.nn.Parameter) for each in tensors):
        return False
    if not torch.is_grad_enabled() or not linear.weight.requires_grad:
        return False
    if gate.is_nested or not nn.takes(gate, up):
        return False
    return context_of(gate) == 0 and can_be_joined(gate, up, results)


class GatedLinear(torch.autograd.Function):
    """Computes ``linear(act(gate) * up, weight, bias)``, and saves gate, up and weight for backward.

    PyTorch would also save the product, for the weight's gradient. The product is a third of what a gated MLP saves.
    Backward computes it again from gate and up, in a small part of the time of a matrix product.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, function: str) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.function = function
        return torch.nn.functional.linear(_product(gate, up, function), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needs_gate, needs_up, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad_out.reshape(-1, grad_out.shape[-1])
        grad_gate = grad_up = grad_weight = grad_bias = None
        if needs_weight:
            grad_weight = rows.t() @ _product(gate, up, ctx.function).reshape(-1, weight.shape[1])
        if needs_bias:
            grad_bias = rows.sum(0)
        if needs_gate or needs_up:
            known = KNOWN[ctx.function]
            product_backward = getattr(_ops, f"{known.gated}_backward")
            grad_gate, grad_up = product_backward(grad_out @ weight, gate, up, *known.backward_options)
        return grad_gate, grad_up, grad_weight, grad_bias, None


# ---- deciding ----


def decide(
    module: torch.nn.Module, class_of: Callable[[torch.nn.Module], type], wants: Callable[[str], bool]
) -> tuple[type | None, str, list[str]]:
    """Returns the new class of a module or None, the functions that its new forward calls, and the reasons why other
    calls in the forward were not replaced. `class_of` says which class a child will have, and `wants` which functions
    may be called."""
    kind: Any = type(module)
    sites: tuple[Site, ...] = ()
    if kind.__module__.split(".")[0] != "torch" and "forward" not in vars(module):
        with contextlib.suppress(Unfit):
            sites = sources.sites_of(kind.forward)
    functions: dict[str, None] = {}
    wanted, reasons = [], []
    for site in sites:
        child = module._modules.get(site.name)
        function = _function_at(site, None if child is None else class_of(child))
        if function is None or not wants(function):
            continue
        try:
            if site.kind == "rotary":
                rotary_of(function_of(kind, site), site.options, site.arguments)
        except Unfit as reason:
            reasons.append(f"its {site.name} {reason}")
            continue
        wanted.append(site)
        if site.kind != "dropout":
            functions[function] = None
    called, made = ", ".join(functions), None
    try:
        made = rewritten_class(kind, frozenset(wanted)) if called else None
    except Unfit as reason:
        reasons.append(f"it could call {called}, but {reason}")
    return made, called, list(dict.fromkeys(reasons))


def _function_at(site: Site, kind: type | None) -> str | None:
    """Returns the function that replaces the code at a site. `kind` is the class of the site's child module."""
    if site.kind == "rotary":
        return "rotary_embedding"
    if site.kind == "dropout":
        return "dropout" if site == FUNCTIONAL_DROPOUT or kind is nn.Dropout else None
    formula: Any = kind.formula if kind is not None and is_formula_class(kind) else None  # type: ignore[attr-defined]
    if site.kind == "add_norm":
        if kind in (nn.LayerNorm, nn.RMSNorm):
            return "add_layer_norm" if kind is nn.LayerNorm else "add_rms_norm"
        return f"add_{formula}" if isinstance(formula, Norm) else None
    if site.options:  # torch.nn.functional's
        return name_of_product(site.name)
    if isinstance(formula, Activation):
        return name_of_product(formula.function)
    return next((known.gated for known in KNOWN.values() if known.module is kind), None)


def function_of(kind: Any, site: Site) -> Any:
    first, *attributes = site.name.split(".")
    found = getattr(inspect.unwrap(kind.forward), "__globals__", {}).get(first)
    return functools.reduce(lambda each, name: getattr(each, name, None), attributes, found)


@functools.cache
def rotary_of(function: Any, options: tuple[tuple[str, Any], ...], arguments: int) -> Rotary:
    if not arguments:
        raise Unfit("is called with other arguments than q, k, cos, sin or x, cos, sin")
    return rotary_forms.recognise(function if arguments == 4 else rotary_forms.in_pairs(function), dict(options))

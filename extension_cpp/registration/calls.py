"""The operators as functions that cost little: an operator, its no-grad overload, or its autograd.Function directly.

An Autograd kernel in Python runs at every call of an operator, with gradients or without, and again for the backward
operator. For small tensors that is most of the time. So each operator with an Autograd kernel has a no-grad overload:
the operator <name>_no_grad, which has the same arguments, kernels and fake, and no Autograd kernel. It may leave out
the last results, if only backward reads them; it then has a C++ function of its own (def_with_no_grad in
csrc/common/shim/op.h).

The no-grad overload is called instead of the operator under no_grad, and in a backward pass that is not differentiated
itself. It is not called while a graph records the call, because a graph captured under no_grad may be trained later.

Where gradients are recorded and nothing else wants to see the call, the function applies the operator's
autograd.Function itself. The dispatcher would call Python for it, with boxed arguments, and Python the dispatcher.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import DispatchKey, DispatchKeySet, Tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as symbolic_trace
from torch.nn import Parameter

from .._namespace import NAMESPACE
from . import checks
from .lists import list_places, one_by_one

own_ops = getattr(torch.ops, NAMESPACE)  # the operators of this package
NO_GRAD = "_no_grad"  # the suffix of a no-grad overload's name, as in csrc/common/shim/op.cpp


def operators(namespace: str = NAMESPACE) -> SimpleNamespace:
    """A function for each operator that has a no-grad overload. It takes arguments by position.

    Under no_grad it calls the overload, unless a graph records the call. It always returns the overload's results.
    """
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")]
    return SimpleNamespace(
        **{
            name.split("::")[1]: _operator_or_overload(overload_of(name), overload_of(name + NO_GRAD))
            for name in names
            if name + NO_GRAD in names
        }
    )


def overload_of(op: str) -> Any:
    """The overload "namespace::name" or "namespace::name.overload"."""
    namespace, name = op.split("::")
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def is_recorded(args: tuple[Any, ...] | None = None) -> bool:
    """Whether a graph may record this call (torch.export, make_fx or another dispatch mode, torch.fx, torch.jit.trace),
    or forward-mode differentiation is on.

    torch.compile does not count: it guards on the grad mode, and nothing differentiates its backward graphs. Nor does
    torch.fx, if the call's arguments are given and none of them is its Proxy.
    """
    if torch.compiler.is_compiling():
        return torch.compiler._is_exporting_flag  # is_exporting() is always true while torch.compile traces it
    if forward_ad._current_level >= 0:  # no_grad does not switch forward mode off
        return True
    if torch._C._len_torch_dispatch_stack() > 0:
        return TracingContext.try_get() is None
    if torch._C._is_tracing():
        return True
    # The types come first, because PyTorch takes half a microsecond to say whether torch.fx traces.
    return (args is None or not _PLAIN.issuperset(map(type, args))) and symbolic_trace.is_fx_symbolic_tracing()


def call(name: str, *args: Any, **keywords: Any) -> Any:
    """Calls an operator of this package that has no no-grad overload: "name" or "name.overload".

    All arguments are given; the keyword-only ones, which are the last, in their order.
    """
    op = overload_of(f"{NAMESPACE}::{name}")
    try:
        return op(*args, **keywords)
    except Exception:
        checks.check_tensors(op._schema, (*args, *keywords.values()))
        raise


def _thread_without_modes() -> tuple[int, int]:
    """The keys that a thread's calls include and exclude while nothing is switched on. Autocast is excluded."""
    found: list[int] = []
    sets = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set
    thread = threading.Thread(target=lambda: found.extend(keys().raw_repr() for keys in sets))
    thread.start()
    thread.join()
    return found[0], found[1]


_INCLUDED, _excluded = _thread_without_modes()
_EXCLUDED = frozenset((_excluded,))
_AUTOCAST = [DispatchKeySet(key).raw_repr() for key in (DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA)]
# What a thread excludes while autocast is off for both, one or none of the device types.
_EXCLUDED_WITH_AUTOCAST = frozenset(_excluded & ~cpu & ~cuda for cpu in (0, _AUTOCAST[0]) for cuda in (0, _AUTOCAST[1]))
_NUMBERS = frozenset((int, float, bool, type(None), list, tuple, torch.Size))
_PLAIN = _NUMBERS | {Tensor, Parameter}

# The autograd.Function of each operator that a call may apply without the dispatcher (autograd.py).
DIRECT: dict[str, Any] = {}
CASTING: set[str] = set()  # the operators that have an autocast rule


def _requires_grad(name: str, args: tuple[Any, ...]) -> bool | None:
    """Whether a call has gradients; None if something beside autograd may want to see it."""
    if not torch.is_grad_enabled():
        return None if is_recorded(args) else False
    if torch.compiler.is_compiling():  # first, because torch.compile cannot trace what follows
        return None
    excluded = _EXCLUDED if name in CASTING else _EXCLUDED_WITH_AUTOCAST
    if (
        torch._C._len_torch_function_stack() > 0
        or forward_ad._current_level >= 0
        or torch._C._dispatch_tls_local_include_set().raw_repr() != _INCLUDED  # a dispatch mode, torch.func, jit.trace
        or torch._C._dispatch_tls_local_exclude_set().raw_repr() not in excluded  # autocast, inference mode
    ):
        return None
    requires_grad = False
    for x in args:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            requires_grad = requires_grad or x.requires_grad
        elif kind not in _NUMBERS:
            return None
    return requires_grad


def _operator_or_overload(op: Any, no_grad: Any) -> Callable[..., Any]:
    name = op._schema.name
    defaults = tuple(argument.default_value for argument in op._schema.arguments)
    count = len(no_grad._schema.returns)
    all_results = count == len(op._schema.returns)
    lists = list_places(op)

    def call(*args: Any) -> Any:
        try:
            requires_grad = _requires_grad(name, one_by_one(args, lists) if lists else args)
            if requires_grad is False:
                return no_grad(*args)
            if requires_grad and name in DIRECT:
                return DIRECT[name].apply(*args, *defaults[len(args) :])
            results = op(*args)
        except Exception:
            checks.check_tensors(op._schema, args)
            raise
        if all_results and count == 1:
            return results
        # By index: under torch.fx all results are one Proxy.
        return results[0] if count == 1 else tuple([results[i] for i in range(count)])

    return call

"""Makes Python functions that call the operators at low cost, past their Autograd kernels where possible.

An operator's Autograd kernel is Python code. It runs at every call of the operator, with gradients or without, and
again for the backward operator. For small tensors it takes most of the call's time. So each operator with an Autograd
kernel has a no-grad overload: the operator <name>_no_grad, which has the same arguments, kernels and fake, and no
Autograd kernel. The overload may leave out the last results, if only backward reads them. It then has a C++ function of
its own, and there is an operator <name>_all_results, with all results and no Autograd kernel (DEF_WITH_FEWER_RESULTS in
csrc/common/shim/op.h).

The no-grad overload is called instead of the operator under no_grad, and in a backward pass that is not differentiated
itself. It is not called while a graph records the call, because a graph captured under no_grad may be trained later.

Where gradients are recorded and only autograd must see the call, the function applies the operator's autograd.Function
itself. The dispatcher would box the arguments to call the Autograd kernel, which would call the dispatcher again.

Most of a call's time is cache misses, because the host's caches don't hold all code of a call, and in a model other
code runs between two calls. A C function that takes 0.1 us in a loop takes 1 us here. So _requires_grad calls few
functions, and this module imports PyTorch's functions by name: looking them up in torch and torch._C would read these
modules' large dictionaries.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import DispatchKey, Tensor, is_grad_enabled
from torch._C import (
    _are_functorch_transforms_active,
    _dispatch_tls_is_dispatch_key_excluded,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import _symbolic_trace as symbolic_trace
from torch.nn import Parameter

from .._namespace import NAMESPACE
from . import checks
from .lists import list_places, one_by_one

own_ops = getattr(torch.ops, NAMESPACE)  # the operators of this package
# The suffixes of the overloads' names, as in csrc/common/shim/registration.cpp.
NO_GRAD, ALL_RESULTS = "_no_grad", "_all_results"


def operators(namespace: str = NAMESPACE) -> SimpleNamespace:
    """Returns a function for each operator that has a no-grad overload. The functions take all arguments by position.

    Under no_grad a function calls the overload, unless a graph records the call. If the operator has more results than
    the overload, the function never returns the additional ones.
    """
    ops = overloads(namespace)
    pairs = {name: (op, ops[name + NO_GRAD]) for name, op in ops.items() if name + NO_GRAD in ops}
    return SimpleNamespace(**{name: _operator_or_overload(*pair) for name, pair in pairs.items()})


def overloads(namespace: str = NAMESPACE) -> dict[str, Any]:
    """Returns every operator of a namespace by its name, no-grad overloads included."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")]
    return {name.removeprefix(f"{namespace}::"): overload_of(name) for name in names}


def overload_of(op: str) -> Any:
    """Returns the operator of torch.ops with the name "namespace::name" or "namespace::name.overload"."""
    namespace, name = op.split("::")
    name, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def defaults_of(op: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns an operator's defaults, and those of its keyword-only arguments by name, or None for no default."""
    arguments = op._schema.arguments
    by_name = {argument.name: argument.default_value for argument in arguments if argument.kwarg_only}
    return tuple(argument.default_value for argument in arguments if not argument.kwarg_only), by_name


def by_position(op: Any) -> Callable[..., Any]:
    """Returns a function that calls an operator and takes all arguments by position, the keyword-only ones last."""
    names = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    if not names:
        return op
    count = len(op._schema.arguments) - len(names)
    return lambda *args: op(*args[:count], **dict(zip(names, args[count:], strict=False)))


def untraced(op: Any) -> Callable[..., Any]:
    """Returns by_position(op) or, without keyword-only arguments, the C++ function that a call of the operator calls
    (OpOverload.__call__). torch.compile cannot trace it."""
    return by_position(op) if defaults_of(op)[1] else op._op


def without_suffix(name: str) -> str:
    """Returns the operator's name, given its own name or that of its overload without an Autograd kernel."""
    return name.removesuffix(NO_GRAD).removesuffix(ALL_RESULTS)


def overloads_of(op: str) -> list[Any]:
    """Returns the overloads of "namespace::name" that have no Autograd kernel. The first one has all results."""
    names = torch._C._dispatch_get_all_op_names()
    return [overload_of(op + suffix) for suffix in (ALL_RESULTS, NO_GRAD) if op + suffix in names]


def is_recorded() -> bool:
    """Returns whether a graph may record this call (torch.export, make_fx or another dispatch mode, torch.fx,
    torch.jit.trace), or whether forward-mode differentiation is on.

    A graph of torch.compile does not count: it is only reused in the same grad mode, and nothing differentiates
    torch.compile's backward graphs.
    """
    if is_compiling():
        return torch.compiler._is_exporting_flag  # is_exporting() is always true in code that torch.compile traces
    if forward_ad._current_level >= 0:  # no_grad does not switch forward mode off
        return True
    if _len_torch_dispatch_stack() > 0:
        return TracingContext.try_get() is None
    return _is_tracing() or symbolic_trace.is_fx_symbolic_tracing()


def call(name: str, *args: Any, **keywords: Any) -> Any:
    """Calls the operator "name" or "name.overload" of this package, for operators that have no no-grad overload. All
    arguments must be given, defaults included. The keyword-only ones come in the schema's order."""
    op = overload_of(f"{NAMESPACE}::{name}")
    try:
        return op(*args, **keywords)
    except Exception:
        checks.check_tensors(op._schema, (*args, *keywords.values()))
        raise


_AUTOGRAD = DispatchKey.AutogradFunctionality
_PLAIN = frozenset((int, float, bool, type(None), list, tuple, torch.Size, Tensor, Parameter))

# Maps an operator to the apply of its autograd.Function that needs no dispatcher. autograd.py fills it.
DIRECT: dict[str, Callable[..., Any]] = {}
CASTING: set[str] = set()  # the operators that have an autocast rule


def _requires_grad(name: str, args: tuple[Any, ...]) -> bool | None:
    """Returns whether autograd must record the call, or None if a mode, a transform or a graph may have to see it."""
    if forward_ad._current_level >= 0:
        return None
    is_plain = _PLAIN.issuperset(map(type, args)) and _len_torch_dispatch_stack() == 0 and not _is_tracing()
    if not is_grad_enabled():
        return False if is_plain or not is_recorded() else None
    if (
        not is_plain
        or _len_torch_function_stack() > 0
        or _are_functorch_transforms_active()
        or _dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)  # in a kernel below autograd
        or (name in CASTING and _is_any_autocast_enabled())
    ):
        return None
    for x in args:  # noqa: SIM110  # a generator takes longer
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def _operator_or_overload(op: Any, no_grad: Any) -> Callable[..., Any]:
    name = op._schema.name
    defaults = tuple(argument.default_value for argument in op._schema.arguments)
    most, count = len(defaults), len(no_grad._schema.returns)
    all_results = count == len(op._schema.returns)
    lists = list_places(op)
    call_op, call_no_grad, untraced_no_grad = by_position(op), by_position(no_grad), untraced(no_grad)

    def call(*args: Any) -> Any:
        try:
            if is_dynamo_compiling():  # comes first, because torch.compile cannot trace the code below
                if not (is_grad_enabled() or torch.compiler._is_exporting_flag):
                    return call_no_grad(*args)
            else:
                requires_grad = _requires_grad(name, one_by_one(args, lists) if lists else args)
                if requires_grad is False:
                    return untraced_no_grad(*args)
                if requires_grad and name in DIRECT:
                    if len(args) < most:
                        args = (*args, *defaults[len(args) :])
                    return DIRECT[name](*args)
            results = call_op(*args)
        except Exception:
            checks.check_tensors(op._schema, args)
            raise
        if all_results and count == 1:
            return results
        # The results are indexed, because under torch.fx they are one Proxy, which cannot be unpacked.
        return results[0] if count == 1 else tuple([results[i] for i in range(count)])

    return call

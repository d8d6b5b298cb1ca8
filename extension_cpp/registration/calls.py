"""The operators as functions, which pick an operator or its no-grad overload at each call.

An Autograd kernel in Python runs at every call of an operator, with gradients or without, and again for the backward
operator. For small tensors that is most of the time. So each operator with an Autograd kernel has a no-grad overload:
the operator <name>_no_grad, which has the same arguments, kernels and fake, and no Autograd kernel. It may leave out
the last results, if only backward reads them; it then has a C++ function of its own (def_with_no_grad in
csrc/common/shim/op.h).

The no-grad overload is called instead of the operator under no_grad, and in a backward pass that is not differentiated
itself. It is not called while a graph records the call, because a graph captured under no_grad may be trained later.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as symbolic_trace

from .._namespace import NAMESPACE
from . import checks

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


def _is_differentiable() -> bool:
    """Whether a call needs the operator, which has a derivative, and not its no-grad overload."""
    return torch.is_grad_enabled() or is_recorded()


def is_recorded() -> bool:
    """Whether a graph may record this call (torch.export, make_fx or another dispatch mode, torch.fx, torch.jit.trace),
    or forward-mode differentiation is on.

    torch.compile does not count: it guards on the grad mode, and nothing differentiates its backward graphs.
    """
    if torch.compiler.is_compiling():
        return torch.compiler._is_exporting_flag  # is_exporting() is always true while torch.compile traces it
    if forward_ad._current_level >= 0:  # no_grad does not switch forward mode off
        return True
    if torch._C._len_torch_dispatch_stack() > 0:
        return TracingContext.try_get() is None
    return torch._C._is_tracing() or symbolic_trace.is_fx_symbolic_tracing()


def _operator_or_overload(op: Any, no_grad: Any) -> Callable[..., Any]:
    count = len(no_grad._schema.returns)

    def call(*args: Any) -> Any:
        try:
            return (op if _is_differentiable() else no_grad)(*args)
        except Exception:
            checks.check_tensors(op._schema, args)
            raise

    def call_for_first(*args: Any) -> Any:
        try:
            return op(*args)[0] if _is_differentiable() else no_grad(*args)
        except Exception:
            checks.check_tensors(op._schema, args)
            raise

    def call_for_some(*args: Any) -> Any:
        try:
            results = (op if _is_differentiable() else no_grad)(*args)
        except Exception:
            checks.check_tensors(op._schema, args)
            raise
        return tuple([results[i] for i in range(count)])  # by index: under torch.fx all of them are one Proxy

    return call if count == len(op._schema.returns) else call_for_first if count == 1 else call_for_some

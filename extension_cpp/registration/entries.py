"""Provides `register`, which makes one entry of the table in ops.py: all that Python registers for one operator."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import DispatchKey, DispatchKeySet, Tensor

from . import checks
from .autograd import Gradients, library_for, qualified, register_autograd, register_fake, register_not_differentiable
from .calls import ALL_RESULTS, CASTING, NO_GRAD, overload_of, own_ops, without_suffix
from .mutation import register_mutation


class Mark(str):
    """A constant that stands in an entry where a function could stand."""


# In place of a backward: the derivative of this order is not implemented, and computing it raises RuntimeError.
NO_SECOND, NO_THIRD = Mark("second"), Mark("third")
# In place of a backward: the operator has no derivative, because it writes into an argument or helps another operator.
WRITES, NOT_DIFFERENTIABLE = Mark("writes"), Mark("not differentiable")
# In place of an autocast rule: autocast on CUDA casts to float32. The CPU gets no such rule, because torch.compile
# would use the rule that is registered last for both device types.
FLOAT32_ON_CUDA = Mark("float32")
# In place of a rule for jagged nested tensors or for DTensors: the operator raises an error for such tensors.
NONE = Mark("none")
# What an operator and its backward operators do with jagged tensors (nested.py). BY_ROWS: the operator runs once, on
# the rows of all tensors together. PADDED: it raises an error, which says that the tensors must be padded.
BY_ROWS, PADDED = Mark("by rows"), Mark("padded")

# Rules for DTensors. A rule gets the call as a dictionary: each argument by name, defaults included. In place of a
# tensor the dictionary has an object with shape, ndim and tensor_meta.dtype. A placement is the dimension that is
# sharded, PARTIAL (the processes' tensors must be added), or None if the tensor is replicated.
PARTIAL = Mark("partial")
Call = dict[str, Any]
Placement = int | Mark | None
Sharding = tuple[Sequence[Placement], Mapping[str, Placement]]  # placements of the results; of arguments by name
Rule = Callable[[Call], Iterator[Sharding]]

NESTED: dict[str, Mark] = {}  # the mark of each operator, by its name; operators marked NONE are left out
SHARDING: dict[str, Rule | Mark] = {}  # by operator
# What register_autograd got for each differentiable operator. The benchmarks register the same in another way.
DERIVATIVES: dict[str, dict[str, Any]] = {}


def register(
    op: str,
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Gradients] | Mark,
    setup_context: Callable[..., None] | None = None,
    plain: Callable[..., Any] | None = None,
    autocast: Callable[..., tuple[Any, ...]] | Mark | None = None,
    nested: Mark = NONE,
    sharding: Rule | Mark = NONE,
    kernel: Callable[..., Any] | None = None,
    no_grad_kernel: Callable[..., Any] | None = None,
) -> None:
    """Registers an operator's fake, derivative and autocast rule, and stores its rules for nested tensors and DTensors.

    Without a setup_context the operator saves its inputs. autograd.py says what the functions take and return. `kernel`
    is for an operator without kernels in C. If its no-grad overload returns fewer results, the overload gets
    `no_grad_kernel`.
    """
    register_fake(op)(fake)
    if backward is WRITES:
        register_mutation(op)
    elif backward is NOT_DIFFERENTIABLE:
        register_not_differentiable(op)
    elif isinstance(backward, Mark):
        register_autograd(op, _not_implemented(op, backward))
    else:
        setup_context = setup_context or _save_inputs(op)
        DERIVATIVES[op] = {"backward": backward, "setup_context": setup_context, "plain": plain}
        register_autograd(op, **DERIVATIVES[op])
    if autocast is FLOAT32_ON_CUDA:
        CASTING.add(qualified(op))
        for name in (qualified(op), qualified(op) + NO_GRAD):
            library = library_for(f"Autocast cuda {name}", name)
            torch.library.register_autocast(name, "cuda", torch.float32, lib=library)
    elif callable(autocast):
        _register_autocast_rule(op, autocast)
    if nested is not NONE:
        NESTED[op] = nested
    SHARDING[op] = sharding
    if kernel is not None:
        _register_kernel(op, kernel)
        _register_kernel(op + NO_GRAD, no_grad_kernel or kernel)
        if no_grad_kernel is not None:
            _register_kernel(op + ALL_RESULTS, kernel)


def _register_autocast_rule(op: str, rule: Callable[[str, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Makes autocast call an operator, or its no-grad overload, with what rule(device_type, arguments) returns.
    `arguments` has the arguments of the call by position, defaults included."""
    op = qualified(op)
    CASTING.add(op)
    keys = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
    for name in (op, op + NO_GRAD):
        overload = overload_of(name)
        defaults = tuple(argument.default_value for argument in overload._schema.arguments)
        for device_type in ("cpu", "cuda"):

            def kernel(
                *args: Any, overload: Any = overload, device_type: str = device_type, defaults: Any = defaults
            ) -> Any:
                with torch._C._ExcludeDispatchKeyGuard(keys):
                    return overload(*rule(device_type, (*args, *defaults[len(args) :])))

            library = library_for(f"Autocast {device_type} {name}", op)
            library.impl(name.split("::")[1], kernel, f"Autocast{device_type.upper()}")


def _save_inputs(op: str) -> Callable[..., None]:
    """Makes a setup_context that saves an operator's tensors, its first arguments. The others become ctx.options."""
    schema = getattr(own_ops, op).default._schema
    count = sum(str(argument.type) == "Tensor" for argument in schema.arguments)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.options = inputs[count:]

    return setup_context


def _not_implemented(op: str, order: str) -> Callable[..., NoReturn]:
    name = op.removesuffix("_backward").removesuffix("_double")

    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(f"extension_cpp::{name}: the {order} derivative is not implemented")

    return backward


def _register_kernel(name: str, kernel: Callable[..., Any]) -> None:
    """Registers a Python function as the kernel of an operator on CPU and CUDA."""
    schema = getattr(own_ops, name).default._schema
    defaults = tuple(argument.default_value for argument in schema.arguments)

    def checked(*args: Any) -> Any:
        args = (*args, *defaults[len(args) :])  # the dispatcher leaves out trailing arguments with default values
        _check_memory(schema, args)
        with torch.no_grad():  # a no-grad overload may be called while gradients are recorded
            return kernel(*args)

    op = qualified(name)
    for key in ("CPU", "CUDA"):
        library_for(f"{key} {op}", op).impl(name, checked, key)


def _check_memory(schema: Any, args: Sequence[Any]) -> None:
    """Fails if a tensor's storage was freed, as check_memory of csrc/common/shim/op.h does. PyTorch's matrix product of
    such a tensor may crash the process."""
    for argument, x in zip(schema.arguments, args, strict=True):
        if isinstance(x, Tensor) and x.numel() > 0 and x.untyped_storage().nbytes() == 0:
            got = f"memory for its {x.numel()} elements, but got a storage of 0 bytes"
            checks.fail(without_suffix(schema.name.split("::")[1]), f"expected {argument.name} to have {got}")

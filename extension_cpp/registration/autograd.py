"""Provides a register_autograd that adds less time to each call of an operator than torch.library's.

If gradients are recorded, torch.library.register_autograd makes an object of each call's arguments, looks up defaults
in the schema, enters a guard, and sets needs_input_grad twice in a backward. The register_autograd here does none of
that, and differs from torch.library's in two ways:

* torch.library's raises under the transforms of torch.func, and gives a tangent of zero in forward-mode
  differentiation. Here the transforms work. Forward mode computes in plain tensor operations, or raises an error.
* torch.library's guard keeps the operator's kernels from recording gradients. The guard is not needed here, because
  autograd.Function switches recording off, and nothing is recorded if no argument requires grad.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import DispatchKey, DispatchKeySet, Tensor
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.library import Library
from torch.nn import Parameter

from .._namespace import NAMESPACE
from .calls import DIRECT, defaults_of, overload_of, overloads_of, untraced
from .lists import FunctionOfLists, is_list, list_places, one_by_one


def keys_below(key: DispatchKey) -> DispatchKeySet:
    """Returns the keys that the dispatcher handles after this one. The bits of a DispatchKeySet are in that order.
    PythonDispatcher is added, because it must see each operator that is called while torch.compile traces."""
    return DispatchKeySet.from_raw_repr(DispatchKeySet(key).raw_repr() - 1).add(DispatchKey.PythonDispatcher)


_AFTER_AUTOGRAD = keys_below(DispatchKey.AutogradOther)

# Maps each registration to its Library. The name of an Autograd registration is the operator's; other names begin with
# the dispatch key. A registration lasts as long as its Library. The dictionary outlives this module: if the package is
# imported again, it must end the earlier registrations, because PyTorch allows only one at a time.
registrations: dict[str, Library] = vars(torch.ops).setdefault("registrations of extension_cpp", {})

# The package `distributed`, which assigns itself to this variable when torch.distributed.tensor is imported.
distributed: Any = None

# Maps the name of an operator's argument to the argument's gradient.
Gradients = dict[str, Tensor | Sequence[Tensor | None] | None]


def qualified(op: str) -> str:
    """Returns the name of an operator with its namespace. A name without one gets this package's namespace."""
    return op if "::" in op else f"{NAMESPACE}::{op}"


def library_for(key: str, op: str) -> Library:
    """Makes a Library for one registration, and destroys the one that an earlier import of the package made for it."""
    earlier = registrations.pop(key, None)
    if earlier is not None:
        earlier._destroy()
    registrations[key] = Library(op.split("::")[0], "FRAGMENT")
    return registrations[key]


def register_fake(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Works as torch.library.register_fake, for an operator and for its overloads that have no Autograd kernel.

    The fake gets all arguments, defaults included, and returns the operator's results. For an overload with fewer
    results, the last ones are dropped.
    """
    op = qualified(op)
    defaults, keyword_defaults = defaults_of(overload_of(op))

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def fake(*args: Any, **keywords: Any) -> Any:
            return function(*args, *defaults[len(args) :], **keyword_defaults | keywords)

        torch.library.register_fake(op, fake, lib=library_for(f"Fake {op}", op))
        for overload in overloads_of(op):
            name, count = overload._schema.name, len(overload._schema.returns)
            has_all = count == len(overload_of(op)._schema.returns)
            torch.library.register_fake(
                name, fake if has_all else leading(fake, count), lib=library_for(f"Fake {name}", op)
            )
        return fake

    return register


def leading(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Makes a function that returns only the first `count` of the results of another function."""

    @functools.wraps(function)
    def first(*args: Any, **keywords: Any) -> Any:
        results = function(*args, **keywords)
        return results[0] if count == 1 else results[:count]

    return first


def is_sharded(x: object) -> bool:
    """Returns whether x is a DTensor."""
    return distributed is not None and isinstance(x, distributed.DTensor)


def has_tangent(*args: Any) -> bool:
    """Returns whether one of the arguments has a tangent of forward-mode differentiation."""
    return forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args
    )


def _is_batched(x: object) -> bool:
    """Returns whether x is a batched tensor of vmap, for which the operator would run once per element of the batch."""
    functorch = torch._C._functorch
    while isinstance(x, Tensor) and functorch.is_gradtrackingtensor(x):
        x = functorch.get_unwrapped(x)
    return isinstance(x, Tensor) and functorch.is_batchedtensor(x)


def register_autograd(
    op: str,
    backward: Callable[..., Gradients],
    *,
    setup_context: Callable[..., Any] | None = None,
    plain: Callable[..., Any] | None = None,
) -> None:
    """Gives an operator its derivative, as torch.library.register_autograd does; torch.func's transforms work, too.

    Args:
        op: "name" of an operator of this package, or "namespace::name" of any. The operator must write to no argument
            and take tensors only by position. It may take lists of tensors (``Tensor[]``) and return one list.
        backward: ``backward(ctx, *grads)`` returns a dictionary from the names of arguments to their gradients. An
            argument that is missing in the dictionary, or has None there, gets no gradient. The gradient of an argument
            that does not require grad is dropped. (With torch.library, backward returns a tuple in the order of the
            arguments.) If an argument or the result is a list of tensors, its gradient is a list, too.
        setup_context: ``setup_context(ctx, inputs, output)`` saves what backward reads. ``inputs`` and
            ``ctx.needs_input_grad`` have an entry for each argument that can be given by position, defaults included.
            The entry of ``ctx.needs_input_grad`` for a list of tensors is a tuple.
            If the operator has keyword-only arguments, they come as ``keyword_only_inputs``.
        plain: the operator in plain tensor operations. It computes the results if an argument has a tangent of
            forward-mode differentiation. The operator is then called only for its checks, and not at all under vmap or
            while a graph records the call. None: forward mode raises RuntimeError.

    Raises:
        NotImplementedError: the operator does not meet the conditions named for ``op``.
    """
    op = qualified(op)
    name = op.split("::")[1]
    overload = overload_of(op)
    _check_schema(overload._schema)
    library = library_for(op, op)
    library.impl(name, _autograd_kernel(overload, backward, setup_context, plain), "Autograd", with_keyset=True)
    _register_batching(op)
    for each in overloads_of(op):
        register_not_differentiable(each._schema.name)


def register_not_differentiable(op: str) -> None:
    """Registers that the results of an operator do not require grad, as for torch.argmax.

    Without this registration the results would seem to require grad. A backward would give no gradient, and only warn.

    Args:
        op: "name" of an operator of this package, or "namespace::name" of any.
    """
    op = qualified(op)
    library_for(op, op).impl(op.split("::")[1], torch.library.fallthrough_kernel, "Autograd")
    _register_batching(op)


def _register_batching(op: str) -> None:
    """Makes vmap call the operator for each element of the batch. Without this, PyTorch does the same but warns."""
    overload = overload_of(op)

    def elements(info: Any, x: Any, dim: Any) -> Any:
        if isinstance(dim, list):  # of a list of tensors
            each = zip(*(elements(info, *pair) for pair in zip(x, dim, strict=True)), strict=True)
            return [*map(list, each)] or [[]] * max(info.batch_size, 1)
        if not isinstance(x, Tensor) or dim is None:
            return [x] * max(info.batch_size, 1)
        x = x.movedim(dim, 0)
        # For an empty batch, one call with zeros gives the shapes of the results. A sum keeps them differentiable.
        return x if info.batch_size else x.sum(0, keepdim=True, dtype=x.dtype)

    def loop(info: Any, in_dims: tuple[Any, ...], *args: Any, **keywords: Any) -> Any:
        columns = (elements(info, x, dim) for x, dim in zip(args, in_dims, strict=True))
        results = [overload(*element, **keywords) for element in zip(*columns, strict=True)]
        if isinstance(results[0], Tensor):
            return torch.stack(results)[: info.batch_size], 0
        stacked = [torch.stack(each)[: info.batch_size] for each in zip(*results, strict=True)]
        kind = type(results[0])
        return kind(stacked), kind([0] * len(stacked))

    torch.library.register_vmap(op, loop, lib=library_for(f"Batched {op}", op))


def _check_schema(schema: Any) -> None:
    for argument in (*schema.arguments, *schema.returns):
        kind = str(argument.type)
        is_other_list = kind not in ("Tensor", "Optional[Tensor]", "List[Tensor]") and "Tensor" in kind
        if argument.alias_info is not None or is_other_list or ("Tensor" in kind and argument.kwarg_only):
            raise NotImplementedError(
                f"{schema.name}: expected an operator that writes to no argument and has neither optional lists of "
                f"tensors nor keyword-only tensors, but got {schema}"
            )
    if len(schema.returns) > 1 and any(map(is_list, schema.returns)):
        raise NotImplementedError(f"{schema.name}: expected a list as the only result, but got {schema}")


def _in_order(
    op: Any, backward: Callable[..., Gradients], names: list[str], beyond: int = 0, more: int = 0
) -> Callable[..., tuple[Any, ...]]:
    """Makes a backward that returns the gradients in the order of the arguments `names`, as autograd.Function needs.
    `beyond` is the number of results that have no gradient, and `more` that of further inputs, which get None."""
    known = frozenset(names)
    no_grads, after = (None,) * beyond, (None,) * more
    # A cache of the arguments' names, with None where no gradient is needed. A key is needs_input_grad.
    orders: dict[tuple[bool, ...], list[str | None]] = {}

    def in_order(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        gradients: Any = backward(ctx, *grads, *no_grads)
        if type(gradients) is not dict or not known.issuperset(gradients):
            raise TypeError(
                f"{op._schema.name}: expected its backward to return a dictionary of gradients with keys among "
                f"{names}, but got {gradients if type(gradients) is not dict else list(gradients)}"
            )
        needs = ctx.needs_input_grad
        order = orders.get(needs)
        if order is None:
            order = [name if is_needed else None for name, is_needed in zip(names, needs, strict=True)]
            orders[needs] = order
        return *map(gradients.get, order), *after

    return in_order


def _is_compiled(args: Iterable[Any]) -> bool:
    """Returns whether torch.compile traces this call, and all tensors are plain. The compiled graph then holds an
    overload without an Autograd kernel. An exported graph holds the operator, because the graph may be trained."""
    if TracingContext.try_get() is None or torch.compiler._is_exporting_flag:
        return False
    return all(not isinstance(x, Tensor) or type(x) in (Tensor, Parameter, FakeTensor, FunctionalTensor) for x in args)


def _function_of(op: Any, backward: Callable[..., Gradients], setup_context: Callable[..., Any] | None) -> Any:
    """Makes the autograd.Function that an operator's Autograd kernel applies.

    The apply of a Function takes no keywords, and its backward must return a gradient for each argument. So the
    dispatch keys and the keyword arguments come as one last argument, a pair, whose gradient is always None.
    """
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    keyword_defaults = defaults_of(op)[1]
    overloads = overloads_of(op._schema.name)
    below_autograd = overloads[0] if overloads else None
    count = len(overloads[-1]._schema.returns) if overloads else len(op._schema.returns)

    def forward(ctx: Any, *args: Any) -> Any:
        inputs, (keys, keywords) = args[:-1], args[-1]
        if torch._C._are_functorch_transforms_active():
            # autograd.Function switches recording off. torch.func's transforms at lower levels need recording on.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                output = op.redispatch(keys, *inputs, **keywords)
        elif below_autograd is not None and _is_compiled(inputs):
            output = below_autograd(*inputs, **keywords)
        else:
            output = op.redispatch(keys, *inputs, **keywords)
        ctx.needs_input_grad = ctx.needs_input_grad[:-1]
        if distributed is not None:
            ctx.mesh = next((x.device_mesh for x in inputs if is_sharded(x)), None)
        if count < len(op._schema.returns):  # only backward reads the results that the no-grad overload leaves out
            ctx.mark_non_differentiable(*output[count:])
        if setup_context is not None:
            given = {"keyword_only_inputs": keyword_defaults | keywords} if keyword_defaults else {}
            setup_context(ctx=ctx, inputs=inputs, output=output, **given)
        return output

    in_order = _in_order(op, backward, names, more=1)

    def backward_of_function(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if getattr(ctx, "mesh", None) is not None:  # autograd passes plain zeros, not DTensors, for unused results
            grads = distributed.on_mesh(grads, ctx.mesh)
        return in_order(ctx, *grads)

    return _new_function(op, forward, backward_of_function)


def _new_function(op: Any, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    lists, returns_list = list_places(op), any(map(is_list, op._schema.returns))
    if lists or returns_list:
        return FunctionOfLists(functools.partial(_function_class, op), forward, backward, lists, returns_list)
    return _function_class(op, forward, backward)


def _function_class(op: Any, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    # The class is made by type(), because PyTorch takes grad_fn's name from the class's name when the class is made.
    functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    # Compiled autograd calls this method of a class. autograd.Function has it, and the base class below does not.
    functions["_compiled_autograd_key"] = staticmethod(torch.autograd.Function._compiled_autograd_key)
    # The base class is not autograd.Function, which raises under torch.func's transforms. When the Autograd kernel
    # runs, their dispatch has already unwrapped the tensors to the level of one transform. There this class records
    # gradients as PyTorch's own operators do.
    return type(op._schema.name.split("::")[1], (torch.autograd.function._SingleLevelFunction,), functions)


def _direct_function(op: Any, backward: Callable[..., Gradients], setup_context: Callable[..., Any] | None) -> Any:
    """Makes the autograd.Function that calls.py applies without the dispatcher.

    Its forward returns the results that the no-grad overload has. The operator's other results are only saved, and
    backward gets None as their gradients.
    """
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    keyword_only = [*defaults_of(op)[1]]
    overloads = overloads_of(op._schema.name)
    below_autograd = untraced(overloads[0])
    count = len(overloads[-1]._schema.returns)
    setup = _setup_by_position(setup_context, len(names), keyword_only) if keyword_only else setup_context
    beyond = len(op._schema.returns) - count

    def forward(ctx: Any, *args: Any) -> Any:
        output = below_autograd(*args)
        if setup is not None:
            setup(ctx, args, output)
        return output if not beyond else output[0] if count == 1 else output[:count]

    return _new_function(op, forward, _in_order(op, backward, names, beyond, len(keyword_only)))


def _setup_by_position(
    setup_context: Callable[..., Any] | None, count: int, keyword_only: list[str]
) -> Callable[..., None]:
    """Makes a setup_context that gets the keyword-only arguments as inputs, after the first `count`."""

    def setup(ctx: Any, args: tuple[Any, ...], output: Any) -> None:
        ctx.needs_input_grad = ctx.needs_input_grad[:count]
        if setup_context is not None:
            keywords = dict(zip(keyword_only, args[count:], strict=True))
            setup_context(ctx, args[:count], output, keyword_only_inputs=keywords)

    return setup


def _autograd_kernel(
    op: Any,
    backward: Callable[..., Gradients],
    setup_context: Callable[..., Any] | None,
    plain: Callable[..., Any] | None,
) -> Callable[..., Any]:
    node = _function_of(op, backward, setup_context)
    if overloads_of(op._schema.name):
        DIRECT[op._schema.name] = _direct_function(op, backward, setup_context).apply
    defaults, keyword_defaults = defaults_of(op)
    lists = list_places(op)

    def apply(*args: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return node.apply(*args)
        with enable_single_level_autograd_function():
            return node.apply(*args)

    def kernel(keys: DispatchKeySet, *args: Any, **keywords: Any) -> Any:
        keys = keys & _AFTER_AUTOGRAD
        each = one_by_one(args, lists)
        if forward_ad._current_level >= 0 and has_tangent(*each):
            if plain is None:
                raise RuntimeError(f"{op._schema.name}: forward-mode differentiation is not implemented")
            if not (torch._C._len_torch_dispatch_stack() or any(map(_is_batched, each))):
                with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False):
                    op.redispatch(keys, *args, **keywords)  # only for the operator's checks
            return plain(*args, *defaults[len(args) :], **keyword_defaults | keywords)
        if torch.is_grad_enabled():
            for arg in each:
                if isinstance(arg, Tensor) and arg.requires_grad:
                    # The dispatcher leaves out trailing arguments with default values.
                    return apply(*unwrap_dead_wrappers(args), *defaults[len(args) :], (keys, keywords))
        return op.redispatch(keys, *args, **keywords)

    return kernel

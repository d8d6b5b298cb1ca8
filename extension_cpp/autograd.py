"""register_autograd as torch.library's, cheaper a call, and operators, which go round it where no gradient is recorded.

An Autograd kernel in Python runs at every call, with gradients and without, and for the backward op again, so that on
small tensors it is most of the time. So each operator with an Autograd kernel has a twin without one, <name>_no_grad:
the same arguments, kernels and fake. It may go without the results at the end that only a backward pass reads, by a
function of its own (def_with_twin in csrc/common/op.h). It is called in the operator's place under no_grad, and in a
backward pass that is not differentiated itself, unless a graph records the call: a graph captured under no_grad may be
trained later.

Where gradients are recorded, torch.library.register_autograd makes an object of each call's arguments, looks up
defaults in the schema, enters a guard, and sets needs_input_grad twice a backward. None of that is wanted here:

* Transforms of torch.func are refused, and forward-mode differentiation gets a tangent of zero without a word. Here the
  first work, and the second has the operator in plain tensor operations, or raises.
* The guard keeps what runs below from recording gradients. autograd.Function has switched them off by then, and where
  no argument requires grad there are none to record.
* Lists of tensors would have to be flattened. Operators that have some are refused.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import DispatchKey, DispatchKeySet, Tensor
from torch._functorch.utils import enable_single_level_autograd_function, unwrap_dead_wrappers
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as symbolic_trace
from torch.library import Library

from extension_cpp import checks

# Of a call's keys those that come after autograd: the bits of a set are in the order of dispatch. PythonDispatcher, the
# first of all while torch.compile traces, has to see each step.
_AFTER_AUTOGRAD = DispatchKeySet.from_raw_repr(DispatchKeySet(DispatchKey.AutogradOther).raw_repr() - 1).add(
    DispatchKey.PythonDispatcher
)

# Of Autograd kernels by operator, of fakes and autocast kernels by the key and the operator; one lasts as long as its
# Library. Kept where they outlive this module: PyTorch takes none a second time, and the package may be imported again.
registrations: dict[str, Library] = vars(torch.ops).setdefault("registrations of extension_cpp", {})

# DTensor, and the module that knows what to do with one: both set by that module, where there is one.
DTENSOR: tuple[Any, ...] = ()
sharding: Any = None

Gradients = dict[str, Tensor | None]  # by the name of the argument

TWIN = "_no_grad"  # behind an operator's name, as in csrc/common/op.cpp


def operators(namespace: str) -> SimpleNamespace:
    """The operators that have a twin, as functions of arguments by position, with the twin's results.

    Under no_grad they call the twin, unless a graph records the call.
    """
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{namespace}::")]
    return SimpleNamespace(
        **{
            name.split("::")[1]: _operator_or_twin(_overload(name), _overload(name + TWIN))
            for name in names
            if name + TWIN in names
        }
    )


def _overload(op: str) -> Any:
    namespace, name = op.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def _is_differentiable() -> bool:
    """Whether a call must go to the operator itself, which has a derivative, and not to its twin."""
    return torch.is_grad_enabled() or is_recorded()


def is_recorded() -> bool:
    """Whether a graph may record this call: torch.export, make_fx or another dispatch mode, torch.fx, torch.jit.trace;
    or forward-mode differentiation may follow it.

    torch.compile is not among them: it guards on the grad mode, and nothing differentiates its backward graphs.
    """
    if torch.compiler.is_compiling():
        return torch.compiler._is_exporting_flag  # is_exporting() is always true where torch.compile traces it
    if forward_ad._current_level >= 0:  # which no_grad does not switch off
        return True
    if torch._C._len_torch_dispatch_stack() > 0:
        return TracingContext.try_get() is None
    return torch._C._is_tracing() or symbolic_trace._is_fx_tracing_flag


def _operator_or_twin(op: Any, twin: Any) -> Callable[..., Any]:
    count = len(twin._schema.returns)

    def call(*args: Any) -> Any:
        try:
            return (op if _is_differentiable() else twin)(*args)
        except Exception:
            checks.check_tensors(op._schema, args)
            raise

    def call_for_first(*args: Any) -> Any:
        try:
            return op(*args)[0] if _is_differentiable() else twin(*args)
        except Exception:
            checks.check_tensors(op._schema, args)
            raise

    def call_for_some(*args: Any) -> Any:
        try:
            results = (op if _is_differentiable() else twin)(*args)
        except Exception:
            checks.check_tensors(op._schema, args)
            raise
        return tuple([results[i] for i in range(count)])  # one by one, as torch.fx has a Proxy for them all

    return call if count == len(op._schema.returns) else call_for_first if count == 1 else call_for_some


def library_for(key: str, op: str) -> Library:
    """A Library for one registration, in place of that of an earlier import."""
    earlier = registrations.pop(key, None)
    if earlier is not None:
        earlier._destroy()
    registrations[key] = Library(op.split("::")[0], "FRAGMENT")
    return registrations[key]


def register_fake(op: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """torch.library.register_fake for an operator, and with as many of its results as it has for its twin, if any."""

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(op, fake, lib=library_for(f"Fake {op}", op))
        if op + TWIN not in torch._C._dispatch_get_all_op_names():
            return fake
        results_of_op, count = (len(_overload(name)._schema.returns) for name in (op, op + TWIN))

        def of_twin(*args: Any, **keywords: Any) -> Any:
            results = fake(*args, **keywords)
            return results[0] if count == 1 else results[:count]

        twin = fake if count == results_of_op else of_twin
        torch.library.register_fake(op + TWIN, twin, lib=library_for(f"Fake {op}{TWIN}", op))
        return fake

    return register


def register_autocast(op: str, device_type: str, cast_inputs: torch.dtype) -> None:
    """torch.library.register_autocast for an operator and its twin."""
    for name in (op, op + TWIN):
        library = library_for(f"Autocast {device_type} {name}", op)
        torch.library.register_autocast(name, device_type, cast_inputs, lib=library)


def register_autocast_rule(op: str, rule: Callable[[str, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Under autocast calls an operator, or its twin, with rule(device_type, arguments) in place of its arguments.

    The arguments are by position, defaults included.
    """
    keys = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
    for name in (op, op + TWIN):
        overload = _overload(name)
        defaults = tuple(argument.default_value for argument in overload._schema.arguments)
        for device_type in ("cpu", "cuda"):

            def kernel(
                *args: Any, overload: Any = overload, device_type: str = device_type, defaults: Any = defaults
            ) -> Any:
                with torch._C._ExcludeDispatchKeyGuard(keys):
                    return overload(*rule(device_type, (*args, *defaults[len(args) :])))

            library = library_for(f"Autocast {device_type} {name}", op)
            library.impl(name.split("::")[1], kernel, f"Autocast{device_type.upper()}")


def has_tangent(*args: Any) -> bool:
    """Whether forward-mode differentiation goes through one of these."""
    return forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in args
    )


def register_autograd(
    op: str,
    backward: Callable[..., Gradients],
    *,
    setup_context: Callable[..., Any] | None = None,
    plain: Callable[..., Any] | None = None,
) -> None:
    """Gives an operator its derivative, as torch.library.register_autograd does, and under torch.func's transforms.

    Args:
        op: "namespace::name" of an operator that writes to no argument and takes and returns no list of tensors, and
            tensors by position alone.
        backward: ``backward(ctx, *grads)`` returns the gradients as a dictionary, from an argument's name to its
            gradient. An argument that is not there, or None, has no gradient; one whose argument does not require grad
            is dropped. (torch.library's returns a tuple in the order of the arguments.)
        setup_context: ``setup_context(ctx, inputs, output)`` keeps what backward reads; ``inputs`` and
            ``ctx.needs_input_grad`` have an entry for each of these arguments, defaults included. An operator with
            keyword-only arguments gets them as ``keyword_only_inputs``, too.
        plain: the operator in plain tensor operations, called in its place where an argument has a tangent of
            forward-mode differentiation. None: there forward mode raises RuntimeError.

    Raises:
        NotImplementedError: the operator's schema is not of that kind.
    """
    name = op.split("::")[1]
    overload = _overload(op)
    _check_schema(overload._schema)
    library = library_for(op, op)
    library.impl(name, _autograd_kernel(overload, backward, setup_context, plain), "Autograd", with_keyset=True)


def _check_schema(schema: Any) -> None:
    for argument in (*schema.arguments, *schema.returns):
        kind = str(argument.type)
        if argument.alias_info is not None or ("Tensor" in kind and ("List" in kind or argument.kwarg_only)):
            raise NotImplementedError(
                f"{schema.name}: expected an operator that writes to no argument and has neither lists of tensors nor "
                f"keyword-only tensors, but got {schema}; use torch.library.register_autograd"
            )


def _autograd_kernel(
    op: Any,
    backward: Callable[..., Gradients],
    setup_context: Callable[..., Any] | None,
    plain: Callable[..., Any] | None,
) -> Callable[..., Any]:
    by_position = [argument for argument in op._schema.arguments if not argument.kwarg_only]
    names = [argument.name for argument in by_position]
    known = frozenset(names)
    orders: dict[tuple[bool, ...], list[Any]] = {}  # names, or None where no gradient is needed; by needs_input_grad
    keyword_only = [argument for argument in op._schema.arguments if argument.kwarg_only]
    defaults = tuple(argument.default_value for argument in by_position)
    keyword_defaults = {argument.name: argument.default_value for argument in keyword_only}

    # Function.apply takes no keywords, and one more argument is one more gradient: what is none comes last, as a pair.
    def forward(ctx: Any, *args: Any) -> Any:
        inputs, (keys, keywords) = args[:-1], args[-1]
        if torch._C._are_functorch_transforms_active():
            # Function switches gradients off for the levels below, too, where other transforms record theirs.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                output = op.redispatch(keys, *inputs, **keywords)
        else:
            output = op.redispatch(keys, *inputs, **keywords)
        ctx.needs_input_grad = ctx.needs_input_grad[:-1]
        if DTENSOR:
            ctx.mesh = next((x.device_mesh for x in inputs if isinstance(x, DTENSOR)), None)
        if setup_context is not None:
            given = {"keyword_only_inputs": keyword_defaults | keywords} if keyword_only else {}
            setup_context(ctx=ctx, inputs=inputs, output=output, **given)
        return output

    def in_order(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        if getattr(ctx, "mesh", None) is not None:  # autograd's zeros, for results that are not used, are plain
            grads = sharding.on_mesh(grads, ctx.mesh)
        gradients = backward(ctx, *grads)
        if type(gradients) is not dict or not gradients.keys() <= known:
            raise TypeError(
                f"{op._schema.name}: expected its backward to return a dictionary of gradients with keys among "
                f"{names}, but got {gradients if type(gradients) is not dict else list(gradients)}"
            )
        order = orders.get(ctx.needs_input_grad)
        if order is None:
            pairs = zip(names, ctx.needs_input_grad, strict=True)
            order = orders[ctx.needs_input_grad] = [name if is_needed else None for name, is_needed in pairs]
        return *map(gradients.get, order), None

    # Made by type(), because PyTorch takes the name in grad_fn from the class while it is made.
    functions = {"forward": staticmethod(forward), "backward": staticmethod(in_order)}
    node: Any = type(op._schema.name.split("::")[1], (torch.autograd.Function,), functions)
    # Function.apply without its check that refuses torch.func's transforms: their dispatch has brought the tensors to
    # the level of one transform, where this kernel records like the kernels of PyTorch's own operators.
    single_level_apply = super(torch.autograd.Function, node).apply

    def apply(*args: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return single_level_apply(*args)
        with enable_single_level_autograd_function():
            return single_level_apply(*args)

    def kernel(keys: DispatchKeySet, *args: Any, **keywords: Any) -> Any:
        keys = keys & _AFTER_AUTOGRAD
        if forward_ad._current_level >= 0 and has_tangent(*args):
            if plain is None:
                raise RuntimeError(f"{op._schema.name}: forward-mode differentiation is not implemented")
            return plain(*args, *defaults[len(args) :], **keywords)
        if torch.is_grad_enabled():
            for arg in args:
                if isinstance(arg, Tensor) and arg.requires_grad:
                    # The dispatcher leaves out trailing arguments that are their defaults.
                    return apply(*unwrap_dead_wrappers(args), *defaults[len(args) :], (keys, keywords))
        return op.redispatch(keys, *args, **keywords)

    return kernel

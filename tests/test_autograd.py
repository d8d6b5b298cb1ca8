"""Tests that registration/autograd.py behaves like torch.library.register_autograd, except that it calls an operator's
no-grad overload if no gradient is needed.

tests/battery tests every op with opcheck, torch.compile, second derivatives, no_grad, inference mode and threads.
test_norm.py tests autocast.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import extension_cpp
from extension_cpp import _ops
from extension_cpp.registration.autograd import _AFTER_AUTOGRAD, Gradients, register_autograd, register_fake
from extension_cpp.registration.calls import operators, overloads_of, without_suffix
from tests.forked import python

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


@pytest.fixture
def tensors(device: str) -> tuple[Tensor, ...]:
    """Returns x, weight and bias of a layer_norm, all of which require grad."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 5), (5,), (5,))]
    return tuple(tensor.to(device).requires_grad_() for tensor in made)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return extension_cpp.layer_norm(x, (5,), weight, bias)


def gradients(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*tensors).sin().sum(), tensors)


def assert_equal(ours: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
    for a, b in zip(ours, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_what_comes_after_autograd_is_what_pytorch_says() -> None:
    assert _AFTER_AUTOGRAD.raw_repr() == torch._C._after_autograd_keyset.raw_repr()


# Defines an operator with default values and a keyword-only argument. `given` records what its setup_context receives.

library = torch.library.Library("autograd_test", "DEF")
library.define("scaled(Tensor x, Tensor? y=None, float factor=2.0, *, bool negate=False) -> Tensor")
given: dict[str, Any] = {}


def _scaled(x: Tensor, y: Tensor | None = None, factor: float = 2.0, *, negate: bool = False) -> Tensor:
    z = x * (-factor if negate else factor)
    return z if y is None else z + y


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.factor = -inputs[2] if keyword_only_inputs["negate"] else inputs[2]
    given.update(inputs=inputs, keyword_only_inputs=keyword_only_inputs, needs=ctx.needs_input_grad)


def _backward(ctx: Any, grad_out: Tensor) -> Gradients:
    return {"y": grad_out, "x": grad_out * ctx.factor}


library.impl("scaled", _scaled, "CompositeExplicitAutograd")
register_autograd("autograd_test::scaled", _backward, setup_context=_setup_context)


@pytest.mark.parametrize("gradients, got", [({"z": None}, r"\['z'\]"), ((None, None, None), r"\(None, None, None\)")])
def test_gradients_of_no_argument_are_refused(gradients: Any, got: str) -> None:
    name = f"twice_{type(gradients).__name__}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: 2 * x, "CompositeExplicitAutograd")
    register_autograd(f"autograd_test::{name}", lambda ctx, grad_out: gradients)
    y = getattr(torch.ops.autograd_test, name)(torch.ones(3, requires_grad=True))
    expected = "expected its backward to return a dictionary of gradients with keys among"
    with pytest.raises(TypeError, match=rf"autograd_test::{name}: {expected} \['x'\], but got {got}"):
        y.sum().backward()


@pytest.mark.parametrize("needs_x, needs_y", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("arguments, factor", [({}, 2), ({"factor": 3.0}, 3), ({"factor": 3.0, "negate": True}, -3)])
def test_arguments_defaults_and_what_needs_grad(needs_x, needs_y, arguments, factor, device) -> None:
    x, y = (torch.ones(3, device=device, requires_grad=needs) for needs in (needs_x, needs_y))
    z = torch.ops.autograd_test.scaled(x, y, **arguments)
    assert z.tolist() == [factor + 1] * 3
    z.sum().backward()
    assert given["inputs"][0] is x and given["inputs"][1] is y and given["inputs"][2:] == (abs(factor),)
    assert given["keyword_only_inputs"] == {"negate": factor < 0}
    assert given["needs"] == (needs_x, needs_y, False)
    assert (x.grad is None) if not needs_x else x.grad.tolist() == [factor] * 3
    assert (y.grad is None) if not needs_y else y.grad.tolist() == [1] * 3


def test_arguments_left_out(device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    torch.ops.autograd_test.scaled(x).sum().backward()
    assert given["inputs"][1:] == (None, 2.0) and given["needs"] == (True, False, False)
    assert x.grad.tolist() == [2] * 3


def test_nothing_is_kept_where_no_gradient_is_wanted(device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    given.clear()
    with torch.no_grad():
        torch.ops.autograd_test.scaled(x)
    torch.ops.autograd_test.scaled(x.detach())
    assert not given


def _times(x: Tensor, *, by: float, more: float) -> Tensor:
    return x * by + more


def _times_setup_context(
    ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: dict[str, Any]
) -> None:
    ctx.by = keyword_only_inputs["by"]
    given.update(inputs=inputs, keyword_only_inputs=keyword_only_inputs, needs=ctx.needs_input_grad)


for suffix in ("", "_no_grad"):
    library.define(f"times{suffix}(Tensor x, *, float by, float more=1.0) -> Tensor")
    library.impl(f"times{suffix}", lambda x, by, more=1.0: _times(x, by=by, more=more), "CPU")
register_fake("autograd_test::times")(_times)
register_autograd(
    "autograd_test::times",
    lambda ctx, grad: {"x": grad * ctx.by},
    setup_context=_times_setup_context,
    plain=_times,
)


@pytest.mark.parametrize("more", [(), (0.5,)])
def test_keyword_only_arguments(more: tuple[float, ...]) -> None:
    """A function of `operators` takes them by position, also where it applies the autograd.Function itself. The fake
    and the plain form get their defaults."""
    times, x = operators("autograd_test").times, torch.ones(3, requires_grad=True)
    expected = torch.full((3,), 3.0 + sum(more or (1.0,)))
    given.clear()
    out = times(x, 3.0, *more)
    assert torch.equal(out, expected) and torch.autograd.grad(out.sum(), x)[0].tolist() == [3.0] * 3
    assert given["inputs"][0] is x and len(given["inputs"]) == 1 and given["needs"] == (True,)
    assert given["keyword_only_inputs"] == {"by": 3.0, "more": sum(more or (1.0,))}
    with torch.no_grad():
        assert torch.equal(times(x, 3.0, *more), expected)
    with FakeTensorMode() as mode:
        assert times(mode.from_tensor(x), 3.0, *more).shape == x.shape
    value, tangent = torch.func.jvp(lambda x: times(x, 3.0, *more), (x.detach(),), (torch.ones(3),))
    assert torch.equal(value, expected) and tangent.tolist() == [3.0] * 3


@pytest.mark.parametrize(
    "schema",
    ["(Tensor(a!) x) -> ()", "(Tensor?[] x) -> Tensor", "(Tensor x) -> (Tensor, Tensor[])", "(*, Tensor x) -> Tensor"],
)
def test_other_schemas_are_refused(schema) -> None:
    name = f"other{abs(hash(schema))}"
    library.define(name + schema)
    with pytest.raises(NotImplementedError, match=f"autograd_test::{name}: expected .*, but got autograd_test::{name}"):
        register_autograd(f"autograd_test::{name}", _backward)


def test_lists_in_torchs_own_registration() -> None:
    """With PyTorch's register_autograd, torch.func.grad and vmap reject a list, as docs/registration.md says."""
    op = "autograd_test::total_of_list"
    library.define("total_of_list(Tensor[] xs) -> Tensor")
    library.impl("total_of_list", lambda xs: torch.stack(xs).sum(0), "CPU")
    torch.library.register_autograd(
        op,
        lambda ctx, grad: [grad] * ctx.count,
        setup_context=lambda ctx, inputs, output: setattr(ctx, "count", len(inputs[0])),
        lib=library,
    )

    def twice(x: Tensor) -> Tensor:
        return torch.ops.autograd_test.total_of_list([x, x])

    x = torch.ones(3)
    leaf = x.clone().requires_grad_()
    assert torch.autograd.grad(twice(leaf).sum(), leaf)[0].tolist() == [2] * 3
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: twice(x).sum())(x)
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(twice)(torch.ones(2, 3))
    value, tangent = torch.func.jvp(twice, (x,), (x,))
    assert value.tolist() == [2] * 3 and tangent.tolist() == [0] * 3


def _lists_backward(ctx: Any, grads: list[Tensor]) -> Gradients:
    given["needs"] = ctx.needs_input_grad
    count = len(grads)
    xs, by = ctx.saved_tensors[:count], ctx.saved_tensors[count]
    pairs = zip(grads, xs, strict=True)
    return {"xs": [grad * by for grad in grads], "by": sum((grad * x).sum() for grad, x in pairs)}


def _scale_all(xs: list[Tensor], by: Tensor, more: float = 0.0) -> list[Tensor]:
    return [x * by + more for x in xs]


library.define("scale_all(Tensor[] xs, Tensor by, float more=0.0) -> Tensor[]")
library.impl("scale_all", _scale_all, "CPU")
torch.library.register_fake("autograd_test::scale_all", _scale_all, lib=library)
register_autograd(
    "autograd_test::scale_all",
    _lists_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[0], inputs[1]),
    plain=_scale_all,
)


def test_lists() -> None:
    """An operator on a list of tensors has gradients of every order, and works in torch.func and torch.compile."""
    op = torch.ops.autograd_test.scale_all
    x, y, by = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (4,), ()))

    def every(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, y, by: sum((out.sin() ** 2).sum() for out in function([x, y], by))

    assert isinstance(op([x, y], by), list) and op([], by) == []
    assert torch.autograd.gradcheck(lambda x, y, by: tuple(op([x, y], by)), (x, y, by), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x, y, by: tuple(op([x, y], by)), (x, y, by))
    torch.autograd.grad(op([x.detach(), y], by)[0].sum(), by)
    assert given["needs"] == ((False, True), True, False)
    torch.library.opcheck(op.default, ([x, y], by))
    args = tuple(each.detach() for each in (x, y, by))
    ours, theirs = every(op), every(_scale_all)
    for transform in (
        lambda f: torch.func.grad(f, argnums=(0, 1, 2)),
        lambda f: torch.func.hessian(f),
        lambda f: lambda *args: torch.func.jvp(f, args, args),
        lambda f: lambda x, y, by: torch.vmap(f, in_dims=(0, None, None))(x, y, by),
        lambda f: lambda x, y, by: torch.vmap(torch.func.grad(f), in_dims=(None, 0, None))(x, y, by),
        lambda f: torch.compile(torch.func.grad(f), backend="aot_eager", fullgraph=True),
    ):
        assert_equal(tree_leaves(transform(ours)(*args)), tree_leaves(transform(theirs)(*args)))


# ---- Outputs: the operator layer_norm has three, of which only the first is differentiable ----


def test_outputs_and_the_name_of_the_node(tensors) -> None:
    x, weight, bias = tensors
    y, mean, rstd = torch.ops.extension_cpp.layer_norm(x, (5,), weight, bias)
    assert y.requires_grad and not mean.requires_grad and not rstd.requires_grad
    assert type(y.grad_fn).__name__ == "layer_normBackward"
    assert not torch.ops.extension_cpp.layer_norm(x.detach(), (5,))[0].requires_grad


def test_saved_tensors_are_guarded(tensors) -> None:
    """backward raises an error after a saved tensor was changed in place, and after a backward that freed it."""
    x = tensors[0]
    y = layer_norm(*tensors)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    total = layer_norm(*tensors).sum()
    total.backward(retain_graph=True)
    first = x.grad.clone()
    total.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        total.backward()


def test_hooks(tensors) -> None:
    expected = gradients(layer_norm, tensors)
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: unpacked.append(t) or t):
        y = layer_norm(*tensors)
    assert len(packed) == 5
    y.register_hook(lambda grad: 2 * grad)
    seen: list[Tensor] = []
    y.grad_fn.register_hook(lambda grads_in, grads_out: seen.extend(grads_out[:1]))
    tensors[0].register_hook(lambda grad: 3 * grad)
    grads = torch.autograd.grad(y, tensors, y.detach().cos())
    assert len(unpacked) == 5 and torch.equal(seen[0], 2 * y.detach().cos())
    assert_equal(grads, (6 * expected[0], 2 * expected[1], 2 * expected[2]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant, tensors) -> None:
    expected = gradients(layer_norm, tensors)
    calls = []

    def block(*tensors: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return layer_norm(*tensors)

    for tensor in tensors:
        tensor.grad = None
    checkpoint(block, *tensors, use_reentrant=use_reentrant).sin().sum().backward()
    assert len(calls) == 2
    assert_equal(tuple(tensor.grad for tensor in tensors), expected)


def test_vmap(tensors) -> None:
    """vmap of layer_norm over x gives the same result and gradients as one call of layer_norm on all of x."""
    expected = gradients(layer_norm, tensors)
    mapped = torch.func.vmap(layer_norm, (0, None, None))
    torch.testing.assert_close(mapped(*tensors), layer_norm(*tensors))
    torch.testing.assert_close(gradients(mapped, tensors), expected)


def test_func_grad_is_autograds(tensors) -> None:
    """torch.func.grad of layer_norm gives the same bits as torch.autograd.grad. tests/battery tests all transforms."""
    (expected,) = torch.autograd.grad(layer_norm(*tensors).sin().sum(), tensors[:1])
    got = torch.func.grad(lambda x: layer_norm(x, *tensors[1:]).sin().sum())(tensors[0].detach())
    assert torch.equal(got, expected)


def test_forward_mode_without_a_plain_form_raises() -> None:
    x = torch.ones(3)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"scaled: forward-mode .* is not implemented"):
        torch.ops.autograd_test.scaled(forward_ad.make_dual(x, x))


@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
def test_dual_tensors(gradients, tensors) -> None:
    """Forward mode by dual tensors works with and without no_grad. Calls without dual tensors give the usual result."""
    x, weight, bias = (tensor.detach() for tensor in tensors)
    with torch.set_grad_enabled(gradients), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.cos())
        ours = forward_ad.unpack_dual(layer_norm(dual, weight, bias))
        exact = forward_ad.unpack_dual(torch.nn.functional.layer_norm(dual, (5,), weight, bias))
        torch.testing.assert_close(ours, exact)
        assert torch.equal(layer_norm(x, weight, bias), layer_norm(*tensors).detach())
        for a, b, out in ((dual, x, x.clone()), (x, dual, x.clone()), (x, x, dual)):
            with pytest.raises(RuntimeError, match=r"muladd.out: functions with out=... arguments don't support"):
                extension_cpp.muladd(a, b, 1.0, out=out)


def test_third_derivative_of_mish_is_refused_in_forward_mode() -> None:
    x = torch.ones(3, dtype=torch.float64)
    second = torch.func.grad(lambda x: torch.func.grad(lambda x: extension_cpp.mish(x).sum())(x).sum())
    with pytest.raises(RuntimeError, match=r"extension_cpp::mish.*not implemented"):
        torch.func.jvp(second, (x,), (x,))


def test_a_dispatch_mode_sees_calls_below_autograd(tensors) -> None:
    expected = gradients(layer_norm, tensors)
    seen: list[tuple[str, bool]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if func.namespace == "extension_cpp":
                seen.append((func._schema.name, any(tensor.requires_grad for tensor in output)))
            return output

    with Watch():
        grads = gradients(layer_norm, tensors)
    assert seen == [("extension_cpp::layer_norm", False), ("extension_cpp::layer_norm_backward", False)]
    assert_equal(grads, expected)


def test_functions_fill_in_defaults() -> None:
    """A function in _ops fills in the schema's defaults. The function must also do so if a tensor requires grad, when
    it calls the autograd.Function and not the operator. The package's public functions always pass all arguments."""
    x = torch.randn(3, 4, requires_grad=True)
    y = _ops.cumsum(x, 1)
    (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(y, _ops.cumsum(x, 1, False, False)) and grad[0].tolist() == [4, 3, 2, 1]


# Overloads without an Autograd kernel.


def test_what_autograd_knows_has_overloads() -> None:
    """Every operator with an Autograd kernel has a no-grad overload with the same arguments. If this overload leaves
    out results that only backward reads, a second overload has all results."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("extension_cpp::")}
    bare = {name for name in names if name == without_suffix(name)}
    bare -= {f"extension_cpp::{n}" for n in ("muladd.out", "cross_entropy_chunk", "cross_entropy_scale")}
    kept = {"layer_norm": 1, "rms_norm": 1, "layer_norm_dropout": 1, "add_layer_norm": 2, "add_rms_norm": 2}
    kept |= {"cross_entropy": 1, "linear_cross_entropy": 1, "token_log_probs": 2}
    assert bare == {f"extension_cpp::{name}" for name in vars(operators("extension_cpp"))}
    for name in bare:
        arguments, results = str(torch._C._get_schema(name, "")).split("(", 1)[1].rsplit(" -> ", 1)
        count = results.count("Tensor")
        counts = []
        for overload in overloads_of(name):
            overload_arguments, of_overload = str(overload._schema).split("(", 1)[1].rsplit(" -> ", 1)
            assert overload_arguments == arguments
            counts.append(of_overload.count("Tensor"))
            for key in ("CPU", "CUDA", "Meta"):
                assert has(overload._schema.name, key) == has(name, key), f"{overload}: {key}"
        few = kept.get(name.split("::")[1])
        assert counts == ([count] if few is None else [count, few])
        for key in ("AutocastCPU", "AutocastCUDA"):
            assert has(f"{name}_no_grad", key) == has(name, key), f"{name}_no_grad: {key}"


def test_integer_results_are_not_differentiable() -> None:
    """Integer results do not require grad, even if other results do, in eager mode, torch.func and torch.compile."""
    with torch.library._scoped_library("autograd_test", "FRAGMENT") as library:
        library.define("largest(Tensor x) -> (Tensor, Tensor)")
        library.impl("largest", lambda x: tuple(x.max(-1)), "CPU")
        name = "autograd_test::largest"
        torch.library.register_fake(
            name, lambda x: (x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1]).long()), lib=library
        )

        def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
            ctx.shape = inputs[0].shape
            ctx.save_for_backward(output[1])

        def backward(ctx: Any, grad_values: Tensor, _: Any) -> Gradients:
            (indices,) = ctx.saved_tensors
            zeros = grad_values.new_zeros(ctx.shape)
            return {"x": zeros.scatter(-1, indices.unsqueeze(-1), grad_values.unsqueeze(-1))}

        register_autograd(name, backward, setup_context=setup_context)
        largest, x = torch.ops.autograd_test.largest, torch.randn(3, 5, requires_grad=True)
        expected = torch.nn.functional.one_hot(x.argmax(-1), 5).to(x.dtype)
        for each in (largest, torch.compile(lambda x: largest(x), fullgraph=True, backend="aot_eager")):
            values, indices = each(x)
            assert values.requires_grad and not indices.requires_grad
            assert torch.equal(torch.autograd.grad(values.sum(), x)[0], expected)

        def summed(x: Tensor) -> tuple[Tensor, Tensor]:
            values, indices = largest(x)
            assert not indices.requires_grad
            return values.sum(), indices

        gradient, indices = torch.func.grad(summed, has_aux=True)(x.detach())
        assert torch.equal(gradient, expected) and torch.equal(indices, x.argmax(-1))


def test_vmap_over_dimensions_that_are_not_the_first() -> None:
    a, b = torch.randn(3, 5, 4), torch.randn(4, 3, 5)
    result = torch.vmap(lambda a, b: extension_cpp.muladd(a, b, 0.5), (2, 0), 1)(a, b)
    assert torch.equal(result, extension_cpp.muladd(a.movedim(2, 1), b.movedim(0, 1), 0.5))


def test_vmap_over_nothing() -> None:
    """vmap over a batch of size 0 returns results whose first dimension has size 0 and whose other sizes are right."""
    x = torch.empty(0, 3, 5)
    assert torch.vmap(extension_cpp.relu)(x).shape == x.shape
    log_probs, entropy = torch.vmap(extension_cpp.token_log_probs)(x, torch.empty(0, 3, dtype=torch.int64))
    assert log_probs.shape == entropy.shape == (0, 3)


def compiled_graphs(function: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], dict[str, list[str]]]:
    """Returns the compiled function and, filled in later, the names of this package's operators in its graphs."""
    graphs: dict[str, list[str]] = {"forward": [], "backward": []}

    def keep(which: str) -> Callable[..., Any]:
        def compiler(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            graphs[which] += [str(node.target) for node in module.graph.nodes if "extension_cpp" in str(node.target)]
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"), inference_compiler=keep("forward")
    )
    return torch.compile(function, backend=backend, fullgraph=True), graphs


def test_compiled_graphs_have_no_grad_overloads_where_nothing_is_recorded(tensors) -> None:
    torch._dynamo.reset()
    compiled, graphs = compiled_graphs(layer_norm)
    assert_equal(gradients(compiled, tensors), gradients(layer_norm, tensors))
    names = {"forward": ["extension_cpp.layer_norm_all_results.default"]}
    names["backward"] = ["extension_cpp.layer_norm_backward_no_grad.default"]
    assert graphs == names
    with torch.no_grad():
        assert torch.equal(compiled(*tensors), layer_norm(*tensors))
    names["forward"].append("extension_cpp.layer_norm_no_grad.default")
    assert graphs == names
    assert compiled(*tensors).requires_grad and graphs == names


def test_many_gradients_at_once(tensors) -> None:
    """A backward with is_grads_batched, which runs under vmap, gives the gradients of one backward per grad_out."""
    y = layer_norm(*tensors)
    many = torch.randn(3, *y.shape, dtype=y.dtype, device=y.device)
    at_once = torch.autograd.grad(y, tensors, many, retain_graph=True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(y, tensors, grad_out, retain_graph=True) for grad_out in many]
    assert_equal(at_once, tuple(torch.stack(grads) for grads in zip(*one_by_one, strict=True)))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp, torch.func.jacrev])
def test_no_grad_around_a_transform_does_not_reach_into_it(transform, tensors) -> None:
    """torch.func's transforms give the right gradients even if they are called under no_grad."""
    x = tensors[0].detach()

    def function(x: Tensor) -> Tensor:
        return layer_norm(x, *tensors[1:]).sum()

    (expected,) = torch.autograd.grad(layer_norm(*tensors).sum(), tensors[:1])
    with torch.no_grad():
        if transform is torch.func.vjp:
            (got,) = torch.func.vjp(function, x)[1](torch.ones((), dtype=x.dtype, device=x.device))
        else:
            got = transform(function)(x)
    torch.testing.assert_close(got, expected)


def test_no_grad_inside_a_transform(tensors) -> None:
    """torch.func.grad, once or nested, treats a factor that the function computed under no_grad as a constant."""
    x = tensors[0].detach()

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = extension_cpp.relu(x)
        return (factor * x.square()).sum()

    assert torch.equal(torch.func.grad(function)(x), 2 * x.relu() * x)
    assert torch.equal(torch.func.grad(lambda x: torch.func.grad(function)(x).sum())(x), 2 * x.relu())


AGAIN = """
import importlib, sys, warnings
warnings.simplefilter("error", UserWarning)
import torch, extension_cpp
from torch._subclasses.fake_tensor import FakeTensorMode

def works(package):
    for _ in range(2):
        x = torch.randn(4, 3, requires_grad=True)
        for y in (package.mish(x), package.layer_norm(x, (3,)), package.nn.RMSNorm(3)(x)):
            y.sum().backward()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            package.layer_norm(x, (3,))
        torch.func.jvp(package.relu, (x.detach(),), (x.detach(),))
        with FakeTensorMode():
            package.muladd(torch.empty(3), torch.empty(3), 1.0, out=torch.empty(3))

def modules():
    return [name for name in sys.modules if name.split(".")[0] == "extension_cpp"]

for name in modules():
    importlib.reload(sys.modules[name])
    works(extension_cpp)
first = extension_cpp
for _ in range(2):
    for name in modules():
        del sys.modules[name]
    again = importlib.import_module("extension_cpp")
    assert again is not first
    works(again)
    works(first)  # whoever holds it goes on
del first, extension_cpp
import gc
gc.collect()
works(again)
print("works")
"""


def test_importing_again_and_reloading() -> None:
    """The package works after it is imported or reloaded several times, as notebooks and test runners do."""
    done = python("-c", AGAIN)
    assert done.stdout == "works\n", done.stderr


def test_forward_mode_under_vmap_calls_no_operator(device: str) -> None:
    """Forward mode under vmap works for a batch of size 0. It must not call the operator to check the arguments: vmap
    calls an operator without a batching rule once per batch element, and raises an error if there is none."""
    x = torch.randn(0, 4, device=device)
    tangents = torch.func.vmap(lambda x: torch.func.jvp(extension_cpp.relu, (x,), (torch.ones_like(x),))[1])(x)
    assert tangents.shape == x.shape


def test_compiled_graphs_call_no_autograd_kernel() -> None:
    """Graphs of torch.compile contain no-grad overloads in place of this package's operators. AOTAutograd has already
    differentiated such a graph, and an Autograd kernel in it would only cost time."""
    called: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes if "extension_cpp" in str(node.target))
        return make_boxed_func(graph.forward)

    x = torch.randn(4, 8, requires_grad=True)
    backend = aot_autograd(fw_compiler=compiler)
    torch.compile(extension_cpp.gelu, backend=backend, fullgraph=True)(x).sum().backward()
    assert called == ["extension_cpp.gelu_no_grad.default", "extension_cpp.gelu_backward_no_grad.default"]
    exported = torch.export.export(ExportedGelu(), (x,)).module()
    assert "torch.ops.extension_cpp.gelu.default" in exported.code  # exported graphs may be trained


class ExportedGelu(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return extension_cpp.gelu(x)

"""extension_cpp.autograd keeps what torch.library.register_autograd promises.

opcheck, torch.compile, second derivatives, no_grad, inference mode and threads are the battery's, for every op, and
autocast is test_norm.py's.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import extension_cpp
from extension_cpp.autograd import _AFTER_AUTOGRAD, register_autograd


@pytest.fixture
def tensors(device: str) -> tuple[Tensor, ...]:
    """x, weight and bias of a layer_norm, all of which require grad."""
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


# An operator with a default and a keyword-only argument, and what its setup_context was given.

library = torch.library.Library("autograd_test", "DEF")
library.define("scaled(Tensor x, Tensor? y=None, float factor=2.0, *, bool negate=False) -> Tensor")
given: dict[str, Any] = {}


def _scaled(x: Tensor, y: Tensor | None = None, factor: float = 2.0, *, negate: bool = False) -> Tensor:
    z = x * (-factor if negate else factor)
    return z if y is None else z + y


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.factor = -inputs[2] if keyword_only_inputs["negate"] else inputs[2]
    given.update(inputs=inputs, keyword_only_inputs=keyword_only_inputs, needs=ctx.needs_input_grad)


def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    needs_x, needs_y, _ = ctx.needs_input_grad
    return grad_out * ctx.factor if needs_x else None, grad_out if needs_y else None, None


library.impl("scaled", _scaled, "CompositeExplicitAutograd")
register_autograd("autograd_test::scaled", _backward, setup_context=_setup_context)


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


@pytest.mark.parametrize(
    "schema", ["(Tensor(a!) x) -> ()", "(Tensor[] x) -> Tensor", "(Tensor x) -> Tensor[]", "(*, Tensor x) -> Tensor"]
)
def test_other_schemas_are_refused(schema) -> None:
    name = f"other{abs(hash(schema))}"
    library.define(name + schema)
    with pytest.raises(NotImplementedError, match=f"autograd_test::{name}: expected an operator that .*, but got .*;"):
        register_autograd(f"autograd_test::{name}", _backward)


# layer_norm: three outputs, of which one has a derivative.


def test_outputs_and_the_name_of_the_node(tensors) -> None:
    x, weight, bias = tensors
    y, mean, rstd = torch.ops.extension_cpp.layer_norm(x, (5,), weight, bias)
    assert y.requires_grad and not mean.requires_grad and not rstd.requires_grad
    assert type(y.grad_fn).__name__ == "layer_normBackward"
    assert not torch.ops.extension_cpp.layer_norm(x.detach(), (5,))[0].requires_grad


def test_saved_tensors_are_guarded(tensors) -> None:
    """Against changes in place, and against a second backward that finds them freed."""
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
    """Over x; the gradient of what vmap gives is that of the whole."""
    expected = gradients(layer_norm, tensors)
    mapped = torch.func.vmap(layer_norm, (0, None, None))
    torch.testing.assert_close(mapped(*tensors), layer_norm(*tensors))
    torch.testing.assert_close(gradients(mapped, tensors), expected)


def test_func_grad_gets_pytorchs_sentence(tensors) -> None:
    """As with torch.library.register_autograd: no derivative is silently left out."""
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: layer_norm(x, *tensors[1:]).sum())(tensors[0].detach())


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

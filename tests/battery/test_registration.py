"""Tests for which dispatch keys every operator of this package has a kernel, even operators that no OpSpec calls."""

import ast
from pathlib import Path

import torch

from extension_cpp import ops
from extension_cpp.registration.calls import overload_of
from tests.battery import calls_of_every_order, every_differentiable_op, with_overloads
from tests.checks import as_tuple, maker
from tests.opspec import OpSpec


def names() -> list[str]:
    every = torch._C._dispatch_get_all_op_names()
    names = [name for name in every if name.startswith("extension_cpp::")]
    assert names
    return names


def lacking(names: list[str], key: str) -> list[str]:
    return [name for name in names if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]


def test_every_operator_says_what_autograd_does() -> None:
    """Every operator has an Autograd kernel, which register_autograd, register_not_differentiable or register_mutation
    registers. Without one, the results of a non-differentiable operator would seem to require grad."""
    assert lacking(names(), "Autograd") == []


def test_entries_of_public_ops_say_what_nested_tensors_and_dtensors_get() -> None:
    """Every public op's entry in ops.py says what the op does with nested tensors and with DTensors."""
    calls = [node for node in ast.walk(ast.parse(Path(ops.__file__).read_text())) if isinstance(node, ast.Call)]
    entries = {
        call.args[0].value: {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "register" and isinstance(call.args[0], ast.Constant)
    }
    assert {*ops.__all__} <= entries.keys()
    for name in ops.__all__:
        entry = entries[name]
        needed = {"fake", "backward", "nested", "sharding"}
        if entry.get("backward") not in ("WRITES", "NOT_DIFFERENTIABLE"):
            needed.add("plain")
        assert needed <= entry.keys(), name


def test_every_operator_that_writes_counts_versions() -> None:
    """Every operator that writes increases version counters. Without that, backward could read overwritten values."""
    writing = [name for name in names() if "!" in str(overload_of(name)._schema)]
    assert lacking(writing, "ADInplaceOrView") == []
    assert not set(names()) - set(writing) - set(lacking(names(), "ADInplaceOrView"))


def test_every_operator_has_a_fake() -> None:
    assert lacking(names(), "Meta") == []


def test_every_operator_has_a_batching_rule() -> None:
    """Every operator that writes no argument has a batching rule. Without one, vmap warns of a performance drop."""
    reading = [name for name in names() if "!" not in str(overload_of(name)._schema)]
    assert lacking(reading, "FuncTorchBatched") == []


@every_differentiable_op
def test_overloads_give_no_gradient(spec: OpSpec, device: str) -> None:
    """The results of a no-grad overload do not require grad, even if its arguments do."""
    sample = next(iter(spec.sample_inputs(maker(device, torch.float32), (5, 33))))
    for op, args, kwargs in calls_of_every_order(spec, sample, "contiguous").made:
        args = tuple(
            x.detach().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args
        )
        for overload in with_overloads(op)[1:]:
            results = as_tuple(overload(*args, **kwargs))
            assert [y.requires_grad for y in results] == [False] * len(results), overload

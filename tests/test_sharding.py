"""Tests DTensors, FSDP2, tensor and sequence parallel, and DistributedDataParallel, in processes with gloo on the CPU,
and with NCCL where each process has a GPU.

The processes start once and run every check. A test then reads the result of its check.
"""

import contextlib
import datetime
import functools
import importlib
import math
import multiprocessing
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import extension_cpp
from extension_cpp.after_import import after_import
from extension_cpp.nn import convert
from extension_cpp.registration.entries import NONE, SHARDING
from tests.checks import as_tuple, maker, random_grad
from tests.opspec import OpSpec, Sample, all_specs

DEVICE = "cpu"  # the device type under test, which process() sets
SHAPE = (4, 6, 8)
POINTWISE = ("muladd", "relu", "mish", "silu", "gelu", "swiglu", "geglu", "scale_bias_relu", "bias_gelu")
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False}


# ---- what a rule promises ----


def row_dims(name: str, sample: Sample) -> list[int]:
    """Returns the dimensions of SHAPE in which tensors of this shape may stay sharded."""
    dims = range(len(SHAPE))
    if name in POINTWISE or name == "reduce_sum":
        return list(dims)
    if name == "dropout":
        return []
    if "cumsum" in name or "recurrence" in name:
        dim = sample.kwargs.get("dim", -2) if "recurrence" in name else sample.args[1]
        return [d for d in dims if d != dim % len(dims)]
    if "softmax" in name:
        dim = sample.args[1] if len(sample.args) > 1 else -1
        return [d for d in dims if d != dim % len(dims)]
    if "norm" in name:
        shape = next(arg for arg in sample.args if isinstance(arg, tuple))
        has_dropout = isinstance(sample.args[-1], Tensor) and sample.args[-1].dtype is torch.int64
        return [] if has_dropout else list(dims[: -len(shape)])
    class_dim = 1 if name == "cross_entropy" else len(dims) - 1
    return [d for d in dims if d != class_dim]


def expected_placements(name: str, sample: Sample, d: int) -> str:
    """Returns the placements of the results if the first tensor is sharded in dimension d."""
    if name == "reduce_sum":
        dim = sample.args[1] if len(sample.args) > 1 else None
        given = (dim,) if isinstance(dim, int) else dim
        dims = {e % len(SHAPE) for e in given} if given else set(range(len(SHAPE)))
        return "P(sum)" if d in dims else f"S({d if sample.kwargs else d - sum(e < d for e in dims)})"
    if name.endswith("cross_entropy"):
        reduction = sample.kwargs.get("reduction", "mean")
        row = d - 1 if name == "cross_entropy" and d > 1 else d
        return {"none": f"S({row})", "sum": "P(sum)", "mean": "R"}[reduction]
    return f"S({d})"


# ---- the checks, which run in every process ----


@dataclass
class Placed:
    outputs: list[Any]
    outputs_no_grad: list[Any]
    gradients: list[Any]
    gradients_with_graph: list[Any]
    second: list[Any]  # gradients of a sum of the gradients; empty if there is no second derivative


def run(function: Callable[..., Any], sample: Sample, leaves: list[Tensor], second_order: bool) -> Placed:
    outputs = as_tuple(function(*sample.args, **sample.kwargs))
    with torch.no_grad():
        again = as_tuple(function(*sample.args, **sample.kwargs))
    grads = [grad_for(x).requires_grad_(second_order) for x in outputs]
    gradients = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    with_graph = torch.autograd.grad(outputs, leaves, grads, create_graph=True)
    second: Any = ()
    if second_order:
        ends = [grad_for(x) for x in with_graph]
        inputs = [*leaves, *grads]
        of_first = torch.autograd.grad(with_graph[0], inputs, ends[0], allow_unused=True, retain_graph=True)
        second = *of_first, *torch.autograd.grad(with_graph, inputs, ends, allow_unused=True)
    return Placed(list(outputs), list(again), list(gradients), list(with_graph), [x for x in second if x is not None])


def grad_for(x: Any) -> Any:
    """Returns a gradient of result x with the placements of x. If x is a partial sum, the gradient is replicated."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    g = random_grad()(torch.empty(x.shape, dtype=x.dtype))
    if not isinstance(x, DTensor):
        return g
    return distribute_tensor(g, x.device_mesh, [Replicate() if p.is_partial() else p for p in x.placements])


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def run_on_mesh(spec: OpSpec, sample: Sample, mesh: Any, placements: list[Any]) -> Placed:
    """Runs the op on DTensors. Tensors of the shape SHAPE get `placements`, and other tensors are replicated."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    replicated = [Replicate()] * mesh.ndim
    leaves = []

    def one(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        place = placements if x.shape == SHAPE else replicated
        x = distribute_tensor(x.detach(), mesh, place).requires_grad_(x.requires_grad)
        if x.requires_grad:
            leaves.append(x)
        return x

    args, kwargs = [one(x) for x in sample.args], {key: one(x) for key, x in sample.kwargs.items()}
    result = run(spec.function, Sample(tuple(args), kwargs), leaves, spec.second_order)
    assert all(isinstance(x, DTensor) for x in (*result.outputs, *result.outputs_no_grad))
    return result


def letters(x: Any) -> str:
    return "".join(str(p) for p in x.placements)


def samples(spec: OpSpec, dtype: torch.dtype) -> Iterator[Sample]:
    """Yields the spec's samples and, in addition, recurrences with broadcast factors, and a fused norm without
    dropout."""
    make = maker(DEVICE, dtype)
    yield from spec.sample_inputs(make, SHAPE)
    if spec.name == "linear_recurrence" and spec.options:
        for of_a in spec.options.values["a"]:
            yield spec.options.sample(make, SHAPE, {"a": of_a})
    x, w = make(SHAPE), SHAPE[-1:]
    if spec.name == "add_layer_norm":
        yield Sample((x, make(SHAPE), w, make(w), make(w), 1e-5, 0.0, None))
    elif spec.name == "add_rms_norm":
        yield Sample((x, make(SHAPE), w, make(w), 1e-5, 0.0, None))
    elif spec.name == "layer_norm_dropout":
        yield Sample((x, w, make(w), make(w), 1e-5, 0.0, None))


def check_op(spec: OpSpec, mesh: Any, dtype: torch.dtype = torch.float32) -> None:
    """Checks values, gradients and placements, with each dimension sharded and, for one sample, with none sharded."""
    from torch.distributed.tensor import Replicate, Shard

    for number, sample in enumerate(samples(spec, dtype)):
        given = [x for x in (*sample.args, *sample.kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
        exact = run(spec.function, sample, given, spec.second_order)
        for d in (*range(len(SHAPE)), *([None] if number == 0 else [])):
            ours = run_on_mesh(spec, sample, mesh, [Replicate() if d is None else Shard(d)] * mesh.ndim)
            what = f"{spec.name}{sample.kwargs} sharded in dimension {d}"
            if d in row_dims(spec.name, sample):
                assert_placements(spec.name, sample, d, ours, given, what)
            assert_values(spec.name, sample, d, ours, exact, what)


def assert_placements(name: str, sample: Sample, d: int, ours: Placed, given: list[Tensor], what: str) -> None:
    """Checks that results and gradients have the placements for which nothing was gathered without need."""
    expected = expected_placements(name, sample, d)
    for x in (*ours.outputs, *ours.outputs_no_grad):
        assert letters(x) == expected, f"{what}: {letters(x)}, expected {expected}"
    if name == "reduce_sum":  # the gradient of reduce_sum is a view of grad_out
        return
    for gradients in (ours.gradients, ours.gradients_with_graph):
        for x, leaf in zip(gradients, given, strict=True):
            is_bias = name in ("scale_bias_relu", "bias_gelu") and d == len(SHAPE) - 1 and leaf.dim() == 1
            expected = f"S({d})" if leaf.dim() == len(SHAPE) else "S(0)" if is_bias else "P(sum)"
            if "recurrence" in name and leaf is sample.args[0]:  # the gradient of a is a sum where a broadcasts
                of_a = d - (len(SHAPE) - leaf.dim())
                expected = f"S({of_a})" if of_a >= 0 and leaf.shape[of_a] > 1 else "P(sum)"
            elif "recurrence" in name and leaf.dim() < len(SHAPE):  # h0
                expected = f"S({d - (d > sample.kwargs.get('dim', -2) % len(SHAPE))})"
            assert letters(x) == expected, f"{what}: gradient {letters(x)}, expected {expected}"
    for x in ours.second if name in POINTWISE else ():
        assert x.shape != SHAPE or letters(x) == f"S({d})", f"{what}: second gradient {letters(x)}"


def assert_values(name: str, sample: Sample, d: int | None, ours: Placed, exact: Placed, what: str) -> None:
    """Compares with one process: bitwise where each row or element is computed alone, and otherwise up to rounding."""
    stays = d in row_dims(name, sample)
    is_mean = name == "cross_entropy" and sample.kwargs.get("reduction", "mean") == "mean"
    is_over_classes = name == "cross_entropy" and d == 1
    same = (
        name != "linear_cross_entropy"
        and not is_mean
        and not is_over_classes
        and (not stays or expected_placements(name, sample, d).startswith("S"))
    )
    for x, y, whole_x in zip(ours.outputs, ours.outputs_no_grad, exact.outputs, strict=True):
        compare(whole(x), whole_x, same, what)
        compare(whole(y), whole_x, same, f"{what}, no_grad")
    for x, y, whole_x in zip(ours.gradients, ours.gradients_with_graph, exact.gradients, strict=True):
        alone = same and (d is None or not stays or whole_x.shape == SHAPE)
        compare(whole(x), whole_x, alone, f"{what}, gradient")
        compare(whole(y), whole_x, alone, f"{what}, gradient with a graph")
    for x, whole_x in zip(ours.second, exact.second, strict=True):
        compare(whole(x), whole_x, False, f"{what}, second gradient")


def compare(x: Tensor, exact: Tensor, same: bool, what: str) -> None:
    assert x.dtype == exact.dtype and x.shape == exact.shape, what
    if same:
        assert torch.equal(x, exact), f"{what}: other bits, off by {(x - exact).abs().max()}"
    else:
        eps, small = torch.finfo(x.dtype).eps, 1e-5
        if eps > 1e-4:  # half types add large terms in another order
            small = max(small, 4 * eps * exact.abs().max().item())
        torch.testing.assert_close(x, exact, rtol=max(1.3e-6, 2 * eps), atol=small, msg=lambda m: f"{what}: {m}")


def check_every_op_has_a_rule(mesh: Any) -> None:
    """Every op and no-grad overload has a sharding rule. An op with NONE in its entry raises an error for DTensors."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    from extension_cpp.distributed import sharding

    known = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    assert all(op in known for op in sharding.overloads().values())
    # An op from a template has no rule until its author writes one and adds a row to docs/distributed.md.
    document = (Path(__file__).parents[1] / "docs" / "distributed.md").read_text()
    table = document.split("## What stays sharded")[1].split("\n* ")[0].splitlines()
    listed = {name for line in table[4:] if line for name in line.split("|")[1].strip().split(", ")}
    new = tuple(spec.name for spec in all_specs() if spec.name not in listed)
    # Only linear_cross_entropy calls cross_entropy_chunk and cross_entropy_scale, on tensors of one process.
    refusing = {name for name, rule in SHARDING.items() if rule is NONE and not name.startswith(new)}
    assert refusing == {"muladd.out", "cross_entropy_chunk", "cross_entropy_scale"}
    x = distribute_tensor(torch.ones(4, device=DEVICE), mesh, [Replicate()])
    factor = distribute_tensor(torch.ones((), device=DEVICE), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"cross_entropy_scale: expected no DTensor; call it on to_local\(\)"):
        sharding.overloads()["cross_entropy_scale"](x, factor)


def check_cache(mesh: Any) -> None:
    """PyTorch caches the placements of a call. A call with the same tensors and other arguments must not get them."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, 4, 4), mesh, [Shard(1)])
    w = distribute_tensor(torch.randn(4), mesh, [Replicate()])
    for shape in ((4,), (4, 4), (4,)):
        assert letters(extension_cpp.rms_norm(x, shape)) == (
            "S(1)" if len(shape) == 1 else letters_of_gathered(x, shape)
        )
    for dim, expected in ((1, "P(sum)"), (0, "S(0)"), ((0, 1), "P(sum)")):
        assert letters(extension_cpp.reduce_sum(x, dim)) == expected
    plain = x.full_tensor()
    for weight, bias in ((w, None), (None, w)):
        y = extension_cpp.layer_norm(x, (4,), weight, bias).full_tensor()
        parts = [None if part is None else part.full_tensor() for part in (weight, bias)]
        assert torch.equal(y, extension_cpp.layer_norm(plain, (4,), *parts))


def check_cache_of_calls_with_bools(mesh: Any) -> None:
    """Placements that PyTorch caches for a call are not used for calls with other bools. Bools tell backward operators
    which gradients are needed, and x is frozen in some calls here."""
    from torch.distributed.tensor import Shard, distribute_tensor

    frozen_in_turn = ("scale_bias_relu", "bias_gelu", "layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
    for spec in (spec for spec in all_specs() if spec.name in (*frozen_in_turn, "linear_cross_entropy")):
        # Other checks use other dtypes, for which calls with all gradients are in the cache. float64 is new there.
        sample = list(samples(spec, torch.float64))[-1 if spec.positional else 0]  # of a fused norm without dropout
        tensors = [i for i, x in enumerate(sample.args) if isinstance(x, Tensor) and x.requires_grad]
        for needed in (tensors[1:], tensors, tensors[:1], tensors[1:2], tensors):
            args = tuple(
                x.detach().requires_grad_(i in needed) if i in tensors else x for i, x in enumerate(sample.args)
            )
            given = [args[i] for i in needed]
            exact = run(spec.function, Sample(args, sample.kwargs), given, False)
            ours = run_on_mesh(replace(spec, second_order=False), Sample(args, sample.kwargs), mesh, [Shard(1)])
            for x, whole_x in zip(ours.gradients, exact.gradients, strict=True):
                compare(whole(x), whole_x, False, f"{spec.name}, gradients of {needed}")
    x = distribute_tensor(torch.randn(SHAPE), mesh, [Shard(1)])
    for keepdim in (False, True, False):
        assert letters(extension_cpp.reduce_sum(x, 0, keepdim=keepdim)) == ("S(1)" if keepdim else "S(0)")


def letters_of_gathered(x: Any, shape: tuple[int, ...]) -> str:
    return letters(extension_cpp.rms_norm(x.redistribute(placements=x.placements), shape))


def check_rotary_of_batches(mesh: Any) -> None:
    """Rotary embeddings are right for cos and sin of each sequence or of all, and if processes have uneven shards."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    make = maker(DEVICE, torch.float32)
    q, k = make((3, 5, 7, 8)), make((3, 3, 7, 8))
    for cos_shape in ((3, 7, 8), (1, 7, 6), (7, 8)):
        cos, sin = make(cos_shape).detach(), make(cos_shape).detach()
        exact = extension_cpp.rotary_embedding(q, k, cos, sin)
        exact_grads = torch.autograd.grad(exact, [q, k], [grad_for(y) for y in exact])
        for d in range(3):
            x = [distribute_tensor(t.detach(), mesh, [Shard(d)]).requires_grad_() for t in (q, k)]
            outputs = extension_cpp.rotary_embedding(
                *x, *(distribute_tensor(f, mesh, [Replicate()]) for f in (cos, sin))
            )
            grads = torch.autograd.grad(outputs, x, [grad_for(y) for y in outputs])
            for ours, whole_x in zip((*outputs, *grads), (*exact, *exact_grads), strict=True):
                assert letters(ours) == f"S({d})", f"cos {cos_shape} sharded in dimension {d}: {letters(ours)}"
                assert torch.equal(ours.full_tensor(), whole_x), f"cos {cos_shape} sharded in dimension {d}"


def check_refusals(mesh: Any) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match=r"extension_cpp::muladd: expected no DTensor; leave out= away"):
        extension_cpp.muladd(x, x, 1.0, out=x.clone())


# Options of a loss whose classes are sharded. With both class weights and smoothing the logits are gathered.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none", "ignore_index": 5},
    {"ignore_index": 1, "label_smoothing": 0.25},
    {"reduction": "sum", "z_loss": 0.01, "label_smoothing": 1.0},
    {"reduction": "none", "softcap": 2.0, "z_loss": 0.1},
    {"softcap": 3.0, "label_smoothing": 0.5, "z_loss": 0.1},
    {"weight": True, "ignore_index": 5, "z_loss": 0.1},
    {"weight": True, "reduction": "none"},
    {"weight": True, "label_smoothing": 0.25},
]
CLASSES = 7


def class_options(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return options | ({"weight": maker(DEVICE, dtype)((CLASSES,)).detach().abs() + 0.5} if "weight" in options else {})


def assert_same_loss(ours: Any, leaves: list[Any], exact: Tensor, exact_leaves: list[Tensor], what: str) -> list[Any]:
    """Checks that a loss and its gradients are near those of one process. Returns the gradients."""
    compare(whole(ours), exact, False, what)
    g = grad_for(exact)
    grads = torch.autograd.grad(whole(ours), leaves, g)
    for grad, exact_grad in zip(grads, torch.autograd.grad(exact, exact_leaves, g), strict=True):
        compare(whole(grad), exact_grad, False, f"{what}, gradient")
    return list(grads)


def check_classes_in_several_processes(mesh: Any) -> None:
    """With sharded classes the loss is replicated, and the gradient is sharded as the logits. Target and weight are
    plain tensors or DTensors. float32 has most cases: all dtypes share the code that reads shapes and options."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for shape in ((5, CLASSES), (2, CLASSES, 3), (CLASSES,)):
        dim = min(1, len(shape) - 1)
        target = torch.arange(math.prod(shape) // CLASSES).reshape(shape[:dim] + shape[dim + 1 :]) % CLASSES
        others = (torch.float64, torch.bfloat16, torch.float16) if len(shape) == 2 else ()
        for dtype in (torch.float32, *others):
            for number, options in enumerate(OPTIONS if dtype is torch.float32 else OPTIONS[1::3]):
                what, options = f"{shape} {dtype} {options}", class_options(options, dtype)
                logits = maker(DEVICE, dtype)(shape)
                exact = extension_cpp.cross_entropy(logits, target, **options)
                x = distribute_tensor(logits.detach(), mesh, [Shard(dim)]).requires_grad_()
                given = target
                if number % 2:
                    given = distribute_tensor(target, mesh, [Replicate()])
                    if "weight" in options:
                        options["weight"] = distribute_tensor(options["weight"], mesh, [Replicate()])
                ours = extension_cpp.cross_entropy(x, given, **options)
                assert letters(ours) == "R" and ours.dtype == exact.dtype, what
                with torch.no_grad():
                    assert torch.equal(whole(extension_cpp.cross_entropy(x, given, **options)), whole(ours)), what
                (grad,) = assert_same_loss(ours, [x], exact, [logits], what)
                is_gathered = "weight" in options and "label_smoothing" in options
                assert letters(grad) == ("R" if is_gathered else f"S({dim})"), what


class LargeResults(TorchDispatchMode):
    """Records the names of operators that make a tensor of at least `numel` elements."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.names = numel, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        tensors = [x for x in as_tuple(results) if isinstance(x, Tensor) and not x.is_meta]
        if any(x.numel() >= self.numel for x in tensors):
            self.names.append(func.name())
        return results


def counts(communication: Any) -> dict[str, int]:
    """Returns the number of each collective operation that a CommDebugMode saw."""
    return {str(op).split(".")[-1]: count for op, count in communication.get_comm_counts().items()}


def check_what_classes_in_several_processes_cost(mesh: Any) -> None:
    """A loss over sharded classes costs two all-reduces. It gathers no logits, and its only large result is the
    gradient."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    for options in ({}, {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.1}):
        local = torch.randn(4, 50, requires_grad=True)
        with CommDebugMode() as communication, LargeResults(local.numel()) as large:
            logits = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
            loss = extension_cpp.cross_entropy(logits, torch.tensor([0, 99, 50, 49]), **options)
            assert {str(op): n for op, n in communication.get_comm_counts().items()} == {
                "c10d_functional.all_reduce": 2
            }
            loss.backward()
            assert communication.get_total_counts() == 2
        made = [name for name in large.names if "view" not in name and "detach" not in name and "alias" not in name]
        assert made == ["extension_cpp::cross_entropy_backward", "aten::scatter_.src"], made


def check_hostile_logits_over_classes(mesh: Any) -> None:
    """Losses are right for large and infinite logits, also if a process has only -inf. NaN reaches all processes."""
    from torch.distributed.tensor import Shard, distribute_tensor

    logits = maker(DEVICE, torch.float32)((8, 8)).detach()
    target = torch.tensor([0, 7, 3, 4, 5, 2, 1, 6])
    logits[0] = torch.tensor([1e4, -1e4] * 4)
    logits[1, :7] = -torch.inf
    logits[2, 4:] = -torch.inf
    logits[3, :4] = 3e38
    logits[4, 0] = torch.nan
    logits[5, 6] = torch.nan
    logits[6] = -torch.inf
    logits[7, 2] = torch.inf
    for ignore_index in (-100, 5):
        results = []
        for x in (logits.clone(), distribute_tensor(logits, mesh, [Shard(1)])):
            x.requires_grad_()
            loss = extension_cpp.cross_entropy(x, target, reduction="none", ignore_index=ignore_index)
            results.append([whole(y) for y in (loss, *torch.autograd.grad(whole(loss).sum(), x))])
        for exact, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, exact, equal_nan=True)
    assert results[1][0][4] == 0 and (results[1][1][4] == 0).all() and results[1][0][5].isnan()


def check_equal_large_logits_over_classes(mesh: Any) -> None:
    """Losses are right if the largest logits are equal and huge, in all processes or in one
    (tests/test_large_logits.py)."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for dtype in (torch.float32, torch.float64):
        eps, maxima = torch.finfo(dtype).eps, [1e13, 1e20, -1e30, torch.finfo(dtype).min]
        logits = torch.tensor(maxima, dtype=dtype)[:, None].repeat(2, 8)
        logits[4:, 5:] = -torch.inf
        logits[7, 3:] = -torch.inf
        target = torch.tensor([0, 7, 3, 4, 0, 1, 2, 0])
        for label_smoothing in (0.0, 0.25):
            exact = logits.double().requires_grad_()
            ours = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
            results = []
            for loss, x in ((torch.nn.functional.cross_entropy, exact), (extension_cpp.cross_entropy, ours)):
                value = loss(x, target, reduction="none", label_smoothing=label_smoothing)
                grad = torch.autograd.grad(value, x, torch.ones_like(value))[0]
                results.append([whole(value).double(), whole(grad).double()])
            for right, x in zip(*results, strict=True):
                # A probability of 1 / 8 is exp(-2.1), with roundings of some eps. The loss is at most 2.1.
                torch.testing.assert_close(x, right, rtol=8 * eps, atol=8 * eps)


def check_targets_that_no_process_has(mesh: Any) -> None:
    """On CUDA and in compiled code nothing checks targets: rows of invalid targets are NaN, as with one process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from extension_cpp.distributed import sharded_loss

    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(1)]).requires_grad_()
    target = distribute_tensor(torch.tensor([0, 8, -1, 5]), mesh, [Replicate()])
    classes = sharded_loss.classes_of(x, 1)
    losses = sharded_loss.RowLosses.apply(x, target, None, 1, classes, sharded_loss.LossOptions()).full_tensor()
    (grad,) = torch.autograd.grad(losses.sum(), x)
    assert losses.isnan().tolist() == [False, True, True, False]
    assert (grad.full_tensor().isnan() == losses.isnan()[:, None]).all()


def check_errors_over_classes(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, t = distribute_tensor(torch.zeros(2, 8), mesh, [Shard(1)]), torch.tensor([0, 7])
    op = r"extension_cpp::cross_entropy: expected"
    for target, options, message in (
        (t + 1, {}, r"target in \[0, 7\] or ignore_index, but got 8"),
        (t.int(), {}, "target to be int64, class indices, but got int32"),
        (t[:1], {}, r"target of shape \[2\], that of logits without the classes, but got \[1\]"),
        (t, {"softcap": 0.0}, "softcap to be None or a positive normal number of float32, but got 0"),
        (t, {"weight": torch.ones(4)}, r"weight of shape \[8\], a number for each class, but got \[4\]"),
        (t, {"weight": torch.ones(8, requires_grad=True)}, "weight not to require grad"),
    ):
        if message.startswith(r"target in \[") and DEVICE == "cuda":
            continue  # check_targets_that_no_process_has checks this case
        with pytest.raises(RuntimeError, match=f"{op} {message}"):
            extension_cpp.cross_entropy(x, target, **options)
    y = x.detach().requires_grad_()
    loss = extension_cpp.cross_entropy(y, t) + (y * y).sum()  # the second derivative must not be that of y * y alone
    (g,) = torch.autograd.grad(loss, y, create_graph=True)
    with pytest.raises(RuntimeError, match="cross_entropy: the second derivative is not implemented"):
        torch.autograd.grad(g.full_tensor().sum(), y)
    few = distribute_tensor(torch.zeros(2, 1), mesh, [Shard(1)])  # the last process has no class: logits are gathered
    assert letters(extension_cpp.cross_entropy(few, distribute_tensor(t * 0, mesh, [Replicate()]))) == "R"


def check_linear_over_classes(mesh: Any) -> None:
    """linear_cross_entropy gathers neither a weight that is sharded over the classes nor the logits."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    for dtype in (torch.float32, torch.bfloat16):
        make = maker(DEVICE, dtype)
        for number, options in enumerate(OPTIONS if dtype is torch.float32 else OPTIONS[1::3]):
            what, options = f"{dtype} {options}", class_options(options, dtype)
            shape, bias = ((4, 6, 8), True) if number % 2 else ((5, 8), False)
            leaves = [make(shape), make((CLASSES, 8)), *([make((CLASSES,))] if bias else [])]
            target = torch.arange(math.prod(shape[:-1])).reshape(shape[:-1]) % CLASSES
            for place in (Replicate(), Shard(0)):
                exact = extension_cpp.linear_cross_entropy(*leaves[:2], target, *leaves[2:], **options)
                parts = [
                    distribute_tensor(leaf.detach(), mesh, [place if i == 0 else Shard(0)]).requires_grad_()
                    for i, leaf in enumerate(leaves)
                ]
                given, labels = {name: whole_to(mesh, x) for name, x in options.items()}, whole_to(mesh, target)
                with CommDebugMode() as communication:
                    ours = extension_cpp.linear_cross_entropy(*parts[:2], labels, *parts[2:], **given)
                grads = assert_same_loss(ours, parts, exact, leaves, what)
                if "weight" not in options or "label_smoothing" not in options:
                    assert all(letters(grad) == "S(0)" for grad in grads[1:]), what
                    if place == Replicate():
                        assert counts(communication) == {"all_reduce": 2}, what


def whole_to(mesh: Any, x: Any) -> Any:
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(x, mesh, [Replicate()] * mesh.ndim) if isinstance(x, Tensor) else x


def check_half(mesh: Any) -> None:
    """Checks three ops in one half type, because both half types share all code but the rounding. In float16
    linear_cross_entropy's backward recomputes the logits, and cross_entropy rounds its loss to float16."""
    half = {"linear_cross_entropy": torch.float16, "cross_entropy": torch.float16, "rms_norm": torch.bfloat16}
    for spec in all_specs():
        if spec.name in half:
            check_op(spec, mesh, half[spec.name])


def check_dropout_drops_the_same(mesh: Any) -> None:
    """With one seed, processes drop the same elements as a single process. With different seeds they agree on a
    mask."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.randn(4, 8, generator=torch.Generator(DEVICE).manual_seed(1))
    x = distribute_tensor(whole, mesh, [Shard(0)])
    torch.manual_seed(5)
    expected = extension_cpp.dropout(whole, 0.5)
    torch.manual_seed(5)
    assert torch.equal(extension_cpp.dropout(x, 0.5).full_tensor(), expected)
    torch.manual_seed(mesh.get_rank())
    y = extension_cpp.dropout(x, 0.5)
    ours = y.full_tensor()
    everywhere = [torch.empty_like(ours) for _ in range(mesh.size())]
    torch.distributed.all_gather(everywhere, ours)
    assert all(torch.equal(other, ours) for other in everywhere)
    _, s = extension_cpp.add_rms_norm(x, x, (8,), None, 1e-6, 0.5)
    dropped = (s.full_tensor() == whole).sum()
    assert 0 < dropped < whole.numel()


def check_compile(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x = distribute_tensor(torch.randn(4, 6, 8), mesh, [Shard(1)]).requires_grad_()
    w = distribute_tensor(torch.randn(8), mesh, [Replicate()]).requires_grad_()

    def function(x: Any, w: Any) -> Any:
        return extension_cpp.mish(extension_cpp.rms_norm(x, (8,), w))

    logits = distribute_tensor(torch.randn(4, CLASSES), mesh, [Shard(1)]).requires_grad_()
    target = distribute_tensor(torch.tensor([0, 6, 3, 5]), mesh, [Replicate()])

    def loss(logits: Any) -> Any:
        return extension_cpp.cross_entropy(logits, target, ignore_index=5, label_smoothing=0.1)

    for each, leaves in ((function, [x, w]), (loss, [logits])):
        results = []
        for f in (each, torch.compile(each, backend="aot_eager", fullgraph=True)):
            y = f(*leaves)
            results.append([y, *torch.autograd.grad(y, leaves, grad_for(y))])
        for eager, compiled in zip(*results, strict=True):
            assert letters(eager) == letters(compiled) and torch.equal(eager.full_tensor(), compiled.full_tensor())


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 0.8, 0.3)
    return model


def tokens(count: int = 4) -> Tensor:
    return torch.randint(64, (count, 12), generator=torch.Generator(DEVICE).manual_seed(3))


def loss_and_gradients(model: torch.nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    return loss.detach(), gradients


def assert_same_model(ours: tuple[Tensor, dict[str, Tensor]], stock: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Compares loss and gradients of two models, within the error of float32 sums in another order."""
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=1e-6)
    assert ours[1].keys() == stock[1].keys()
    for name, gradient in stock[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def part_of(ids: Tensor, mesh: Any) -> Tensor:
    return ids.chunk(mesh.size())[mesh.get_rank()]


def mean_over(mesh: Any, loss: Tensor) -> Tensor:
    torch.distributed.all_reduce(loss)
    return loss / mesh.size()


def check_fully_shard(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    expected = loss_and_gradients(llama(), tokens())
    for loss_from in ("logits", "linear"):
        model = llama()
        assert len(convert(model, loss=loss_from).changed) == (14 if loss_from == "logits" else 15)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss, gradients = loss_and_gradients(model, part_of(tokens(), mesh))
        assert_same_model((mean_over(mesh, loss), gradients), expected)


def check_convert_after_fully_shard(mesh: Any) -> None:
    """After fully_shard, convert replaces no modules with parameters, and says to convert before fully_shard."""
    from torch.distributed.fsdp import fully_shard

    model = llama()
    fully_shard(model, mesh=mesh)
    changed, left = convert(model)
    assert not [name for name in changed if "norm" in name]
    assert left["model.norm"] == (
        "LlamaRMSNorm: its weight is a DTensor, not a plain tensor; convert the model before fully_shard, "
        "parallelize_module or distribute_module"
    )


def check_fully_shard_mixed_precision(mesh: Any) -> None:
    """With bfloat16 parameters the loss is near that with float32, and the weights are finite after a step."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    stock, model = llama(), llama()
    convert(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    loss, gradients = loss_and_gradients(model, part_of(tokens(), mesh))
    expected = loss_and_gradients(stock, tokens())
    torch.testing.assert_close(mean_over(mesh, loss.float()), expected[0], rtol=0.01, atol=0.0)
    for name, gradient in expected[1].items():
        assert gradients[name].dtype is torch.float32
        error = (gradients[name] - gradient).norm() / gradient.norm()
        assert error < 0.05, f"{name}: {error}"


def check_sequence_parallel(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    stock, model = llama(), llama()
    convert(model)
    by_rows = {"output_layouts": Shard(1), "use_local_output": False}
    gather = {"input_kwarg_layouts": {"hidden_states": Shard(1)}}
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **by_rows),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(len(model.model.layers)):
        plan |= {
            f"model.layers.{i}.{name}": style
            for name, style in {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(**gather, desired_input_kwarg_layouts={"hidden_states": Replicate()}),
                **{f"self_attn.{part}_proj": ColwiseParallel() for part in "qkv"},
                "self_attn.o_proj": RowwiseParallel(**by_rows),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(**by_rows),
            }.items()
        }
    parallelize_module(model, mesh, plan)
    seen = []
    model.model.norm.register_forward_hook(lambda module, args, result: seen.append(result))
    ours = loss_and_gradients(model, tokens())
    assert isinstance(seen[0], DTensor) and letters(seen[0]) == "S(1)"  # the norms run on a part of each sequence
    assert_same_model(ours, loss_and_gradients(stock, tokens()))


def check_vocabulary_parallel(mesh: Any) -> None:
    """A converted Llama works with an output layer that leaves the logits sharded over the classes."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for loss_from in ("logits", "linear"):  # a parallelized output layer has hooks, so that it computes its logits
        stock, model = llama(), llama()
        convert(model, loss=loss_from)
        head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, mesh, {"lm_head": head})
        logits = model(input_ids=tokens()).logits
        assert letters(logits) == "S(2)"
        loss, gradients = loss_and_gradients(model, tokens())
        assert letters(loss) == "R" and letters(model.lm_head.weight.grad) == "S(0)"
        assert_same_model((loss.full_tensor(), gradients), loss_and_gradients(stock, tokens()))


def check_data_parallel(mesh: Any) -> None:
    from torch.nn.parallel import DistributedDataParallel

    stock, model = llama(), llama()
    convert(model)
    parallel = DistributedDataParallel(model)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (stock, parallel)]
    loss, _ = loss_and_gradients(parallel, part_of(tokens(), mesh))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_model((mean_over(mesh, loss), gradients), loss_and_gradients(stock, tokens()))
    for step in steps:
        step.step()
    for a, b in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def check_two_dimensions(mesh: Any) -> None:
    """A norm is right on a mesh of 2 x 2 processes that shards the batch and the rows of each sequence."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    square = init_device_mesh(DEVICE, (2, 2))
    whole = torch.randn(4, 6, 8, requires_grad=True, generator=torch.Generator(DEVICE).manual_seed(1))
    weight = torch.randn(8, requires_grad=True, generator=torch.Generator(DEVICE).manual_seed(2))
    x = distribute_tensor(whole.detach(), square, [Shard(0), Shard(1)]).requires_grad_()
    w = distribute_tensor(weight.detach(), square, [Replicate(), Replicate()]).requires_grad_()
    y = extension_cpp.rms_norm(x, (8,), w)
    assert letters(y) == "S(0)S(1)"
    expected = extension_cpp.rms_norm(whole, (8,), weight)
    assert torch.equal(y.full_tensor(), expected)
    g = random_grad()(expected)
    ours = torch.autograd.grad(y.full_tensor(), [x, w], g)
    exact = torch.autograd.grad(expected, [whole, weight], g)
    assert letters(ours[0]) == "S(0)S(1)" and letters(ours[1]) == "P(sum)P(sum)"
    assert torch.equal(ours[0].full_tensor(), exact[0])
    torch.testing.assert_close(ours[1].full_tensor(), exact[1])


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Yields a folder that all processes can read."""
    with tempfile.TemporaryDirectory() as own:
        name = [own]
        torch.distributed.broadcast_object_list(name)
        yield Path(name[0])
        torch.distributed.barrier()


def check_checkpoint(mesh: Any) -> None:
    """torch.distributed.checkpoint saves a converted, sharded model and its optimizer in two processes. One process
    loads them and continues as the two do."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def start(is_sharded: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = llama()
        convert(model)
        for module in (*model.model.layers, model) if is_sharded else ():
            fully_shard(module, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
        optimizer.zero_grad()
        loss_and_gradients(model, ids)
        optimizer.step()

    def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    with shared_folder() as folder:
        sharded = start(True)
        step(*sharded, part_of(tokens(), mesh))
        checkpoint.save(state_of(*sharded), checkpoint_id=folder)
        alone = start(False)
        state = state_of(*alone)
        checkpoint.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(*alone, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for (name, ours), saved in zip(alone[0].named_parameters(), sharded[0].parameters(), strict=True):
        assert torch.equal(ours, saved.full_tensor()), name
        for key, value in sharded[1].state[saved].items():
            assert torch.equal(alone[1].state[ours][key], whole(value)), f"{name}: {key}"
    step(*sharded, part_of(tokens(), mesh))
    step(*alone, tokens())
    for (name, ours), saved in zip(alone[0].named_parameters(), sharded[0].parameters(), strict=True):
        # AdamW divides a gradient by its size. If the gradient is nearly 0, a rounding decides the sign of the step.
        assert (ours - saved.full_tensor()).norm() <= 1e-3 * ours.norm(), name


def check_training(mesh: Any) -> None:
    """Several processes of examples/train_text.py have the losses of one. Any number resumes from their checkpoints."""
    with torch.device("cpu"):  # the example passes a device to all tensors that are not on the CPU
        compare_trainings(mesh)


def compare_trainings(mesh: Any) -> None:
    from examples import train_text
    from tests.test_train_text import SIZES

    text = train_text.Text.of(train_text.read_text(None), SIZES["context"])
    settings = train_text.Settings(DEVICE, 6, text.digest, **SIZES | {"learning_rate": 9e-3})
    begun = settings.steps // 2

    def train(parallel: str | None, steps: int, start: Path | None = None) -> Any:
        training = train_text.Training("ours", text, settings, compiled=False, parallel=parallel)
        if start is not None:
            training.resume(start)
        while len(training.losses) < steps:
            training.step()
        training.validate()
        return training

    def close(training: Any, what: str) -> None:
        """Compares losses of a training with those of one process. Each process rounds its part of a gradient to
        bfloat16, so that a step, and the change of the loss, have a relative difference of one bfloat16 eps."""
        losses, exact = torch.tensor(training.losses), torch.tensor(alone.losses)
        bound = torch.finfo(torch.bfloat16).eps * (exact.max() - exact.min())
        assert (losses - exact).abs().max() <= bound, f"{what}: {losses - exact}"
        assert abs(training.validation[settings.steps] - alone.validation[settings.steps]) <= bound, what

    alone = train(None, settings.steps)
    assert alone.losses[-1] < alone.losses[0] - 0.1
    with shared_folder() as folder:
        half = train(None, begun)
        if mesh.get_rank() == 0:
            half.save(folder / "None.pt")
        for parallel in ("ddp", "fsdp"):
            half = train(parallel, begun)
            half.save(folder / f"{parallel}.pt")
            while len(half.losses) < settings.steps:
                half.step()
            half.validate()
            close(half, parallel)
            torch.distributed.barrier()
            again = train(parallel, settings.steps, folder / f"{parallel}.pt")
            assert again.losses == half.losses and again.validation.items() <= half.validation.items(), parallel
        for saved, resumed in (("None", "fsdp"), ("fsdp", None), ("ddp", None)):  # other pairs follow from these
            close(train(resumed, settings.steps, folder / f"{saved}.pt"), f"{saved}, then {resumed}")


def check_rows_and_classes(mesh: Any) -> None:
    """A loss is right on a mesh of 2 x 2 processes that shards the rows and the classes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    square = init_device_mesh(DEVICE, (2, 2))
    logits, target = maker(DEVICE, torch.float32)((5, CLASSES)), torch.tensor([0, 6, 3, 4, 5])
    x = distribute_tensor(logits.detach(), square, [Shard(0), Shard(1)]).requires_grad_()
    t = whole_to(square, target)
    for options, expected in (({}, "RR"), ({"reduction": "sum"}, "P(sum)R"), ({"reduction": "none"}, "S(0)R")):
        exact = extension_cpp.cross_entropy(logits, target, ignore_index=4, **options)
        ours = extension_cpp.cross_entropy(x, t, ignore_index=4, **options)
        assert letters(ours) == expected, options
        (grad,) = assert_same_loss(ours, [x], exact, [logits], str(options))
        assert letters(grad) == "S(0)S(1)"
    linear, features = maker(DEVICE, torch.float32)((CLASSES, 8)), maker(DEVICE, torch.float32)((5, 8))
    parts = [distribute_tensor(features.detach(), square, [Shard(0), Replicate()]).requires_grad_()]
    parts += [distribute_tensor(linear.detach(), square, [Replicate(), Shard(0)]).requires_grad_()]
    exact = extension_cpp.linear_cross_entropy(features, linear, target)
    ours = extension_cpp.linear_cross_entropy(*parts, t)
    grads = assert_same_loss(ours, parts, exact, [features, linear], "linear_cross_entropy on 2 x 2")
    assert letters(ours) == "RR" and letters(grads[1]) == "P(sum)S(0)"


def checks(processes: int) -> dict[str, Callable[[Any], None]]:
    # An op from a template has no rule until its author writes one. Until then DTensors raise an error.
    specs = {spec.name: spec for spec in all_specs() if SHARDING[spec.name] is not NONE}
    if processes == 4:
        names = ("rms_norm", "cross_entropy")
        own = {"two_dimensions": check_two_dimensions, "rows_and_classes": check_rows_and_classes}
        return own | {name: lambda mesh, spec=specs[name]: check_op(spec, mesh) for name in names}
    return {name: lambda mesh, spec=spec: check_op(spec, mesh) for name, spec in specs.items()} | {
        name.removeprefix("check_"): check
        for name, check in globals().items()
        if name.startswith("check_") and name not in ("check_op", "check_two_dimensions", "check_rows_and_classes")
    }


# ---- the processes ----


def process(rank: int, processes: int, folder: str, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    global DEVICE
    DEVICE = device
    if device == "cuda":
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_default_device(device)  # not for the CPU, where PyTorch would run Python code at each function call
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(seconds=30),
    )
    mesh = init_device_mesh(device, (processes,))
    for name, check in checks(processes).items():
        torch.manual_seed(0)
        try:
            check(mesh)
            said = ""
        # An error must be raised in every process. Otherwise the next collective operation ends in a timeout.
        except (Exception, pytest.fail.Exception):
            said = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(said)
    torch.distributed.destroy_process_group()


# Modules that the fork server imports once for all processes: those of the checks, and those that PyTorch imports when
# it compiles or saves. The server skips a module that is not installed.
PRELOAD = ["tests.test_sharding", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"]
PRELOAD += ["torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.debug", "functorch.compile"]
PRELOAD += ["torch._inductor.select_algorithm", "transformers.models.llama.modeling_llama", "tests.test_train_text"]


@functools.cache
def said_by(processes: int, device: str) -> dict[str, list[str]]:
    """Returns the traceback of each check in each process, or an empty string if the check holds.

    With a GPU each process is a new interpreter: modules that the fork server imports initialize CUDA, which does not
    work in a process that is forked afterwards.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    with tempfile.TemporaryDirectory() as name:
        try:
            start = torch.multiprocessing.start_processes
            start(process, (processes, name, device), processes, start_method=method)
        except Exception:  # for example if a process crashed; every test reports it
            return {check: [traceback.format_exc()] for check in checks(processes)}
        said = [[Path(name, f"{check}.{rank}").read_text() for rank in range(processes)] for check in checks(processes)]
    return dict(zip(checks(processes), said, strict=True))


def assert_nothing_said(processes: int, device: str, name: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < processes:
        pytest.skip(f"{processes} processes with a GPU each, and there are {torch.cuda.device_count()}")
    for rank, said in enumerate(said_by(processes, device)[name]):
        assert not said, f"process {rank}:\n{said}"


@pytest.mark.parametrize("name", checks(2))
def test_two_processes(name: str, device: str) -> None:
    assert_nothing_said(2, device, name)


@pytest.mark.parametrize("name", checks(4))
def test_four_processes(name: str, device: str) -> None:
    assert_nothing_said(4, device, name)


# ---- when the rules are registered ----

IMPORTS = """
import sys
import extension_cpp
assert "torch.distributed.tensor" not in sys.modules and "extension_cpp.distributed" not in sys.modules
import importlib.util
importlib.util.find_spec("torch.distributed.tensor")  # a question is no import
finders = len(sys.meta_path)
for name in [name for name in sys.modules if name.startswith("extension_cpp")]:
    del sys.modules[name]
import extension_cpp
assert len(sys.meta_path) == finders
import torch.distributed.tensor as first
assert extension_cpp.registration.autograd.distributed.DTensor is first.DTensor
assert "extension_cpp.distributed" in sys.modules
for name in [name for name in sys.modules if name.startswith("extension_cpp")]:
    del sys.modules[name]
import extension_cpp
assert extension_cpp.registration.autograd.distributed.DTensor is first.DTensor
print("works")
"""


def test_rules_come_with_dtensor() -> None:
    """The rules are registered in any order of the imports, and when the package is imported again."""
    root = Path(extension_cpp.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=root, capture_output=True, text=True)
    assert done.stdout == "works\n", done.stderr


def test_a_failure_after_an_import_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_for_after_import.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def fail() -> None:
        raise RuntimeError("no rules today")

    after_import("module_for_after_import", fail)
    with pytest.warns(UserWarning, match="extension_cpp: what follows the import of .* failed: no rules today"):
        module = importlib.import_module("module_for_after_import")
    assert module.value == 1

"""Runs tests of the battery on kinds of ops that the package does not have, and on these ops with planted errors.

The ops are written in Python, in the namespace spec_kinds, and stand for a user's kernels.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from extension_cpp.registration.mutation import register_mutation
from tests.battery.test_graphs import (
    test_compile_fullgraph_with_dynamic_shapes as check_compile,
)
from tests.battery.test_graphs import test_fake_has_the_real_strides as check_fakes
from tests.battery.test_graphs import test_opcheck as check_with_opcheck
from tests.battery.test_layouts import test_any_stride_of_a_dimension_of_size_1 as check_strides
from tests.battery.test_mutation import test_every_written_argument_counts_a_version as check_versions
from tests.battery.test_mutation import test_other_arguments_and_gaps_are_not_written as check_gaps
from tests.battery.test_refusals import test_bad_input_gets_its_sentence as check_refusals
from tests.battery.test_refusals import test_fakes_refuse_what_kernels_refuse as check_refusals_of_fakes
from tests.battery.test_runtime import test_eight_python_threads as check_threads
from tests.checks import check, maker
from tests.opspec import Bench, ErrorSample, Make, OpSpec, Sample

LIBRARY = torch.library.Library("spec_kinds", "DEF")


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CPU")
    if "!" not in schema:
        LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"spec_kinds::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.spec_kinds, name)


def check_matrix(name: str, x: Tensor) -> None:
    torch._check(x.dim() == 2, lambda: f"spec_kinds::{name}: expected x of 2 dimensions, but got {x.dim()}")


def spec(
    name: str, function: Any, reference: Any, arguments: Callable[[Make, Any], tuple[Any, ...]], **more: Any
) -> Any:
    """Returns the spec of an op whose first tensor x is a matrix."""

    def samples(make: Make, shape: Sequence[int]) -> Iterator[Sample]:
        if len(shape) == 2 and min(shape) > 0:
            yield Sample(arguments(lambda shape: make(shape).detach(), shape))

    def errors(device: str) -> Iterator[ErrorSample]:
        args = arguments(lambda shape: torch.zeros(shape, device=device), (4, 6))
        x: Any = torch.zeros(2, 3, 4, device=device)
        x = [x, x] if isinstance(args[0], list) else x
        yield ErrorSample((x, *args[1:]), f"spec_kinds::{name}: expected x of 2 dimensions, but got 3")

    bench = Bench(lambda make, shape: next(samples(make, shape)), 1, 0)
    return OpSpec(name, samples, errors, bench, False, (1, 0), function, reference, differentiable=False, **more)


def topk_gate(x: Tensor, last: bool = False, offset: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the largest element of each row and its index, which at a tie is the first index."""
    check_matrix("topk_gate", x)
    at = x.shape[1] - 1 - x.flip(1).argmax(1) if last else x.argmax(1)
    return x.gather(1, at[:, None])[:, 0], at + offset


def topk_fake(x: Tensor, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    check_matrix("topk_gate", x)
    return x.new_empty(x.shape[:1]), x.new_empty(x.shape[:1], dtype=dtype)


def quantize_rows(x: Tensor) -> Tensor:
    """Rounds 8 * x to whole numbers and returns these as int8."""
    check_matrix("quantize_rows", x)
    return (x.float() * 8).round().clamp(-127, 127).to(torch.int8)


def quantize_fake(x: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    check_matrix("quantize_rows", x)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def ties(make: Make, shape: Sequence[int]) -> tuple[Any, ...]:
    return ((make(shape) > 0).to(make((1,)).dtype),)


def one(make: Make, shape: Sequence[int]) -> tuple[Any, ...]:
    return (make(shape),)


TOPK = spec("topk_gate", define("topk_gate(Tensor x) -> (Tensor, Tensor)", topk_gate, topk_fake), topk_gate, ties)
QUANTIZE = spec(
    "quantize_rows",
    define("quantize_rows(Tensor x) -> Tensor", quantize_rows, quantize_fake),
    quantize_rows,
    one,
)


def halve(x: Tensor) -> None:
    torch.ops.spec_kinds.halve(x)


def halve_reference(x: Tensor) -> None:
    x.mul_(0.5)


def halve_without_version(x: Tensor) -> None:
    torch.ops.spec_kinds.halve_without_version(x)


def halve_densely(x: Tensor) -> None:
    """Has a planted error: if x has gaps, the kernel writes into a contiguous copy of x instead of x."""
    torch.ops.spec_kinds.halve(x.contiguous())


def halve_kernel(x: Tensor) -> None:
    check_matrix("halve", x)
    x.data.mul_(0.5)  # does not count a version, like a kernel in C


for name in ("halve", "halve_without_version"):
    define(f"{name}(Tensor(a!) x) -> ()", halve_kernel, halve_kernel)
register_mutation("spec_kinds::halve")
HALVE = spec("halve", halve, halve_reference, one, mutates=("x",))


def scale_all(xs: list[Tensor], by: Tensor) -> Any:
    return torch.ops.spec_kinds.scale_all(xs, by)


def scale_all_kernel(xs: list[Tensor], by: Tensor) -> list[Tensor]:
    for x in xs:
        check_matrix("scale_all", x)
    return [x * by for x in xs]


def halve_all(xs: list[Tensor]) -> None:
    torch.ops.spec_kinds.halve_all(xs)


def halve_all_kernel(xs: list[Tensor]) -> None:
    for x in xs:
        check_matrix("halve_all", x)
    for x in xs:
        x.data.mul_(0.5)


def halve_all_reference(xs: list[Tensor]) -> None:
    for x in xs:
        x.mul_(0.5)


define("scale_all(Tensor[] xs, Tensor by) -> Tensor[]", scale_all_kernel, scale_all_kernel)
define("halve_all(Tensor(a!)[] xs) -> ()", halve_all_kernel, halve_all_kernel)
register_mutation("spec_kinds::halve_all")
SCALE_ALL = spec(
    "scale_all",
    scale_all,
    scale_all_kernel,
    lambda make, shape: ([make(shape), make(shape[::-1])], make(())),
    lists=("xs",),
)
HALVE_ALL = spec(
    "halve_all",
    halve_all,
    halve_all_reference,
    lambda make, shape: ([make(shape), make(shape[::-1])],),
    lists=("xs",),
    mutates=("xs",),
)
SPECS = [TOPK, QUANTIZE, HALVE, SCALE_ALL, HALVE_ALL]


def check_values(spec: OpSpec) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shape in [(4, 6), (33, 31)]:
            for sample in spec.sample_inputs(maker("cpu", dtype), shape):
                check(spec, sample)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_battery_takes_every_kind(spec: OpSpec, request: pytest.FixtureRequest) -> None:
    check_values(spec)
    check_with_opcheck(spec, "cpu", request)
    check_fakes(spec, "cpu")
    check_compile(spec, "cpu")
    check_strides(spec, torch.float32, 7, "cpu")
    check_threads(spec, "cpu")
    check_refusals(spec, "cpu")
    for device in ("cpu", "meta"):
        check_refusals_of_fakes(spec, device)


PLANTED: dict[str, tuple[OpSpec, Callable[..., Any], str]] = {
    "the last of a tie": (
        TOPK,
        lambda x: topk_gate(x, last=True),
        "output 1 .* differ; the first at .*: got .*, expected",
    ),
    "index off by one": (TOPK, lambda x: topk_gate(x, offset=1), "output 1 .* differ; the first at"),
    "index of int32": (
        TOPK,
        lambda x: (topk_gate(x)[0], topk_gate(x)[1].int()),
        "expected torch.int64, but got torch.int32",
    ),
    "zeros": (TOPK, lambda x: tuple(map(torch.zeros_like, topk_gate(x))), "output 0 .* elements are wrong; at"),
    "int8 off by one": (
        QUANTIZE,
        lambda x: quantize_rows(x) + 1,
        "output 0 .* differ; the first at .*: got .*, expected",
    ),
}


@pytest.mark.parametrize("error", PLANTED)
def test_planted_errors_of_values(error: str) -> None:
    spec, function, message = PLANTED[error]
    with pytest.raises(AssertionError, match=message):
        check_values(replace(spec, function=function))


@pytest.mark.parametrize(
    "spec, kernel, fake, message",
    [
        (
            TOPK,
            topk_gate,
            lambda x: topk_fake(x, torch.int32),
            "the fake's dtype is torch.int32, the kernel's torch.int64",
        ),
        (TOPK, topk_gate, lambda x: (x.new_empty(3), topk_fake(x)[1]), "the fake's shape is"),
        (QUANTIZE, quantize_rows, lambda x: quantize_fake(x, torch.uint8), "the fake's dtype is torch.uint8"),
    ],
    ids=["index dtype", "shape", "int8 dtype"],
)
def test_planted_errors_of_fakes(spec: OpSpec, kernel: Any, fake: Any, message: str, request: Any) -> None:
    name = f"wrong_{request.node.callspec.id.replace(' ', '_').replace('-', '_')}"
    schema = str(spec.function.default._schema).removeprefix(f"spec_kinds::{spec.name}")
    with pytest.raises(AssertionError, match=message):
        check_fakes(replace(spec, function=define(name + schema, kernel, fake)), "cpu")


def take(x: Tensor, k: int) -> Tensor:
    check_matrix("take", x)
    return x[:, :k].clone()


@pytest.mark.parametrize("kind", ["SymInt", "int"])
def test_an_int_in_a_shape_names_its_guard(kind: str) -> None:
    name = f"take_{kind}"
    op = define(f"{name}(Tensor x, {kind} k) -> Tensor", take, lambda x, k: x.new_empty(x.shape[0], k))
    takes = spec(name, lambda x, k: op(x, k), take, lambda make, shape: (make(shape), shape[1] // 2))
    if kind == "SymInt":
        return check_compile(takes, "cpu")
    with pytest.raises(torch._dynamo.exc.RecompileError, match=r"(?s)guard failure.*\bk\b"):
        check_compile(takes, "cpu")


def test_planted_errors_of_writes() -> None:
    check_versions(HALVE, "cpu")
    check_gaps(HALVE, "cpu")
    with pytest.raises(AssertionError):
        check_versions(replace(HALVE, in_place=halve_without_version), "cpu")
    with pytest.raises(AssertionError, match="x, sliced"):
        check_gaps(replace(HALVE, in_place=halve_densely), "cpu")

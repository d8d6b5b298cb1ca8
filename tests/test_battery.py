"""Every promise of docs and specs, over every op, dtype and device there is."""

import contextlib
import ctypes
import functools
import gc
import hashlib
import inspect
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from tests.checks import (
    LAYOUTS,
    Calls,
    Expected,
    Strides,
    as_tuple,
    check,
    convert,
    expect,
    leaves,
    maker,
    random_grad,
    run,
    with_float_weights,
)
from tests.opspec import DTYPES, ErrorSample, OpSpec, Sample, all_specs, timed_specs

SPECS = all_specs()
ROOT = Path(__file__).resolve().parent.parent

every_op = pytest.mark.parametrize("spec", SPECS, ids=str)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

SHAPES = [
    *itertools.product((0, 1, 33), (1, 31, 32, 33, 1023, 1025, 3584)),
    *[(65536, width) for width in (1, 7, 33)],
    *[
        (),
        (0,),
        (1,),
        (4097,),
        (3, 0),
        (0, 0),
        (2, 3, 5),
        (2, 0, 5),
        (7, 1, 33),
        (2, 3, 4, 5),
        (1, 1, 1, 1),
        (2, 9, 17, 33),
    ],
]


@every_op
@every_dtype
def test_right_for_every_shape(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    for shape in SHAPES:
        for sample in spec.sample_inputs(maker(device, dtype, seed=10 + len(shape)), shape):
            check(spec, sample)


@every_op
@every_dtype
def test_many_rows(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Tensors that fill the GPU, at the widths of its kernels. Others take few rows and, in the norms, larger tensors
    (test_norm_kernels.py)."""
    if device != "cuda":
        pytest.skip("how many rows there are decides only on the GPU which kernel takes them")
    narrow = (8, 48, 200, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2304, 2560, 3072, 4096, 4608, 5120)
    wide = (6144, 7168, 8192, 10240, 12288, 16384, 20480, 32768, 36864, 45056)
    wider = (49152, 55296, 81920, 98304, 114688, 131072)
    between_lines = (24584, 49160, 50260, 65544)
    uneven = (18432, 60000, 100000, 118000, 122880)  # threads of a cluster have one vector more than others
    odd = (33, 129, 257, 385, 513, 641, 769, 1025, 1281, 1537, 2049, 2561, 3073, 3585, 4097, 5121, 6145, 8191)
    wide_odd = (8193, 10249, 14001, 16385, 36865, 43013, 50257, 65537, 81921, 120001)
    last_block_empty = (30725, 61449)  # of a cluster: float layer_norm, a half type's with a residual
    for width in (*narrow, *wide, *wider, *between_lines, *uneven, *odd, *wide_odd, *last_block_empty):
        # More bytes than few rows have, or several rows a cluster, also of the widest, of which fewer run at once.
        size = (17 if width <= 16384 else 10) << 20
        shape = (max(size // dtype.itemsize // width, 400 if width <= 32768 else 100) + 3, width)
        sample = next(iter(spec.sample_inputs(maker(device, dtype), shape)))
        ours = check(spec, sample)
        with torch.no_grad():  # by the twin, which may go without some results
            outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
        for output, as_before in zip(outputs, ours.outputs, strict=True):
            assert torch.equal(output, as_before), f"{spec.name} {shape}: without gradients"


@every_op
@every_dtype
def test_few_rows(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Rows that other kernels take than those of many, and numbers of them where the shape changes."""
    if device != "cuda":
        pytest.skip("how many rows there are decides only on the GPU which kernel takes them")
    for rows, width in itertools.product((3, 132, 133, 513), (64, 256, 512, 1024, 2048, 4096, 8192, 16384)):
        check(spec, next(iter(spec.sample_inputs(maker(device, dtype), (rows, width)))))


@every_op
@every_dtype
def test_any_layout(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Layouts of the inputs, each with layouts of grad_out; .sum().backward() gives the expanded one."""
    for shape in [(6, 33), (3, 4, 33), (2, 3, 4, 37), (2, 64, 8, 8)]:
        truths: dict[tuple[int, bool, bool], Expected] = {}  # of layouts, only the expanded one changes values
        for layout, grad_layout in itertools.product(LAYOUTS, LAYOUTS):
            for number, sample in enumerate(spec.sample_inputs(maker(device, dtype, layout=layout), shape)):
                values = (number, layout == "expanded", grad_layout == "expanded")
                if values not in truths:
                    truths[values] = expect(spec, sample, grad_layout)
                what = f"{layout}, grad_out {grad_layout}"
                ours = check(spec, sample, grad_layout, what, expected=truths[values])
                if spec.keeps_strides:
                    expected = torch.empty_like(sample.args[0]).stride()
                    assert ours.outputs[0].stride() == expected, f"{spec.name} {shape} {layout}: strides"


@every_op
@every_dtype
def test_mixed_layouts(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """The operands of one call in layouts of their own."""
    for first, second in itertools.permutations(LAYOUTS, 2):
        turns = itertools.cycle(
            [maker(device, dtype, seed=1, layout=first), maker(device, dtype, seed=2, layout=second)]
        )
        for sample in spec.sample_inputs(lambda shape, turns=turns: next(turns)(shape), (2, 6, 5, 33)):
            check(spec, sample, "contiguous", f"{first} with {second}")


@every_op
@every_dtype
def test_rows_with_gaps(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Rows with a gap of three elements: each begins at another offset from a vector's address."""
    shapes = [(5, 33), (9, 256), *([(300, 1024), (135, 4096), (40, 16384), (9, 50257)] if device == "cuda" else [])]
    for shape in shapes:
        for sample in spec.sample_inputs(maker(device, dtype, layout="padded"), shape):
            check(spec, sample, "padded", "padded rows")


OPCHECKS = inspect.signature(torch.library.opcheck).parameters["test_utils"].default


@every_op
def test_opcheck(spec: OpSpec, device: str, request: pytest.FixtureRequest) -> None:
    """All its tests for every dtype and every layout; for each pair of them all but the slow one, AOT dispatch, which
    the slow tier has for each pair, too."""
    cases = [(torch.float32, (5, 33)), (torch.bfloat16, (2, 3, 4, 5)), (torch.float64, (0, 3))]
    for i, (dtype, shape) in enumerate(cases):
        for j, layout in enumerate(("sliced", "transposed", "contiguous")):
            everything = i == j or request.config.getoption("--slow")
            tests = [test for test in OPCHECKS if everything or test != "test_aot_dispatch_dynamic"]
            for sample in spec.sample_inputs(maker(device, dtype, layout=layout), shape):
                with Calls() as calls:
                    outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
                # opcheck compares the results, and takes NaN to differ from NaN.
                if calls.made and not any(output.isnan().any() for output in outputs):
                    torch.library.opcheck(*calls.made[0], test_utils=tests)


@every_op
def test_gradcheck(spec: OpSpec, device: str) -> None:
    """The float64 kernels against finite differences, for several layouts; the second order where promised, and
    forward mode."""
    for shape, layout in [((3, 5), "contiguous"), ((2, 3, 4), "transposed"), ((2, 3), "sliced")]:
        for sample in spec.sample_inputs(maker(device, torch.float64, layout=layout, seed=3), shape):
            tensors = leaves(sample)

            def function(*inputs: torch.Tensor, sample: Sample = sample) -> torch.Tensor | tuple[torch.Tensor, ...]:
                given = iter(inputs)
                args = [next(given) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in sample.args]
                return spec.function(*args, **sample.kwargs)

            torch.autograd.gradcheck(function, tensors, check_forward_ad=True)
            if spec.second_order:
                torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True)


@every_op
@every_dtype
def test_forward_mode_gives_the_kernels_values(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Shape, dtype and value of every result, of every operator that a sample reaches, where tensors have tangents."""
    for sample in spec.sample_inputs(maker(device, dtype), (5, 33)):
        for each in (sample, *([with_float_weights(sample)] if spec.float_weights and dtype.itemsize == 2 else [])):
            for op, args, kwargs in _calls_of_every_order(spec, each, "contiguous").made:
                args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
                expected = as_tuple(op(*args, **kwargs))
                with forward_ad.dual_level():
                    duals = (
                        forward_ad.make_dual(x, torch.ones_like(x))
                        if isinstance(x, torch.Tensor) and x.is_floating_point()
                        else x
                        for x in args
                    )
                    try:
                        results = [forward_ad.unpack_dual(x).primal for x in as_tuple(op(*duals, **kwargs))]
                    except RuntimeError as error:
                        assert str(error).endswith(": forward-mode differentiation is not implemented")
                        assert "backward" in str(error), "the forward has a plain form"
                        continue
                for a, b in zip(results, expected, strict=True):
                    # Sums of 33 columns or 5 rows of terms of about 1, and a product or two of each.
                    size = max(1.0, b.abs().max().item()) if b.numel() else 0.0
                    torch.testing.assert_close(a, b, rtol=0, atol=16 * torch.finfo(dtype).eps * size)


Scalar = Callable[..., torch.Tensor]


def _jvp(f: Scalar, tensors: tuple[torch.Tensor, ...]) -> Any:
    return torch.func.jvp(f, tensors, tuple(x.cos() for x in tensors))


def _all(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


def _total(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([x.sin().sum() for x in tensors]).sum()


def _second(f: Scalar, x: tuple[torch.Tensor, ...]) -> Any:
    return torch.func.grad(lambda *x: _total(torch.func.grad(f, _all(x))(*x)), _all(x))(*x)


# Of a scalar function of several tensors.
FIRST_ORDER: dict[str, Callable[[Scalar, tuple[torch.Tensor, ...]], Any]] = {
    "grad": lambda f, x: torch.func.grad(f, _all(x))(*x),
    "vjp": lambda f, x: torch.func.vjp(f, *x)[1](torch.tensor(2.0, dtype=x[0].dtype, device=x[0].device)),
    "jvp": _jvp,
    "jvp under no_grad": lambda f, x: torch.no_grad()(_jvp)(f, x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f, _all(x))(*x),
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(f, _all(x)))(*(torch.stack([t, t + 1]) for t in x)),
}
SECOND_ORDER: dict[str, Callable[[Scalar, tuple[torch.Tensor, ...]], Any]] = {
    "grad of grad": _second,
    "jvp of grad": lambda f, x: _jvp(torch.func.grad(f, _all(x)), x),
    "grad of jvp": lambda f, x: torch.func.grad(lambda *x: _jvp(f, x)[1], _all(x))(*x),
    "jvp of jvp": lambda f, x: _jvp(lambda *x: _jvp(f, x)[1], x),
    "hessian": lambda f, x: torch.func.hessian(f, _all(x))(*x),
    "jacrev of jacrev": lambda f, x: torch.func.jacrev(torch.func.jacrev(f, _all(x)), _all(x))(*x),
}


@every_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [*FIRST_ORDER, *SECOND_ORDER])
def test_torch_func(spec: OpSpec, transform: str, device: str) -> None:
    """Every transform of torch.func, as of the reference in float64."""
    apply = (FIRST_ORDER | SECOND_ORDER)[transform]
    for sample in spec.sample_inputs(maker(device, torch.float64, seed=3), (2, 3)):
        primals = tuple(x.detach() for x in leaves(sample))

        def scalar(function: Callable[..., Any], sample: Sample = sample) -> Scalar:
            def of(*tensors: torch.Tensor) -> torch.Tensor:
                given = iter(tensors)
                args = [next(given) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in sample.args]
                return _total(as_tuple(function(*args, **sample.kwargs)))

            return of

        if transform in SECOND_ORDER and not spec.second_order and transform not in ("grad of jvp", "jvp of jvp"):
            with pytest.raises(RuntimeError, match=r"extension_cpp::.* is not implemented"):
                apply(scalar(spec.function), primals)
            continue
        got, want = apply(scalar(spec.function), primals), apply(scalar(spec.in_steps or spec.reference), primals)
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, (got, want)), strict=True):
            torch.testing.assert_close(a, b)


def _subsets(items: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Every one but the empty one."""
    items = tuple(items)
    return itertools.chain.from_iterable(itertools.combinations(items, n + 1) for n in range(len(items)))


def _derivatives(
    function: Callable[..., Any], sample: Sample, needed: tuple[int, ...], used: tuple[int, ...], second: bool
) -> list[torch.Tensor]:
    """The gradients of those arguments through those outputs, and those of each subset of the gradients."""
    args = [
        x.detach().requires_grad_(i in needed) if isinstance(x, torch.Tensor) else x for i, x in enumerate(sample.args)
    ]
    wanted = [args[i] for i in needed]
    outputs = as_tuple(function(*args, **sample.kwargs))
    outputs = tuple(outputs[i] for i in used)
    grads_out = [random_grad()(output).requires_grad_(second) for output in outputs]

    def grad(
        of: Sequence[torch.Tensor], by: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        pairs = [(x, g) for x, g in zip(of, grads, strict=True) if x.requires_grad]
        if not pairs:
            return [torch.zeros_like(x) for x in by]
        of, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(of, by, grads, create_graph=second, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, by, strict=True)]

    first = grad(outputs, wanted, grads_out)
    found = [*first]
    for some in _subsets(first if second else ()):
        found += grad(some, [*wanted, *grads_out], [g.detach().cos() for g in some])
    return [x.detach() for x in found]


@every_op
def test_every_subset_of_inputs_and_outputs(spec: OpSpec, device: str) -> None:
    """First and second order where some inputs require grad and some results are used; gradcheck takes all."""
    for sample in spec.sample_inputs(maker(device, torch.float64, seed=4), (3, 5)):
        tensors = [i for i, x in enumerate(sample.args) if isinstance(x, torch.Tensor) and x.requires_grad]
        count = len(as_tuple(spec.function(*sample.args, **sample.kwargs)))
        for needed, used in itertools.product(_subsets(tensors), _subsets(range(count))):
            both = [
                _derivatives(function, sample, needed, used, spec.second_order)
                for function in (spec.function, spec.in_steps or spec.reference)
            ]
            for ours, exact in zip(*both, strict=True):
                torch.testing.assert_close(ours, exact, msg=lambda text, at=(needed, used): f"{at}: {text}")


@every_op
def test_checkpointing(spec: OpSpec, device: str) -> None:
    """Forward runs again in backward, and gives the same bits."""
    for sample in spec.sample_inputs(maker(device, torch.float32), (6, 33)):

        def again(*args: object, sample: Sample = sample) -> object:
            return checkpoint(functools.partial(spec.function, **sample.kwargs), *args, use_reentrant=False)

        ours, plain = run(again, Sample(sample.args), random_grad()), run(spec.function, sample, random_grad())
        for (name, a), (_, b) in zip(ours.tensors(), plain.tensors(), strict=True):
            assert torch.equal(a, b), name


@every_op
def test_autocast(spec: OpSpec, device: str) -> None:
    """Tensors of one dtype, float32, are no reason to cast; the norms' tests have what is."""
    if spec.has_products:
        pytest.skip("autocast casts matrix products: test_loss.py has this test")
    for sample in spec.sample_inputs(maker(device, torch.float32), (6, 33)):
        plain = run(spec.function, sample, random_grad())
        for compiled in (False, True):
            function = torch.compile(spec.function, backend="aot_eager", fullgraph=True) if compiled else spec.function
            with torch.autocast(device, torch.bfloat16):
                ours = run(function, sample, random_grad())
            for (name, a), (_, b) in zip(ours.tensors(), plain.tensors(), strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), f"{name}, compiled: {compiled}"


@every_op
def test_vmap(spec: OpSpec, device: str) -> None:
    """Over a dimension of every floating-point tensor: what the calls one by one give, gradients too."""
    calls = [list(spec.sample_inputs(maker(device, torch.float32, seed=seed), (4, 33))) for seed in (1, 2, 3)]
    for same in zip(*calls, strict=True):
        batched = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in same[0].args]
        args = [
            torch.stack([sample.args[i].detach() for sample in same]).requires_grad_(x.requires_grad)
            if is_batched
            else x
            for i, (is_batched, x) in enumerate(zip(batched, same[0].args, strict=True))
        ]
        function = functools.partial(spec.function, **same[0].kwargs)
        mapped = torch.vmap(function, tuple(0 if is_batched else None for is_batched in batched))
        ours = run(mapped, Sample(tuple(args)), torch.ones_like)
        for i, sample in enumerate(same):
            alone = run(function, Sample(sample.args), torch.ones_like)
            for (name, a), (_, b) in zip(ours.tensors(), alone.tensors(), strict=True):
                torch.testing.assert_close(a[i], b, msg=lambda text, name=name: f"{name}: {text}")


@every_op
@every_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_nan_and_inf_at_each_position(spec: OpSpec, dtype: torch.dtype, value: float, device: str) -> None:
    """Where the reference lets it go, and nowhere else. 67 columns are two blocks and a tail on the CPU, vectors and a
    tail on the GPU. An infinite input may leave the op finite where the reference's formula gives inf * 0 (the limit
    is right).
    """
    for number, sample in enumerate(spec.sample_inputs(maker(device, dtype), (2, 67))):
        for x in leaves(sample):
            for index in range(0, x.numel(), 1 if dtype is torch.float32 and number == 0 else 13):
                keep = x.detach().clone()
                x.detach().view(-1)[index] = value
                check(spec, sample, what=f"{value} at {index}", limits=value == value)
                x.detach().copy_(keep)


@every_op
@every_dtype
@pytest.mark.parametrize(
    "mean, spread", [(4e4, 1.0), (0.0, 1e30), (0.0, 1e-39), (0.0, 1e-44), (-90.0, 5.0), (0.0, 30.0)]
)
def test_hostile_numbers(spec: OpSpec, dtype: torch.dtype, device: str, mean: float, spread: float) -> None:
    """Values far from 1: overflow, denormals, and both ends of exp."""
    for width in (1025, 1024):
        for sample in spec.sample_inputs(maker(device, dtype, mean=mean, spread=spread), (33, width)):
            check(spec, sample, what=f"{width} columns, mean {mean}, spread {spread}", limits=True)


@every_op
def test_rows_of_minus_infinity(spec: OpSpec, device: str) -> None:
    for width in (64, 65):
        for sample in spec.sample_inputs(maker(device, torch.float32), (3, width)):
            sample.args[0].detach()[1] = -float("inf")
            # One row for all of x is finite * 0 where x is finite; PyTorch's fused rms_norm on the GPU makes
            # NaN of that.
            check(spec, sample, limits=True)


@every_op
def test_bad_input_gets_its_sentence(spec: OpSpec, device: str) -> None:
    samples = list(spec.error_inputs(device))
    assert samples
    for sample in samples:
        out = sample.kwargs.get("out")
        before = out.detach().clone() if out is not None else None
        with pytest.raises(RuntimeError) as error:
            spec.function(*sample.args, **sample.kwargs)
        assert str(error.value) == sample.message
        if out is not None:
            assert torch.equal(out, before), f"{sample.message}: out was written"


def _on_meta(sample: ErrorSample) -> ErrorSample:
    """The same call on meta tensors; those that share memory share it there, too."""
    storages: dict[int, torch.Tensor] = {}

    def one(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        flat = torch.empty(storage.nbytes() // x.itemsize, dtype=x.dtype, device="meta")
        flat = storages.setdefault(storage.data_ptr(), flat)
        return flat.as_strided(x.shape, x.stride(), x.storage_offset()).requires_grad_(x.requires_grad)

    kwargs = {key: one(x) for key, x in sample.kwargs.items()}
    return ErrorSample(tuple(one(x) for x in sample.args), sample.message, kwargs)


@every_op
@pytest.mark.parametrize("fake_device", ["cpu", "cuda", "meta"])
def test_fakes_refuse_what_kernels_refuse(spec: OpSpec, fake_device: str) -> None:
    """With the same sentence, on tensors without data: else torch.export succeeds, and the program fails at run time.
    FakeTensors are on "cuda" on a machine without a GPU, too."""
    with FakeTensorMode() if fake_device != "meta" else contextlib.nullcontext():
        samples = list(spec.error_inputs("cpu" if fake_device == "meta" else fake_device))
        for sample in map(_on_meta, samples) if fake_device == "meta" else samples:
            for gradients in (True, *(() if "require grad" in sample.message else (False,))):
                with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError) as error:
                    spec.function(*sample.args, **sample.kwargs)
                assert str(error.value) == sample.message


def _wrong(name: str, x: Any, others: dict[str, Any]) -> Iterator[Any]:
    """What an operator must not take in an argument's place, beside those others."""
    if isinstance(x, torch.Tensor):
        yield x.cfloat() if x.is_floating_point() else x.float()
        yield x.int()
        tensors = [other for other in others.values() if isinstance(other, torch.Tensor)]
        if x.is_floating_point() and any(other.is_floating_point() for other in tensors):
            yield x.float() if x.dtype is torch.float64 else x.double()
        has_like = any(other.shape == x.shape and x.numel() > 0 for other in tensors)
        if name == "seed" or "normalized_shape" in others or has_like:
            yield torch.cat([x.reshape(-1), x.reshape(-1)[:1]])
        if tensors:
            yield x.to("meta")
    elif name == "p":
        yield from (-0.5, 1.5, float("nan"))
    elif name == "normalized_shape":
        yield from ((), (*x, 2), (2, *x[1:]), (1, 1, 1, 1, *x))
    elif name == "dim" and isinstance(x, int):
        yield from (7, -7)
    elif name == "dim":
        yield from ((7,), (-7,), (0, 0))


@every_op
def test_every_argument_is_checked(spec: OpSpec, device: str) -> None:
    """Of backward operators and no-grad overloads, too, by kernels and fakes in the same words: an argument that is
    wrong by itself is refused in a sentence that names it."""
    refused = 0
    for sample in spec.sample_inputs(maker(device, torch.float32), (3, 5)):
        for called, args, kwargs in _calls_of_every_order(spec, sample, "contiguous").made:
            args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
            given = {argument.name: x for argument, x in zip(called._schema.arguments, args, strict=False)}
            for op, (i, name) in itertools.product(_with_twin(called), enumerate(given)):
                for wrong in _wrong(name, args[i], {other: x for other, x in given.items() if other != name}):
                    call = [*args[:i], wrong, *args[i + 1 :]]
                    with pytest.raises(RuntimeError) as error:
                        op(*call, **kwargs)
                    message = str(error.value)
                    assert message.startswith(f"{called._schema.name}: expected "), message
                    assert re.search(rf"\b({name}|dim|seed)\b", message), message
                    with FakeTensorMode() as mode, pytest.raises(RuntimeError) as fake_error:
                        op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in call), **kwargs)
                    assert str(fake_error.value) == message
                    refused += 1
    assert refused > 0


VIEWS_AND_COPIES = {
    f"aten::{name}"
    for name in [
        "empty",
        "empty_like",
        "empty_strided",
        "contiguous",
        "clone",
        "copy_",
        "detach",
        "expand",
        "as_strided",
        "unsqueeze",
        "permute",
        "view",
    ]
}


def profiled(call: Callable[[], object], device: str) -> tuple[set[str], list[str]]:
    """The operators that a call runs, and its kernels on the GPU; filling and copying memory is none."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    for _ in range(2):  # the first run of a profiler may miss kernels
        with profile(activities=activities) as profiler:
            call()
            if device == "cuda":
                torch.cuda.synchronize()
    on_gpu = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {event.name for event in profiler.events()}, [name for name in on_gpu if not name.startswith("Mem")]


@pytest.mark.parametrize("spec", timed_specs(), ids=str)
def test_ours_all_the_way(spec: OpSpec, device: str) -> None:
    """Under the profiler: our ops, of PyTorch's only allocation, views and copies; on the GPU no kernel too many,
    neither for rows that a block takes nor for those of a cluster."""
    for shape in [(4096, 1024), *([(2100, 16384), (1100, 50257)] if device == "cuda" else [])]:
        sample = spec.bench.sample(maker(device, torch.float32), shape)
        outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
        grads_out, inputs = [random_grad()(output) for output in outputs], leaves(sample)
        forward = functools.partial(spec.function, *sample.args, **sample.kwargs)
        backward = functools.partial(torch.autograd.grad, outputs, inputs, grads_out, retain_graph=True)
        for call, launches in zip((forward, backward), spec.launches, strict=True):
            names, kernels = profiled(call, device)
            foreign = {name for name in names if name.startswith("aten::")} - VIEWS_AND_COPIES
            assert not foreign, f"{spec.name} calls {sorted(foreign)}"
            assert launches == 0 or any(name.startswith("extension_cpp::") for name in names)
            assert device == "cpu" or len(kernels) == launches, (shape, kernels)


@every_op
def test_compile_fullgraph_with_dynamic_shapes(spec: OpSpec, device: str) -> None:
    """One graph, no second compilation for other sizes, the eager result, forward and backward."""
    samples = [list(spec.sample_inputs(maker(device, torch.float32), shape)) for shape in [(6, 40), (9, 64), (5, 33)]]
    for same_call in zip(*samples, strict=True):
        torch._dynamo.reset()
        backend = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(spec.function, backend=backend, fullgraph=True, dynamic=True)
        counts = []
        for sample in same_call:
            ours, eager = run(compiled, sample, random_grad()), run(spec.function, sample, random_grad())
            counts.append(backend.frame_count)
            for (name, a), (_, b) in zip(ours.tensors(), eager.tensors(), strict=True):
                assert torch.equal(a, b), f"{spec.name} {sample.args[0].shape}: {name} differs under torch.compile"
                assert a.stride() == b.stride(), f"{spec.name} {sample.args[0].shape}: {name} has other strides"
        assert len(set(counts)) == 1, f"{spec.name}: compiled again for another shape"


# What transpose(1, 2) makes of one third of a packed QKV of (batch, rows, heads, width).
PERMUTED = Strides(order=(0, 2, 1, 3), steps=(1, 3, 1, 1), expanded=frozenset(), offset=8)


@every_op
def test_compile_with_inductor(spec: OpSpec, device: str) -> None:
    """The default backend, the op between PyTorch's own, with inputs that are permuted and have gaps."""
    torch._dynamo.reset()
    for sample in spec.sample_inputs(maker(device, torch.float32, layout=PERMUTED), (2, 4, 7, 8)):

        def model(*args: object, sample: Sample = sample) -> tuple[torch.Tensor, ...]:
            outputs = as_tuple(spec.function(*args, **sample.kwargs))
            return tuple((output * 2.0).sin() for output in outputs)

        ours = run(torch.compile(model, fullgraph=True), Sample(sample.args), random_grad())
        eager = run(model, Sample(sample.args), random_grad())
        for (name, a), (_, b) in zip(ours.tensors(), eager.tensors(), strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
        break


class EveryOp(torch.nn.Module):
    """One sample of every op, on inputs that are permuted and have gaps: sums over a dimension of the results."""

    def __init__(self, samples: list[tuple[OpSpec, Sample]]) -> None:
        super().__init__()
        self.samples = samples

    def forward(self, tensors: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for (spec, sample), inputs in zip(self.samples, tensors, strict=True):
            left = iter(inputs)
            args = [next(left) if isinstance(x, torch.Tensor) else x for x in sample.args]
            outputs = as_tuple(spec.function(*args, **sample.kwargs))
            results += [output.sum(1) if output.dim() > 1 else output for output in outputs]
        return results


def test_ahead_of_time_inductor(device: str, tmp_path: Path) -> None:
    """AOTInductor's code reads a result at the strides that the fake promises, and checks nothing."""
    make = maker(device, torch.float32, layout=PERMUTED)
    samples = [(spec, next(iter(spec.sample_inputs(make, (2, 4, 7, 8))))) for spec in SPECS]
    tensors = [[x.detach() for x in sample.args if isinstance(x, torch.Tensor)] for _, sample in samples]
    model = EveryOp(samples)
    program = torch.export.export(model, (tensors,))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    for ours, eager in zip(torch._inductor.aoti_load_package(path)(tensors), model(tensors), strict=True):
        torch.testing.assert_close(ours, eager)


def _calls_of_every_order(spec: OpSpec, sample: Sample, layout: str | Strides) -> Calls:
    """The operators that the forward, the backward and, where there is one, the second order call."""
    grad_out = random_grad(layout)
    with Calls() as calls:
        outputs = as_tuple(spec.function(*sample.args, **sample.kwargs))
        first = torch.autograd.grad(
            outputs, leaves(sample), [grad_out(output) for output in outputs], create_graph=spec.second_order
        )
        again = [gradient for gradient in first if gradient.requires_grad]
        if again:
            torch.autograd.grad(again, leaves(sample), [grad_out(g) for g in again], allow_unused=True)
    return calls


def _with_twin(op: torch._ops.OpOverload) -> list[torch._ops.OpOverload]:
    """An operator beside its no-grad overload."""
    name = op._schema.name.split("::")[1].removesuffix("_no_grad")
    return [getattr(torch.ops.extension_cpp, each).default for each in (name, f"{name}_no_grad")]


def _check_fakes(spec: OpSpec, sample: Sample, layout: str | Strides, what: str) -> None:
    """Shape, dtype and strides of every fake, for every operator that the sample reaches, beside the real results."""
    for called, args, kwargs in _calls_of_every_order(spec, sample, layout).made:
        args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
        for op in _with_twin(called):
            reals = as_tuple(op(*args, **kwargs))
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args]
                promises = as_tuple(op(*fakes, **kwargs))
            for real, fake in zip(reals, promises, strict=True):
                assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device), f"{op} {what}"
                for size, promised, stride in zip(real.shape, fake.stride(), real.stride(), strict=True):
                    assert size == 1 or promised == stride or real.numel() == 0, (
                        f"{op} {what}: the fake promises strides {fake.stride()} for {real.stride()}"
                    )


@every_op
def test_fake_has_the_real_strides(spec: OpSpec, device: str) -> None:
    for shape, layout in itertools.product([(6, 33), (2, 3, 4, 37), (1, 3, 1, 5), (3, 0)], LAYOUTS):
        for sample in spec.sample_inputs(maker(device, torch.bfloat16, layout=layout), shape):
            for each in (sample, *([with_float_weights(sample)] if spec.float_weights else [])):
                _check_fakes(spec, each, layout, f"{shape} {layout}")


ANY_STRIDES = st.builds(
    Strides,
    order=st.permutations(range(4)).map(tuple),
    steps=st.tuples(*[st.integers(1, 3)] * 4),
    expanded=st.frozensets(st.integers(0, 3), max_size=2),
    offset=st.integers(0, 3),
)


@every_op
@settings(deadline=None, derandomize=True, max_examples=50, suppress_health_check=list(HealthCheck))
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), first=ANY_STRIDES, second=ANY_STRIDES)
def test_fake_has_the_real_strides_of_any_layout(
    spec: OpSpec, device: str, shape: tuple[int, ...], first: Strides, second: Strides
) -> None:
    """Any order of dimensions, gaps, offsets, expanded dimensions and dimensions of size 1."""
    turns = itertools.cycle([maker(device, torch.float32, layout=layout) for layout in (first, second)])
    for sample in spec.sample_inputs(lambda shape: next(turns)(shape), shape):
        _check_fakes(spec, sample, second, f"{shape} {first}, others {second}")


def _bits(x: torch.Tensor) -> bytes:
    return x.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def _calls(spec: OpSpec, dtype: torch.dtype, device: str) -> list[Sample]:
    """Of at least 8 blocks of work each."""
    shapes = [(700, 1025), (3, 200_001), (4099, 31)]
    if device == "cuda":
        shapes += [(300, 1024), (107, 50257)]
    return [sample for shape in shapes for sample in spec.sample_inputs(maker(device, dtype), shape)]


def _digest(spec: OpSpec, calls: list[Sample]) -> str:
    """A hash of results and gradients."""
    digest = hashlib.sha256()
    for sample in calls:
        for _, x in run(spec.function, sample, random_grad()).tensors():
            digest.update(_bits(x))
    return digest.hexdigest()


@every_op
@every_dtype
def test_deterministic_at_any_number_of_threads(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    before, calls = torch.get_num_threads(), _calls(spec, dtype, device)
    try:
        digests = set()
        # PyTorch's matrix products on the CPU add in another order for another number of threads.
        for threads in (2, 2) if spec.has_products else (1, 2, 7, 2):
            torch.set_num_threads(threads)
            digests.add(_digest(spec, calls))
        assert len(digests) == 1
    finally:
        torch.set_num_threads(before)


LEVEL_SCRIPT = """
import ctypes, sys, torch, extension_cpp
from tests.test_battery import DTYPES, SPECS, _calls, _digest
from tests.checks import check, maker
level = ctypes.CDLL(extension_cpp.LIBRARY).extension_cpp_cpu_level
level.restype = ctypes.c_char_p
print("level", level().decode())
for spec in SPECS:
    for dtype in DTYPES:
        if sys.argv[1] == "right":
            for sample in spec.sample_inputs(maker("cpu", dtype), (33, 1025)):
                check(spec, sample)
        else:
            print(spec.name, dtype, _digest(spec, _calls(spec, dtype, "cpu")))
"""


def _run_at_level(level: str, what: str) -> list[str]:
    environment = {**os.environ, "EXTENSION_CPP_CPU_LEVEL": level}
    command = [sys.executable, "-c", LEVEL_SCRIPT, what]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_instruction_sets_agree() -> None:
    """Each level is right, and those that have FMA give the same bits, so that one of them is asked."""
    assert _run_at_level("baseline", "right") == ["level baseline"]
    v3, v4 = _run_at_level("v3", "bits"), _run_at_level("v4", "bits")
    if v4[0] != "level v4":
        pytest.skip("this machine has no AVX-512, so that there is only one level with FMA")
    assert v3[0] == "level v3"
    assert len(v3) > len(SPECS) and v3[1:] == v4[1:]


def _allocated(device: str) -> int:
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    class Mallinfo2(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in [
                "arena",
                "ordblks",
                "smblks",
                "hblks",
                "hblkhd",
                "usmblks",
                "fsmblks",
                "uordblks",
                "fordblks",
                "keepcost",
            ]
        ]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


@every_op
def test_no_leak(spec: OpSpec, device: str) -> None:
    """1000 calls, strided inputs and errors included, leave less behind than 16 bytes a call."""
    good = next(iter(spec.sample_inputs(maker(device, torch.float32, layout="sliced"), (8, 33))))
    bad = next(iter(spec.error_inputs(device)))

    def call() -> None:
        run(spec.function, good, random_grad())
        with pytest.raises(RuntimeError):
            spec.function(*bad.args, **bad.kwargs)

    for _ in range(50):
        call()
    before = _allocated(device)
    for _ in range(1000):
        call()
    assert _allocated(device) - before < 16_000


@every_op
def test_eight_python_threads(spec: OpSpec, device: str) -> None:
    calls = _calls(spec, torch.float32, device)
    expected = _digest(spec, calls)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(_digest(spec, calls))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 8


@every_op
def test_inference_mode_and_no_grad(spec: OpSpec, device: str) -> None:
    sample = next(iter(spec.sample_inputs(maker(device, torch.float32), (5, 33))))
    expected = as_tuple(spec.function(*sample.args, **sample.kwargs))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            results = as_tuple(spec.function(*sample.args, **sample.kwargs))
        for result, output in zip(results, expected, strict=True):
            assert not result.requires_grad
            assert torch.equal(result, output.detach())


@every_op
def test_twins_serve_where_no_gradient_is_recorded(spec: OpSpec, device: str) -> None:
    """Under no_grad and in a plain backward pass; each gives the operator's bits, and passes opcheck itself."""
    for sample in spec.sample_inputs(maker(device, torch.float32, layout="transposed"), (5, 33)):
        found: dict[str, tuple[torch.Tensor, ...]] = {}

        def twins(name: str, call: Callable[[], Any], found: dict[str, Any] = found) -> set[bool]:
            """Whether each of our operators that a call runs is a twin."""

            def keep() -> None:
                found[name] = as_tuple(call())

            events, _ = profiled(keep, device)
            ours = [event for event in events if event.startswith("extension_cpp::")]
            if spec.has_products:  # its kernel calls others, which have no gradient to record
                ours = [event for event in ours if spec.name in event]
            return {event.endswith("_no_grad") for event in ours}

        forward = functools.partial(spec.function, *sample.args, **sample.kwargs)
        assert twins("outputs", forward) == {False}
        grads_out = [torch.ones_like(output) for output in found["outputs"]]
        backward = functools.partial(
            torch.autograd.grad, found["outputs"], leaves(sample), grads_out, retain_graph=True
        )
        kinds = [twins("gradients", functools.partial(backward, create_graph=True)), twins("plain", backward)]
        assert kinds in ([{False}, {True}], [set(), set()])
        with torch.no_grad():
            assert twins("results", forward) == {True}
        for a, b in [("outputs", "results"), ("gradients", "plain")]:
            for x, y in zip(found[a], found[b], strict=True):
                assert torch.equal(x, y) and x.stride() == y.stride()
        for called, args, kwargs in _calls_of_every_order(spec, sample, "contiguous").made:
            args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
            torch.library.opcheck(_with_twin(called)[1], args, kwargs)


class OneCall(torch.nn.Module):
    """A sample as a module: x comes in, other tensors are parameters and buffers."""

    def __init__(self, spec: OpSpec, sample: Sample) -> None:
        super().__init__()
        self.function = functools.partial(spec.function, **sample.kwargs)
        self.others = list(sample.args[1:])
        for i, x in enumerate(self.others):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                self.register_parameter(f"tensor_{i}", torch.nn.Parameter(x.detach()))
            elif isinstance(x, torch.Tensor):
                self.register_buffer(f"tensor_{i}", x)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        others = [getattr(self, f"tensor_{i}", other) for i, other in enumerate(self.others)]
        outputs = self.function(x, *others)
        return outputs if isinstance(outputs, tuple) else (outputs,)


CAPTURES: dict[str, Callable[[OneCall, torch.Tensor], torch.nn.Module]] = {
    "torch.export": lambda module, x: torch.export.export(module, (x,)).module(),
    "strict torch.export": lambda module, x: torch.export.export(module, (x,), strict=True).module(),
    "make_fx": lambda module, x: make_fx(module)(x),
    "symbolic_trace": lambda module, x: torch.fx.symbolic_trace(module),
    "jit.trace": lambda module, x: torch.jit.trace(module, (x,)),
}


@every_op
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("gradients", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("capture", CAPTURES)
def test_captured_graphs_train(spec: OpSpec, capture: str, gradients: bool, device: str) -> None:
    """What was captured under no_grad may be trained later: it gives eager's results and every gradient."""
    if capture == "jit.trace" and sys.version_info >= (3, 14):
        pytest.skip("torch.jit does not support Python 3.14")
    for sample in spec.sample_inputs(maker(device, torch.float32), (5, 33)):
        module, x = OneCall(spec, sample), sample.args[0].detach()
        with torch.set_grad_enabled(gradients):
            captured = CAPTURES[capture](module, x)
        results = []
        for each in (captured, module):
            each.zero_grad()
            leaf = x.clone().requires_grad_()
            outputs = each(leaf)
            torch.autograd.backward(outputs, [random_grad()(output) for output in outputs])
            parameters = [*module.parameters()] if capture in ("make_fx", "symbolic_trace") else [*each.parameters()]
            results.append([*outputs, leaf.grad, *(parameter.grad for parameter in parameters)])
        for ours, eager in zip(*results, strict=True):
            assert ours is not None and torch.equal(ours, eager)


@every_op
def test_side_stream_and_cuda_graph(spec: OpSpec, device: str) -> None:
    """Kernels run on PyTorch's current stream: right on a side stream, and a captured graph replays them."""
    if device != "cuda":
        pytest.skip("CUDA streams need a GPU")
    sample = convert(next(iter(spec.sample_inputs(maker(device, torch.float32), (512, 1024)))), torch.float32)
    expected = [output.detach() for output in as_tuple(spec.function(*sample.args, **sample.kwargs))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    x = sample.args[0]
    with torch.no_grad(), torch.cuda.stream(stream):
        keep = x.clone()
        x.zero_()
        torch.cuda._sleep(50_000_000)  # work on another stream would read the zeros
        x.copy_(keep)
        results = as_tuple(spec.function(*sample.args, **sample.kwargs))
    stream.synchronize()
    assert all(map(torch.equal, results, expected))
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = as_tuple(spec.function(*sample.args, **sample.kwargs))
    with torch.no_grad():
        x.zero_()
        x.copy_(keep)
    for output in captured:
        output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))


@every_op
def test_every_launch_is_on_the_current_stream(spec: OpSpec, device: str) -> None:
    """All kernels of forward and of backward, those of a second phase, too."""
    if device != "cuda":
        pytest.skip("CUDA streams need a GPU")
    for shape in [(512, 1024), (300, 16384), (9, 50257)]:
        sample = next(iter(spec.sample_inputs(maker(device, torch.bfloat16), shape)))
        with torch.cuda.stream(torch.cuda.Stream()):
            run(spec.function, sample, random_grad())  # PyTorch's libraries set themselves up on streams of their own
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run(spec.function, sample, random_grad())
                torch.cuda.synchronize()
        events = profiler.profiler.kineto_results.events()
        on_gpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
        streams = {event.device_resource_id(): event.name() for event in on_gpu if not event.name().startswith("Mem")}
        assert len(streams) == 1, f"{spec.name} {shape}: kernels by stream: {streams}"


@every_op
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_while_the_first_is_current(spec: OpSpec) -> None:
    """On a stream of its own: there most launches without a guard fail; on a default one the first GPU works."""
    default = torch.cuda.current_stream(1)
    torch.cuda.set_stream(torch.cuda.Stream(1))  # makes the second GPU current
    try:
        torch.cuda.set_device(0)
        for shape in [(33, 1025), (300, 16384)]:
            for sample in spec.sample_inputs(maker("cuda:1", torch.float32), shape):
                result = check(spec, sample)
                assert {x.device.index for _, x in result.tensors()} == {1} and torch.cuda.current_device() == 0
    finally:
        torch.cuda.set_stream(default)
        torch.cuda.set_device(0)


@every_op
@pytest.mark.slow
@pytest.mark.parametrize("cols", [1 << 16, 50257])
def test_more_than_two_to_the_31_elements(spec: OpSpec, cols: int, device: str) -> None:
    """int64 everywhere: the last rows of a tensor of 2^31 + 2^17 elements are what a small tensor of them gives; on a
    GPU also of more than 2^32 elements, in rows whose width does not divide 2^32."""
    if spec.positional:
        pytest.skip("no small tensor has these elements' masks: test_dropout.py and test_fused_norm.py have this test")
    if cols != 1 << 16 and device == "cpu":
        pytest.skip("the CPU's kernels count in int64 alone, and 2^32 elements take minutes")
    rows = (1 << 31 if cols == 1 << 16 else 1 << 32) // cols + 2
    few = 64  # not so few that a kernel has more threads for each, and sums in another order
    generator = torch.Generator().manual_seed(0)
    last = torch.randn(few, cols, generator=generator).bfloat16().to(device)

    def make(shape: tuple[int, ...]) -> torch.Tensor:
        if shape[0] not in (rows, few):
            return torch.ones(shape, dtype=torch.bfloat16, device=device)
        x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        x[-few:] = last[:, : shape[-1]].view(few, *shape[1:])
        return x.requires_grad_(device == "cuda")

    # Norms over the last two dimensions still have the rows apart.
    shapes = [(count, 1, cols) for count in (rows, few)]
    for big, small in zip(*(spec.sample_inputs(make, shape) for shape in shapes), strict=True):
        outputs = [as_tuple(spec.function(*sample.args, **sample.kwargs)) for sample in (big, small)]
        for a, b in zip(*outputs, strict=True):
            if a.shape[:1] == (rows,):
                assert torch.equal(a[-few:], b)
            else:
                torch.testing.assert_close(a, b)  # a sum over the rows: the zeros add nothing
        a, b = (output[0] for output in outputs)
        if a.requires_grad and a.shape[:1] == (rows,):
            gradients = [torch.autograd.grad(y, sample.args[0], y.detach())[0] for y, sample in ((a, big), (b, small))]
            torch.testing.assert_close(gradients[0][-few:], gradients[1])
            del gradients
        del outputs, a, b

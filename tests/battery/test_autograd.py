"""Tests derivatives of first and second order: autograd, torch.func, checkpointing, autocast and vmap."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from extension_cpp.registration.calls import NO_GRAD, overloads_of, without_suffix
from tests.battery import OPCHECKS, calls_of_every_order, every_differentiable_op, every_dtype, profiled, with_overloads
from tests.checks import (
    as_tuple,
    leaves,
    maker,
    random_grad,
    run,
    with_float_weights,
)
from tests.opspec import OpSpec, Sample

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


@every_differentiable_op
def test_gradcheck(spec: OpSpec, device: str, request: pytest.FixtureRequest) -> None:
    """Gradients in float64 equal finite differences for several layouts, also in forward mode and in second order. For
    the first layout, the whole Jacobian is compared. For the others this needs --slow; without it only random products
    with the Jacobian are compared, which miss some errors of 1 %."""
    for shape, layout in [((3, 5), "contiguous"), ((2, 3, 4), "transposed"), ((2, 3), "sliced")]:
        fast = layout != "contiguous" and not request.config.getoption("--slow")
        for sample in spec.sample_inputs(maker(device, torch.float64, layout=layout, seed=3), shape):
            tensors = leaves(sample)
            trained = [y.requires_grad for y in as_tuple(spec.function(*sample.args, **sample.kwargs))]

            def function(*inputs: Any, sample: Sample = sample, trained: list[bool] = trained) -> Any:
                given = iter(inputs)
                args = [next(given) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in sample.args]
                return tuple(itertools.compress(as_tuple(spec.function(*args, **sample.kwargs)), trained))

            torch.autograd.gradcheck(function, tensors, check_forward_ad=True, fast_mode=fast)
            if spec.second_order:
                torch.autograd.gradgradcheck(function, tensors, check_fwd_over_rev=True, fast_mode=fast)


@every_differentiable_op
@every_dtype
def test_forward_mode_gives_the_kernels_values(spec: OpSpec, dtype: torch.dtype, device: str) -> None:
    """Each operator, also in backward, returns the same values for dual tensors as for tensors without tangents."""
    for sample in spec.sample_inputs(maker(device, dtype), (5, 33)):
        for each in (sample, *([with_float_weights(sample)] if spec.float_weights and dtype.itemsize == 2 else [])):
            for op, args, kwargs in calls_of_every_order(spec, each, "contiguous").made:
                args = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
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
                    # The two may add in another order. An element is a sum over 33 columns or 5 rows, whose terms are
                    # near 1.
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


# For each transform of torch.func, a function that applies it to a scalar function f, and returns the result for the
# tensors x.
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


@every_differentiable_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [*FIRST_ORDER, *SECOND_ORDER])
def test_torch_func(spec: OpSpec, transform: str, device: str) -> None:
    """Each of torch.func's transforms gives the same result for the op as for its reference, in float64."""
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
    """Yields every non-empty subset of the items."""
    items = tuple(items)
    return itertools.chain.from_iterable(itertools.combinations(items, n + 1) for n in range(len(items)))


def _derivatives(
    function: Callable[..., Any], sample: Sample, needed: tuple[int, ...], used: tuple[int, ...], second: bool
) -> list[torch.Tensor]:
    """Returns the gradients of the arguments number `needed` if only the outputs number `used` are used. With `second`,
    also returns the second-order gradients through every subset of these gradients."""
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


@every_differentiable_op
def test_every_subset_of_inputs_and_outputs(spec: OpSpec, device: str) -> None:
    """Gradients are right if any subset of the inputs requires grad and any subset of the outputs is used."""
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


def _kept(function: Callable[..., Any], sample: Sample) -> tuple[set[int], int]:
    """Calls the function. Returns the indices of the arguments that autograd saves for backward, and the number of
    elements of the largest saved tensor that is neither an argument nor an output."""
    kept: dict[int, int] = {}  # the number of elements of each saved tensor, by the address of its storage

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.numel()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outputs = as_tuple(function(*sample.args, **sample.kwargs))
    tensors = {i: x.untyped_storage().data_ptr() for i, x in enumerate(sample.args) if isinstance(x, torch.Tensor)}
    known = {*tensors.values(), *(y.untyped_storage().data_ptr() for y in outputs)}
    places = {i for i, storage in tensors.items() if storage in kept and sample.args[i].requires_grad}
    return places, max((count for storage, count in kept.items() if storage not in known), default=0)


@every_differentiable_op
def test_backward_keeps_no_argument_that_it_can_do_without(spec: OpSpec, device: str) -> None:
    """An op saves for backward no argument that its reference does not save. A saved argument stays in memory, and must
    not change in place. Arguments no larger than the largest intermediate that the reference saves are exempt."""
    for sample in spec.sample_inputs(maker(device, torch.float32), (3, 5)):
        (ours, _), (needed, intermediate) = _kept(spec.function, sample), _kept(spec.reference, sample)
        # scale_bias_relu must save x and bias, because an output that is rounded to 0 loses the sign of x + bias.
        extra = ours - needed if spec.name != "scale_bias_relu" else set()
        names = [spec.names[i] for i in extra if sample.args[i].numel() > intermediate]
        assert not names, f"{spec.name} saves {', '.join(names)} (ctx.save_for_backward; --save of the command)"


@every_differentiable_op
def test_checkpointing(spec: OpSpec, device: str) -> None:
    """Under torch.utils.checkpoint, which runs forward again in backward, an op gives the bits of a plain call."""
    for sample in spec.sample_inputs(maker(device, torch.float32), (6, 33)):

        def again(*args: object, sample: Sample = sample) -> object:
            return checkpoint(functools.partial(spec.function, **sample.kwargs), *args, use_reentrant=False)

        ours, plain = run(again, Sample(sample.args), random_grad()), run(spec.function, sample, random_grad())
        for (name, a), (_, b) in zip(ours.tensors(), plain.tensors(), strict=True):
            assert torch.equal(a, b), name


@every_differentiable_op
def test_autocast(spec: OpSpec, device: str) -> None:
    """For float32 inputs, outputs and gradients have the same dtypes and bits with autocast as without, in eager mode
    and compiled. test_norm.py tests inputs that autocast casts."""
    if spec.has_products:
        pytest.skip("autocast casts matrix products: test_loss.py has this test")
    for number, sample in enumerate(spec.sample_inputs(maker(device, torch.float32), (6, 33))):
        plain = run(spec.function, sample, random_grad())
        for compiled in (False, True) if number == 0 else (False,):
            function = torch.compile(spec.function, backend="aot_eager", fullgraph=True) if compiled else spec.function
            with torch.autocast(device, torch.bfloat16):
                ours = run(function, sample, random_grad())
            for (name, a), (_, b) in zip(ours.tensors(), plain.tensors(), strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), f"{name}, compiled: {compiled}"


@every_differentiable_op
def test_vmap(spec: OpSpec, device: str) -> None:
    """vmap over a new dimension of all floating-point tensors equals one call per element, also in gradients."""
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
            own = (x if is_batched else y for is_batched, x, y in zip(batched, sample.args, same[0].args, strict=True))
            alone = run(function, Sample(tuple(own)), torch.ones_like)
            for (name, a), (_, b) in zip(ours.tensors(), alone.tensors(), strict=True):
                torch.testing.assert_close(a[i], b, msg=lambda text, name=name: f"{name}: {text}")


@every_differentiable_op
def test_vmap_over_an_empty_batch(spec: OpSpec, device: str) -> None:
    """If vmap maps an argument over a batch of size 0, results and gradients have a first dimension of 0."""
    for sample in spec.sample_inputs(maker(device, torch.float32), (4, 33)):
        function, alone = functools.partial(spec.function, **sample.kwargs), run(spec.function, sample, torch.ones_like)
        for place in (i for i, x in enumerate(sample.args) if isinstance(x, torch.Tensor) and x.requires_grad):
            args = [x.detach() if isinstance(x, torch.Tensor) else x for x in sample.args]
            args[place] = args[place].new_empty(0, *args[place].shape).requires_grad_()
            mapped = torch.vmap(function, tuple(0 if i == place else None for i in range(len(args))))
            ours = run(mapped, Sample(tuple(args)), torch.ones_like)
            shapes = [(0, *y.shape) for y in alone.outputs]
            assert [tuple(y.shape) for y in ours.outputs] == shapes
            assert [tuple(g.shape) for g in ours.gradients] == [tuple(args[place].shape)]


@every_differentiable_op
def test_inference_mode_and_no_grad(spec: OpSpec, device: str) -> None:
    sample = next(iter(spec.sample_inputs(maker(device, torch.float32), (5, 33))))
    expected = as_tuple(spec.function(*sample.args, **sample.kwargs))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            results = as_tuple(spec.function(*sample.args, **sample.kwargs))
        for result, output in zip(results, expected, strict=True):
            assert not result.requires_grad
            assert torch.equal(result, output.detach())


@every_differentiable_op
def test_overloads_run_in_place_of_operators(spec: OpSpec, device: str) -> None:
    """Where plain calls could run an operator, they run its overload without an Autograd kernel: in a forward with
    gradients, under no_grad and in backward. The overload gives the operator's bits, and passes opcheck."""
    for sample in spec.sample_inputs(maker(device, torch.float32, layout="transposed"), (5, 33)):
        found: dict[str, tuple[torch.Tensor, ...]] = {}

        def suffixes(name: str, call: Callable[[], Any], found: dict[str, Any] = found) -> set[str]:
            """Returns the suffixes, such as "_no_grad", of the names of the operators that `call` runs. Stores the
            call's results in `found`."""

            def keep() -> None:
                found[name] = as_tuple(call())

            events, _ = profiled(keep, device)
            ours = [event for event in events if event.startswith("extension_cpp::")]
            if spec.has_products:  # the op's kernel itself calls further operators
                ours = [event for event in ours if spec.name in event]
            return {event.removeprefix(without_suffix(event)) for event in ours}

        forward = functools.partial(spec.function, *sample.args, **sample.kwargs)
        with_all_results, *_ = overloads_of(f"extension_cpp::{spec.name}")
        assert suffixes("outputs", forward) == {
            with_all_results._schema.name.removeprefix(f"extension_cpp::{spec.name}")
        }
        outputs = [output for output in found["outputs"] if output.requires_grad]
        grads_out = [torch.ones_like(output, requires_grad=True) for output in outputs]
        backward = functools.partial(torch.autograd.grad, outputs, leaves(sample), grads_out, retain_graph=True)
        kinds = [
            suffixes("gradients", functools.partial(backward, create_graph=True)),
            suffixes("plain", backward),
        ]
        # In the second case a backward with create_graph calls the operator. This is so on a GPU, because torch 2.11
        # runs backward there in a thread of its own. In the third case backward calls no operator of this op.
        assert kinds in ([{NO_GRAD}, {NO_GRAD}], [{""}, {NO_GRAD}], [set(), set()])
        with torch.no_grad():
            assert suffixes("results", forward) == {NO_GRAD}
        for a, b in [("outputs", "results"), ("gradients", "plain")]:
            for x, y in zip(found[a], found[b], strict=True):
                assert torch.equal(x, y) and x.stride() == y.stride()
        for called, args, kwargs in calls_of_every_order(spec, sample, "contiguous").made:
            args = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            # opcheck's slowest test, test_aot_dispatch_dynamic, tests autograd, which the overloads do not have.
            tests = [test for test in OPCHECKS if test != "test_aot_dispatch_dynamic"]
            for overload in with_overloads(called)[1:]:
                torch.library.opcheck(overload, args, kwargs, test_utils=tests)

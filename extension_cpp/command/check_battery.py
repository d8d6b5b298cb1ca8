"""The checks of the command `check`. Each returns a note about the operator, or raises Refused if the operator fails
the check, or NotRun if the check does not apply."""

import contextlib
import ctypes
import functools
import inspect
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .check_case import Checked, NotRun, Refused, checks, judge, on_cpu, opspec, sentence
from .once import once_cpu, once_cuda

CALLS, WAIT = 11, 0.2  # number of timed calls; seconds to wait for a thread that still writes
DRAWS, IMPROBABLE = 32, 20.0  # number of random results; a right operator fails with probability exp(-IMPROBABLE)
M_PERTURB = -6


def passes_opcheck(case: Checked) -> str:
    """Runs torch.library.opcheck, which checks the schema, the registration of autograd, the fake and compiled code."""
    utils = inspect.signature(torch.library.opcheck).parameters["test_utils"].default
    utils = [name for name in utils if not (case.random and "aot" in name)]  # compiled code may draw other numbers
    try:
        sample = differentiated(case)[0]
    except NotRun:
        sample = case.draw()
    case.called(lambda *args, **kwargs: torch.library.opcheck(case.op, args, kwargs, test_utils=utils), sample.args)
    return ""


def keeps_inputs(case: Checked) -> str:
    sample = case.draw()
    before = [(i, sample.args[i].clone(), sample.args[i]._version) for i in case.places(sample)]
    case.call(*sample.args)
    for i, values, version in before:
        name = f"{case.words(sample)}: argument {case.names[i]}"
        if message := judge.unequal(sample.args[i], values):
            raise Refused(f"{name} was overwritten, which the schema does not say: {message} before the call")
        if sample.args[i]._version != version:
            raise Refused(f"{name} was written: expected version {version}, but got {sample.args[i]._version}")
    return f"by its schema it writes {', '.join(case.names[i] for i in case.written)}" if case.written else ""


def is_deterministic(case: Checked) -> str:
    sample = case.draw()
    first = [x.clone() for x in case.call(*sample.args)]
    for number in (2, 3):
        case.same(case.call(*sample.args), first, sample, f"call {number} with the same inputs")
    return "with one seed" if case.random else ""


def has_right_values(case: Checked) -> str:
    """Checks that each element has the float64 reference's value up to the rounding error that the judge allows."""
    needs_reference(case)
    case.judged(case.draw())
    return f"{case.count} of {case.every} results, as many as the reference gives" if case.count < case.every else ""


def needs_reference(case: Checked) -> None:
    if not case.is_judged:
        raise NotRun("random results have no right values" if case.random else "no --reference says what is right")


def is_not_zero(case: Checked) -> str:
    """Checks that the results are not zeros, for a sample for which the judge would find zeros wrong."""
    sample = case.draw()
    results = [x.cpu() for x in case.call(*sample.args)]
    if case.is_judged:
        with contextlib.suppress(AssertionError):  # zeros are wrong
            judge.assert_right(judge.Result(tuple(map(torch.zeros_like, results)), []), case.expect(sample), "")
            raise Refused(f"{case.words(sample)}: zeros are right, so this sample shows nothing; give another one")
    if not any(x.any() for x in results):
        raise Refused(f"{case.words(sample)}: all elements of the results are 0")
    return ""


def resized(sample: Any, group: Sequence[tuple[int, int]], size: int, lists: bool) -> Any:
    """Returns the sample with size `size` in the dimensions of `group`. A smaller size cuts off elements, and a larger
    one repeats the first elements. With `lists`, numbers in lists that equal the old size change, too."""
    args, old = list(sample.args), sample.args[group[0][0]].shape[group[0][1]]
    for i, d in group:
        args[i] = args[i].index_select(d, torch.arange(size, device=args[i].device) % old)
    if lists:
        args = [[size if n == old else n for n in x] if isinstance(x, (list, tuple)) else x for x in args]
    return opspec.Sample(tuple(args))


def other_sizes(case: Checked) -> Iterator[tuple[Any, Any]]:
    """Yields samples with one size changed that the reference accepts, each with the expected results. The size changes
    in all dimensions that have it, or only in those of them at the same position from the right."""
    sample = case.draw()
    sizes = {(i, d): sample.args[i].shape[d] for i in case.places(sample) for d in range(-sample.args[i].dim(), 0)}
    groups = {
        tuple(place for place in sizes if sizes[place] == n and (anywhere or place[1] == d))
        for ((_, d), n), anywhere in itertools.product(sizes.items(), (True, False))
    }
    for group in sorted(groups):
        n = sizes[group[0]]
        for size in sorted({n - 1, n // 2 | 1, n + 3, 1, 0} - {n}) if n else ():
            for lists in (True, False):
                other = resized(sample, group, size, lists)
                try:
                    expected = case.expect(other)
                except Exception:  # the reference does not accept this size
                    continue
                yield other, expected
                break


def takes_other_sizes(case: Checked) -> str:
    needs_reference(case)
    tried, raised = 0, []
    for sample, expected in other_sizes(case):
        tried += 1
        try:
            case.call(*sample.args)
        except Exception as error:
            raised.append(f"{case.words(sample)}: raised {sentence(error)}")
        else:
            empty = any(not sample.args[i].numel() for i in case.places(sample))  # an op may return 0 as their mean
            case.judged(sample, expected=expected, limits=empty)
    if not tried:
        raise NotRun("the reference takes no other sizes")
    if len(raised) == tried:
        raise Refused(f"it takes none of {tried} other sizes; {raised[0]}")
    return f"{tried} others" + (f", of which it refuses {len(raised)}; {raised[0]}" if raised else "")


def renew(case: Checked, sample: Any) -> bool:
    """Writes other values into the memory of a sample's tensors, without a change of their versions. The values come
    from another draw. If the sample is not random, they are half the old values in another order. Returns whether the
    sample has tensors to write."""
    other, places = case.draw(1).args, case.places(sample)
    if all(torch.equal(sample.args[i], other[i]) for i in places):
        places = case.places(sample, floating=True)
        other = {i: 0.5 * sample.args[i].flatten().roll(1).view(sample.args[i].shape) for i in places}
    for i in places:
        sample.args[i].data.copy_(other[i])
    return bool(places)


def is_not_cached(case: Checked) -> str:
    sample = case.draw()
    results = case.call(*sample.args)
    first = [x.clone() for x in results]
    if not renew(case, sample):
        raise NotRun("the sample draws no random numbers, and has no floating-point tensor")
    case.judged(sample, "other values in the memory of the call before")
    again = case.call(*sample.args)
    numbers = [i for i, x in enumerate(first) if x.is_floating_point() and x.numel()]
    if numbers and not case.is_judged and all(torch.equal(first[i], again[i]) for i in numbers):
        raise Refused(f"{case.words(sample)}: the results for other values are the same")
    case.same(results, first, sample, "the first results after two more calls")
    case.judged(case.draw(), "the first values in other memory")
    return ""


def takes_layouts(case: Checked) -> str:
    """Checks the operator with inputs of each layout: first all tensors have the layout, then one tensor alone."""
    if case.random:
        raise NotRun("which element gets which random number may depend on the layout")
    places = [i for i in case.places(case.draw()) if case.draw().args[i].dim() and i not in case.written]
    for layout in checks.LAYOUTS[1:]:
        for chosen in [places, *([i] for i in places if len(places) > 1)]:
            args = list(case.draw().args)
            for i in chosen:
                if layout != "expanded" or args[i].is_floating_point():
                    args[i] = checks.with_layout(args[i], layout)
            case.judged(opspec.Sample(tuple(args)), f"{layout} {', '.join(case.names[i] for i in chosen)}")
    return ""


def gradients(results: Sequence[Tensor], leaves: list[Tensor]) -> Sequence[Tensor | None]:
    outputs = [x for x in results if x.requires_grad]
    try:
        return torch.autograd.grad(outputs, leaves, list(map(checks.random_grad(), outputs)), allow_unused=True)
    except RuntimeError as error:
        if "no autograd formula" in str(error) or "is not implemented" in str(error):
            raise NotRun(f"not differentiable: {sentence(error)}") from None
        raise


def differentiated(case: Checked) -> tuple[Any, dict[int, Tensor | None], list[bool]]:
    """Returns a sample whose tensors require grad, its gradients by argument index, and which results require grad.

    If tensors of the sample itself require grad, those that do not are left out, as in the spec of an operator that is
    not differentiable in each of its arguments.
    """
    sample = case.draw()
    places = [i for i in case.asked or case.places(sample, floating=True) if i not in case.written]
    for i in places:
        sample.args[i].requires_grad_()
    try:
        results = case.call(*sample.args)
    except RuntimeError as error:
        if case.written and re.search("requires? grad", str(error)):
            raise NotRun(f"it writes into an argument, and takes none that requires grad: {sentence(error)}") from None
        raise
    if not any(x.requires_grad for x in results):
        raise NotRun("no result requires grad")
    found = gradients(results, [sample.args[i] for i in places])
    return sample, dict(zip(places, found, strict=True)), [x.requires_grad for x in results]


def has_right_gradients(case: Checked) -> str:
    """Checks the gradients of all floating-point arguments that have a gradient in the reference."""
    sample, ours, flags = differentiated(case)
    if not case.is_judged:
        return agrees_with_differences(case, [i for i, x in ours.items() if x is not None])
    case.flags = flags
    try:
        double = judge.convert(opspec.Sample(tuple(map(on_cpu, sample.args))), torch.float64)
        right = gradients(case.right(*double.args), [double.args[i] for i in ours])
        for (i, gradient), exact in zip(ours.items(), right, strict=True):
            sample.args[i].requires_grad_(exact is not None)
            if gradient is None and exact is not None:
                raise Refused(f"{case.words(sample)}: no gradient of {case.names[i]}, and the reference has one")
        names = [case.names[i] for i in ours if sample.args[i].requires_grad]
        case.judged(sample)
    finally:
        case.flags = []
    return f"of {', '.join(names)}"


def agrees_with_differences(case: Checked, places: list[int]) -> str:
    """Compares the gradients with finite differences of the operator in float64 (gradcheck), without a reference."""
    args = list(judge.convert(case.draw(), torch.float64).args)
    try:
        case.call(*args)
    except Exception as error:
        raise NotRun(f"no reference, and differences need float64: {sentence(error)}") from None

    def function(*leaves: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(places, leaves, strict=True))
        return tuple(x for x in case.call(*(given.get(i, x) for i, x in enumerate(args))) if x.requires_grad)

    leaves = [args[i].requires_grad_() for i in places]
    torch.autograd.gradcheck(function, leaves, fast_mode=True, atol=1e-6, rtol=1e-5)  # differences: 9 right digits
    return "by differences in float64"


def leaves_nothing_behind(case: Checked) -> str:
    """Checks that the operator writes no memory after its call has returned, by a thread or, on a GPU, a stream."""
    sample = case.draw()
    if case.device == "cpu":
        results = case.call(*sample.args)
        first = [x.clone() for x in results]
        time.sleep(WAIT)
        case.same(results, first, sample, f"changed within {WAIT} s after the call")
        return ""
    expected, numbers = case.call(*sample.args), [sample.args[i] for i in case.places(sample, floating=True)]
    values = [x.clone() for x in numbers]
    for x in numbers:
        x.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # delays this stream, so that a kernel on another stream still reads zeros
        for x, value in zip(numbers, values, strict=True):
            x.copy_(value)
        results = case.call(*sample.args)
        read = [x.clone() for x in results]
    stream.synchronize()
    case.same(read, expected, sample, "read on the current stream, which is not the default one")
    torch.cuda.synchronize()
    case.same(results, read, sample, "after the work on all streams")
    return ""


@functools.cache
def twice_the_cache() -> Tensor:
    return torch.zeros(2 * checks.last_level_cache(), dtype=torch.uint8)


def takes_time(case: Checked) -> str:
    """Times the operator and the reference in turns. Before each call the cache is filled with other data. The result
    of the operator's last timed call is judged."""
    sample = case.draw()
    seconds: dict[str, list[float]] = {"operator": [], "reference": []}

    def timed(name: str, call: Callable[..., Any]) -> Any:
        kept: list[Any] = []
        if case.device == "cpu":
            twice_the_cache().add_(1)
        once = once_cpu if case.device == "cpu" else once_cuda
        seconds[name].append(once(lambda: kept.append(call(*sample.args))))
        return kept.pop()

    for _ in range(CALLS + 2):
        timed("operator", case.call)
        with contextlib.suppress(Exception):  # there may be no reference, or one for float64 only
            timed("reference", case.right)
    renew(case, sample)
    case.judged(sample, "the last timed call", call=lambda *flat: timed("operator", case.call))
    ours, other = (statistics.median(each[2:] or [math.nan]) * 1e6 for each in seconds.values())
    beside = f", {ours / other:.2f} of the reference's {other:.1f} us in the same dtype"
    return f"{ours:.1f} us{'' if math.isnan(other) else beside}"


def writes_every_element(case: Checked) -> str:
    """Checks that the results do not depend on the previous contents of their memory."""
    sample, found = case.draw(), []
    for fill in (0x01, 0x80):
        if case.device == "cpu":  # makes malloc fill freed memory with `fill`, and new memory with its complement
            ctypes.CDLL(None).mallopt(M_PERTURB, fill)
        other = case.draw()  # `other` stays alive, so that the last call below gets the memory of `results`
        results = case.call(*other.args)
        for x in results if case.device == "cuda" else ():
            x.fill_(fill)
        del results
        found.append([x.clone() for x in case.call(*sample.args)])
    case.same(found[1], found[0], sample, "beside a call whose fresh memory has other contents")
    return ""


def has_right_statistics(case: Checked) -> str:
    """Checks that two seeds give two results, and that each element's mean and mean square are near the reference's."""
    sample = case.draw()
    first, other = (case.call(*sample.args, seed=seed) for seed in (1, 2))
    if all(map(torch.equal, first, other)):
        raise Refused(f"{case.words(sample)}: the results of two seeds are the same")
    if case.reference is None:
        raise NotRun("two seeds give two results, but no --reference says which mean they should have")
    torch.manual_seed(0)
    for i, (x, y) in enumerate(zip(first, case.right(*sample.args), strict=True)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            expected, got = (f"{each.dtype} {list(each.shape)}" for each in (y, x))
            raise Refused(f"{case.words(sample)}: output {i}: expected {expected}, but got {got}")
        ours = torch.stack([case.call(*sample.args, seed=seed)[i].double().cpu() for seed in range(DRAWS)])
        right = torch.stack([case.right(*sample.args)[i].double().cpu() for _ in range(DRAWS)])
        eps = torch.finfo(x.dtype).eps if x.is_floating_point() else 0.0
        for power, name in ((1, "means"), (2, "mean squares")):
            if message := far_apart(ours**power, right**power, 2 * power * eps):
                raise Refused(f"{case.words(sample)}: {name} of output {i} in {DRAWS} draws: {message}")
    return ""


def far_apart(ours: Tensor, right: Tensor, eps: float) -> str | None:
    """Says where the means over the first dimension differ most, or returns None if their squared distance is below a
    bound. Draws from distributions with equal means exceed the bound with a probability of exp(-IMPROBABLE) (Laurent
    and Massart 2000, lemma 1)."""
    spread = (ours.var(0) + right.var(0)) / DRAWS
    got, expected = ours.mean(0), right.mean(0)
    far = ((got - expected).abs() - eps * (ours.abs() + right.abs()).mean(0)).clamp(min=0)
    allowed = spread.sum() + 2 * math.sqrt(IMPROBABLE) * spread.norm() + 2 * IMPROBABLE * spread.max()
    distance = far.square().sum()
    if distance <= allowed:
        return None
    at = tuple(int(i) for i in torch.unravel_index(far.argmax(), far.shape))
    return (
        f"at {list(at)} got {got[at]:.6g}, expected {expected[at]:.6g}; the squared distance of all {far.numel()} is "
        f"{distance:.3g}, over the bound {allowed:.3g}"
    )


CHECKS = {
    "opcheck": passes_opcheck,
    "inputs": keeps_inputs,
    "determinism": is_deterministic,
    "values": has_right_values,
    "statistics": has_right_statistics,
    "zeros": is_not_zero,
    "other sizes": takes_other_sizes,
    "cached": is_not_cached,
    "layouts": takes_layouts,
    "gradients": has_right_gradients,
    "left behind": leaves_nothing_behind,
    "timing": takes_time,
    "every element": writes_every_element,
}

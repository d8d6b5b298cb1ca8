"""Compares an op's results with float64 results, and computes the rounding error that each element may have.

An op computes in float32 (for float64 inputs in float64) and rounds its result once. An element may therefore differ
from the exact value by

    eps(result) |exact| + tiny(result) + c eps(computed) (size + smallest normal number) + rounded + saved

* eps(result), eps(computed): the machine epsilon of the result's dtype, and of the dtype in which the op computes.
* tiny: the smallest subnormal number of the result's dtype.
* size: the sum of the absolute values of all terms that the formula adds for this element. The rounding errors of terms
  remain even if the terms cancel. A subnormal number may be rounded by as much as the smallest normal number. If `size`
  overflows, any value of the element is allowed.
* c: how often a term and the partial sums that contain it are rounded. The op's spec derives it.
* rounded: the change of the element by rounding intermediate numbers, such as logits, to the op's dtype.
* saved: the change of a gradient by rounding those outputs of forward that backward reads. The gradient is also
  compared with the one that is exact for the rounded outputs (`from_saved` of the spec), without this summand.

The function `terms` of a spec computes these summands. Without it, `perturbed` estimates `size`: it changes the inputs
and all intermediate numbers a little and measures how much the exact results change.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.opspec import Call, OpSpec, Sample, Terms, as_tuple, leaves

# In float64 the reference has rounding errors, too, and adds in another order. `c` must cover its errors and the op's.
LEAST_C_OF_FLOAT64 = 32.0
# `perturbed` runs the reference DRAWS times with all numbers changed at random by up to eps, and takes each element's
# largest change. For a sum of few terms this is near the largest possible change. For n terms it is about sqrt(n) times
# smaller than the largest possible change, and so are rounding errors.
DRAWS, C_OF_DRAWS = 8, 16.0

ROOT = Path(__file__).resolve().parent.parent
LARGE = 1e150  # replaces an infinity in sizes, where inf * 0 would be NaN


@dataclass
class Result:
    outputs: tuple[Tensor, ...]
    gradients: list[Tensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for i, output in enumerate(self.outputs):
            yield f"output {i}", output
        for i, gradient in enumerate(self.gradients):
            yield f"gradient {i}", gradient


def run(function: Callable[..., Any], sample: Sample, grad_out: Callable[[Tensor], Tensor]) -> Result:
    """Runs the function on the sample, forward and backward. grad_out(output) makes the gradient of an output."""
    with torch.enable_grad():
        outputs = as_tuple(function(*sample.args, **sample.kwargs))
    results = tuple(output.detach() for output in outputs)
    if not leaves(sample):
        return Result(results, [])
    outputs = tuple(output for output in outputs if output.requires_grad)
    gradients = torch.autograd.grad(outputs, leaves(sample), [grad_out(output) for output in outputs])
    return Result(results, list(gradients))


def mapped(sample: Sample, change: Callable[[Tensor], Tensor]) -> Sample:
    """Returns a sample that has change(x) for each tensor x, as a leaf that requires grad if x does."""

    def one(x: Any) -> Any:
        return change(x.detach()).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    return Sample(tuple(map(one, sample.args)), {name: one(x) for name, x in sample.kwargs.items()})


def convert(sample: Sample, dtype: torch.dtype) -> Sample:
    """Returns a copy of the sample with floating-point tensors of another dtype. A seed keeps its integer dtype."""
    return mapped(sample, lambda x: x.to(dtype) if x.is_floating_point() else x)


def run_with(function: Callable[..., Any], sample: Sample, grads: list[Tensor]) -> Result:
    """Runs the function on the sample, forward and backward, with the given gradients of its outputs. An output of
    another size than its gradient, because the size depends on the data, gets zeros as its gradient."""
    left = iter(grads)

    def grad_out(output: Tensor) -> Tensor:
        given = next(left)
        return given if given.shape == output.shape else torch.zeros_like(output)

    return run(function, sample, grad_out)


def of_absolute_values(reference: Callable[..., Any], call: Call) -> Result:
    """Evaluates a formula of products and sums, and its gradients, for the absolute values of all tensors. Each element
    is then its `size`, the sum of its terms' absolute values. All floating-point arguments get gradients."""

    def absolute(x: Any) -> Any:
        is_number = isinstance(x, Tensor) and x.is_floating_point()
        return x.detach().abs().clamp(max=LARGE).requires_grad_() if is_number else x

    args = tuple(map(absolute, call.sample.args))
    return run_with(reference, Sample(args, call.sample.kwargs), [g.abs() for g in call.grads])


def rounded_sums(reference: Callable[..., Any], c: float) -> Callable[[Call], tuple[list[Terms], dict[int, Terms]]]:
    """Returns `terms` for the spec of an op whose results and gradients are sums of products, as in the reference. Each
    term is rounded c times."""

    def terms(call: Call) -> tuple[list[Terms], dict[int, Terms]]:
        sizes = of_absolute_values(reference, call)
        places = (i for i, x in enumerate(call.sample.args) if isinstance(x, Tensor) and x.is_floating_point())
        gradients = dict(zip(places, sizes.gradients, strict=True))
        return [Terms(size, c) for size in sizes.outputs], {i: Terms(size, c) for i, size in gradients.items()}

    return terms


@dataclass
class Truth:
    """The exact outputs and gradients of a call, and the Terms that bound the op's rounding errors for each of them."""

    exact: Result
    terms: Callable[[], list[Terms]]  # returns the Terms of each output, and then those of each gradient
    keep_saved: bool = True

    @functools.cached_property
    def known_terms(self) -> list[Terms]:
        return self.terms()

    def allowed(self, number: int, dtype: torch.dtype) -> Tensor:
        """Returns the error that each element of output or gradient `number` may have if the op gives it in `dtype`."""
        _, exact = list(self.exact.tensors())[number]
        terms = self.known_terms[number]
        info = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32)
        c = max(terms.c, LEAST_C_OF_FLOAT64) if dtype is torch.float64 else terms.c
        size = torch.where(terms.size > info.max, torch.inf, terms.size + info.smallest_normal)
        bound = least_allowed(exact, dtype) + c * info.eps * zero_for_nan(size) + zero_for_nan(terms.rounded)
        return bound + zero_for_nan(terms.saved) if self.keep_saved else bound


def zero_for_nan(x: Tensor | float) -> Tensor:
    """Replaces NaN, which means an infinite or NaN input, by 0. The element may then have the error of one rounding."""
    return torch.as_tensor(x).nan_to_num(0.0, math.inf)


def least_allowed(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a bound of the error of rounding each exact value to the dtype once."""
    info = torch.finfo(dtype)
    return exact.abs() * info.eps + info.smallest_normal * info.eps


@dataclass
class Expected:
    """The exact results of a call. If the spec has `from_saved`, also those exact for the op's rounded outputs."""

    spec: OpSpec
    call: Call
    whole: Truth

    def truths(self, ours: Result) -> Iterator[tuple[str, Truth]]:
        if self.spec.from_saved is not None:
            saved = tuple(output.double() for output in ours.outputs)
            call = Call(self.call.sample, saved, self.call.grads, self.call.dtype)
            with torch.no_grad():
                exact = Result(*self.spec.from_saved(call))
            yield "from the results", Truth(exact, functools.partial(terms_of, self.spec, call), keep_saved=False)
        yield "from end to end", self.whole


def terms_of(spec: OpSpec, call: Call) -> list[Terms]:
    """Returns the Terms of every output, and then those of the gradient of each leaf."""
    assert spec.terms is not None
    with torch.no_grad():
        outputs, gradients = spec.terms(call)
    return [*outputs, *(gradients[i] for i in call.leaf_numbers())]


class Rounded(TorchDispatchMode):
    """Changes every number that PyTorch computes, forward and backward, by a random relative error of up to eps. A
    subnormal number changes by up to eps times the smallest normal one. A number beyond the dtype's range becomes
    infinite."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.info, self.generator = torch.finfo(dtype), torch.Generator().manual_seed(0)
        self.eps = max(self.info.eps, 2.0**-30)  # smaller changes would be lost in the reference's own rounding

    def changed(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        step = self.eps * (2 * torch.rand(x.shape, generator=self.generator, dtype=torch.float64) - 1).to(x.device)
        size = x.abs()
        moved = torch.where(size > self.info.max, x.sign() * math.inf, x + (size + self.info.smallest_normal) * step)
        return moved.to(x.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if any(each.alias_info for each in (*func._schema.arguments, *func._schema.returns)):  # a view, or in place
            return results
        return tree_map(self.changed, results)


def perturbed(reference: Callable[..., Any], call: Call, exact: Result) -> list[Terms]:
    """Estimates each element's `size` by random relative changes of up to eps of inputs and intermediate results of the
    reference. Of a PyTorch operator such as a norm, only the result is changed.

    Where equal inputs become different, a size that depends on the data may change. Such a draw has no elements to
    compare. Then the inputs stay as they are, and if the size still changes, the draw does not count."""
    mode = Rounded(call.computed)
    # The `size` of an element is at least its value, even if the element is no sum.
    changes = [x.double().abs() for _, x in exact.tensors()]
    for _ in range(DRAWS):
        sample = mapped(call.sample, mode.changed)
        grads = [mode.changed(g) for g in call.grads]
        for given in (sample, call.sample):
            with mode:
                again = run_with(reference, given, grads)
            if fits := all(x.shape == y.shape for x, y in zip(again.outputs, exact.outputs, strict=True)):
                break
        for i, ((_, x), (_, y)) in enumerate(zip(again.tensors(), exact.tensors(), strict=True) if fits else ()):
            if not y.is_floating_point():
                continue
            change = torch.where(y.isfinite(), ((x - y).abs() / mode.eps).nan_to_num(math.inf, math.inf), 0)
            changes[i] = torch.maximum(changes[i], change)
    return [Terms(change, C_OF_DRAWS) for change in changes]


def with_saved_results(reference: Callable[..., Any], call: Call, exact: Result) -> list[Terms]:
    """The terms of `perturbed`, and the changes of the exact gradients if what the reference's backward reads is
    rounded to the call's dtype, and if it moves by as much, up or down. Arguments have this dtype."""
    generator = torch.Generator().manual_seed(0)
    arguments = {x.untyped_storage().data_ptr() for x in call.sample.args if isinstance(x, Tensor)}

    def moved(x: Tensor) -> Tensor:
        sign = torch.randint(2, x.shape, generator=generator, device="cpu").to(x) * 2 - 1
        return x + call.rounding(x) * sign

    def changes(move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        def unpack(x: Tensor) -> Tensor:
            is_read = x.is_floating_point() and x.untyped_storage().data_ptr() not in arguments
            return move(x) if is_read else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            again = run_with(reference, call.sample, call.grads)
        pairs = zip(again.tensors(), exact.tensors(), strict=True)
        return [(x - y).abs().double().nan_to_num(math.inf, math.inf) for (_, x), (_, y) in pairs]

    rounded = changes(lambda x: x.to(call.dtype).to(x))
    draws = zip(*(changes(moved) for _ in range(2 * DRAWS)), strict=True)  # signs of two terms agree in one of them
    most = (functools.reduce(torch.maximum, each) for each in draws)
    terms = zip(perturbed(reference, call, exact), rounded, most, strict=True)
    return [replace(each, saved=x + y) for each, x, y in terms]


def dtype_of(sample: Sample) -> torch.dtype:
    """Returns the dtype of the first floating-point argument."""
    tensors = (x for x in (*sample.args, *sample.kwargs.values()) if isinstance(x, Tensor))
    return next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)


def expect(spec: OpSpec, sample: Sample, grad_out: Callable[[Tensor], Tensor]) -> Expected:
    """Returns the results that a call of the op should give, which the spec's reference computes in float64."""
    reference, double = spec.by_hand or spec.reference, convert(sample, torch.float64)
    grads: list[Tensor] = []  # the gradients of those outputs that require grad

    def kept(output: Tensor) -> Tensor:
        grads.append(grad_out(output).detach())
        return grads[-1]

    exact = run(reference, double, kept)
    call = Call(double, exact.outputs, grads, dtype_of(sample))
    if spec.terms is None:
        terms = with_saved_results if spec.saves_results else perturbed
        return Expected(spec, call, Truth(exact, functools.partial(terms, reference, call, exact)))
    return Expected(spec, call, Truth(exact, functools.partial(terms_of, spec, call)))


def in_words(name: str, expected: Expected) -> str:
    """Returns "gradient of weight" for "gradient 1", and "output indices" for "output 1", if the schema has names."""
    kind, number = name.split()
    spec, sample = expected.spec, expected.call.sample
    if kind == "gradient":
        given = [*zip(spec.names, sample.args, strict=False), *sample.kwargs.items()]
        names = [key for key, x in given if any(x is leaf for leaf in leaves(sample))]
        return f"gradient of {names[int(number)]}" if len(names) == len(leaves(sample)) else name
    namespace, _, op = spec.name.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "extension_cpp"), op, None)
    returns = packet.default._schema.returns if packet is not None and "default" in packet.overloads() else []
    names = [*(each.name for each in returns if each.alias_info is None), *spec.mutates]
    is_named = len(names) == len(expected.whole.exact.outputs) and names[int(number)]
    return f"output {names[int(number)]}" if is_named else name


def assert_right(ours: Result, expected: Expected, what: str, limits: bool = False, nan_for_inf: bool = False) -> None:
    """Asserts that every output and gradient is within its error bound, and has NaN and infinities where the exact one
    has them.

    With `limits`, a finite value is right where the reference's formula gives NaN. With `nan_for_inf`, NaN is right
    where the formula gives an infinity.
    """
    for kind, truth in expected.truths(ours):
        if not ours.gradients:  # forward alone
            truth = replace(truth, exact=Result(truth.exact.outputs, []))
        for number, ((name, got), _) in enumerate(zip(ours.tensors(), truth.exact.tensors(), strict=True)):
            is_exact = number in expected.spec.exact and name.startswith("output")
            if message := refused(got, number, truth, is_exact, limits, nan_for_inf):
                raise AssertionError(f"{what}, {in_words(name, expected)} {kind}: {message}")


def refused(
    got: Tensor,
    number: int,
    truth: Truth,
    is_exact: bool = False,
    limits: bool = False,
    nan_for_inf: bool = False,
) -> str | None:
    """Returns what is wrong with an output or gradient, or None. With `is_exact` it must equal the rounded exact one,
    as integers always must."""
    _, exact = list(truth.exact.tensors())[number]
    if got.shape != exact.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
    if is_exact or not (got.is_floating_point() and exact.is_floating_point()):
        return unequal(got, exact)
    return wrong(got, number, truth, limits, nan_for_inf)


def unwritten(name: str, device: str | None) -> str:
    """Returns in which lines the kernels that `new --schema` generated still lack the formula, or "" if in none."""
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "extension_cpp" / "csrc" / name).glob("*"))
        if device is None or (path.suffix == ".cu") == (device == "cuda")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "WRITE THE FORMULA HERE" in line
    ]
    return f"write the formula in {' and '.join(found)}" if found else ""


def unequal(got: Tensor, exact: Tensor) -> str | None:
    """Returns where a result differs from the exact one, rounded to its dtype, or None. NaN counts as equal to NaN."""
    if got.dtype.is_floating_point != exact.dtype.is_floating_point or (
        not got.dtype.is_floating_point and got.dtype != exact.dtype
    ):
        return f"expected {exact.dtype}, but got {got.dtype}"
    expected = exact.to(got.dtype)
    differs = ~((got == expected) | ((got != got) & (expected != expected)))
    if not differs.any():
        return None
    at = tuple(int(i) for i in differs.nonzero()[0])
    count = f"{int(differs.sum())} of {differs.numel()} elements differ"
    return f"{count}; the first at {list(at)}: got {got[at].item()}, expected {expected[at].item()}"


def wrong(got: Tensor, number: int, truth: Truth, limits: bool = False, nan_for_inf: bool = False) -> str | None:
    """Returns a message that says which elements of an output or gradient are wrong, or None if none are."""
    _, exact = list(truth.exact.tensors())[number]
    x, finite = got.double(), is_finite(exact, got.dtype)
    if finite is not None and (message := wrong_specials(x, exact, limits, nan_for_inf)):
        return message
    error = (x - exact).abs()
    if finite is not None:
        overflows = (exact.abs() > torch.finfo(got.dtype).max * 1.01) & (exact.abs() < math.inf)
        is_right = (x == exact.sign() * math.inf) | (x.isnan() & nan_for_inf)
        error = torch.where(overflows, torch.where(is_right, 0, math.inf), error)
    over = ~(error <= least_allowed(exact, got.dtype))  # a fast first test, which most tensors pass
    if finite is not None:
        over &= finite | overflows
    if not over.any():
        return None
    allowed = truth.allowed(number, got.dtype).expand(exact.shape)
    over &= ~(error <= allowed) & (allowed < math.inf)
    if not over.any():
        return None
    ratio = torch.where(over, error / allowed, 0).nan_to_num(math.inf, math.inf)
    at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    return (
        f"{int(over.sum())} of {over.numel()} elements are wrong; at {list(at)} got {got[at].item():.9g}, expected "
        f"{exact[at].item():.9g}, error {error[at].item():.3g} over the bound {allowed[at].item():.3g}"
    )


def is_finite(exact: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Returns a mask of the exact values below 99 % of the dtype's largest number. None means all, and saves time."""
    limit = torch.finfo(dtype).max * 0.99
    if exact.numel() == 0:
        return None
    least, most = torch.aminmax(exact)
    if max(-least.item(), most.item()) < limit:
        return None
    return exact.abs() < limit  # a NaN fails the comparison


def wrong_specials(x: Tensor, exact: Tensor, limits: bool, nan_for_inf: bool) -> str | None:
    """Returns a message if NaN or infinities are not where the exact result has them, and otherwise None."""
    special = ~(exact.abs() < math.inf)
    if not special.any():
        return None
    got, expected = x[special], exact[special]
    if nan_for_inf:
        expected = torch.where(got.isnan(), got, expected)
    if limits:
        got = torch.where(expected.isnan(), expected, got)
    if not torch.equal(got.isnan(), expected.isnan()):
        return "NaN in the wrong places"
    return None if torch.equal(got[~got.isnan()], expected[~expected.isnan()]) else "infinities differ"

"""Tests that judge.py rejects wrong results of every op in every dtype. Right results are the reference's, rounded, and
wrong ones are made from them. Kernels run only in the test without `terms`."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.checks import check, expect, maker
from tests.judge import Expected, Result, Truth, assert_right, in_words, wrong
from tests.opspec import DTYPES, OpSpec, Sample, Terms, all_specs

WIDTHS = (256, 1025, 4096, 65536)
ROWS = 2


def samples(spec: OpSpec, dtype: torch.dtype, width: int) -> Iterator[Sample]:
    """Yields samples with rows of `width` elements and, if the op can work along columns, with columns of `width`
    elements. Up to a width of 1025, these are all samples of the spec, and above it those of its benchmarks. If the
    reference is slow, there are samples with a width of 65536 only in bfloat16."""
    if width > 4096 and (spec.by_hand or spec.has_products) and dtype is not torch.bfloat16:
        return
    if spec.has_products:  # the spread makes the logits equally large for every width
        yield from spec.sample_inputs(maker("cpu", dtype, seed=width, spread=width**-0.25), (ROWS, width))
        return
    benches = [spec.bench, *(bench for name, bench in spec.variants.items() if name == "columns")]
    for bench, shape in zip(benches, ((ROWS, width), (width, ROWS)), strict=False):
        if width <= 1025:
            yield from spec.sample_inputs(maker("cpu", dtype, seed=width), shape)
        else:
            yield bench.sample(maker("cpu", dtype, seed=width), shape)


def rounded(expected: Expected, dtype: torch.dtype, result_dtype: torch.dtype) -> Result:
    """Returns right outputs and gradients, which are the exact ones rounded to their dtypes. If the op computes
    gradients or further outputs from its rounded outputs, they are exact for the rounded outputs."""
    outputs = tuple(x.to(result_dtype) for x in expected.whole.exact.outputs)
    _, truth = next(iter(expected.truths(Result(outputs, expected.whole.exact.gradients))))
    outputs = tuple(x.to(result_dtype) for x in truth.exact.outputs)
    return Result(outputs, [x.to(dtype) for x in truth.exact.gradients])


def planted(right: Tensor, allowed: Tensor, size: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the names and values of wrong results, made from the right one. `allowed` is the error bound of each
    element, and `size` is the sum of the absolute values of its terms."""
    is_half = right.dtype.itemsize == 2
    factor = 1.05 if is_half else 1.001
    yield "zeros", torch.zeros_like(right)
    yield "sign", -right
    yield f"x {factor}", right * factor
    if right.dim() == 0:
        return
    at = tuple(torch.unravel_index(right.abs().argmax(), right.shape))
    step = torch.finfo(right.dtype).eps * right.double().abs()
    yield "one element off by twice its bound", changed(right, at, right[at].double() + 2 * allowed[at] + step[at])
    near = torch.where((size <= 64 * right.double().abs()) & (right.abs() > 1e-3), right.double().abs(), 0)
    if is_half and near.max() > 0:
        at = tuple(torch.unravel_index(near.argmax(), right.shape))
        yield "one element off by 8 eps", changed(right, at, right[at].double() + 8 * step[at])
    yield "last column 0", changed(right, (..., -1), 0)
    if right.shape[-1] >= 64:
        yield "32 columns 0", changed(right, (..., slice(8, 40)), 0)
    if right.dim() > 1 and right.shape[0] > 1:
        yield "last row 0", changed(right, -1, 0)
        yield "rows exchanged", changed(right, [0, 1], right[[1, 0]])
        yield "a neighbour's row", changed(right, 0, right[1])


def changed(x: Tensor, at: object, value: object) -> Tensor:
    x = x.clone()
    x[at] = value
    return x


@pytest.mark.parametrize("spec", all_specs(), ids=str)
def test_planted_results_are_refused(spec: OpSpec) -> None:
    unseen, tried = set(), 0
    for dtype in DTYPES:
        for width in WIDTHS:
            for sample_number, sample in enumerate(samples(spec, dtype, width)):
                expected = expect(spec, sample)
                result_dtype = torch.promote_types(dtype, torch.float32) if spec.float_results else dtype
                right = rounded(expected, dtype, result_dtype)
                truths = [truth for _, truth in expected.truths(right)]
                for number, (name, tensor) in enumerate(right.tensors()):
                    place = f"{name} of sample {sample_number}, {dtype}, {width} columns"
                    for truth in truths:
                        assert (message := wrong(tensor, number, truth)) is None, f"{place}: {message}"
                    allowed, size = truths[0].allowed(number, tensor.dtype), truths[0].known_terms[number].size
                    allowed, size = (x.expand(tensor.shape) for x in (allowed, size))
                    for kind, x in planted(tensor, allowed, size):
                        if torch.equal(x, tensor):
                            continue
                        tried += 1
                        if not any(wrong(x, number, truth) for truth in truths):
                            unseen.add(f"{place}: {kind}")
    print(f"{spec.name}: {len(unseen)} of {tried} planted results are not seen")
    assert len(unseen) <= spec.unseen and tried > 100, "\n".join(sorted(unseen))


INDEPENDENT = [spec for spec in all_specs() if spec.from_saved is None and not spec.has_products]
# The softmaxes, whose backward and whose reference's backward read the rounded results, without their `from_saved`.
SAVING = [replace(spec, from_saved=None, saves_results=True) for spec in all_specs() if "softmax" in spec.name]


@pytest.mark.parametrize("spec", [*INDEPENDENT, *SAVING], ids=str)
def test_without_terms_numbers_are_changed(spec: OpSpec) -> None:
    """Without `terms`, as in a new package, the judge accepts the results of an op's kernels, and rejects zeros, a
    wrong sign and a factor of 1.05."""
    spec = replace(spec, terms=None)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for sample in spec.sample_inputs(maker("cpu", dtype), (5, 257)):
            expected = expect(spec, sample)
            ours = check(spec, sample, expected=expected)
            for number, (name, tensor) in enumerate(ours.tensors()):
                for kind, factor in (("zeros", 0.0), ("sign", -1.0), ("x 1.05", 1.05)):
                    assert wrong(tensor * factor, number, expected.whole) or not tensor.any(), (
                        f"{name}, {dtype}: {kind}"
                    )


def test_special_values() -> None:
    """The judge rejects a result whose NaN or infinities are not where the exact result has them. It also rejects a
    finite number where the exact result exceeds the range of the result's dtype."""
    exact = torch.linspace(1, 2, 66, dtype=torch.float64).reshape(2, 33)
    exact[0, 3], exact[1, 5], exact[1, 7] = torch.inf, torch.nan, 1e39
    truth = Truth(Result((exact,), []), lambda: [Terms(torch.ones_like(exact), 2)])
    right = exact.float()
    assert wrong(right, 0, truth) is None
    for at, value in (((0, 3), 1.0), ((0, 3), -torch.inf), ((0, 3), torch.nan), ((1, 5), 0.0), ((0, 0), torch.nan)):
        assert wrong(changed(right, at, value), 0, truth), (at, value)
    assert wrong(changed(right, (1, 7), 1.0), 0, truth)


# A spec of which only the reference counts.
BARE = replace(all_specs()[0], by_hand=None, terms=None, from_saved=None, saves_results=False, exact=(), mutates=())


def test_sizes_that_depend_on_the_data() -> None:
    """Where inputs are equal, a change of each makes fewer results. The judge still sees a wrong element, and a wrong
    gradient."""

    def largest(x: Tensor) -> Tensor:
        return (x - 3)[x >= x.max()]

    x = torch.tensor([1.0, 4.0, 2.0, 4.0, 4.0]).requires_grad_()
    expected = expect(replace(BARE, reference=largest), Sample((x,)))
    right = rounded(expected, torch.float32, torch.float32)
    assert [*right.outputs[0]] == [1, 1, 1] and right.gradients[0].count_nonzero() == 3
    for number, (_, tensor) in enumerate(right.tensors()):
        assert wrong(tensor, number, expected.whole) is None and wrong(tensor * 1.0001, number, expected.whole)


def test_messages_have_the_names_of_the_schema() -> None:
    """A result without a name has its number."""
    sample = Sample((torch.rand(2, 3).requires_grad_(),))
    for op, values, indices in (("aten::sort", "output values", "output indices"), ("none", "output 0", "output 1")):
        expected = expect(replace(BARE, name=op, names=("self",), reference=torch.sort), sample)
        exact = expected.whole.exact
        assert [in_words(name, expected) for name, _ in exact.tensors()] == [values, indices, "gradient of self"]
        with pytest.raises(AssertionError, match=f"op, {values} from end to end"):
            assert_right(Result((exact.outputs[0] + 1, exact.outputs[1]), []), expected, "op")

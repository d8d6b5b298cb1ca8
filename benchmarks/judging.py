"""Judges the results of the last timed call of each contender, by the judge of the tests (tests/judge.py).

Whole lines are judged at their full length: the first, the last and 62 that a seed draws. A line is a row, or a column
for ops along the first dimension, or a token for the rotary embedding. Sums over lines, such as mean losses and weight
gradients, are judged over all lines. Before the last call other numbers are written into its inputs or, for a backward,
into the gradients of its outputs, so that a result kept from an earlier call is wrong.

The results of this package's op are judged element by element. Another contender may also round each step of its
formula to its dtype, as PyTorch does. Each line of its result may then be twice as far from the exact line as the
farthest line of the reference in that dtype (gradients.py), and a sum over lines twice as far from the exact sum as
that of eager PyTorch. Relative errors must stay below a quarter.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import extension_cpp
from benchmarks import gradients
from tests import judge as rule
from tests.opspec import OpSpec, Sample, Terms, as_tuple, leaves

LINES = 64
CHUNK = 2**22  # sums over all lines convert so many elements of x to float64 at a time


def tensors(sample: Sample) -> list[Tensor]:
    return [x for x in (*sample.args, *sample.kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]


class Judge:
    """Judges the contenders of one case. `other` is a second sample of the same shapes, whose numbers replace those of
    `sample` before the last call."""

    def __init__(self, spec: OpSpec, sample: Sample, other: Sample, seed: int, eager: Callable[..., Any]) -> None:
        self.spec, self.sample, self.other, self.eager = spec, sample, other, eager
        self.dim = -1 if spec.name.endswith("_columns") else -2 if spec.name == "rotary_embedding" else 0
        self.count = sample.args[0].shape[self.dim]
        inner = 1 + torch.randperm(max(self.count - 2, 0), generator=torch.Generator().manual_seed(seed))
        some = {0, self.count - 1, *inner[: LINES - 2].tolist()}
        self.seeds = [x for x in sample.args if isinstance(x, Tensor) and x.shape == (1,)]
        self.lines = sorted(some if spec.bench.by_lines else range(self.count))
        self.grads: list[tuple[Tensor, Tensor]] = []  # each output's gradient, and that of the last call
        self.outputs: dict[str, tuple[Tensor, ...]] = {}  # results of the forward that a backward differentiates
        self.copies: list[Sample] = []  # the inputs of each contender's backward
        self.wrong: dict[str, str] = {}
        self.skipped = {"copy"}
        self.stock_sums: dict[str, gradients.Error] = {}  # errors of eager PyTorch
        self.known_sums: rule.Truth | None = None

    def backward(self, name: str, function: Callable[..., Any]) -> Callable[[], Any]:
        """Calls a contender's forward, and returns a call of its backward. All contenders get the same grad_outs.

        Each contender has a copy of the inputs, because some libraries write gradients or results into their inputs.
        """
        self.copies.append(rule.mapped(self.sample, torch.clone))
        outputs = as_tuple(function(*self.copies[-1].args, **self.copies[-1].kwargs))
        self.outputs[name] = tuple(x.detach().clone() for x in outputs)  # an output may be one of the inputs
        outputs = tuple(x for x in outputs if x.requires_grad)
        self.grads = self.grads or [(torch.randn_like(x), torch.randn_like(x)) for x in outputs]
        inputs, grads = leaves(self.copies[-1]), [grad for grad, _ in self.grads]
        return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)

    def renew(self) -> None:
        for now, later in self.grads or zip(tensors(self.sample), tensors(self.other), strict=True):
            now.data.copy_(0.5 * later.data)  # halved, because two draws of many numbers have nearly equal means
        for sample in self.copies:
            for now, first in zip(tensors(sample), tensors(self.sample), strict=True):
                now.data.copy_(first.data)
        poison = [torch.full_like(self.sample.args[0], float("nan")) for _ in range(4)]
        del poison  # new tensors now get memory full of NaN, so that an element that no kernel writes is wrong

    def judge(self, name: str, result: Any) -> None:
        if name in self.skipped:
            return
        if self.spec.from_saved is not None:  # the exact sums depend on the result's rounded outputs
            self.known_sums = None
        outputs, values = self.outputs.get(name), as_tuple(result)
        got = rule.Result(values, []) if outputs is None else rule.Result(outputs, list(values))
        try:
            message = self.message(got)
            if name != "ours":
                far_away = self.far_away(name, got)
                message = message and far_away
        except Exception as error:  # raised, for example, if a result is not a tensor
            message = f"{type(error).__name__}: {error}"
        if message is not None:
            self.wrong[name] = f"wrong, {message}"[:300]

    def message(self, got: rule.Result) -> str | None:
        """Says what is wrong with a result, or returns None. That of a backward has its forward's outputs, too."""
        some = rule.Result(tuple(map(self.of_lines, got.outputs)), list(map(self.of_lines, got.gradients)))
        with self.masks(self.lines):
            for kind, truth in self.expected.truths(some) if got.gradients else [("", self.expected.whole)]:
                for number, (what, x) in enumerate(some.tensors()):
                    if message := rule.refused(x, number, self.sums(got) if self.is_sum(x) else truth):
                        return f"{what}{kind and f' {kind}'}: {message}"
        return None

    def far_away(self, name: str, got: rule.Result) -> str | None:
        """Says which tensor of a contender's result is too far from the exact one, or returns None."""
        found = {}
        for number, (what, x) in enumerate(got.tensors()):
            truth, lines = self.sums(got) if self.is_sum(x) else self.expected.whole, self.of_lines(x)
            if x.is_floating_point():
                found[what] = self.error(lines, number, truth)
            elif message := rule.refused(lines, number, truth):
                return f"{what}: {message}"
        most = 0.125  # half the largest error allowed; a contender with larger errors computes something else
        beside = dict.fromkeys(found, gradients.Error(most, most)) | self.stock_sums | self.stock
        if name == "eager":
            self.stock_sums = {what: each for what, each in found.items() if what not in self.stock}
        beside = {
            what: gradients.Error(min(each.distance, most), min(abs(each.scale), most)) for what, each in beside.items()
        }
        values = (x for x in got.gradients or got.outputs if x.is_floating_point())
        eps = max((torch.finfo(x.dtype).eps for x in values), default=0.0)
        floor = max(2 * eps, 32 * torch.finfo(torch.float32).eps)  # 32: of an exponential
        return gradients.wrong(found, beside, floor, what="")

    def error(self, got: Tensor, number: int, truth: rule.Truth) -> gradients.Error:
        exact = list(truth.exact.tensors())[number][1]
        if got.dim() > 1:
            got, exact = got.movedim(self.dim, 0), exact.movedim(self.dim, 0)
        return gradients.error(got, exact, by_lines=True)

    @functools.cached_property
    def stock(self) -> dict[str, gradients.Error]:
        """The errors of the reference in the dtype of the inputs, on the lines that are judged (self.lines)."""
        sample, grads = self.call_on(self.lines)
        with self.masks(self.lines):
            if grads:
                left = iter(grads)
                found = rule.run(self.eager, sample, lambda output: next(left).to(output.dtype))
            else:
                with torch.no_grad():
                    found = rule.Result(as_tuple(self.eager(*sample.args, **sample.kwargs)), [])
        return {
            what: self.error(x, number, self.expected.whole)
            for number, (what, x) in enumerate(found.tensors())
            if x.is_floating_point() and not self.is_sum(x)
        }

    def is_sum(self, x: Tensor) -> bool:
        """Returns whether a result is a sum over all rows (or columns): a mean loss, or the gradient of a weight."""
        has_weights = any(each.dim() == 1 for each in leaves(self.sample)) and x.is_floating_point()
        is_weight = has_weights and x.dim() == 1 and x.shape[0] == self.sample.args[0].shape[-1]
        return self.spec.bench.by_lines and (x.dim() == 0 or is_weight)

    def of_lines(self, x: Tensor, lines: Sequence[int] | None = None) -> Tensor:
        """Returns some lines (rows, columns or tokens) of an input or a result, those of self.lines by default. A
        weight or its gradient, which has no lines, is returned as a whole."""
        if not self.spec.bench.by_lines or self.is_sum(x):
            return x.detach()
        index = torch.tensor(self.lines if lines is None else lines, device=x.device)
        return x.detach().index_select(self.dim, index)

    def call_on(self, lines: Sequence[int]) -> tuple[Sample, list[Tensor]]:
        """Returns the arguments of the call for some lines alone, and the gradients of its outputs. The gradient of a
        mean over all lines is scaled for the mean over these lines, which divides by fewer."""
        sample = rule.mapped(self.sample, lambda x: x if x.shape == (1,) else self.of_lines(x, lines))  # (1,): a seed
        share = len(lines) / self.count
        return sample, [self.of_lines(grad, lines) * (share if grad.dim() == 0 else 1) for grad, _ in self.grads]

    def part(self, lines: Sequence[int]) -> rule.Expected:
        """Returns the expected results of the call on some lines alone."""
        sample, given = self.call_on(lines)
        grads = itertools.cycle(given)

        def grad_out(output: Tensor) -> Tensor:
            return next(grads).to(output.dtype) if given else torch.ones_like(output)

        with self.masks(lines):
            expected = rule.expect(self.spec, sample, grad_out)
            expected.whole.known_terms  # noqa: B018  # computed here, while these lines' masks are set
        return expected

    @functools.cached_property
    def expected(self) -> rule.Expected:
        return self.part(self.lines)

    def sums(self, got: rule.Result) -> rule.Truth:
        """Returns the exact values of results that are sums over all lines, and the terms of their error bounds."""
        if self.known_sums is not None:
            return self.known_sums
        size, total = max(CHUNK * self.count // self.sample.args[0].numel(), 1), list[Any]()
        outputs = got.outputs if got.gradients else ()  # what a backward may read
        for begin in range(0, self.count, size):
            lines = range(begin, min(begin + size, self.count))
            expected, saved = self.part(lines), tuple(self.of_lines(x, lines) for x in outputs)
            with self.masks(lines):
                _, truth = next(iter(expected.truths(rule.Result(saved, []))))
                terms = truth.known_terms
            exact, share = [x for _, x in truth.exact.tensors()], len(lines) / self.count
            parts = [(x, term.size, term.saved, term.rounded) for x, term in zip(exact, terms, strict=True)]
            for number, part in enumerate(parts):
                if part[0].dim() == 0:  # a mean over these lines
                    parts[number] = part = tuple(share * each for each in part)
                if total and self.is_sum(part[0]):
                    parts[number] = tuple(map(operator.add, total[number], part))
            total = parts
        terms = [Terms(total[i][1], term.c, *total[i][2:]) for i, term in enumerate(terms)]
        exact, count = [part[0] for part in total], len(truth.exact.outputs)
        whole = rule.Result(tuple(exact[:count]), exact[count:])
        self.known_sums = rule.Truth(whole, lambda: terms, truth.keep_saved)
        return self.known_sums

    @functools.cached_property
    def mask(self) -> Tensor:
        """What dropout with the sample's seed keeps of the whole tensor."""
        x, p = self.sample.args[0], next(a for a in reversed(self.sample.args) if isinstance(a, float))
        ones = torch.ones(x.shape, dtype=torch.float16, device=x.device)
        return extension_cpp.reference.dropout(ones, p, seed=self.seeds[0]) != 0

    def masks(self, lines: Sequence[int]) -> AbstractContextManager[Any]:
        """Makes the reference's dropout apply the mask that these lines have in the whole tensor."""
        if not self.seeds:
            return nullcontext()
        kept = self.mask.index_select(0, torch.tensor(lines, device=self.mask.device))

        def dropout(input: Tensor, p: float = 0.5, training: bool = True, seed: Tensor | None = None) -> Tensor:
            return torch.where(kept, input / (1 - p), 0)

        return mock.patch.object(extension_cpp.reference, "dropout", dropout)

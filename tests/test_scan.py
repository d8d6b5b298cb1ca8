"""Tests scans along rows or columns, called lines: long lines, equal bits beside other lines, recurrences, autocast."""

import functools
import itertools
import math
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import build_library
import extension_cpp
from extension_cpp.nn import MinGRU
from tests.battery import profiled
from tests.checks import last_level_cache, maker, random_grad, run
from tests.loops import PART, result_and_gradients
from tests.opspec import DTYPES, OpSpec, all_specs
from tests.test_c import level_here

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def randn(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return maker(device, dtype)(shape).detach()


@every_dtype
@pytest.mark.parametrize("shape, dim", [((5 * PART + 7,), 0), ((PART + 1, 2), 0), ((2 * PART, 33), 0), ((1, PART), 1)])
def test_long_lines(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str) -> None:
    """Sums along long lines are right. Their bits are the same for any number of threads and beside other lines."""
    x = randn(shape, dtype, device)
    before = torch.get_num_threads()
    for exclusive, reverse in itertools.product((False, True), repeat=2):
        options = {"exclusive": exclusive, "reverse": reverse}
        results = []
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(extension_cpp.cumsum(x, dim, **options))
            results += extension_cpp.cumsum(torch.stack([x] * 3), dim + 1, **options)
        torch.set_num_threads(before)
        for other in results[1:]:
            assert torch.equal(other, results[0])
        exact = extension_cpp.reference.cumsum(x.double(), dim, **options)
        # Half types round only the result. float32 and float64 also round sums of 2^14 numbers, as the reference does.
        roundings = {torch.float64: x.shape[dim] ** 0.5, torch.float32: 32}.get(dtype, 1)
        bound = roundings * torch.finfo(dtype).eps * exact.abs().max().item()
        assert (results[0].double() - exact).abs().max().item() <= bound


@every_dtype
def test_a_line_has_the_same_bits_beside_any_number_of_others(dtype: torch.dtype, device: str) -> None:
    x = randn((2003, 40), dtype, device)
    a = x.sigmoid()
    for scan in (
        lambda lines: extension_cpp.cumsum(x[:, lines], 0),
        lambda lines: extension_cpp.logcumsumexp(x[:, lines], 0),
        lambda lines: extension_cpp.linear_recurrence(a[:, lines], x[:, lines], dim=0),
    ):
        every = scan(slice(40))
        for count in (2, 8, 9, 33):
            assert torch.equal(scan(slice(count)), every[:, :count])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("lines", [1, 2, 33])
def test_recurrences_round_a_step_once(lines: int, reverse: bool) -> None:
    """On a CPU with fused multiply-adds, a step a * h + b rounds once: the rounding error of a * h is left here."""
    if level_here() == "baseline":
        pytest.skip("the baseline rounds the product, too")
    small = 2.0**-12
    a, b = torch.tensor([[0, 1 + small], [1 + small, -1 - 2 * small]]).repeat(1, 40)
    a, b = (x.flip(0) if reverse else x for x in (a, b))
    h = extension_cpp.linear_recurrence(*(x[:, None].expand(80, lines) for x in (a, b)), dim=0, reverse=reverse)
    assert torch.equal(h[(a != 0).nonzero()], torch.full((40, 1, lines), small**2))


@every_dtype
@pytest.mark.parametrize("spec", [spec for spec in all_specs() if spec.by_hand], ids=str)
def test_references_by_hand_have_the_bits_of_those_under_autograd(
    spec: OpSpec, dtype: torch.dtype, device: str
) -> None:
    for mean, spread in ((0.0, 1.0), (-90.0, 5.0), (0.0, 1e30)):
        for shape in ((), (3, 0), (1,), (7, 33), (2, 3, 5)):
            for sample in spec.sample_inputs(maker(device, dtype, mean=mean, spread=spread), shape):
                by_hand, plain = (run(each, sample, random_grad()) for each in (spec.by_hand, spec.reference))
                for (name, ours), (_, exact) in zip(by_hand.tensors(), plain.tensors(), strict=True):
                    torch.testing.assert_close(ours, exact, rtol=0, atol=0, equal_nan=True, msg=f"{name} of {shape}")


SCANS = {
    "cumsum": lambda x: extension_cpp.cumsum(x, 1),
    "cumsum, reverse": lambda x: extension_cpp.cumsum(x, 1, reverse=True),
    "cumsum, exclusive": lambda x: extension_cpp.cumsum(x, 1, exclusive=True),
    "logcumsumexp": lambda x: extension_cpp.logcumsumexp(x, 1),
    # clamp() is exact, while the last digit of torch.sigmoid depends on the element's position in the tensor
    "linear_recurrence": lambda x: extension_cpp.linear_recurrence(x.clamp(-1, 1), x, dim=1),
    "linear_recurrence, reverse": lambda x: extension_cpp.linear_recurrence(x.clamp(-1, 1), x, dim=1, reverse=True),
}


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("line", [(4096,), (4100,), (64, 64)], ids=str)
def test_results_larger_than_the_cache(line: tuple[int, ...], scan: str) -> None:
    """Large results and gradients, which the CPU streams in whole cache lines, have the bits of small ones."""
    rows = last_level_cache() // 2 // (4 * math.prod(line)) + 1  # x and y exceed the cache together
    x = randn((rows, *line), torch.float32, "cpu").requires_grad_()
    y = SCANS[scan](x)
    (grad,) = torch.autograd.grad(y, x, y.detach())
    for part in torch.arange(rows).chunk(4):
        few = x.detach()[part].requires_grad_()
        of_few = SCANS[scan](few)
        assert torch.equal(y[part], of_few)
        assert torch.equal(grad[part], torch.autograd.grad(of_few, few, of_few.detach())[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape, dim", [((64,), 0), ((3, 64), 1), ((64, 40), 0)])
def test_logcumsumexp_keeps_small_terms_beside_0(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str
) -> None:
    """Small terms are not lost beside a term of exp(0). In float32, exp(-17) is below the rounding error of 1 +
    exp(-17). The tolerance allows each of 64 terms two roundings."""
    x = torch.full(shape, -17.0, dtype=dtype, device=device)
    x.select(dim, 0).zero_()
    exact = x.narrow(dim, 1, 63).double().exp().cumsum(dim).log1p()
    y = extension_cpp.logcumsumexp(x, dim).narrow(dim, 1, 63).double()
    torch.testing.assert_close(y, exact, rtol=128 * torch.finfo(dtype).eps, atol=0)


def loop(
    a: Tensor, b: Tensor, h0: Tensor | None, grad_h: Tensor, dim: int, reverse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns all states and the gradients of a, b and h0, computed step by step in float64. Python's numbers are
    faster here than tensors of one to three elements."""
    size, lines = b.shape[dim], b.numel() // b.shape[dim]
    given = [x.double().movedim(dim, 0).reshape(size, lines).t().tolist() for x in (a.expand(b.shape), b, grad_h)]
    firsts = [0.0] * lines if h0 is None else h0.double().reshape(lines).tolist()
    order = range(size)[::-1] if reverse else range(size)
    states, grads_a, grads_b, carries = [], [], [], []
    for factors, terms, grads, first in zip(*given, firsts, strict=True):
        h, before, u, grad_a = ([0.0] * size for _ in range(4))
        state = first
        for t in order:
            before[t] = state
            state = h[t] = factors[t] * state + terms[t]
        carried = 0.0
        for t in order[::-1]:
            u[t] = grads[t] + carried
            grad_a[t] = u[t] * before[t]
            carried = factors[t] * u[t]
        for all_lines, line in ((states, h), (grads_a, grad_a), (grads_b, u), (carries, carried)):
            all_lines.append(line)
    along = [size, *(n for d, n in enumerate(b.shape) if d != dim)]
    results = [torch.tensor(x, dtype=torch.float64, device=b.device) for x in (states, grads_a, grads_b)]
    carry = torch.tensor(carries, dtype=torch.float64, device=b.device).reshape(along[1:])
    return *(x.t().reshape(along).movedim(0, dim) for x in results), carry


@every_dtype
@pytest.mark.parametrize("shape, dim", [((2 * PART + 7,), 0), ((PART + 33, 3), 0), ((1, PART + 1), 1)])
@pytest.mark.parametrize("reverse", [False, True])
def test_long_recurrences(shape: tuple[int, ...], dim: int, reverse: bool, dtype: torch.dtype, device: str) -> None:
    """Long recurrences are right. Factors are near 1, so that a state influences the part of the line that another
    thread computes. The bits are the same for any number of threads and beside other lines."""
    make = maker(device, dtype, seed=dim)
    a = (1 - make(shape).detach().sigmoid() / 512).to(dtype)
    b, g = make(shape).detach(), make(shape).detach()
    h0 = 100 * make([size for d, size in enumerate(shape) if d != dim]).detach()
    before, results = torch.get_num_threads(), []

    def states_and_gradients(dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = [x.clone().requires_grad_() for x in tensors[:3]]
        h = extension_cpp.linear_recurrence(*given, dim=dim, reverse=reverse)
        return h.detach(), *torch.autograd.grad(h, given, tensors[3])

    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(states_and_gradients(dim, a, b, h0, g))
        many = states_and_gradients(dim + 1, *(torch.stack([x] * 3) for x in (a, b, h0, g)))
        results += zip(*many, strict=True)
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
    for ours, exact in zip(results[0], loop(a, b, h0, g, dim, reverse), strict=True):
        roundings = {torch.float64: 64, torch.float32: 64}.get(dtype, 2)
        assert (ours.double() - exact).abs().max() <= roundings * torch.finfo(dtype).eps * exact.abs().max()


@every_dtype
@pytest.mark.parametrize("shape, dim", [((2 * PART + 7,), 0), ((PART + 33, 3), 0), ((1, PART + 1), 1)])
def test_long_logcumsumexp(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str) -> None:
    """Long lines are right. x rises slowly, so that the sums of many parts of a line matter. The bits are the same for
    any number of threads and beside other lines."""
    x = maker(device, dtype)(shape).detach()
    x = (x + torch.linspace(0, 4, shape[dim], device=device).view(-1, *(1,) * (len(shape) - 1 - dim))).to(dtype)
    g = maker(device, dtype, seed=1)(shape).detach()
    before, results = torch.get_num_threads(), []

    def result_and_gradient(dim: int, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = extension_cpp.logcumsumexp(x, dim)
        return y.detach(), *torch.autograd.grad(y, x, g)

    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(result_and_gradient(dim, x, g))
        results += zip(*result_and_gradient(dim + 1, torch.stack([x] * 3), torch.stack([g] * 3)), strict=True)
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
    exact_y = torch.logcumsumexp(x.double(), dim)
    y, grad = (t.double() for t in results[0])
    eps = torch.finfo(dtype).eps
    # In float64 the reference exact_y is rounded as often as y.
    assert (y - exact_y).abs().max() <= (64 if dtype is torch.float64 else 4) * eps * exact_y.abs().max()
    # Each gradient is a sum over later steps: exp(x[k]) * sum(g[j] * exp(-y[j])).
    z = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(torch.logcumsumexp(z, dim), z, g.double())
    assert (grad - exact).abs().max() <= (1024 if dtype.itemsize > 2 else 16) * eps * exact.abs().max()


def test_min_gru_beside_a_loop(device: str) -> None:
    """States and gradients of MinGRU equal those of a loop, in both directions. Two halves of a sequence give the same
    states as the whole sequence."""
    for reverse in (False, True):
        layer = MinGRU(5, 7, reverse=reverse, device=device, dtype=torch.float64)
        x = torch.randn(2, 9, 5, device=device, dtype=torch.float64, requires_grad=True)
        h0 = torch.randn(2, 7, device=device, dtype=torch.float64, requires_grad=True)
        gate, candidate = layer.projection(x).chunk(2, -1)
        z, state, states = torch.sigmoid(gate), h0, {}
        for t in reversed(range(9)) if reverse else range(9):
            state = states[t] = (1 - z[:, t]) * state + z[:, t] * candidate[:, t]
        expected = torch.stack([states[t] for t in range(9)], 1)
        h, last = layer(x, h0)
        torch.testing.assert_close(h, expected)
        assert torch.equal(last, h[:, 0 if reverse else -1])
        leaves = [x, h0, *layer.parameters()]
        for ours, exact in zip(*(torch.autograd.grad(y.sin().sum(), leaves) for y in (h, expected)), strict=True):
            torch.testing.assert_close(ours, exact)
        halves = (x[:, 4:], x[:, :4]) if reverse else (x[:, :4], x[:, 4:])
        first, carried = layer(halves[0], h0)
        second, _ = layer(halves[1], carried)
        torch.testing.assert_close(torch.cat((second, first) if reverse else (first, second), 1), h)


@pytest.mark.parametrize("shape", [(), (5,), (9, 4)], ids=str)
def test_min_gru_says_what_it_expects(shape: tuple[int, ...]) -> None:
    expected = f"extension_cpp::MinGRU: expected input of shape (..., T, 5), but got {list(shape)}"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        MinGRU(5, 7)(torch.ones(shape))


def test_autocast_promotes(device: str) -> None:
    """Autocast promotes mixed dtypes, which raise an error without it. cumsum has the dtype of torch.cumsum."""
    a, b = torch.rand(4, 3, device=device), torch.randn(4, 3, device=device, dtype=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        h = extension_cpp.linear_recurrence(a, b, b[0])
        summed = extension_cpp.cumsum(b, 0)
        assert summed.dtype == torch.cumsum(b, 0).dtype
        assert extension_cpp.logcumsumexp(b, 0).dtype == torch.logcumsumexp(b, 0).dtype
    assert torch.equal(h, extension_cpp.linear_recurrence(a, b.float(), b[0].float()))
    with pytest.raises(RuntimeError, match="expected a to be bfloat16 like b, but got float32"):
        extension_cpp.linear_recurrence(a, b)


VIEWS = {
    "every third column": lambda x: x[:, ::3],
    "every second row, transposed": lambda x: x.t()[::2],
    "half of each row": lambda x: x[:, :30],
    "expanded": lambda x: x[:1].expand(40, 60),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("view", VIEWS)
def test_strides_are_read_in_place(view: str, dim: int, device: str) -> None:
    x = VIEWS[view](torch.randn(40, 60, device=device))
    for scan in (
        lambda: extension_cpp.cumsum(x, dim),
        lambda: extension_cpp.logcumsumexp(x, dim),
        lambda: extension_cpp.linear_recurrence(x, x, dim=dim),
    ):
        names, _ = profiled(scan, device)
        assert "aten::copy_" not in names


SHARED = {"each head": (-1,), "each line": (1,), "each channel": (-2,), "each step": (0, -1), "each element": ()}


def scans_of_slices(
    ops: Mapping[str, Callable[..., Tensor]], shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str
) -> list[tuple[Callable[..., Tensor], list[Tensor]]]:
    """Returns functions that scan, each with its operands and grad_out. No single stride of an operand steps through
    two of its dimensions, except in dense broadcast factors. A last dimension of whole vectors is not sliced."""

    def sliced(sizes: Sequence[int]) -> Tensor:
        steps = [1 if size == shape[-1] and size % 8 == 0 else 2 for size in sizes]
        x = randn(tuple(size * step for size, step in zip(sizes, steps, strict=True)), dtype, device)
        return x[tuple(slice(None, None, step) for step in steps)]

    x, g = sliced(shape), sliced(shape)
    h0 = sliced(shape[::-1]).permute(*range(len(shape))[::-1]).select(dim, 0)
    scans: list[tuple[Callable[..., Tensor], list[Tensor]]] = [
        (lambda x: ops["cumsum"](x, dim, exclusive=True), [x, g]),
        (lambda x: ops["logcumsumexp"](x, dim), [x, g]),
    ]
    for shared, reverse in itertools.product(SHARED.values(), (False, True)):
        sizes = list(shape)
        for d in shared:
            sizes[d] = 1
        a = sliced(sizes).clamp(-1, 1).expand(shape)
        scans.append((functools.partial(ops["linear_recurrence"], dim=dim, reverse=reverse), [a, x, h0, g]))
    return scans


SHAPES = [*(((3, 40, 4, 6), dim) for dim in range(4)), ((2, PART + 9, 2, 2), 1), ((2, 3, PART + 33), 2)]
SHAPES += [((2,) * 8, 3), ((2, 2500, 3, 8), 1), ((2, 3, PART + 32), 2), ((5, 7, 32), 2)]


@every_dtype
@pytest.mark.parametrize("shape, dim", SHAPES, ids=str)
def test_operands_without_a_common_stride(shape: tuple[int, ...], dim: int, dtype: torch.dtype, device: str) -> None:
    """Operands in which no single stride joins two dimensions are not copied, and give the bits of contiguous ones."""
    ops = {name: getattr(extension_cpp, name) for name in ("cumsum", "logcumsumexp", "linear_recurrence")}
    scans, ours = scans_of_slices(ops, shape, dim, dtype, device), []
    names, _ = profiled(lambda: ours.extend(result_and_gradients(*each) for each in scans), device)
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous"}
    for (scan, operands), got in zip(scans, ours, strict=False):  # `ours` has the results of two runs
        assert all(map(torch.equal, got, result_and_gradients(scan, [x.contiguous() for x in operands])))


@pytest.mark.parametrize("shape", [(9_000_001,), (1_100_000, 8)], ids=str)
def test_every_level_of_the_tree(shape: tuple[int, ...], device: str) -> None:
    """Sums of small whole numbers over more than 1,024 tiles, which a GPU adds in all levels of a tree, are exact."""
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(0)).float()
    exact, x = x.double().cumsum(0), x.to(device)
    one = torch.ones(1, device=device)
    for sums in (extension_cpp.cumsum(x, 0), extension_cpp.linear_recurrence(one, x, dim=0)):
        assert torch.equal(sums.cpu().double(), exact)


@pytest.mark.parametrize("of_a", [(1, 6), (6,), (40, 6)], ids=str)
def test_sizes_that_depend_on_data_compile(of_a: tuple[int, ...], device: str) -> None:
    def states(a: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        return extension_cpp.linear_recurrence(a[mask] if len(a) == len(mask) else a, x[mask], dim=0)

    a = torch.rand(of_a, device=device, requires_grad=True)
    x = torch.randn(40, 6, device=device, requires_grad=True)
    mask = torch.arange(40, device=device) % 3 > 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(states, backend="aot_eager", fullgraph=True)(a, x, mask)
        gradients = torch.autograd.grad(got.sum(), (a, x))
    expected = states(a, x, mask)
    assert torch.equal(got, expected)
    for ours, other in zip(gradients, torch.autograd.grad(expected.sum(), (a, x)), strict=True):
        assert torch.equal(ours, other)


PLANS = r"""
#include <cstdio>
#include <initializer_list>
#include "scan/scan_plan.h"
int main() {
  for (int width : {2, 4, 8})
    for (int vectors : {2, 4, 8, 16})
      for (int64_t length : {1, 2, 5, 16, 17, 100, 255, 1000, 4096, 9001, 300000})
        for (int64_t inner : {1, 2, 3, 40, 5000})
          for (int64_t outer : {1, 3, 1000}) {
            const scan_shape shape{outer, length, inner, DTYPE_FLOAT32, nullptr};
            const scans::Plan plan = scans::pick(shape, width, vectors, vectors);
            std::printf("%d %d %lld %d %d %d %d %lld %lld\n", width, vectors, (long long)length, plan.is_rows,
                        plan.lanes, plan.segments, plan.vectors, (long long)plan.steps, (long long)plan.tiles);
          }
}
"""


def test_a_line_is_cut_by_its_length_alone_on_a_gpu(tmp_path: Path) -> None:
    """How a GPU kernel divides a line depends on the line's length and on the layout, never on the number of lines."""
    source, program = tmp_path / "plans.cpp", tmp_path / "plans"
    source.write_text(PLANS)
    command = [*build_library.compiler("CXX", "c++", "g++"), "-std=c++17", f"-I{build_library.CSRC}"]
    subprocess.run([*command, source, "-o", program], check=True)
    lines = set(subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines())
    assert len(lines) == 3 * 4 * 11 * 2

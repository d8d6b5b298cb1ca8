"""Tests what concerns only GPUs: wrong targets, for which no error can be raised, sizes beyond 32 bits, calls that
launch several kernels, and clusters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import extension_cpp
from tests.checks import Result, random_grad, run
from tests.opspec import Sample

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the CPU raises, counts in int64, and has no CTAs"
)
GIB = 1 << 30


def needs_memory(gib: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of the GPU's memory, and {free / GIB:.0f} are free")


# ---- Losses with a target that is not a class index ----


@pytest.mark.parametrize("wrong", [-1, 7, 2**40])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_a_loss_over_a_target_that_is_no_class(name: str, reduction: str, wrong: int) -> None:
    """If one target is not a class index, the loss is NaN, and so is the gradient of this target's row. The other rows
    have the gradient of a loss without the wrong row. The gradient of the weight, a sum over all rows, is NaN."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).cuda().requires_grad_() for shape in ((5, 3), (7, 3)))
    target, keep = torch.arange(5, device="cuda"), torch.arange(5, device="cuda") != 2
    leaves = [x, weight] if name == "linear_cross_entropy" else [F.linear(x, weight).detach().requires_grad_()]
    function = getattr(extension_cpp, name)
    exact_leaf = leaves[0].detach().double()[keep].requires_grad_()
    logits = F.linear(exact_leaf, weight.detach().double()) if len(leaves) == 2 else exact_leaf
    exact = torch.autograd.grad(F.cross_entropy(logits, target[keep], reduction=reduction), exact_leaf)[0]
    target[2] = wrong
    loss = function(*leaves, target, reduction=reduction)
    gradients = torch.autograd.grad(loss, leaves)
    assert loss.isnan() and gradients[0][2].isnan().all()
    assert all(gradient.isnan().all() for gradient in gradients[1:])
    # The tolerance is 16 eps: the sums have 3 and 7 products of size 1.
    torch.testing.assert_close(gradients[0][keep].double(), exact, rtol=0, atol=16 * torch.finfo(torch.float32).eps)


# ---- sizes beyond 32 bits ----


def near(got: Tensor, exact: Tensor, size: Tensor) -> bool:
    """Returns whether the error of bfloat16 results is at most one rounding plus 2^-14 times `size`, the sum of the
    absolute values of their terms. The relative error of exp for half types, 2^-18, and that of a float32 tree
    reduction of 2^17 terms, 17 roundings of 2^-24, are together smaller than 2^-14."""
    return bool(((got.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-14 * size + 1e-38).all())


@pytest.mark.slow  # needs most of the GPU's memory, which pytest-xdist's workers share
@pytest.mark.parametrize("shape", [(1, 70_000, 32_768), (3, 30_000, 32_768)], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_strips_past_two_to_the_31(name: str, shape: tuple[int, ...]) -> None:
    """softmax and log_softmax along the middle of three dimensions are right for elements beyond index 2^31.

    A strip is the elements with the same first and last index. In one tensor the last elements of each strip are beyond
    2^31, and in the other tensor all elements of the last strips. The first and last 64 strips are compared with
    float64. The exact gradient is computed from the rounded result, because the op's backward reads the rounded result.
    """
    needs_memory(28)
    outer, _, inner = shape
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    x.normal_(generator=torch.Generator("cuda").manual_seed(0)).requires_grad_()
    g = torch.ones_like(x)
    g[:, ::2] = 0.5
    y = getattr(extension_cpp, name)(x, 1)
    (grad,) = torch.autograd.grad(y, x, g)
    for at, strips in ((0, slice(0, 64)), (outer - 1, slice(inner - 64, inner))):
        part = x.detach()[at, :, strips].double()
        of_y, of_g = y.detach()[at, :, strips], g[at, :, strips].double()
        if name == "softmax":
            exact, p = part.softmax(0), of_y.double()
            total, factor = (p * of_g).sum(0), p
        else:
            exact, p = part.log_softmax(0), of_y.double().exp()
            total, factor = p * of_g.sum(0), torch.ones_like(p)
        assert near(of_y, exact, exact.abs())
        assert near(grad[at, :, strips], factor * (of_g - total), factor * (of_g + total))


@pytest.mark.slow  # needs most of the GPU's memory, which pytest-xdist's workers share
def test_losses_of_strips_past_two_to_the_31() -> None:
    """cross_entropy along the middle dimension is right for rows whose logits have indices beyond 2^31."""
    needs_memory(16)
    shape = (3, 30_000, 32_768)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    x.normal_(generator=torch.Generator("cuda").manual_seed(0)).requires_grad_()
    target = torch.arange(3 * 32_768, device="cuda").reshape(3, 32_768) % 30_000
    target[:, -1] = 29_999
    loss = extension_cpp.cross_entropy(x, target, reduction="none")
    (grad,) = torch.autograd.grad(loss, x, torch.ones_like(loss))
    for at, strips in ((0, slice(0, 64)), (2, slice(-64, None))):
        part, of_part = x.detach()[at, :, strips].double(), target[at, strips]
        exact = F.cross_entropy(part.t(), of_part, reduction="none")
        one_hot = F.one_hot(of_part, 30_000).t()
        assert near(loss.detach()[at, strips], exact, exact)
        assert near(grad[at, :, strips], part.softmax(0) - one_hot, part.softmax(0) + one_hot)


@pytest.mark.slow  # needs most of the GPU's memory, which pytest-xdist's workers share
def test_rotary_of_more_than_two_to_the_32_threads() -> None:
    """rotary_embedding with 4.3e9 threads, one for each of three pairs in a row of 6 columns, is right: the last four
    sequences have the bits of a call with these four alone."""
    batch, tokens, width = 131_072, 11_000, 6
    assert batch * tokens * width // 2 > 1 << 32
    needs_memory(36)
    q = torch.zeros(batch, 1, tokens, width, dtype=torch.bfloat16, device="cuda")
    for part in (q[:4], q[-4:]):
        part.normal_(generator=torch.Generator("cuda").manual_seed(1))
    k = q[:, :0]
    cos, sin = (torch.rand(tokens, width, device="cuda").bfloat16() for _ in range(2))
    rotated, _ = extension_cpp.rotary_embedding(q, k, cos, sin)
    for part in (slice(0, 4), slice(batch - 4, batch)):
        alone, _ = extension_cpp.rotary_embedding(q[part].clone(), k[part], cos, sin)
        assert alone.any() and torch.equal(rotated[part], alone)
    assert not rotated[4 : batch - 4 : 997].any()


# ---- Calls of an op that launch several kernels or memsets ----


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").requires_grad_()


def recurrence() -> Sample:
    """Returns a recurrence whose a and b differ in memory order, so that a kernel first computes addresses of rows."""
    b = leaf(5, 3, 20_000).detach().transpose(0, 1).requires_grad_()
    return Sample((leaf(3, 5, 20_000, seed=1).detach().sigmoid().requires_grad_(), b), {"dim": -1})


def loss(reduction: str) -> Callable[[], Sample]:
    rows = 300_000
    return lambda: Sample((leaf(rows, 8), torch.arange(rows, device="cuda") % 8), {"reduction": reduction})


# For each call: its op, its sample, and its forward's numbers of kernels and memsets. A memset clears the memory in
# which a scan's tiles publish sums. A loss of many rows takes further kernels that add up the rows.
CALLS: dict[str, tuple[str, Callable[[], Sample], int, int]] = {
    "cumsum along rows": ("cumsum", lambda: Sample((leaf(2, 1_000_003), -1)), 1, 1),
    "cumsum along columns": ("cumsum", lambda: Sample((leaf(300_001, 5), 0)), 1, 1),
    "logcumsumexp": ("logcumsumexp", lambda: Sample((leaf(1, 500_000), -1)), 1, 1),
    "linear_recurrence": ("linear_recurrence", recurrence, 2, 1),
    "mean loss": ("cross_entropy", loss("mean"), 3, 0),
    "sum of losses": ("cross_entropy", loss("sum"), 3, 0),
}


def on_gpu(call: Callable[[], object]) -> list[Any]:
    """Returns the GPU events of a call, which runs twice, because a profiler's first run may miss kernels."""
    for _ in range(2):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    return [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]


def same(ours: Result, expected: Result) -> bool:
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(ours.tensors(), expected.tensors(), strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_several_launches_on_a_side_stream_and_in_a_graph(name: str) -> None:
    """All kernels and memsets of a call run on the current stream, and each replay of a CUDA graph of the call runs
    them again. Without the memset, the second replay would find the sums that the first replay published."""
    op, make, kernels, memsets = CALLS[name]
    sample, function = make(), getattr(extension_cpp, op)
    x = sample.args[0]
    g = random_grad()(function(*sample.args, **sample.kwargs).detach())

    def both() -> Result:
        return run(function, sample, lambda output: g)

    expected, keep = both(), x.detach().clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        done = on_gpu(lambda: function(*sample.args, **sample.kwargs))
        x.detach().zero_()
        torch.cuda._sleep(50_000_000)  # delays this stream, so that a kernel on another stream would read the zeros
        x.detach().copy_(keep)
        ours = both()
    stream.synchronize()
    assert same(ours, expected)
    assert len({event.device_resource_id() for event in done}) == 1
    of_memset = [event.name() for event in done if event.name().startswith("Memset")]
    others = [event.name() for event in done if not event.name().startswith("Mem")]
    assert (len(others), len(of_memset)) == (kernels, memsets), (others, of_memset)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(2):
        for _, y in captured.tensors():
            y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, expected)


# ---- clusters ----


@pytest.mark.parametrize(
    "name, shape", [("softmax", (264, 40_000)), ("strips", (300, 4096, 8)), ("norm", (264, 40_960))]
)
def test_clusters_give_the_same_bits_each_time(name: str, shape: tuple[int, ...]) -> None:
    """Kernels with clusters give the same bits in every run. A CTA that writes too early into the shared memory of
    another CTA gives wrong results only in some runs, beside kernels of another stream that occupy some SMs."""
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    other, side = torch.randn(1 << 22, device="cuda"), torch.cuda.Stream()

    def call() -> Tensor:
        if name == "norm":
            return extension_cpp.layer_norm(x, shape[-1:])
        return extension_cpp.softmax(x, 1)

    expected = call()
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(side):
            other.sin_()
        results = [call() for _ in range(3)]
        assert all(torch.equal(y, expected) for y in results)

"""Tests the losses: invalid targets, chunks of linear_cross_entropy, autocast, and strided rows without copies."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import extension_cpp
from extension_cpp.functional import linear_loss, losses
from tests.battery import profiled

ROWS, CLASSES, FEATURES = 5, 7, 3


def _call(name: str, target: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss or log-probability of each row, and the leaf tensors."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, FEATURES, generator=generator).to(target.device).requires_grad_()
    w = torch.randn(CLASSES, FEATURES, generator=generator).to(target.device).requires_grad_()
    logits = F.linear(x, w).detach().requires_grad_()
    if name == "linear_cross_entropy":
        return extension_cpp.linear_cross_entropy(x, w, target, reduction="none"), [x, w]
    if name == "token_log_probs":
        return extension_cpp.token_log_probs(logits, target)[0], [logits]
    return extension_cpp.cross_entropy(logits, target, reduction="none"), [logits]


LOSSES = ["cross_entropy", "token_log_probs", "linear_cross_entropy"]


@pytest.mark.parametrize("wrong", [-1, CLASSES, 2**40, -(2**62), -(2**63)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_target_that_is_no_class(name: str, wrong: int, device: str) -> None:
    """The CPU raises an error that names the wrong target. A GPU, which raises none, gives NaN in the target's row."""
    good = torch.arange(ROWS, device=device) % CLASSES
    bad = good.clone()
    bad[2] = wrong
    if device == "cpu":
        ignored = "" if name == "token_log_probs" else " or ignore_index"
        expected = rf"extension_cpp::{name}: expected target in \[0, {CLASSES - 1}\]{ignored}, but got {wrong}$"
        with pytest.raises(RuntimeError, match=expected):
            _call(name, bad)
        return
    (losses, leaves), (right, right_leaves) = _call(name, bad), _call(name, good)
    assert losses.isnan().tolist() == [row == 2 for row in range(ROWS)]
    assert torch.equal(losses[losses == losses], right[losses == losses])
    gradient = torch.autograd.grad(losses, leaves[0], torch.ones_like(losses))[0]
    expected_gradient = torch.autograd.grad(right, right_leaves[0], torch.ones_like(right))[0]
    assert gradient[2].isnan().all()
    keep = torch.arange(ROWS, device=device) != 2
    assert torch.equal(gradient[keep], expected_gradient[keep])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_rows_ignored(reduction: str, device: str) -> None:
    """If all rows are ignored, the mean is NaN, as in PyTorch. Gradients are zero, even for a row of NaN."""
    logits = torch.randn(ROWS, CLASSES, device=device)
    logits[1] = math.nan
    target = torch.full((ROWS,), -100, device=device)
    both = []
    for function in (extension_cpp.cross_entropy, F.cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, target, reduction=reduction)
        both.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]))
    (ours, gradient), (eager, _) = both
    torch.testing.assert_close(ours, eager, equal_nan=True)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_one_class(device: str) -> None:
    logits = torch.randn(ROWS, 1, device=device, requires_grad=True)
    target = torch.zeros(ROWS, dtype=torch.int64, device=device)
    loss = extension_cpp.cross_entropy(logits, target)
    assert loss.item() == 0 and torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros_like(logits))


def test_padded_rows_are_read_where_they_lie(device: str) -> None:
    """Logits that are a slice of a tensor with padded classes are not copied."""
    padded = torch.randn(64, 1024, device=device)
    target = torch.arange(64, device=device)
    logits = padded[:, :1000]
    for function in (extension_cpp.cross_entropy, extension_cpp.token_log_probs):
        names, _ = profiled(lambda function=function: function(logits, target), device)
        assert not names & {"aten::contiguous", "aten::clone", "aten::copy_"}
        assert any(name.startswith("extension_cpp::") for name in names)
    torch.testing.assert_close(extension_cpp.cross_entropy(logits, target), F.cross_entropy(logits, target))


def test_autocast_leaves_the_logits_and_gives_a_float32_loss(device: str) -> None:
    logits = torch.randn(ROWS, CLASSES, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.arange(ROWS, device=device)
    for compiled in (False, True):
        function: Callable[..., Any] = extension_cpp.cross_entropy
        function = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
        with torch.autocast(device, torch.bfloat16):
            loss = function(logits, target)
        # The expected loss is computed in float32, because eager mode on CUDA rounds log-probabilities under autocast.
        eager = F.cross_entropy(logits.float(), target)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, eager)
        ours, theirs = torch.autograd.grad(loss, logits)[0], torch.autograd.grad(eager, logits)[0]
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        assert extension_cpp.cross_entropy(logits, target).dtype == torch.float32


def test_autocast_of_linear_cross_entropy(device: str) -> None:
    """Under autocast the matrix products have autocast's dtype, and the loss is float32."""
    x = torch.randn(33, 16, device=device, requires_grad=True)
    w = torch.randn(40, 16, device=device, requires_grad=True)
    target = torch.arange(33, device=device)
    results = []
    for function in (
        lambda: extension_cpp.linear_cross_entropy(x, w, target),
        lambda: F.cross_entropy(F.linear(x, w), target),
    ):
        with torch.autocast(device, torch.bfloat16):
            loss = function()
        assert loss.dtype == torch.float32
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    for ours, eager in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        # Logits of about 4 are rounded to bfloat16, with an error of at most 4 * 2^-9, and so are their gradients.
        torch.testing.assert_close(ours, eager, rtol=2**-7, atol=2**-7 * eager.abs().max().item())


def _linear(dtype: torch.dtype, device: str, rows: int = 700) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(shape, generator=generator) for shape in ((rows, 24), (50, 24), (50,))]
    x, w, b = (t.to(dtype).to(device).requires_grad_() for t in tensors)
    target = torch.randint(50, (rows,), generator=generator).to(device)
    target[::7] = -100
    return x, w, b, target


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Limits chunks to 128 rows of float32 with 50 classes. Returns a list that gets each chunk's number of rows."""
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 128 * 52 * 4)
    seen: list[int] = []
    make = linear_loss.Logits.of

    def logits(self: linear_loss.Logits, part: slice) -> Tensor:
        seen.append(part.stop - part.start)
        return make(self, part)

    monkeypatch.setattr(linear_loss.Logits, "of", logits)
    return seen


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_logits_are_never_whole(reduction: str, small_chunks: list[int], device: str) -> None:
    """The loss processes 700 rows in chunks of at most 128, with the results of one product that has all logits."""
    x, w, b, target = _linear(torch.float32, device)
    loss = extension_cpp.linear_cross_entropy(x, w, target, b, reduction=reduction)
    grad_out = torch.rand_like(loss)
    ours = torch.autograd.grad(loss, (x, w, b), grad_out)
    assert max(small_chunks) <= 128 and sum(small_chunks) == 700 * (2 if reduction == "none" else 1)
    eager = F.cross_entropy(F.linear(x, w, b), target, reduction=reduction)
    torch.testing.assert_close(loss, eager)
    for a, e in zip(ours, torch.autograd.grad(eager, (x, w, b), grad_out), strict=True):
        torch.testing.assert_close(a, e, atol=1e-5 * e.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_padding_of_the_logits(dtype: torch.dtype, reduction: str, small_chunks: list[int], device: str) -> None:
    """Each row of 50 logits is padded to whole 16 bytes. ignore_index may be 50, which is an index in the padding."""
    x, w, b, target = _linear(dtype, device)
    target = target.clamp(min=0)
    target[::3] = 50
    options = {"ignore_index": 50, "reduction": reduction}
    loss = extension_cpp.linear_cross_entropy(x, w, target, b, **options)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    expected = F.cross_entropy(F.linear(*exact), target, **options)
    ours = torch.autograd.grad(loss, (x, w, b), torch.ones_like(loss))
    eps = torch.finfo(dtype).eps
    # Logits, their gradients and the results are rounded. Each chunk after the first rounds the gradient of w again.
    torch.testing.assert_close(loss.double(), expected, atol=8 * eps, rtol=8 * eps)
    for a, e in zip(ours, torch.autograd.grad(expected, exact, torch.ones_like(expected)), strict=True):
        torch.testing.assert_close(a.double(), e, atol=8 * eps * e.abs().max().item(), rtol=8 * eps)


def test_the_gradient_of_an_ignored_row_of_nan_is_zero(device: str) -> None:
    """The gradient of an ignored row of NaN is zero, as docs/ops.md says. PyTorch's is NaN."""
    x = torch.ones(3, 5, device=device)
    x[1] = math.nan
    target = torch.tensor([0, -100, 4], device=device)
    for loss, is_zero in ((extension_cpp.cross_entropy, True), (F.cross_entropy, False)):
        (gradient,) = torch.autograd.grad(loss(leaf := x.clone().requires_grad_(), target), leaf)
        assert bool((gradient[1] == 0).all()) is is_zero and bool(gradient[[0, 2]].isfinite().all())


@pytest.mark.parametrize("ignore_index", [255, -100, 1])
def test_ignored_rows_in_every_derivative(ignore_index: int, device: str) -> None:
    """Every derivative ignores the rows of ignore_index, even if no class has this index. Forward mode has its own
    formula (cross_entropy_plain)."""
    target = torch.tensor([0, ignore_index, 4, ignore_index, 2], device=device)
    logits = torch.randn(5, CLASSES, dtype=torch.float64, device=device)
    tangent = torch.randn_like(logits)
    results = []
    for loss in (extension_cpp.cross_entropy, F.cross_entropy):

        def of(x: Tensor, loss: Callable[..., Tensor] = loss) -> Tensor:
            return loss(x, target, ignore_index=ignore_index, label_smoothing=0.1)

        value, forward_mode = torch.func.jvp(of, (logits,), (tangent,))
        results.append((value, forward_mode, torch.func.grad(of)(logits)))
    torch.testing.assert_close(*results)


def test_chunks_cover_all_rows() -> None:
    for rows in (0, 1, 127, 128, 129, 700, 10_000):
        for classes in (1, 50, 10**9):
            parts = list(linear_loss.chunks(torch.empty(rows, 1), classes))
            assert [i for part in parts for i in range(part.start, part.stop)] == list(range(rows))
            for part in parts:
                size = part.stop - part.start
                assert size == 1 or size * classes * 4 <= linear_loss.CHUNK_BYTES


def test_entropies_of_two_classes() -> None:
    """Entropies of two classes are right. With more classes, errors of exp with opposite signs would cancel. The bound
    of 8 eps covers the errors of exp, of two products and of the sum."""
    logits = torch.stack([torch.zeros(4000), -torch.linspace(0.01, 8, 4000)], 1)
    _, entropy = extension_cpp.token_log_probs(logits, torch.zeros(4000, dtype=torch.int64))
    log_p = logits.double().log_softmax(1)
    torch.testing.assert_close(entropy.double(), -(log_p.exp() * log_p).sum(1), rtol=8 * torch.finfo().eps, atol=0)


def test_total_weight_counts_classes_alone() -> None:
    labels, weight = torch.tensor([0, 4, -1, 5, 2, -100]), torch.tensor([1.0, 2, 4, 8, 16])
    for each, total in ((None, 2), (weight, 17)):
        assert linear_loss.total_weight(labels, 5, each, ignore_index=2, like=weight).tolist() == [total]


@pytest.mark.parametrize("chunk_rows", [4096, 1024, 128])
def test_error_of_the_weight_gradient(chunk_rows: int, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The bfloat16 weight gradient has about eager mode's error. It is the sum over n chunks, of which all but the
    first round the sum so far. The sum of i chunks is about sqrt(i / n) of the whole, so that the n - 1 roundings have
    (n - 1) / 2 times the variance of the last one. 10 % are for chance: both errors are norms over 24,000 numbers."""
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", chunk_rows * 1000 * 2)
    generator = torch.Generator().manual_seed(5)
    x, w = (torch.randn(n, 24, generator=generator).bfloat16().to(device).requires_grad_() for n in (4096, 1000))
    target = torch.randint(1000, (4096,), generator=generator).to(device)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    (right,) = torch.autograd.grad(F.cross_entropy(F.linear(*exact), target), exact[1:])
    (ours,) = torch.autograd.grad(extension_cpp.linear_cross_entropy(x, w, target), w)
    (eager,) = torch.autograd.grad(F.cross_entropy(F.linear(x, w), target), w)
    errors = [((gradient.double() - right).norm() / right.norm()).item() for gradient in (ours, eager)]
    chunks = 4096 / chunk_rows
    assert errors[0] <= 1.1 * math.sqrt(1 + (chunks - 1) / 2) * errors[1], errors


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_has_the_scale_of_the_loss(reduction: str, device: str) -> None:
    """A GradScaler's factor on the loss keeps small float16 gradients from underflow. With "sum" the loss is divided by
    the number of tokens later, before which the weight gradient must not overflow. Eager mode has a similar error."""
    generator = torch.Generator().manual_seed(6)
    x = (torch.rand(4096, 8, generator=generator) * 20).half().to(device).requires_grad_()
    w = torch.zeros(700, 8, dtype=torch.float16, device=device, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.int64, device=device)
    found = []
    for function, dtype in ((extension_cpp.linear_cross_entropy, None), (_eager_linear, None), (_eager_linear, float)):
        leaves = [t if dtype is None else t.detach().double().requires_grad_() for t in (x, w)]
        loss = function(*leaves, target, reduction=reduction).double()
        found.append(torch.autograd.grad(loss * 512 / (1 if reduction == "mean" else 4096), leaves[1])[0].double())
    ours, eager, right = (gradient[1:] for gradient in found)  # excludes class 0, which is the target of all rows
    assert right.abs().max() > 0 and ours.isfinite().all()
    assert (ours - right).norm() <= 2 * (eager - right).norm() + 2**-10 * right.norm()


def _eager_linear(x: Tensor, w: Tensor, target: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(F.linear(x, w), target, reduction=reduction)


def test_probabilities_are_at_most_one(device: str) -> None:
    """Despite rounding, log-probabilities are at most 0 and entropies at least 0, which training code may assert."""
    logits = torch.arange(1.0, 61.0, device=device)[:, None].repeat(1, 2) * torch.tensor([1.0, -1.0], device=device)
    for temperature in (0.7, 1.3):
        for rows in (logits, logits[:, :1], torch.rand(1000, 2, device=device)):
            target = torch.zeros(rows.shape[0], dtype=torch.int64, device=device)
            log_probs, entropy = extension_cpp.token_log_probs(rows, target, temperature)
            assert (log_probs <= 0).all() and (entropy >= 0).all()
            assert rows.shape[1] > 1 or (log_probs >= -(2**-23)).all()  # with one class: 0 up to rounding


# On a GPU, rows of these widths are processed by a group of threads, a CTA or a cluster. The last three widths are no
# multiples of a vector's length.
WIDTHS = (16, 100, 1000, 4096, 16384, 20000, 40000, 128256, 33, 1001, 50257)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_chunk_is_forward_and_backward(width: int, dtype: torch.dtype, device: str) -> None:
    """cross_entropy_chunk overwrites logits with the gradients that cross_entropy's backward gives. Targets lie
    anywhere in a row, one is ignored, and some rows have -inf and NaN."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, width, generator=generator).to(dtype).to(device)
    logits[3, : width // 2] = -math.inf
    logits[4, width // 3] = math.nan
    target = torch.tensor([0, width - 1, width // 2, width - 1, 1, -100, width // 3, 7, 8], device=device)
    leaf = logits.clone().requires_grad_()
    losses = extension_cpp.cross_entropy(leaf, target, reduction="none").double()
    (expected,) = torch.autograd.grad(losses, leaf, torch.full_like(losses, 0.5))
    scale = torch.tensor([0.5], dtype=torch.promote_types(dtype, torch.float32), device=device)
    ours = torch.ops.extension_cpp.cross_entropy_chunk(logits, target, None, -100, 0.0, 0.0, None, scale)
    # The result is rounded once, and the exponentials may be added in another order than in cross_entropy.
    eps = torch.finfo(dtype).eps
    tolerance = {"rtol": 4 * eps, "atol": 1e-9, "equal_nan": True}
    torch.testing.assert_close(ours.double(), losses.detach(), **tolerance | {"atol": 20 * eps})
    # The gradient contains exp(d), where d is a logit minus the log-sum-exp, and |d| is at most 16 here. Rounding d
    # gives exp(d) a relative error of |d| eps / 2, and the conversion to a power of two adds as much.
    tolerance["rtol"] += 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(logits, expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 1000, 4096, 20000, 50257])
def test_batch_invariant(width: int, dtype: torch.dtype, device: str) -> None:
    """The results of a row have the same bits for any number of rows in the call."""
    x = torch.randn(133, width, device=device, dtype=dtype)
    target = torch.arange(133, device=device) % width
    functions: list[Callable[[int], tuple[Tensor, ...]]] = [
        lambda rows: (extension_cpp.softmax(x[:rows]), extension_cpp.log_softmax(x[:rows])),
        lambda rows: (extension_cpp.cross_entropy(x[:rows], target[:rows], reduction="none"),),
        lambda rows: extension_cpp.token_log_probs(x[:rows], target[:rows]),
    ]
    for function in functions:
        whole = function(133)
        for rows in (1, 2, 3, 32):
            for part, of_whole in zip(function(rows), whole, strict=True):
                assert torch.equal(part, of_whole[:rows]), rows


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_frozen_tensors_cost_no_product(needed: tuple[int, ...], device: str) -> None:
    """Only required gradients are computed, because adapters may be trained while the weight of lm_head is frozen."""
    x, w, b, target = _linear(torch.float32, device, 64)
    tensors = [t.detach().requires_grad_(i in needed) for i, t in enumerate((x, w, b))]
    options = target, tensors[2], None, 1, -100, 0.0, 0.0, None, False, *(t.requires_grad for t in tensors)
    _, *made = torch.ops.extension_cpp.linear_cross_entropy(*tensors[:2], *options)
    assert [grad.numel() > 0 for grad in made] == [i in needed for i in range(3)]
    loss = extension_cpp.linear_cross_entropy(*tensors[:2], target, tensors[2])
    eager = F.cross_entropy(F.linear(*tensors), target)
    leaves = [tensors[i] for i in needed]
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(eager, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scale_of_the_gradients(dtype: torch.dtype, device: str) -> None:
    """cross_entropy_scale multiplies half types by a float32 factor and rounds each product once, for any layout."""
    acc = torch.promote_types(dtype, torch.float32)
    factor = torch.tensor(1 / 3, dtype=acc, device=device)
    for shape in [(), (0,), (1,), (1000,), (33, 70)]:
        x = torch.randn(shape, device=device, dtype=torch.float64).to(dtype)
        y = torch.ops.extension_cpp.cross_entropy_scale(x.t() if x.dim() == 2 else x, factor)
        assert torch.equal(y, (x.to(acc) * factor).to(dtype).t() if x.dim() == 2 else (x.to(acc) * factor).to(dtype))
    with pytest.raises(RuntimeError, match="expected factor to be one number of type float"):
        torch.ops.extension_cpp.cross_entropy_scale(torch.ones(3, dtype=dtype, device=device), factor.expand(2))


def test_backward_twice(device: str) -> None:
    """A second backward through the same loss may use the gradients that forward computed."""
    x, w, b, target = _linear(torch.float32, device, 64)
    loss = extension_cpp.linear_cross_entropy(x, w, target, b)
    first = torch.autograd.grad(loss, (x, w, b), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (x, w, b))
    for a, c in zip(first, second, strict=True):
        torch.testing.assert_close(3 * a, c)


def test_second_derivatives_get_a_sentence(device: str) -> None:
    for name in LOSSES:
        losses, leaves = _call(name, torch.arange(ROWS, device=device) % CLASSES)
        gradient = torch.autograd.grad(losses.sum(), leaves[0], create_graph=True)[0]
        with pytest.raises(RuntimeError, match=rf"extension_cpp::{name}: the second derivative is not implemented"):
            gradient.sum().backward()


@pytest.mark.parametrize("temperature", [1e-4, 1e-8, 1e-20, 1e-30])
@pytest.mark.parametrize("shape", [(50, 1000), (50, 7)], ids=str)
def test_small_temperatures_give_the_largest_logit(temperature: float, shape: tuple[int, int], device: str) -> None:
    """For small temperatures the largest logit has probability 1, so that its log-probability and the entropy are 0.
    logits / temperature exceed 2^24, where floats are integers."""
    logits = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 40).to(device).requires_grad_()
    best = logits.detach().argmax(-1)
    log_probs, entropy = extension_cpp.token_log_probs(logits, best, temperature)
    (grad,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)
    second = logits.detach().topk(2).values.diff().abs().squeeze(-1) / temperature
    assert torch.all(log_probs[second > 100] == 0) and torch.all(entropy[second > 200] == 0)
    assert (second > 200).sum() > 40 and torch.isfinite(log_probs).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("inner", [(), (3,)], ids=["rows", "columns"])
def test_gradient_of_a_cap_that_is_small_beside_the_sum(inner: tuple[int, ...], device: str) -> None:
    """The gradient is right where many classes make the log-sum-exp (lse) large beside the softcap: dz/dx must be 1 -
    t^2 and not come from z - lse. t = z / cap has an error of 3 roundings. p has one of 14: 8 of rounding its exponent
    times log2(e), 2 of the rounded constant log2(e), and 4 of 2^x."""
    logits = torch.randn(4, 1000, *inner, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    target = torch.zeros(4, *inner, dtype=torch.int64, device=device)
    double = logits.detach().double().requires_grad_()
    (ours,) = torch.autograd.grad(extension_cpp.cross_entropy(logits, target, softcap=0.1), logits)
    z = 0.1 * (double / 0.1).tanh()
    of_z, exact = torch.autograd.grad(F.cross_entropy(z, target), (z, double))
    assert ((ours - exact).abs() <= 2**-24 * (6 * of_z.abs() + 14 * exact.abs())).all()


def test_forward_mode_of_a_target_that_is_no_class() -> None:
    """The formulas of forward mode give NaN for a target that is no class, because no error can be raised on CUDA."""
    logits, target = torch.randn(3, 5), torch.tensor([1, 7, -100])

    def cross_entropy(x: Tensor) -> Tensor:
        return losses.cross_entropy_plain(x, target, None, -100, 0, 0.0, 0.0, None, False)[0]

    def log_probs_and_entropy(x: Tensor) -> tuple[Tensor, Tensor]:
        return losses.token_log_probs_plain(x, target.clamp(min=0))[:2]

    ones = torch.ones_like(logits)
    for value in torch.func.jvp(cross_entropy, (logits,), (ones,)):
        assert value.isnan().tolist() == [False, True, False] and value[2] == 0
    for pair in torch.func.jvp(log_probs_and_entropy, (logits,), (ones,)):
        assert all(value.isnan().tolist() == [False, True, False] for value in pair)

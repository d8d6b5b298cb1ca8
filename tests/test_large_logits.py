"""Tests losses of rows whose largest logits are equal and huge, as in a row in which all logits are masked.

With logits z, the term log(sum(exp(z - max))) is then lost in the log-sum-exp, even in float64. The gradient needs it:
with C equal logits, each probability is 1 / C. The references are PyTorch's losses in float64.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import extension_cpp

CLASSES, EVERY = 70, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def maxima(dtype: torch.dtype) -> list[float]:
    return [1e13, 1e20, -1e30, torch.finfo(dtype).min]


def rows_of(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Returns logits and targets. For each maximum, there is a row whose logits all equal it, and a row in which every
    third logit does. The last row is random. Smaller logits below finfo.min are -inf, and some are targets."""
    is_largest = torch.arange(CLASSES) % EVERY == 0
    rows = []
    for most in maxima(dtype):
        smaller = most / 2 if most > 0 else 2 * most
        whole = torch.full((CLASSES,), most, dtype=torch.float64)
        rows += [whole, whole.where(is_largest, smaller)]
    rows.append(torch.randn(CLASSES, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    target = torch.tensor([0, 3, 6, 9, 12, 16, 19, 22, 24])
    return torch.stack(rows).to(dtype).to(device), target.to(device)


def arranged(x: Tensor, inner: int) -> Tensor:
    """Returns the rows of x (N, C) unchanged if inner is 1, and otherwise in the shape (N / inner, C, inner)."""
    return x if inner == 1 else x.reshape(-1, inner, CLASSES).transpose(1, 2).contiguous()


def assert_near(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Checks that a gradient is near the exact one, up to the errors of the probability p = exp(z - lse) and of
    rounding to `dtype`. For p above 2^-22, rounding z - lse adds 4 eps, multiplying it by the rounded log2(e) adds 8
    eps, 2^x adds 2 eps, and the logarithm of the sum in lse adds 4 eps. `size` is the largest gradient."""
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    size = exact.abs().max().item()
    torch.testing.assert_close(ours.double(), exact, atol=18 * eps * size, rtol=18 * eps + torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("inner", [1, 3], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cross_entropy(dtype: torch.dtype, inner: int, label_smoothing: float, reduction: str, device: str) -> None:
    rows, labels = rows_of(dtype, device)
    logits, target = arranged(rows, inner), labels.reshape(-1, inner).squeeze(1)
    results = []
    for loss, x in ((extension_cpp.cross_entropy, logits), (F.cross_entropy, logits.double())):
        x.requires_grad_()
        value = loss(x, target, reduction=reduction, label_smoothing=label_smoothing)
        results.append((value.detach(), *torch.autograd.grad(value, x, torch.ones_like(value))))
    (value, grad), (exact, exact_grad) = results
    # The smoothed loss also sums the distances of all logits from the log-sum-exp, in the accumulation type.
    eps = torch.finfo(dtype).eps + CLASSES * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(value, exact.to(dtype), rtol=eps, atol=eps)
    assert_near(grad, exact_grad, dtype)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_log_probs(dtype: torch.dtype, temperature: float, device: str) -> None:
    """Log-probabilities, entropies and their gradients are right. By the logits, the derivative of log_p[target] is [c
    = target] - p, and that of the entropy is -p * (log_p + entropy)."""
    logits, target = rows_of(dtype, device)
    logits.requires_grad_()
    log_p = (logits.detach().double() / temperature).log_softmax(-1)
    p, log_of_target = log_p.exp(), log_p.gather(-1, target[..., None])[..., 0]
    entropy = -torch.where(p == 0, 0, p * log_p).sum(-1)
    of_log_prob = (F.one_hot(target, CLASSES) - p) / temperature
    of_entropy = -torch.where(p == 0, 0, p * (log_p + entropy[..., None])) / temperature
    results = extension_cpp.token_log_probs(logits, target, temperature)
    eps = torch.finfo(results[0].dtype).eps
    for ours, exact, exact_grad in zip(results, (log_of_target, entropy), (of_log_prob, of_entropy), strict=True):
        torch.testing.assert_close(ours, exact.to(ours.dtype), rtol=20 * eps, atol=20 * eps)
        (grad,) = torch.autograd.grad(ours.sum(), logits, retain_graph=True)
        assert_near(grad, exact_grad, dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rows", [4, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_cross_entropy(dtype: torch.dtype, rows: int, reduction: str, device: str) -> None:
    """Loss and gradients are right if x is 0, so that the bias gives the logits. With reduction="none" backward
    computes the logits again. With 130 rows the classes are padded."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(CLASSES, 4, generator=generator).to(dtype).to(device)
    x, target = torch.zeros(rows, 4, dtype=dtype, device=device), torch.arange(rows, device=device) % CLASSES
    for most in maxima(dtype):
        leaves = [t.clone().requires_grad_() for t in (x, weight, torch.full_like(weight[:, 0], most))]
        exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
        loss = extension_cpp.linear_cross_entropy(*leaves[:2], target, leaves[2], reduction=reduction)
        exact = F.cross_entropy(F.linear(*exact_leaves), target, reduction=reduction)
        ours, expected = (
            torch.autograd.grad(value, of, torch.ones_like(value))
            for value, of in ((loss, leaves), (exact, exact_leaves))
        )
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(loss.double(), exact, rtol=4 * eps, atol=0)
        assert torch.equal(ours[1], torch.zeros_like(weight))  # because x is 0
        for grad, right in zip(ours[::2], expected[::2], strict=True):
            # Logit gradients are rounded to `dtype` before they are summed to the gradients of x and the bias.
            torch.testing.assert_close(grad.double(), right, rtol=0, atol=20 * eps * right.abs().max().item())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_forward_mode(dtype: torch.dtype, label_smoothing: float, device: str) -> None:
    logits, target = (x[::2] for x in rows_of(dtype, device))  # without -inf, for which the smoothed loss is infinite
    tangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(device)
    results = []
    for loss, x in ((extension_cpp.cross_entropy, logits), (F.cross_entropy, logits.double())):

        def of(x: Tensor, loss: Callable[..., Tensor] = loss) -> Tensor:
            return loss(x, target, reduction="none", label_smoothing=label_smoothing)

        results.append(torch.func.jvp(of, (x,), (tangent.to(x.dtype),)))
    for ours, exact in zip(*results, strict=True):
        assert_near(ours, exact, dtype)

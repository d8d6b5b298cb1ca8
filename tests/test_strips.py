"""Tests softmax and cross_entropy over a dimension other than the last. On a GPU the size decides how many threads and
CTAs process a strip, a group of adjacent columns (csrc/rows/strips.cuh)."""

import pytest
import torch

from tests.checks import check, maker
from tests.specs import cross_entropy, log_softmax, softmax

# Shapes (outer, columns, inner), with softmax over `columns`. The inner elements are whole vectors or not, and may be
# fewer than a cache line has. In some shapes the last CTA of a cluster gets fewer columns than the others, or none. The
# last shape has more strips than run at once.
SHAPES = [
    (1, 4096, 64),
    (2, 4100, 72),
    (1, 9001, 8),
    (1, 40000, 3),
    (3, 150, 256),
    (5, 1000, 49),
    (1, 21, 4096),
    (2, 3000, 6),
    (1, 2, 2000),
    (700, 33, 40),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_columns(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    for spec in (softmax.SPEC, log_softmax.SPEC, cross_entropy.SPEC):
        for sample in spec.sample_inputs(maker(device, dtype, seed=1), shape):
            if spec is cross_entropy.SPEC or sample.args[1:] == (-2,):
                check(spec, sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [33, 5000])
def test_a_column_has_the_same_bits_in_every_batch(columns: int, dtype: torch.dtype, device: str) -> None:
    x = maker(device, dtype)((40, columns, 64)).detach()
    target = torch.arange(40 * 64, device=device).reshape(40, 64) % columns

    def results(n: int) -> list[torch.Tensor]:
        part = x[:n].clone().requires_grad_()
        y = torch.ops.extension_cpp.softmax(part, 1)
        losses = torch.ops.extension_cpp.cross_entropy(part, target[:n], None, -100, 0, 0.0, 0.0, None, False)[0]
        return [y, losses, *torch.autograd.grad((y * x[:n]).sum() + losses.sum(), part)]

    whole = results(40)
    for n in (1, 2, 7):
        for a, b in zip(results(n), whole, strict=True):
            assert torch.equal(a, b[:n])

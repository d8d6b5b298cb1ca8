"""Tests properties that only kernel_template has. tests/battery tests those that every op must have."""

from typing import Any

import pytest
import torch

import extension_cpp


def test_known_values(device: str) -> None:
    """Values, first and second derivatives are exact, also for tensors without elements or dimensions."""
    values: list[Any] = [[2.0, -3.0], [], 0.5, [[4.0], [1.0]]]
    xs = [torch.tensor(x, device=device, requires_grad=True) for x in values]
    out = extension_cpp.kernel_template(xs, [x.detach() + 1 for x in xs])
    assert [y.tolist() for y in out] == [[6.0, 6.0], [], 0.75, [[20.0], [2.0]]]
    squares = extension_cpp.kernel_template(xs, xs)
    first = torch.autograd.grad([y.sum() for y in squares], xs, create_graph=True)
    second = torch.autograd.grad([y.sum() for y in first], xs)
    assert [y.tolist() for y in first] == [[4.0, -6.0], [], 1.0, [[8.0], [2.0]]]
    assert all(torch.equal(y, torch.full_like(x, 2.0)) for x, y in zip(xs, second, strict=True))


def test_no_tensors_and_no_elements(device: str) -> None:
    assert extension_cpp.kernel_template([], []) == []
    (out,) = extension_cpp.kernel_template([torch.ones(0, 5, device=device)], [torch.ones(0, 5, device=device)])
    assert out.shape == (0, 5)


def tensors_of(count: int, seed: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Makes tensors of about 4096 elements, which is a chunk of the kernel, and of other sizes, 0 and 1 included. Some
    tensors do not begin at a multiple of 16 bytes."""
    sizes = [4096, 1, 0, 4097, 33, 8191, 12_288, 4095]
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(sizes[i % 8] + 1, generator=generator).to(device, dtype) for i in range(count)]
    return [x[1:] if i % 3 == seed else x[:-1] for i, x in enumerate(made)]


@pytest.mark.parametrize("count", [1, 99, 100, 101, 257])
def test_a_result_does_not_depend_on_the_other_tensors(count: int, device: str) -> None:
    """Results and gradients are the products of two tensors alone, for up to 100 tensors (one launch) and for more."""
    for dtype in (torch.float32, torch.bfloat16):
        xs, ys = (tensors_of(count, seed, device, dtype) for seed in (0, 1))
        xs = [x.requires_grad_() for x in xs]
        out = extension_cpp.kernel_template(xs, ys)
        gradients = torch.autograd.grad(out, xs, [y.detach() for y in out])
        for x, y, product, gradient in zip(xs, ys, out, gradients, strict=True):
            assert torch.equal(product, x * y) and torch.equal(gradient, product.detach() * y)
            assert torch.equal(product, extension_cpp.kernel_template([x], [y])[0])


def test_one_tensor_in_several_places(device: str) -> None:
    """The gradient of a tensor that is given several times is the sum over its places."""
    x, y = (torch.full((3,), value, device=device, requires_grad=True) for value in (2.0, 3.0))
    out = extension_cpp.kernel_template([x, x, y.detach()], [x, y, y.detach()])
    assert [each.requires_grad for each in out] == [True] * 3  # autograd marks all results if one input requires grad
    grads = torch.autograd.grad([out[0].sum(), out[1].sum()], [x, y])
    assert [grad.tolist() for grad in grads] == [[7.0] * 3, [2.0] * 3]

"""Tests that swiglu and geglu read halves of a packed tensor without copies, with the bits of contiguous tensors."""

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import extension_cpp
from extension_cpp.nn import GeGLU, SwiGLU

GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": extension_cpp.swiglu,
    "geglu": extension_cpp.geglu,
    "geglu_tanh": lambda gate, up: extension_cpp.geglu(gate, up, "tanh"),
}
every_gate = pytest.mark.parametrize("name", GATES)


def result(f: Callable[[Tensor, Tensor], Tensor], gate: Tensor, up: Tensor, grad_out: Tensor) -> list[Tensor]:
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    y = f(gate, up)
    return [y.detach(), *torch.autograd.grad(y, (gate, up), grad_out)]


@functools.cache
def drawn() -> Tensor:
    """Returns random numbers, enough for the largest tensor of test_halves. Smaller tensors use a part of them."""
    return torch.randn(3 * 9000 * 70, dtype=torch.float64)


@every_gate
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_halves(name: str, dtype: torch.dtype, device: str) -> None:
    """Halves of a packed tensor give the bits of contiguous tensors. Widths and offsets reach kernels with wide, narrow
    or no vectors, work items of several rows, and rows of several work items."""
    widths = (1, 2, 6, 8, 31, 32, 64, 65, 66, 128, 1023, 1024, 9000)
    for width, rows, offset in itertools.product(widths, ((5,), (2, 3), (70,)), (0, 1, 2)):
        count = width * torch.Size(rows).numel()
        packed = drawn()[: offset + 2 * count].to(device, dtype)[offset:].view(*rows, 2 * width)
        gate, up = packed.chunk(2, -1)
        grads = drawn()[-3 * count :].to(device, dtype).view(*rows, 3 * width)
        for grad_out in (grads[..., :width], grads[..., width : 2 * width].contiguous()):
            dense = result(GATES[name], gate.contiguous(), up.contiguous(), grad_out.contiguous())
            for a, b in zip(result(GATES[name], gate, up, grad_out), dense, strict=True):
                assert torch.equal(a, b), (width, rows, offset)
                assert a.is_contiguous()


@every_gate
def test_halves_are_not_copied(name: str, device: str) -> None:
    """Forward and backward on halves of a packed tensor call no operator of PyTorch that copies, such as contiguous."""
    gate, up = torch.randn(3, 40, 256, device=device).chunk(2, -1)
    gate, up = gate.requires_grad_(), up.requires_grad_()
    grad_out = torch.randn(3, 40, 200, device=device)[..., :128]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        y = GATES[name](gate, up)
        torch.autograd.grad(y, (gate, up), grad_out)
    names = {event.name for event in profiler.events() if event.name.startswith("aten::")}
    assert names <= {"aten::empty_strided", "aten::detach", "aten::empty"}, names


@every_gate
def test_third_derivative_is_refused(name: str, device: str) -> None:
    gate, up = (torch.randn(3, dtype=torch.float64, device=device, requires_grad=True) for _ in range(2))
    (first,) = torch.autograd.grad(GATES[name](gate, up).sum(), gate, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="the third derivative is not implemented"):
        torch.autograd.grad(second.sum(), gate)


def test_modules(device: str) -> None:
    """nn.SwiGLU and nn.GeGLU take gate and up packed in one tensor, with the gate first."""
    x = torch.randn(4, 66, device=device, requires_grad=True)
    gate, up = x[:, :33], x[:, 33:]
    pairs = [
        (SwiGLU(), torch.nn.functional.silu(gate) * up),
        (GeGLU(), torch.nn.functional.gelu(gate) * up),
        (GeGLU("tanh"), torch.nn.functional.gelu(gate, approximate="tanh") * up),
    ]
    for module, expected in pairs:
        torch.testing.assert_close(module(x), expected)
        grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (module(x), expected)]
        torch.testing.assert_close(*grads)
    assert repr(GeGLU("tanh")) == "GeGLU(approximate='tanh')"
    with pytest.raises(RuntimeError, match=r"up of shape \[4, 33\] like gate, but got \[4, 32\]"):
        SwiGLU()(torch.randn(4, 65, device=device))

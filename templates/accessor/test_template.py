"""Compares kernel_template with its reference in float64. pytest -s prints the errors."""

import pytest
import torch
from ops_template import kernel_template, reference

SHAPES = [(256, 1024), (1, 1), (3, 0), (0, 5), (33, 257), (20000, 3), (2, 100_003)]
every_device = pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])


def check(x: torch.Tensor, grad_out: torch.Tensor) -> None:
    x = x.detach().requires_grad_()
    y = kernel_template(x)
    (grad_x,) = torch.autograd.grad(y, x, grad_out)
    exact_x = x.detach().double().requires_grad_()
    exact = reference(exact_x)
    (exact_grad_x,) = torch.autograd.grad(exact, exact_x, grad_out.double())
    for name, got, want in [("y", y, exact), ("grad_x", grad_x, exact_grad_x)]:
        error = (got.double() - want).abs().max().item() if got.numel() else 0.0
        print(f"{tuple(x.shape)} {name}: largest error {error:.3g}")
        torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-4)


@every_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_right(shape: tuple[int, int], device: str) -> None:
    torch.manual_seed(0)
    check(torch.randn(shape, device=device), torch.randn(shape, device=device))


@every_device
def test_strides_are_followed(device: str) -> None:
    wide = torch.randn(66, 514, device=device)
    for x in (wide[::2, 1::2], wide[:257, :33].t(), torch.randn(1, 257, device=device).expand(33, 257)):
        x = x[:33, :33]
        check(x, torch.randn(33, 33, device=device).t())
        check(x, torch.ones((), device=device).expand(33, 33))  # what .sum().backward() gives


@every_device
def test_opcheck_and_compile(device: str) -> None:
    x = torch.randn(5, 33, device=device, requires_grad=True)
    ops = torch.ops.kernel_template
    torch.library.opcheck(ops.forward.default, (x,))
    torch.library.opcheck(ops.backward.default, (torch.ones(5, 33, device=device), x.detach()))
    compiled = torch.compile(lambda x: kernel_template(x).sum(), backend="aot_eager", fullgraph=True)
    (got,) = torch.autograd.grad(compiled(x), x)
    (want,) = torch.autograd.grad(kernel_template(x).sum(), x)
    assert torch.equal(got, want)


@every_device
def test_bad_input_gets_its_sentence(device: str) -> None:
    x = torch.ones(2, 3, device=device)
    forward, backward = kernel_template, torch.ops.kernel_template.backward
    bad = [
        (forward, (x.double(),), "kernel_template: expected x to be float32, but got Double"),
        (forward, (x[0],), r"expected x of shape \[B, D\], but got \[3\]"),
        (backward, (x.half(), x), "expected grad_out to be float32, but got Half"),
        (backward, (x[:1], x), r"expected grad_out of shape \[2, 3\] like x, but got \[1, 3\]"),
    ]
    if device == "cuda":
        bad.append((backward, (x.cpu(), x), "expected grad_out on cuda:0 like x, but got cpu"))
    for function, arguments, sentence in bad:
        with pytest.raises(RuntimeError, match=sentence):
            function(*arguments)


def test_second_order_says_no() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    (grad_x,) = torch.autograd.grad(kernel_template(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="the second derivative is not implemented"):
        torch.autograd.grad(grad_x.sum(), x)

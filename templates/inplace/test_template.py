"""Tests properties that only kernel_template has. tests/battery tests those that every op must have."""

import pytest
import torch

import extension_cpp


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_known_values(dtype: torch.dtype, device: str) -> None:
    """Two steps with small numbers give exact values in every dtype."""
    param, momentum = (torch.tensor([x, 8.0], dtype=dtype, device=device) for x in (4.0, 2.0))
    grad = torch.tensor([1.0, -2.0], dtype=dtype, device=device)
    for _ in range(2):
        extension_cpp.kernel_template(param, grad, momentum, 0.5, 0.5)
    assert momentum.tolist() == [2.0, -1.0] and param.tolist() == [2.0, 7.5]
    assert grad.tolist() == [1.0, -2.0]


@pytest.mark.parametrize("size", [64, 70_001])
def test_steps_of_pytorch(size: int, device: str) -> None:
    """Three calls change param as three steps of torch.optim.SGD do. At first both momentums are the gradient."""
    torch.manual_seed(0)
    ours = torch.randn(size, dtype=torch.float64, device=device)
    theirs = torch.nn.Parameter(ours.clone())
    momentum, optimizer = torch.zeros_like(ours), torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for _ in range(3):
        theirs.grad = torch.randn_like(ours)
        optimizer.step()
        extension_cpp.kernel_template(ours, theirs.grad, momentum, 0.1)
    torch.testing.assert_close(ours, theirs.detach())


def test_a_dense_param_is_written_without_a_copy(device: str) -> None:
    """No aten operator allocates or copies during a call, even if param, grad and momentum are transposed."""
    param, grad, momentum = (torch.ones(3, 5, device=device).t() for _ in range(3))
    with torch.profiler.profile() as profiler:
        extension_cpp.kernel_template(param, grad, momentum, 0.5)
    assert not [event.name for event in profiler.events() if event.name.startswith("aten::")]
    assert torch.allclose(param, torch.full_like(param, 0.05)) and param.stride() == (1, 5)


def test_grad_may_be_the_momentum(device: str) -> None:
    param, momentum = torch.ones(33, device=device), torch.ones(33, device=device)
    extension_cpp.kernel_template(param, momentum, momentum, 0.5, 0.5)
    assert torch.equal(momentum, torch.full_like(param, 1.5)) and torch.equal(param, torch.full_like(param, 0.25))


def test_a_backward_that_saved_the_param_raises(device: str) -> None:
    param, x = torch.ones(3, device=device), torch.ones(3, device=device, requires_grad=True)
    y = (x * param).sum()
    extension_cpp.kernel_template(param, torch.ones_like(param), torch.zeros_like(param), 0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_param_that_requires_grad_is_written_under_no_grad(device: str) -> None:
    param = torch.nn.Parameter(torch.ones(3, device=device))
    grad, momentum = torch.ones(3, device=device), torch.zeros(3, device=device)
    with torch.no_grad():
        extension_cpp.kernel_template(param, grad, momentum, 0.5)
    assert param.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
def test_out_is_written_and_returned(layout: str, device: str) -> None:
    """out may have any strides and keeps them. The inputs and the memory between out's elements are not written."""
    torch.manual_seed(0)
    inputs = [torch.randn(33, 65, device=device) for _ in range(3)]
    expected = [x.clone() for x in inputs]
    extension_cpp.kernel_template(*expected, 0.1)
    wide = torch.full((2, 65, 130), float("nan"), device=device)
    made = {"contiguous": wide[:, :33, :65].contiguous(), "transposed": wide[..., :33].contiguous().mT}
    out = made.get(layout, wide[:, :33, ::2]).unbind()
    before, strides = [x.clone() for x in inputs], [x.stride() for x in out]
    assert extension_cpp.kernel_template(*inputs, 0.1, out=out) is out
    assert torch.equal(out[0], expected[0]) and torch.equal(out[1], expected[2])
    assert [x.stride() for x in out] == strides and wide[..., 1::2].isnan().all()
    assert all(map(torch.equal, inputs, before))


def test_out_may_be_the_inputs(device: str) -> None:
    """With the inputs as out, in either order, each result is as if all inputs were read before the first write."""
    for swap in (False, True):
        param, grad, momentum = (torch.full((70_001,), value, device=device) for value in (4.0, 1.0, 2.0))
        out = (momentum, param) if swap else (param, momentum)
        extension_cpp.kernel_template(param, grad, momentum, 0.5, 0.5, out=out)
        assert (out[0] == 3.0).all() and (out[1] == 2.0).all() and (grad == 1.0).all()


def test_out_counts_versions(device: str) -> None:
    """A call with out counts a version of out's tensors and of no input. opcheck accepts the operator."""
    op = torch.ops.extension_cpp.kernel_template.out
    param, grad, momentum, *outs = (torch.ones(3, 5, device=device) for _ in range(5))
    keywords = dict(zip(("param_out", "momentum_out"), outs, strict=True))
    torch.library.opcheck(op, (param, grad, momentum, 0.5), keywords)
    before = [x._version for x in (param, momentum, *outs)]
    op(param, grad, momentum, 0.5, **keywords)
    assert [x._version - old for x, old in zip((param, momentum, *outs), before, strict=True)] == [0, 0, 1, 1]

"""Tests jagged nested tensors: an op runs on their values(), or raises an error message."""

import copy
import warnings

import pytest
import torch
from torch import Tensor

import extension_cpp
from extension_cpp.nn import convert
from extension_cpp.registration.entries import BY_ROWS, NESTED, PADDED
from tests.checks import as_tuple, maker, random_grad
from tests.opspec import OpSpec, all_specs

every_op = pytest.mark.parametrize("spec", [x for x in all_specs() if NESTED.get(x.name) is BY_ROWS], ids=str)


def test_which_ops_run_on_rows() -> None:
    """NESTED, which comes from the entries of ops.py, is as docs/ops.md says. The other tests here rely on it."""
    by_rows = {"muladd", "scale_bias_relu", "relu", "mish", "silu", "gelu", "bias_gelu", "swiglu", "geglu", "dropout"}
    by_rows |= {"layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "layer_norm_dropout"}
    scans = {"cumsum", "logcumsumexp", "linear_recurrence"}
    expected = dict.fromkeys(by_rows, BY_ROWS) | dict.fromkeys(scans, PADDED)
    assert expected == NESTED


def offsets(device: str) -> Tensor:
    """Returns the offsets of four components with 3, 0, 4 and 1 rows."""
    return torch.tensor([0, 3, 3, 7, 8], device=device)


@every_op
@pytest.mark.parametrize("shape", [(8, 6), (8, 4, 6)], ids=str)
def test_nested_is_on_values(spec: OpSpec, shape: tuple[int, ...], device: str) -> None:
    """A result has the bits of a call on the input's values(), with and without gradients, and the input's offsets."""
    lengths = offsets(device)
    for sample in spec.sample_inputs(maker(device, torch.float32), shape):
        if any(isinstance(arg, tuple) and len(arg) == len(shape) for arg in sample.args):
            continue  # normalizes over the jagged dimension, which test_refused tests

        def run(is_nested: bool, sample=sample) -> list[Tensor]:
            leaves = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in sample.args]
            given = [
                torch.nested.nested_tensor_from_jagged(x, lengths)
                if is_nested and isinstance(x, Tensor) and x.shape == sample.args[0].shape
                else x
                for x in leaves
            ]
            outputs = as_tuple(spec.function(*given, **sample.kwargs))
            with torch.no_grad():
                for a, b in zip(outputs, as_tuple(spec.function(*given, **sample.kwargs)), strict=True):
                    assert not is_nested or (a.is_nested and b.is_nested and torch.equal(a.offsets(), lengths))
                    assert torch.equal(a.values(), b.values()) if is_nested else torch.equal(a, b)
            values = [output.values() if is_nested else output for output in outputs]
            torch.autograd.backward(values, [random_grad()(value) for value in values])
            return [*values, *(x.grad for x in leaves if isinstance(x, Tensor) and x.requires_grad)]

        for a, b in zip(run(True), run(False), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(6), torch.nn.RMSNorm(6), torch.nn.Dropout(0.0)], ids=repr)
def test_converted_modules(norm: torch.nn.Module, device: str) -> None:
    stock = norm.to(device)
    ours = copy.deepcopy(stock)
    assert convert(ours).changed
    values = torch.randn(8, 6, device=device)
    x = torch.nested.nested_tensor_from_jagged(values, offsets(device))
    with warnings.catch_warnings():  # PyTorch's rms_norm warns that it is not fused for nested tensors
        warnings.simplefilter("ignore")
        torch.testing.assert_close(ours(x).values(), stock(x).values())


def refused() -> dict[str, tuple]:
    """Returns error messages, each with a call that raises it."""
    values, weight = torch.ones(8, 6), torch.ones(6)
    x = torch.nested.nested_tensor_from_jagged(values, offsets("cpu"))
    others = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 2, 4, 8]))
    turned = torch.nested.nested_tensor_from_jagged(torch.ones(8, 6, 2), offsets("cpu")).transpose(1, 2)
    last = "at most 1 dimensions, those behind the jagged one, but got"
    return {
        "muladd: expected b to have the offsets of the other nested tensors": (extension_cpp.muladd, x, others, 1.0),
        "relu: expected x to be jagged in dimension 1, but got 2": (extension_cpp.relu, turned),
        "muladd: expected b to be jagged in dimension 1, but got 2": (extension_cpp.muladd, x, turned, 1.0),
        f"layer_norm: expected normalized_shape to have {last} [8, 6]": (extension_cpp.layer_norm, x, (8, 6)),
        "reduce_sum: expected no nested tensor; call it on the tensor's values()": (extension_cpp.reduce_sum, x),
        "rms_norm: expected weight of shape [6], normalized_shape, but got [2]": (
            extension_cpp.rms_norm,
            x,
            (6,),
            weight[:2],
        ),
    }


@pytest.mark.parametrize("sentence", refused())
def test_refused(sentence: str) -> None:
    function, *arguments = refused()[sentence]
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError) as error:
            function(*arguments)
        assert str(error.value) == f"extension_cpp::{sentence}"


@pytest.mark.parametrize("spec", [x for x in all_specs() if NESTED.get(x.name) is not BY_ROWS], ids=str)
def test_others_refuse(spec: OpSpec, device: str) -> None:
    for sample in spec.sample_inputs(maker(device, torch.float32), (8, 6)):
        x = torch.nested.nested_tensor_from_jagged(sample.args[0].detach(), offsets(device))
        hint = "pad it" if NESTED.get(spec.name) is PADDED else "call it on the tensor's values"
        with pytest.raises(RuntimeError, match=f"extension_cpp::{spec.name}: expected no nested tensor; {hint}"):
            spec.function(x, *sample.args[1:], **sample.kwargs)

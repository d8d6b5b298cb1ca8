"""Compares the public functions with the functions of reference.py for combinations of their options."""

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

import extension_cpp
from extension_cpp import reference
from tests.checks import as_tuple, random_grad

EPS = (1e-5, 0.5)
P = ({}, {"p": 0.0}, {"p": 0.3}, {"p": 1.0}, {"p": 0.3, "training": False}, {"p": 1.0, "training": False})


def affine(*names: str) -> Iterator[dict[str, Any]]:
    """Yields every subset of the named weights, as keyword arguments."""
    for given in itertools.product((True, False), repeat=len(names)):
        yield {name: torch.randn(6) for name, is_given in zip(names, given, strict=True) if is_given}


def calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    x, residual = torch.randn(5, 6), torch.randn(5, 6)
    for c in (0.0, -1.5):
        yield "muladd", (x, residual, c), {}
    for options in ({}, {"scale": 0.0}, {"scale": -2.0}):
        yield "scale_bias_relu", (x, torch.randn(6)), options
    for dim, keepdim in itertools.product((None, (), 0, -1, (0, 1), (-1,), [1, 0]), (True, False)):
        yield "reduce_sum", (x,), {"dim": dim, "keepdim": keepdim}
    for options in P:
        yield "dropout", (x,), options
    for weights, eps in itertools.product(affine("weight", "bias"), EPS):
        yield "layer_norm", (x, (6,)), {**weights, "eps": eps}
        for options in P:
            yield "add_layer_norm", (x, residual, (6,)), {**weights, "eps": eps, **options}
            yield "layer_norm_dropout", (x, (6,)), {**weights, "eps": eps, **options}
    for weights, eps in itertools.product(affine("weight"), (*EPS, None)):
        yield "rms_norm", (x, (6,)), {**weights, "eps": eps}
        for options in P:
            yield "add_rms_norm", (x, residual, (6,)), {**weights, "eps": eps, **options}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_options(dtype: torch.dtype, device: str) -> None:
    """Results and gradients are those of the reference, which draws the same dropout seed."""

    def leaf(x: Any) -> Any:
        return x.to(device, dtype).requires_grad_() if isinstance(x, torch.Tensor) else x

    torch.manual_seed(0)
    for name, args, kwargs in calls():
        found = []
        for module in (extension_cpp, reference):
            given, options = [leaf(x) for x in args], {key: leaf(x) for key, x in kwargs.items()}
            torch.manual_seed(7)
            outputs = as_tuple(getattr(module, name)(*given, **options))
            leaves = [x for x in (*given, *options.values()) if isinstance(x, torch.Tensor)]
            grads = torch.autograd.grad(outputs, leaves, [random_grad()(y) for y in outputs], materialize_grads=True)
            found.append([*outputs, *grads])
        for ours, exact in zip(*found, strict=True):
            message = f"{name} {args[1:]} {kwargs}"
            torch.testing.assert_close(ours, exact, msg=lambda text, message=message: f"{message}: {text}")


# PyTorch's functions that are not in torch.nn.functional, by the names of our functions.
OF_TORCH = {"reduce_sum": torch.sum, "softmax": torch.softmax, "log_softmax": torch.log_softmax}


@pytest.mark.parametrize(
    "name",
    (
        *("relu", "mish", "silu", "gelu", "reduce_sum", "dropout", "layer_norm", "rms_norm", "softmax", "log_softmax"),
        "cross_entropy",
    ),
)
def test_arguments_have_the_names_of_torch(name: str) -> None:
    """A call of PyTorch's function with keyword arguments also works with our function of this name."""
    function = getattr(extension_cpp, name)
    assert next(iter(inspect.signature(function).parameters)) == "input"
    assert inspect.signature(getattr(extension_cpp.reference, name)).parameters.keys() >= {"input"}
    x, given = torch.randn(4, 6), {"normalized_shape": (6,)} if name.endswith("norm") else {}
    given |= {"dim": -1} if "softmax" in name or name == "reduce_sum" else {}
    given |= {"target": torch.tensor([0, 1, 2, 3])} if name == "cross_entropy" else {}
    given |= {"training": False} if name == "dropout" else {}
    expected = OF_TORCH.get(name, getattr(torch.nn.functional, name, None))(input=x, **given)
    torch.testing.assert_close(function(input=x, **given), expected)


FUNCTIONS = {name: value for name, value in vars(extension_cpp).items() if inspect.isfunction(value)}
WITH_DIM = [name for name, function in FUNCTIONS.items() if "dim" in inspect.signature(function).parameters]


@pytest.mark.parametrize("name", WITH_DIM)
def test_dim_is_an_int(name: str) -> None:
    """dim must be an int. A bool raises an error, as in PyTorch, because the operators would take True for 1."""
    x = torch.randn(2, 3)
    function, args = FUNCTIONS[name], [x] * (2 if name == "linear_recurrence" else 1)
    for dim in (True, False, torch.tensor(True), numpy.bool_(True), 1.0, "1"):
        with pytest.raises(RuntimeError, match=f"extension_cpp::{name}: expected dim to be an int.*, but got"):
            function(*args, dim=dim)
    for dim in (1, torch.tensor(1), numpy.int64(1)):
        assert torch.equal(function(*args, dim=dim), function(*args, dim=-1))

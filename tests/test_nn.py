"""Tests which ops the modules call, and what users of torch.nn expect from a module."""

import ast
import copy
import graphlib
import importlib.util
import io
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import extension_cpp
from extension_cpp.nn import (
    AddLayerNorm,
    AddRMSNorm,
    CrossEntropyLoss,
    Dropout,
    LayerNorm,
    LinearCrossEntropyLoss,
    LogSoftmax,
    Mish,
    ReLU,
    RMSNorm,
    ScaleBiasReLU,
    Softmax,
)

MODULES = [ScaleBiasReLU(33, scale=0.5), ReLU(), Mish(), Dropout(0.3).eval(), LayerNorm(33), RMSNorm(33, eps=1e-6)]
MODULES += [Softmax(), LogSoftmax(dim=0)]
ADD = [AddLayerNorm(33, p=0.3).eval(), AddRMSNorm(33, p=0.3).eval()]


@pytest.mark.parametrize("module", MODULES + ADD, ids=lambda module: type(module).__name__)
def test_copies_and_pickles(module: torch.nn.Module) -> None:
    inputs = [torch.randn(4, 33) for _ in range(1 + (module in ADD))]
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)]
    for twin in twins:
        torch.testing.assert_close(twin(*inputs), module(*inputs), rtol=0, atol=0)
        assert repr(twin) == repr(module)
        assert twin.state_dict().keys() == module.state_dict().keys()


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("module", MODULES + ADD, ids=lambda module: type(module).__name__)
def test_exported_programs(module: torch.nn.Module, gradients: bool) -> None:
    """An exported program works for any number of rows after it is saved and loaded. It calls the operators that have a
    derivative, not their no-grad overloads."""
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    inputs = tuple(torch.randn(4, 33) for _ in range(1 + (module in ADD)))
    with torch.set_grad_enabled(gradients):
        program = torch.export.export(module, inputs, dynamic_shapes=(rows,) * len(inputs))
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    ours = {str(node.target) for node in loaded.graph.nodes if "extension_cpp" in str(node.target)}
    assert isinstance(module, Dropout) or (ours and not any("_no_grad" in name for name in ours))
    inputs = tuple(torch.randn(7, 33) for _ in inputs)
    torch.testing.assert_close(loaded.module()(*inputs), module(*inputs), rtol=0, atol=0)


@pytest.mark.slow
def test_ahead_of_time_inductor(tmp_path) -> None:
    """AOTInductor compiles a program to a library that calls our ops, for any number of rows. Without --slow, these
    modules are only exported, and tests/battery/test_graphs.py compiles one library that has every op."""
    model = torch.nn.Sequential(LayerNorm(33), torch.nn.Linear(33, 8), RMSNorm(8))
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(4, 33),), dynamic_shapes=(rows,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        x = torch.randn(9, 33)
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), model(x))


def test_modules_call_their_ops() -> None:
    x = torch.randn(4, 33)
    layer = ScaleBiasReLU(33, scale=0.5)
    torch.nn.init.normal_(layer.bias)
    assert torch.equal(layer(x), extension_cpp.scale_bias_relu(x, layer.bias, 0.5))
    assert torch.equal(ReLU()(x), extension_cpp.relu(x))
    assert torch.equal(Mish()(x), extension_cpp.mish(x))


@pytest.mark.parametrize("kind, torch_kind", [(ReLU, torch.nn.ReLU), (Mish, torch.nn.Mish)])
def test_inplace_activations(kind: type, torch_kind: type) -> None:
    """An in-place module overwrites and returns its input. The gradient is that of torch.nn's module."""
    ours, theirs = kind(inplace=True), torch_kind(inplace=True)
    assert isinstance(ours, torch_kind) and repr(ours) == repr(theirs)
    leaf = torch.randn(4, 33, requires_grad=True)
    grads = []
    for module in (ours, theirs):
        x = 2 * leaf
        y = module(x)
        assert y is x
        (grad,) = torch.autograd.grad(y.square().sum(), leaf)
        grads += [y, grad]
    torch.testing.assert_close(grads[:2], grads[2:])


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit does not support Python 3.14")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_does_not_know_the_operators(dynamo: bool) -> None:
    """ONNX export fails, as docs/compatibility.md says. The error names the operator, which a user may translate."""
    if dynamo and importlib.util.find_spec("onnxscript") is None:
        pytest.skip("onnxscript, which this exporter needs, is not installed")
    model = torch.nn.Sequential(LayerNorm(8))
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"extension_cpp(::|\.)layer_norm"):
        torch.onnx.export(model, (torch.ones(2, 8),), io.BytesIO(), dynamo=dynamo)


@pytest.mark.parametrize("module", [Dropout, AddLayerNorm, AddRMSNorm])
@pytest.mark.parametrize("p", [-0.1, 1.5])
def test_probabilities_are_refused_as_by_torch(module: type, p: float) -> None:
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1, but got"):
        module(**({} if module is Dropout else {"normalized_shape": 8}), p=p)


def test_scale_bias_relu_as_a_module() -> None:
    layer = ScaleBiasReLU(8, scale=2.0, dtype=torch.bfloat16)
    assert repr(layer) == "ScaleBiasReLU(features=8, scale=2.0)"
    assert layer.bias.dtype is torch.bfloat16 and not layer.bias.any()
    assert list(layer.state_dict()) == ["bias"]
    with torch.device("meta"):
        assert ScaleBiasReLU(8)(torch.empty(3, 8)).shape == (3, 8)


def test_trains_in_a_sequential_model(device: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), ScaleBiasReLU(32), torch.nn.Linear(32, 16), Mish()).to(device)
    x = torch.randn(64, 16, device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_third_derivative_of_mish_is_refused() -> None:
    """The third derivative of mish raises an error. An op without autograd would silently give zero."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(extension_cpp.mish(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="extension_cpp::mish: the third derivative is not implemented"):
        torch.autograd.grad(second.sum(), x)


def test_saved_tensors_are_few() -> None:
    """scale_bias_relu saves only x and bias, and relu only its result. No mask is stored."""
    x, bias = torch.randn(64, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    for function, kept in [
        (lambda: extension_cpp.scale_bias_relu(x, bias, 0.5), 2),
        (lambda: extension_cpp.relu(x), 1),
    ]:
        saved: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            function()
        assert len(saved) == kept


CAPTURED = [*MODULES, Dropout(0.3), AddLayerNorm(33, p=0.3), AddRMSNorm(33, p=0.3)]


@pytest.mark.parametrize("module", CAPTURED, ids=lambda module: type(module).__name__)
def test_symbolic_trace(module: torch.nn.Module) -> None:
    """symbolic_trace works also in training. Each run of the traced graph draws new random numbers."""
    inputs = [torch.randn(4, 33) for _ in range(1 + isinstance(module, (AddLayerNorm, AddRMSNorm)))]
    with torch.no_grad():
        traced = torch.fx.symbolic_trace(module)
    results = []
    for each in (module, traced):
        torch.manual_seed(0)
        results.append(each(*inputs))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    if getattr(module, "p", 0) and module.training:
        assert not torch.equal(torch.cat([*traced(*inputs)]), torch.cat([*results[0]]))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit does not support Python 3.14")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("module", CAPTURED, ids=lambda module: type(module).__name__)
def test_scripting_gets_a_sentence(module: torch.nn.Module) -> None:
    with pytest.raises(RuntimeError, match=f"torch.jit.script cannot compile {type(module).__name__}, whose forward"):
        torch.jit.script(module)


# ---- softmax and the losses ----

LOSSES = [
    CrossEntropyLoss(),
    CrossEntropyLoss(torch.rand(33), ignore_index=2, reduction="sum", label_smoothing=0.1, z_loss=1e-3, softcap=5.0),
    LinearCrossEntropyLoss(33, 8),
    LinearCrossEntropyLoss(33, 8, bias=True, reduction="none", weight=torch.rand(8), ignore_index=2, softcap=5.0),
]


def rows_and_targets(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 33, generator=generator), torch.randint(0, 8, (rows,), generator=generator)


@pytest.mark.parametrize("module", LOSSES, ids=lambda module: type(module).__name__)
def test_losses_copied_pickled_and_captured(module: torch.nn.Module) -> None:
    inputs = rows_and_targets()
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    program = torch.export.export(module, inputs, dynamic_shapes=(rows, rows)).module()
    with torch.no_grad():
        traced = torch.fx.symbolic_trace(module)
    twins = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    assert all(repr(twin) == repr(module) for twin in twins)
    inputs = rows_and_targets(7)
    for twin in (*twins, program, traced):
        torch.testing.assert_close(twin(*inputs), module(*inputs), rtol=0, atol=0)
        assert twin.state_dict().keys() == module.state_dict().keys()
    assert any("cross_entropy" in str(node.target) for node in traced.graph.nodes), "torch.fx saw another branch"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit does not support Python 3.14")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("module", LOSSES, ids=lambda module: type(module).__name__)
def test_scripting_a_loss_gets_a_sentence(module: torch.nn.Module) -> None:
    with pytest.raises(RuntimeError, match=f"torch.jit.script cannot compile {type(module).__name__}, whose forward"):
        torch.jit.script(module)


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_beside_torch(name: str, dim: int, device: str) -> None:
    """The softmax modules give torch.nn's results up to 8 roundings of half an eps each, for sums of 3 to 5 terms,
    relative to the largest result."""
    ours, stock = getattr(extension_cpp.nn, name)(dim=dim), getattr(torch.nn, name)(dim=dim)
    assert repr(ours) == repr(stock) and isinstance(ours, type(stock))
    x = torch.randn(3, 4, 5, device=device)
    got, want = ours(x), stock(x)
    bound = 4 * torch.finfo(torch.float32).eps * want.abs().max()
    assert (got - want).abs().max() <= bound
    assert torch.equal(got, getattr(extension_cpp, "softmax" if name == "Softmax" else "log_softmax")(x, dim))


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax_of_nested_tensors(name: str) -> None:
    rows = [torch.randn(2, 5), torch.randn(3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    got, stock = getattr(extension_cpp.nn, name)()(nested), getattr(torch.nn, name)(dim=-1)
    torch.testing.assert_close(got.values(), torch.cat([stock(row) for row in rows]))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight": torch.rand(8), "ignore_index": 2, "reduction": "sum"},
    {"label_smoothing": 0.1, "reduction": "none"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=", ".join)
def test_cross_entropy_loss_beside_torch(options: dict[str, Any], device: str) -> None:
    """Loss, gradient and state_dict are torch's, for class indices and for probabilities. The bound is 24 roundings of
    half an eps each, for sums over 8 classes and 16 rows, relative to the largest loss."""
    ours, stock = CrossEntropyLoss(**options).to(device), torch.nn.CrossEntropyLoss(**options).to(device)
    assert repr(ours) == repr(stock) == "CrossEntropyLoss()"
    assert list(ours.state_dict()) == list(stock.state_dict()) == ["weight"] * ("weight" in options)
    ours.load_state_dict(stock.state_dict())
    logits = torch.randn(16, 8, device=device, requires_grad=True)
    largest = torch.nn.functional.cross_entropy(logits, logits.argmin(1), reduction="sum").item()
    for target in (torch.randint(0, 8, (16,), device=device), torch.rand(16, 8, device=device)):
        if target.is_floating_point() and "ignore_index" in options:
            continue  # torch accepts no probabilities with ignore_index
        got, want = ours(logits, target), stock(logits, target)
        assert ("cross_entropy" in type(got.grad_fn).__name__) != target.is_floating_point()
        gradients = (torch.autograd.grad(loss.sum(), logits)[0] for loss in (got, want))
        for a, b in zip((got, next(gradients)), (want, next(gradients)), strict=True):
            assert a.shape == b.shape and (a - b).abs().max() <= 12 * torch.finfo(torch.float32).eps * largest


def test_cross_entropy_loss_with_more_than_torch_has() -> None:
    logits, target = torch.randn(4, 8), torch.tensor([1, 2, 3, 4])
    loss = CrossEntropyLoss(z_loss=0.5, softcap=2.0)
    assert torch.equal(loss(logits, target), extension_cpp.cross_entropy(logits, target, z_loss=0.5, softcap=2.0))
    assert repr(loss) == "CrossEntropyLoss(z_loss=0.5, softcap=2.0)"
    with pytest.raises(RuntimeError, match="expected target to be int64, class indices"):
        loss(logits, torch.rand(4, 8))


def test_linear_cross_entropy_loss(device: str) -> None:
    """The module gives the op's result with every option, and has torch.nn.Linear's parameters."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(33, 8, device=device)
    torch.manual_seed(0)
    options = {"weight": torch.rand(8, device=device), "ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1}
    torch.manual_seed(0)
    loss = LinearCrossEntropyLoss(33, 8, bias=True, device=device, z_loss=1e-3, softcap=5.0, **options)
    assert list(loss.state_dict()) == ["weight", "linear.weight", "linear.bias"]
    assert torch.equal(loss.linear.weight, linear.weight) and torch.equal(loss.linear.bias, linear.bias)
    x, target = (each.to(device) for each in rows_and_targets())
    parameters = loss.linear.weight, target, loss.linear.bias
    assert torch.equal(
        loss(x, target), extension_cpp.linear_cross_entropy(x, *parameters, **options, z_loss=1e-3, softcap=5.0)
    )
    want = "reduction='sum', ignore_index=2, label_smoothing=0.1, z_loss=0.001, softcap=5.0"
    assert want in repr(loss) and "(linear): Linear(in_features=33, out_features=8, bias=True)" in repr(loss)
    plain = LinearCrossEntropyLoss(33, 8, dtype=torch.bfloat16)
    assert plain.linear.bias is None and list(plain.state_dict()) == ["linear.weight"]
    assert plain.linear.weight.dtype is torch.bfloat16
    first = plain.linear.weight.clone()
    plain.reset_parameters()
    assert not torch.equal(plain.linear.weight, first)


def test_no_modules_of_the_package_import_each_other_in_a_circle() -> None:
    """The package's modules do not import each other in a circle at module level. Imports inside functions may."""
    imports: dict[str, set[str]] = {}
    package = Path(extension_cpp.__file__).parent
    files = {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}
    for module, path in files.items():
        found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom) and node.level]
        names = [(*module.split(".")[: -node.level], node.module, a.name) for node in found for a in node.names]
        dotted = [".".join(part for part in name if part) for name in names]
        of_names = [name if name in files else name.rpartition(".")[0] for name in dotted]
        imports[module] = {name if name in files else f"{name}.__init__" for name in of_names} & files.keys()
    assert imports["ops"] >= {"registration.entries", "functional.norms"}
    assert imports["nn"] == {"convert.__init__", "modules"}
    for module in (name for name in files if name.startswith("registration.")):
        assert not [name for name in imports[module] if not name.startswith(("registration.", "_namespace"))], module
    del imports["__init__"]
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError if there is a circle


def test_the_mechanism_knows_no_op() -> None:
    """Registration code names no op, so that a new op does not change it."""
    package = Path(extension_cpp.__file__).parent
    word = re.compile(rf"\b({'|'.join(extension_cpp.ops.__all__)})\b")
    for path in (*package.glob("registration/*.py"), package / "distributed" / "sharding.py"):
        assert word.findall(path.read_text()) == [], path


def test_out_of_memory_gets_a_sentence() -> None:
    """An allocation that fails raises a message that begins like PyTorch's and shows no build path."""
    with pytest.raises(RuntimeError) as error:
        extension_cpp.relu(torch.empty(1).expand(1 << 48))
    sentence = "Out of memory. extension_cpp tried to allocate a tensor of shape [281474976710656] on cpu"
    assert str(error.value) == sentence

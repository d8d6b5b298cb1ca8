"""The modules: the ops they call, and what torch.nn users expect of a module."""

import copy
import io
import pickle
import sys

import pytest
import torch

import extension_cpp
from extension_cpp.nn import AddLayerNorm, AddRMSNorm, Dropout, LayerNorm, Mish, ReLU, RMSNorm, ScaleBiasReLU

MODULES = [ScaleBiasReLU(33, scale=0.5), ReLU(), Mish(), Dropout(0.3).eval(), LayerNorm(33), RMSNorm(33, eps=1e-6)]
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
    """For any number of rows, after a turn through a file; what stands in them has a derivative."""
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


def test_ahead_of_time_inductor(tmp_path) -> None:
    """A library that Inductor makes of a program calls our ops in it."""
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
    """An error, in place of the silent zero that an op without autograd gives."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(extension_cpp.mish(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="extension_cpp::mish: the third derivative is not implemented"):
        torch.autograd.grad(second.sum(), x)


def test_saved_tensors_are_few() -> None:
    """scale_bias_relu keeps x and bias alone; relu its result; the mask is never stored."""
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
    """In training, too; the graph draws other random numbers at each run."""
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
